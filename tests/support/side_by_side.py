"""One server bare and one wrapped, the same requests to both, and what each answered.

A *script* is an async function that talks to one `Side`. Every exchange it has is kept:
status, headers and body, byte for byte. `expect_same` runs it on both sides and compares them.
"""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions import SessionLayer, SessionPolicy
from tests.support.everything import Everything
from tests.support.modern import ModernClient
from tests.support.raw import EXTENSION, AsgiCarrier, Json, Reply, in_process

_IGNORED = {"date", "server", "content-length"}
"""Not compared; the length is checked against the body instead."""


@dataclass
class Side:
    name: str
    rich: Everything
    carrier: AsgiCarrier
    masked: dict[str, str] = field(default_factory=dict[str, str])
    replies: list[Reply] = field(default_factory=list[Reply])
    asked: list[str] = field(default_factory=list[str])
    """The requests, for people."""

    def client(self, **options: Any) -> ModernClient:
        """A modern client whose exchanges are compared."""
        return ModernClient(self, **options)

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        """A `Carrier` that keeps its replies."""
        reply = self.carrier.send(method, path, headers, body)
        self.replies.append(reply)
        lines = [f"{method} {path}", *(f"{n}: {v}" for n, v in headers), repr(body[:1_000])]
        self.asked.append("\n".join(lines))
        return reply

    def mask(self, value: str, name: str) -> None:
        """``value`` is random, and compared by this name."""
        self.masked[value] = name

    def transcript(self) -> list[str]:
        """Everything that was answered, in the order of the requests."""
        return [self._written(reply) for reply in self.replies]

    def _written(self, reply: Reply) -> str:
        # As it was sent: a reply reads every line end alike.
        body = b"".join(chunk for of, chunk in self.carrier.journal if of is reply)
        declared = reply.header("content-length")
        assert declared is None or int(declared) == len(body), reply
        text = _without_ours(body).decode("utf-8")
        for value, name in self.masked.items():
            text = text.replace(value, name)
        headers = sorted(f"{n}: {v}" for n, v in reply.headers if n not in _IGNORED)
        raised = f" raised {reply.error!r}" if reply.error is not None else ""
        return "\n".join([f"{reply.status}{raised}", *headers, "", text])


_ADDED = re.compile(
    rb"(?<=Request body too large): the limit is \d+ bytes \(max_message\)"
    rb"|(?<=Not Found)\. This server speaks MCP at [^ ]*"
)
"""What our texts say beyond those of the SDK: the limit, and the path that is served."""


def _without_ours(body: bytes) -> bytes:
    if EXTENSION.encode() not in body:
        return _ADDED.sub(b"", body)
    message = cast("Json", json.loads(body))
    capabilities = message["result"]["capabilities"]
    assert capabilities.pop("sessions") == {}
    extensions = capabilities["extensions"]
    assert extensions.pop(EXTENSION)
    if not extensions:
        del capabilities["extensions"]
    return json.dumps(message, separators=(",", ":")).encode()


Script = Callable[[Side], Awaitable[None]]


@asynccontextmanager
async def bare(make: Callable[[], Everything]) -> AsyncGenerator[Side]:
    """The server as its own HTTP application serves it."""
    rich = make()
    if hasattr(rich.server, "http_app"):
        app = rich.server.http_app(path="/mcp")
    else:
        app = rich.server.streamable_http_app()
    async with app.router.lifespan_context(app), in_process(app) as carrier:
        yield Side("bare", rich, carrier)


@asynccontextmanager
async def wrapped(make: Callable[[], Everything]) -> AsyncGenerator[Side]:
    """The server as the layer serves it.

    It asks no client of the 2026 era, as the SDK does.
    """
    rich = make()
    layer = SessionLayer(rich.server, policy=SessionPolicy(question_timeout=0))
    app = layer.asgi_app()
    async with layer.lifespan(), in_process(app) as carrier:
        yield Side("wrapped", rich, carrier)


async def expect_same(make: Callable[[], Everything], script: Script) -> list[str]:
    """Run ``script`` on both; the transcript, which is the same.

    Raises:
        AssertionError: They answered differently.
    """
    transcripts: list[list[str]] = []
    asked: list[str] = []
    for side_of in (bare, wrapped):
        async with AsyncExitStack() as stack:
            side = await stack.enter_async_context(side_of(make))
            await script(side)
            transcripts.append(side.transcript())
        asked = side.asked
    expected, answered = transcripts
    differing = [
        f"asked:\n{request}\n\nbare:\n{one}\n\nwrapped:\n{other}"
        for request, one, other in zip(asked, expected, answered, strict=True)
        if _steady(one) != _steady(other)
    ]
    # Not `assert`: pytest would explain strings of pages, character by character.
    if differing:
        raise AssertionError(f"{len(differing)} answers differ\n\n" + "\n\n".join(differing[:5]))
    return expected


def _steady(text: str) -> str:
    """Without what no server promises twice: object addresses in error texts."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)
