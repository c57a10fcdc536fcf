"""The whole way to a token: stock clients, an authorization server, and npm's ``server-everything``
behind ``serve``, which has no authentication of its own.
"""

import asyncio
import json
import socket
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)

from tests.interop.environments import HERE, node_project
from tests.support.authorization_server import AuthorizationServer, authorization_server, browse
from tests.support.duplex import websocket
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import SocketCarrier
from tests.support.serving import read_lines, serving

pytestmark = pytest.mark.full

HOME = HERE / "server_everything"
PROGRAM = str(HOME / "node_modules/@modelcontextprotocol/server-everything/dist/index.js")
MODERN = "2026-07-28"
SCOPE = "use"
WITHIN = 60.0
"""Seconds that the way of one client may take."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of a proxy that the environment may name."""
    monkeypatch.setenv("NO_PROXY", "*")


@dataclass
class Setup:
    login: AuthorizationServer
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def carrier(self, token: str) -> BearerCarrier:
        return BearerCarrier(SocketCarrier("127.0.0.1", self.port), token)


@asynccontextmanager
async def setup(here: Path) -> AsyncGenerator[Setup]:
    """``serve`` in a process, with the options that the documentation names."""
    node = node_project(HOME)
    async with authorization_server() as login:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        audience = f"http://127.0.0.1:{port}/mcp"
        options = ("--auth-issuer", login.issuer, "--auth-audience", audience)
        command = ("--auth-scope", SCOPE, "--", node, PROGRAM)
        with serving(here, "--port", str(port), *options, *command, within=180) as process:
            said = await asyncio.to_thread(read_lines, process, 5)
            assert f"http://127.0.0.1:{port}/" in said, said
            yield Setup(login, port)


@dataclass
class Storage:
    tokens: list[OAuthToken] = field(default_factory=list[OAuthToken])
    client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens[-1] if self.tokens else None

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens.append(tokens)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


@dataclass
class Authorized:
    """A stock client that has its second token."""

    session: str | None
    token: str

    async def echo(self, message: str) -> str:
        """What its next call answers."""
        raise NotImplementedError


@dataclass
class PythonClient(Authorized):
    client: Client

    async def echo(self, message: str) -> str:
        return _text(await self.client.call_tool("echo", {"message": message}))


def _text(result: Any) -> str:
    return str(result.content[0].text)


@asynccontextmanager
async def python_client(there: Setup, user: str, mode: str) -> AsyncGenerator[PythonClient]:
    """The SDK's client with its own ``OAuthClientProvider``."""
    storage, returned, sessions = Storage(), list[dict[str, str]](), set[str]()

    async def redirected(url: str) -> None:
        returned.append(await browse(url, user))

    async def called_back() -> AuthorizationCodeResult:
        return AuthorizationCodeResult.model_validate(returned[-1])

    async def noted(answer: httpx2.Response) -> None:
        session = answer.headers.get("mcp-session-id")
        if session is not None:
            sessions.add(session)

    provider = OAuthClientProvider(
        there.url,
        OAuthClientMetadata.model_validate(
            {"client_name": "python", "redirect_uris": ["http://127.0.0.1:1/callback"]}
        ),
        storage,
        redirected,
        called_back,
    )
    async with httpx2.AsyncClient(
        auth=provider, timeout=WITHIN, event_hooks={"response": [noted]}
    ) as http:
        transport = streamable_http_client(there.url, http_client=http)
        async with Client(transport, mode=mode) as client:
            assert len((await client.list_tools()).tools) > 5
            async with asyncio.timeout(WITHIN):
                while len(storage.tokens) < 2:
                    summed = await client.call_tool("get-sum", {"a": 1, "b": 2})
                    assert "3" in _text(summed)
            assert len(returned) == 1, "the user was asked once"
            assert len(sessions) == (1 if mode == "legacy" else 0)
            session = next(iter(sessions), None)
            yield PythonClient(session, storage.tokens[-1].access_token, client)


