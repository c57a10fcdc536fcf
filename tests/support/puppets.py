"""Servers that do nothing by themselves, behind the real port to them: a test says what they say.

Each process is a `Puppet`. What it is asked names its owner, and so does what it says: a client
that receives what is another's has received what it must not.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions import SessionPolicy, StdioServer
from mcp_sessions.core.named import NAMED
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.command import StdioWire
from mcp_sessions.server.upstream.external.output import Output
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.external.upstream import ExternalUpstream, shell_of
from mcp_sessions.server.upstream.port import (
    LISTENS,
    Outbound,
    PeerError,
    PeerRequest,
    UpstreamError,
    UpstreamPeer,
)
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.stores.records import Peer
from tests.support.modern import MODERN

Json = dict[str, Any]
QUESTION = "elicitation/create"
INFO = {"name": "client", "version": "1"}


class Puppet:
    """One process: what it was asked and did not answer, and what it was answered."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.output = Output()
        self.child: Child | None = None
        self.unanswered: dict[int, Json] = {}
        self.answers: dict[str, Json] = {}
        """By the id of its question."""

        self.requests: list[Json] = []
        """All that it ever got."""

        self.notified: list[Json] = []
        """Notifications."""

        self.is_full = False
        self.untaken = 0
        self._ended = asyncio.Event()

    def say(self, message: Json) -> None:
        self.output.feed(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def say_on(self, request_id: int, message: Json) -> None:
        """It says that on the response of a request, as a URL does."""
        assert self.child is not None
        waiting = self.child._open.get(request_id)  # pyright: ignore[reportPrivateUsage]
        later = self.child.take(json.dumps({"jsonrpc": "2.0", **message}).encode(), waiting)
        if later is not None:
            asyncio.ensure_future(later())

    def answer(self, request_id: int) -> None:
        """It answers what it was asked, with the name of whose that is."""
        request = self.unanswered.pop(request_id)
        result: Json = {"owner": owner_of(request), "content": [], "tools": []}
        self.say({"id": request_id, "result": result})

    # --- what a process is to the port --------------------------------------------------------

    def label(self) -> str:
        return "a puppet"

    def write(self, line: bytes) -> None:
        message = json.loads(line)
        if message.get("method") == "initialize":
            capabilities: Json = {"tools": {}, "logging": {}}
            result = {"protocolVersion": "2025-11-25", "capabilities": capabilities}
            info = {"name": "puppet", "version": "1"}
            self.say({"id": message["id"], "result": {**result, "serverInfo": info}})
        elif message.get("method") in ("server/discover", "logging/setLevel"):
            is_known = message["method"] == "logging/setLevel"
            error = {"code": -32601, "message": "Method not found"}
            self.say({"id": message["id"], **({"result": {}} if is_known else {"error": error})})
        elif "method" in message and "id" in message:
            self.unanswered[message["id"]] = message
            self.requests.append(message)
        elif "id" in message:
            self.answers[message["id"]] = message
        else:
            self.notified.append(message)

    async def room(self) -> None: ...

    async def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._ended.set()
        self.output.end()

    async def last_words(self) -> str:
        return "it ended"


class Puppets:
    """Starts them, as `StdioChildren` do processes."""

    def __init__(self) -> None:
        self.all: list[Puppet] = []

    @property
    def living(self) -> list[Puppet]:
        return [each for each in self.all if each.slot.living is each.child]

    def run(self, room: Callable[[], int]) -> None: ...

    async def start(self, slot: Slot, principal: Principal) -> Child:
        puppet = Puppet(slot)
        child = puppet.child = Child(
            StdioWire(cast(Any, puppet), 1_000_000, ReachedLimits(time.monotonic)), slot
        )
        self.all.append(puppet)
        return child

    def start_first(self) -> bool:
        return False

    def retries(self) -> bool:
        return False

    def use(self, server: ExternalServer) -> None: ...

    def session_ended(self, session_id: SessionId) -> None:
        """See `Starter`: nothing is kept here."""

    async def close(self) -> None: ...


def owner_of(message: Json) -> str:
    """Whose a message of a client is, as the client wrote into it."""
    return str(message["params"]["owner"])


@dataclass(eq=False)
class PuppetCall:
    """A request of a client: everything that it receives."""

    owner: str
    principal: Principal = ANONYMOUS
    can_send_request: bool = False
    reach: int = LISTENS
    received: list[Json] = field(default_factory=list[Json])
    request_id: int = 1
    share: str = "somebody"
    conversation_session: SessionId | None = None
    response: None = None
    get_stream: None = None
    session: str | None = None
    conversation: str | None = None
    transport: str = "http"
    context: Any = None
    client: Any = None
    """Its connection."""

    def is_traced(self, span: object) -> None: ...

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        self.received.append({"method": method, "params": dict(params or {})})

    async def report(self, params: Mapping[str, Any]) -> None:
        await self.notify("notifications/progress", params)

    async def send_request(self, asked: PeerRequest) -> Json:
        """See `Call`. It refuses: who was asked is what matters."""
        await self.notify(asked.method, asked.params)
        raise PeerError(-32000, "refused by its client")


class PuppetWorld:
    """The port over puppets, and clients of it."""

    def __init__(self, upstream: ExternalUpstream, puppets: Puppets) -> None:
        self.upstream = upstream
        self.puppets = puppets
        self.calls: list[PuppetCall] = []
        self.tasks: dict[asyncio.Task[Json], PuppetCall] = {}

    def send(
        self,
        owner: str,
        method: str,
        params: Json,
        *,
        capabilities: Json | None = None,
        level: str | None = None,
        session: str | None = None,
        handshake: bool = False,
        token: object = None,
        connection: Any = None,
    ) -> asyncio.Task[Json]:
        """A request of a client, which runs from now on.

        Args:
            token: Of its progress, any JSON value; None: its owner.
            connection: Its client's connection. None: other clients may use that.
        """
        is_asked = handshake or (bool(capabilities) and method in NAMED)
        call = PuppetCall(owner, can_send_request=is_asked, client=connection)
        self.calls.append(call)
        meta: Json = {"progressToken": owner if token is None else token}
        if level is not None:
            meta["io.modelcontextprotocol/logLevel"] = level
        params = {**params, "owner": owner, "_meta": meta}
        session_id = SessionId(session) if session is not None else None
        way = cast(Outbound, call) if session is not None else None
        if handshake:
            peer = self._peer(call, session, capabilities or {})
        else:
            known: Json = {"capabilities": capabilities or {}, "clientInfo": INFO}
            client = Peer(MODERN, known, modern=True)
            peer = self.upstream.modern_peer(client, way, session_id)

        async def run() -> Json:
            try:
                return await peer.request(cast(Any, call), method, params)
            except UpstreamError as failed:
                return {"error": failed.error}

        task = asyncio.create_task(run())
        self.tasks[task] = call
        return task

    async def notify(self, session: str, method: str) -> None:
        """A notification of a client with a handshake."""
        call = PuppetCall(session)
        await self._peer(call, session, {}).notify(cast(Any, call), method, None)

    def _peer(self, call: PuppetCall, session: str | None, capabilities: Json) -> UpstreamPeer:
        known: Json = {"capabilities": capabilities, "clientInfo": INFO}
        return self.upstream.peer(
            Peer("2025-11-25", {"protocolVersion": "2025-11-25", **known}),
            cast(Outbound, call),
            SessionId(session) if session is not None else None,
            is_alone=session is None,
        )


@asynccontextmanager
async def puppet_world(*, per: str = "session", most: int = 3) -> AsyncGenerator[PuppetWorld]:
    """One; afterwards nothing of it runs.

    Args:
        per: See `StdioServer`.
        most: Puppets at a time.
    """
    server = StdioServer("true", per=cast(Any, per), max_children=most)
    puppets = Puppets()
    upstream = ExternalUpstream(
        server,
        puppets,
        shell_of(server, remembers=False),
        other_replicas=None,
        policy=SessionPolicy(),
        declared=DeclaredHeaders(),
        rounds=Rounds(SessionPolicy(), server.max_children, None),
        remembers=False,
    )
    async with upstream.lifespan():
        w = PuppetWorld(upstream, puppets)
        try:
            yield w
        finally:
            for task in w.tasks:
                task.cancel()
            await asyncio.gather(*w.tasks, return_exceptions=True)


async def settled() -> None:
    """Whatever can go on without anything from outside went on."""
    for _ in range(40):
        await asyncio.sleep(0)
