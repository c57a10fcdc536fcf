"""Answers of an issuer have bounds, and an error names the fault."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Receive, Scope, Send

from mcp_sessions.authentication.fetching import LARGEST, FetchFailed, fetch_json, post_form
from tests.support.duplex import listening


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of a proxy that the environment may name."""
    monkeypatch.setenv("NO_PROXY", "*")


class Site:
    """Answers by its path, and counts the bytes that it sent."""

    def __init__(self) -> None:
        self.sent = 0
        self.asked: list[str] = []
        self.continues = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        self.asked.append(path)
        status, headers = 200, [(b"content-type", b"application/json")]
        if path == "/redirects":
            status, headers = 302, [(b"location", b"/good")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        match path:
            case "/good":
                await self._say(send, b'{"a": 1}')
            case "/echo":
                fields = {name.decode(): value.decode() for name, value in scope["headers"]}
                said = {"form": (await receive())["body"].decode()}
                said["authorization"] = fields["authorization"]
                said["type"] = fields["content-type"]
                await self._say(send, json.dumps(said).encode())
            case "/html":
                await self._say(send, b"<!DOCTYPE html><title>Sign in</title>")
            case "/list":
                await self._say(send, b"[]")
            case "/deep":
                await self._say(send, b"[" * 100_000)
            case "/large":
                for _ in range(200):
                    await self._say(send, b" " * 65_536)
            case "/dripping":
                await self._never_ends(receive, send, b" ", 0.01)
            case "/endless":
                await self._never_ends(receive, send, b" " * 65_536, 0)
            case _:
                pass
        await self._say(send, b"")

    async def _never_ends(self, receive: Receive, send: Send, part: bytes, pause: float) -> None:
        """Until the client leaves."""
        await receive()
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await self._say(send, part)
            self.continues.set()
            await asyncio.wait([leaving], timeout=pause)

    async def _say(self, send: Send, body: bytes) -> None:
        self.sent += len(body)
        await send({"type": "http.response.body", "body": body, "more_body": bool(body)})


@pytest.fixture
async def site() -> AsyncGenerator[tuple[Site, str]]:
    serves = Site()
    async with listening(serves) as port:
        yield serves, f"http://127.0.0.1:{port}"


async def test_an_object_is_returned(site: tuple[Site, str]) -> None:
    assert await fetch_json(f"{site[1]}/good") == {"a": 1}


@pytest.mark.parametrize("posts", [False, True], ids=["get", "post"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/redirects", "answers 302"),
        ("/html", "does not answer with JSON"),
        ("/list", "does not answer with a JSON object"),
        ("/deep", "does not answer with JSON"),
        ("/large", f"more than {LARGEST} bytes"),
        ("/endless", f"more than {LARGEST} bytes"),
    ],
)
async def test_another_answer_is_none(
    site: tuple[Site, str], path: str, said: str, posts: bool
) -> None:
    """O: an issuer that redirects, answers HTML or 10 MB, or never ends."""
    url = f"{site[1]}{path}"
    async with asyncio.timeout(20):
        with pytest.raises(FetchFailed, match=said):
            await (post_form(url, {"token": "a"}, "Basic x") if posts else fetch_json(url))
    assert site[0].asked == [path]
    assert site[0].sent < 10 * 1_048_576, "it was not read to its end"


async def test_a_form_is_sent_with_the_credential(site: tuple[Site, str]) -> None:
    assert await post_form(f"{site[1]}/echo", {"token": "a b"}, "Basic x") == {
        "form": "token=a+b",
        "authorization": "Basic x",
        "type": "application/x-www-form-urlencoded",
    }


async def test_an_answer_that_never_ends_takes_no_longer_than_the_caller_waits(
    site: tuple[Site, str],
) -> None:
    """Some bytes at a time, so that no read of them takes long."""
    fetching = asyncio.create_task(fetch_json(f"{site[1]}/dripping"))
    async with asyncio.timeout(20):
        await site[0].continues.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching


async def test_nobody_there_is_said() -> None:
    with pytest.raises(FetchFailed, match="http://127.0.0.1:1/ cannot be reached: "):
        await fetch_json("http://127.0.0.1:1/")