@dataclass
class TypeScriptClient(Authorized):
    process: asyncio.subprocess.Process

    async def echo(self, message: str) -> str:
        """Its last call, after which it leaves."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{message}\n".encode())
        self.process.stdin.close()
        return str((await _line(self.process))["echo"])


async def _line(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None and process.stderr is not None
    async with asyncio.timeout(WITHIN):
        line = await process.stdout.readline()
        return json.loads(line) if line else pytest.fail((await process.stderr.read()).decode())


@asynccontextmanager
async def typescript_client(
    there: Setup, user: str, mode: str, project: str
) -> AsyncGenerator[TypeScriptClient]:
    """A TypeScript client with its own provider, in a process."""
    node = node_project(HERE / project)
    program = str(HERE / project / "authorized.mjs")
    process = await asyncio.create_subprocess_exec(
        node, program, there.url, user, mode, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        seen = await _line(process)
        assert seen["tools"] > 5 and "3" in seen["sum"] and "still here" in seen["echo"]
        assert seen["session"] == seen["sessionAfter"], "the session survives the refresh"
        assert (seen["session"] is None) == (mode != "legacy")
        assert seen["first"] != seen["token"]
        yield TypeScriptClient(seen["session"], seen["token"], process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


KINDS = {
    "python": ("python", "legacy"),
    "python-modern": ("python", MODERN),
    "typescript-1": ("typescript", "legacy"),
    "typescript-2": ("typescript2", "legacy"),
    "typescript-2-modern": ("typescript2", MODERN),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stock_client_registers_gets_a_token_and_a_new_one(
    kind: str, tmp_path: Path
) -> None:
    """O: 401, metadata, registration, PKCE, token, calls, refresh. The session survives the
    refresh, and another user cannot see it.
    """
    project, mode = KINDS[kind]
    async with setup(tmp_path) as there:
        opened = (
            python_client(there, "alice", mode)
            if project == "python"
            else typescript_client(there, "alice", mode, project)
        )
        async with opened as alice:
            counts, login = there.login.counts, there.login
            assert counts["/register"] == counts["authorization_code"] == 1
            assert counts["/authorize"] == 1 and len(login.challenges[0]) == 43
            assert login.resources == [there.url]
            assert counts["refresh_token"] >= 1
            assert login.tokens["alice"][-1] == alice.token
            bob = await token_of(there, "bob")
            if alice.session is not None:
                await expect_unseen(there, alice.session, bob)
            await expect_websocket(there, alice.token, bob)
            assert "and now" in await alice.echo("and now")


async def token_of(there: Setup, user: str) -> str:
    """A token of another user, who has a client as well."""
    async with python_client(there, user, "legacy") as other:
        return other.token


async def expect_unseen(there: Setup, session: str, bob: str) -> None:
    """Over HTTP, the other user gets what an unknown session gets."""
    for method, body in (("POST", b'{"jsonrpc":"2.0","id":1,"method":"ping"}'), ("DELETE", b"")):
        answers: list[tuple[Any, bytes]] = []
        for named in (session, "1" * len(session)):
            fields = [
                ("Accept", "application/json, text/event-stream"),
                ("Content-Type", "application/json"),
                ("Mcp-Session-Id", named),
            ]
            reply = await there.carrier(bob).send(method, "/mcp", fields, body).done()
            answers.append((reply.status, bytes(reply.body)))
        assert answers[0] == answers[1] and answers[0][0] == 404


async def expect_websocket(there: Setup, alice: str, bob: str) -> None:
    """A WebSocket opens with the token, and only its owner can resume its session."""
    url = f"ws://127.0.0.1:{there.port}/mcp"
    bearer = {"Authorization": f"Bearer {alice}"}
    async with websocket(url, headers=bearer) as peer:
        await peer.initialize()
        started = await peer.result("session/start")
        received = await peer.result("tools/call", {"name": "echo", "arguments": {"message": "ws"}})
        assert "ws" in received["content"][0]["text"]
    errors: list[str] = []
    async with websocket(url, headers={"Authorization": f"Bearer {bob}"}) as peer:
        await peer.initialize()
        for named in (started["sessionId"], "1" * len(started["sessionId"])):
            error = await peer.error("session/resume", {"sessionId": named})
            errors.append(json.dumps(error).replace(named, "ID"))
    assert errors[0] == errors[1], "as an unknown one"
    owner = ModernClient(there.carrier(alice))
    await owner.resume(started["sessionId"])
    said = await owner.text("echo", {"message": "again"}, session=started["sessionId"])
    assert "again" in said
