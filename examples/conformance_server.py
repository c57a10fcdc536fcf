"""The server that the conformance vectors are played against: a few fixture tools.

Run it, on HTTP and WebSocket or on standard input and output::

    mcp-sessions serve examples/conformance_server.py
    mcp-sessions serve --stdio examples/conformance_server.py
    mcp-sessions conformance http://127.0.0.1:8000/mcp ws://127.0.0.1:8000/mcp

``conformance/README.md`` describes each tool, so that a server in another language can have
them too. With ``CONFORMANCE_TOKEN`` and ``CONFORMANCE_OTHER_TOKEN`` in its environment it asks
for one of these bearer tokens; each is a principal of its own. ``CONFORMANCE_WEAK_TOKEN`` is
another one of the first principal, with fewer scopes. With ``CONFORMANCE_CONVERSATIONS`` it binds
conversations, and its tool ``counter`` takes a handle: ``mcp-sessions conformance
--conversations``. ``CONFORMANCE_KIND`` is for those that its tool ``beside`` starts: they end with
their standard input, and shut down when they are asked to, have short times, or no store.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from typing import Any

from mcp.server import MCPServer
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from pydantic import AnyHttpUrl, BaseModel

from mcp_sessions import (
    Conversations,
    SessionHandle,
    SessionLayer,
    SessionPolicy,
    TaskPolicy,
    current_session,
)

HELD_AT_MOST = 10.0
"""Seconds that ``hold`` waits for its ``release``."""

POLICY = SessionPolicy(
    # Small limits, so that a vector can reach them.
    max_events=100,
    max_bytes=65_536,
    max_subscriptions=50,
    request_key_bytes=16_384,
    max_message=1_048_576,
)

BRIEF = replace(
    POLICY,
    # Short enough to be waited for; and a window that a slow reader leaves much unread of.
    idle_timeout=4,
    forget_after=4,
    max_age=1,
    detached_timeout=2,
    slow_timeout=1,
    max_events=100_000,
    max_bytes=67_108_864,
)
KINDS = ("draining", "brief", "stateless")
KIND = os.environ.get("CONFORMANCE_KIND")
GRACE = 3.0
"""Seconds in which what runs may finish when the server shuts down."""


class Tokens:
    """The SDK's ``TokenVerifier`` over two words from the environment."""

    def __init__(self, tokens: dict[str, tuple[str, list[str]]]) -> None:
        self.tokens = tokens

    async def verify_token(self, token: str) -> AccessToken | None:
        if token not in self.tokens:
            return None
        subject, scopes = self.tokens[token]
        return AccessToken(token=token, client_id="conformance", scopes=scopes, subject=subject)


def make_server() -> MCPServer[Any]:
    """The server, with authentication if the environment names tokens."""
    names = {
        "CONFORMANCE_TOKEN": ("one", ["use", "hear"]),
        "CONFORMANCE_OTHER_TOKEN": ("other", ["use", "hear"]),
        "CONFORMANCE_WEAK_TOKEN": ("one", ["use"]),
    }
    tokens = {os.environ[name]: who for name, who in names.items() if os.environ.get(name)}
    if not tokens:
        return MCPServer[Any]("conformance", version="1.0")
    settings = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"),
        resource_server_url=AnyHttpUrl("https://server.example/mcp"),
        validate_token_resource=False,
        required_scopes=["use"],
    )
    return MCPServer[Any](
        "conformance", version="1.0", token_verifier=Tokens(tokens), auth=settings
    )


mcp = make_server()
BINDS = KIND is None and bool(os.environ.get("CONFORMANCE_CONVERSATIONS"))
layer = SessionLayer(
    mcp,
    policy=BRIEF if KIND == "brief" else POLICY,
    store=None if KIND == "stateless" else "memory://",
    conversations=Conversations(handle={"counter"}) if BINDS else None,
    # Only for clients that declare tasks: ``mcp-sessions conformance --tasks``.
    tasks=None if KIND == "stateless" else TaskPolicy(always={"hold"}),
)
layer.require_session(tools=["members_only"])


class Holds:
    """How often ``hold`` was started, finished and cancelled under a label; who may go on."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.released: dict[str, asyncio.Event] = {}

    def gate(self, label: str) -> asyncio.Event:
        return self.released.setdefault(label, asyncio.Event())


holds = Holds()
tallies: Counter[str] = Counter()


class Answer(BaseModel):
    """What ``ask`` asks for."""

    answer: str


def session_of_call() -> SessionHandle | None:
    """The session that the client started, or that of its conversation, and the call belongs to."""
    session = current_session(default=None)
    return session if session is not None and session.source != "connection" else None


@mcp.tool(structured_output=False)
async def echo(msg: str) -> str:
    """Answers ``msg``. In a session it counts its calls there, in the session's state."""
    session = session_of_call()
    if session is not None:
        session.state["echoed"] = session.state.get("echoed", 0) + 1
    return msg


@mcp.tool(structured_output=False)
async def remember(key: str, value: str, fail: bool = False) -> str:
    """Sets a key of the session's state; with ``fail`` it then answers with a JSON-RPC error."""
    current_session().state[key] = value
    if fail:
        raise MCPError(-32000, "failed on purpose")
    return "remembered"


@mcp.tool(structured_output=False)
async def recall(key: str) -> str:
    """A key of the session's state, or ``nothing``."""
    session = session_of_call()
    return "nothing" if session is None else str(session.state.get(key, "nothing"))


async def counter() -> str:
    """How often it was called in the session."""
    async with current_session().data.edit() as data:
        data["counter"] = data.get("counter", 0) + 1
        return str(data["counter"])


if BINDS:
    mcp.tool(structured_output=False)(counter)


@mcp.tool(structured_output=False)
async def session_id() -> str:
    """The id of the session that the call belongs to, or ``none``."""
    session = session_of_call()
    return "none" if session is None else session.id


@mcp.tool(structured_output=False)
async def members_only() -> str:
    """Served inside a session only."""
    return "welcome"


@mcp.tool(structured_output=False)
async def update(uri: str, times: int = 1) -> str:
    """A resource changes: sent to all who subscribed, whoever they are."""
    for _ in range(times):
        await layer.notify_resource_updated(uri)
    return "updated"


@mcp.tool(structured_output=False)
async def announce(kind: str) -> str:
    """The list of ``tools``, ``prompts`` or ``resources`` changes: sent to all."""
    changed = {
        "tools": layer.notify_tools_changed,
        "prompts": layer.notify_prompts_changed,
        "resources": layer.notify_resources_changed,
    }
    await changed[kind]()
    return "announced"


@mcp.tool(structured_output=False)
async def emit(uris: list[str], ctx: Context[Any, Any]) -> str:
    """Sends ``resources/updated`` for each, on the standalone channel of the call's session."""
    for uri in uris:
        await ctx.session.send_resource_updated(uri)
    return "emitted"


@mcp.tool(structured_output=False)
async def flood(prefix: str, count: int) -> str:
    """Sends ``resources/updated`` for ``prefix``1 … ``count``, as events of its session."""
    session = current_session()
    for number in range(1, count + 1):
        await session.notify("notifications/resources/updated", {"uri": f"{prefix}{number}"})
    return "flooded"


@mcp.tool(structured_output=False)
async def say(texts: list[str], length: int = 0) -> str:
    """Sends ``notifications/message`` for each text, as events of its session.

    Args:
        texts: What to say.
        length: Characters that each is filled up to.
    """
    session = current_session()
    for text in texts:
        data = text.ljust(length, ".")
        await session.notify("notifications/message", {"level": "info", "data": data})
    return "said"


@mcp.tool(structured_output=False)
async def progress(steps: int, ctx: Context[Any, Any]) -> str:
    """Reports 1 … ``steps`` on its own request's channel."""
    for step in range(1, steps + 1):
        await ctx.report_progress(step, steps)
    return "reported"


@mcp.tool(structured_output=False)
async def ask(question: str, ctx: Context[Any, Any]) -> str:
    """Asks the client's user (elicitation) and returns ``ACTION: ANSWER``."""
    result = await ctx.elicit(question, Answer)
    return f"{result.action}: {result.data.answer if result.action == 'accept' else ''}"


@mcp.tool(structured_output=False)
async def tally(label: str, fail: bool = False) -> str:
    """How often it was called with this label, this call included; with ``fail`` it says so in
    the message of a JSON-RPC error.
    """
    tallies[label] += 1
    if fail:
        raise MCPError(-32000, str(tallies[label]))
    return str(tallies[label])


@mcp.tool(structured_output=False)
async def hold(label: str, ctx: Context[Any, Any]) -> str:
    """Reports progress once and waits for ``release``; then returns ``held``."""
    holds.counts[f"{label} started"] += 1
    try:
        await ctx.report_progress(1, 2)
        async with asyncio.timeout(HELD_AT_MOST):
            await holds.gate(label).wait()
        await ctx.report_progress(2, 2)
    except TimeoutError as error:
        raise ToolError("nobody released it") from error
    except asyncio.CancelledError:
        holds.counts[f"{label} cancelled"] += 1
        raise
    holds.counts[f"{label} finished"] += 1
    return "held"


@mcp.tool(structured_output=False)
async def release(label: str) -> str:
    """Lets ``hold`` go on."""
    holds.gate(label).set()
    return "released"


@mcp.tool(structured_output=False)
async def held(label: str) -> str:
    """``STARTED started, FINISHED finished, CANCELLED cancelled``: what ``hold`` did."""
    counts = [f"{holds.counts[f'{label} {what}']} {what}" for what in WHAT_HAPPENED]
    return ", ".join(counts)


WHAT_HAPPENED = ("started", "finished", "cancelled")


@mcp.tool(structured_output=False)
async def revoke(session: str | None = None) -> str:
    """The server ends a session by itself; without a name that of the call's conversation."""
    if session is None:
        # A handler sees the SHA-256 of the id.
        shown = current_session().id
        known = [each.id for each in await layer.sessions.list()]
        session = next(each for each in known if sha256(each.encode()).hexdigest() == shown)
    return "revoked" if await layer.sessions.end(session) else "not there"


@mcp.resource("conformance://resource/{name}")
def resource(name: str) -> str:
    """A resource; what it holds is of no interest."""
    return f"resource {name}"


@mcp.prompt()
def greet(name: str) -> str:
    """A prompt; what it says is of no interest."""
    return f"Greet {name}."


@mcp.completion()
async def complete(*_: object) -> None:
    """Completes nothing: its answer is of interest."""


class OtherServers:
    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._running: list[Process] = []
        self._starting = asyncio.Lock()

    async def url(self, kind: str) -> str:
        """The URL of a server of that kind. If it is to shut down, each call gets a new one."""
        async with self._starting:
            if kind not in self._urls or kind == "draining":
                self._urls[kind] = await self._start(kind)
            return self._urls[kind]

    async def _start(self, kind: str) -> str:
        # It ends when this process does, however that ends: then its input does.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={**os.environ, "CONFORMANCE_KIND": kind},
        )
        self._running.append(process)
        url = await process.stdout.readline() if process.stdout is not None else b""
        if not url:
            raise ToolError(f"the server that is {kind} did not start")
        return url.decode().strip()


other_servers = OtherServers()


@mcp.tool(structured_output=False)
async def beside(kind: str = "") -> str:
    """Starts a server next to this one and returns its URL; without a kind: the kinds there are."""
    if not kind:
        return " ".join(KINDS)
    if kind not in KINDS:
        raise ToolError(f"there is no kind {kind}")
    return await other_servers.url(kind)


@mcp.tool(structured_output=False)
async def drain() -> str:
    """The server shuts down, as an application does that goes on listening meanwhile."""
    if KIND != "draining":
        raise ToolError("others use this server")
    leaving.add(asyncio.create_task(leave()))
    return "draining"


async def leave() -> None:
    """Drain, and stay long enough for clients that ask for the outcome."""
    await layer.drain(GRACE)
    await asyncio.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGTERM)


leaving: set[asyncio.Task[None]] = set()


def end_with_input() -> None:
    """End when the program that started this server has ended."""
    while sys.stdin.buffer.read(65_536):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def serve_another() -> None:
    """Serve on a free port, and print the port for the program that started this server."""
    threading.Thread(target=end_with_input, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    layer.run("http", sock=listener, on_started=lambda: print(url, flush=True))


def main() -> None:
    """Serve on http://127.0.0.1:8000/mcp and on the WebSocket next to it."""
    if KIND is not None:
        serve_another()
    else:
        layer.run("http", port=int(os.environ.get("PORT", "8000")))


if __name__ == "__main__":
    main()
