"""What replicas tell each other of sessions: taken over, ended, asked, answered, cancelled.

Each handler looks at the store, or at what this process knows itself, before it does what a
message says; see :mod:`mcp_sessions.server.cluster.bus`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import Answer, error_body
from mcp_sessions.errors import INVALID_REQUEST, Detached
from mcp_sessions.ids import ConnectionId, FencingEpoch, RequestKey, SessionId
from mcp_sessions.server.cluster.bus import ClusterBus, Members
from mcp_sessions.server.cluster.forwarding import read_principal
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.requests.joining import Joining
from mcp_sessions.server.requests.questions import may_ask
from mcp_sessions.server.requests.runner import REQUEST_CANCELLED, RequestRunner
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attachment

logger = logging.getLogger(__name__)

_ATTACHED_EVERY = 4
"""Rounds between two looks at who has what is attached here. The next event would show it."""

_CANCELLED = error_body(REQUEST_CANCELLED, "Request cancelled")

Publish = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


class Telling:
    """Does what the other replicas tell."""

    def __init__(
        self,
        bus: ClusterBus,
        store: SessionStore,
        hub: Hub,
        broadcaster: ChangeBroadcaster,
        runner: RequestRunner,
        joining: Joining,
        *,
        forget: Callable[[SessionId, ConnectionId | None], Awaitable[None]],
        publish: Publish,
    ) -> None:
        """Take what it works with.

        Args:
            store: What they share.
            hub: The connections of this one.
            broadcaster: Tells the connections of this one what changed.
            runner: The requests of this one.
            joining: Those that wait here for another process.
            forget: Ends what is at work here for a session that is over in the store.
            publish: Puts a change on the server's own bus, and tells nobody else.
        """
        self._bus = bus
        self._store = store
        self._hub = hub
        self._broadcaster = broadcaster
        self._runner = runner
        self._joining = joining
        self._forget = forget
        self._publish = publish
        self._rounds = 0
        bus.on("answer", self._answered)
        bus.on("attached", self._attached)
        bus.on("cancel", self._cancel)
        bus.on("cancel_keyed", self._cancel_keyed)
        bus.on("change", self._changed)
        bus.on("displaced", self._displaced)
        bus.on("ended", self._ended)
        bus.on("progress", self._progressed)
        bus.on("push", self._pushed)
        bus.on("unasked", self._unasked)
        bus.on_over = self._over
        bus.each_round.append(self._round)

    async def _answered(self, message: Members) -> None:
        answer = Answer(message["id"], message["result"], message["error"])
        self._runner.questions.resolve(answer, read_principal(message["principal"]))

    async def _progressed(self, message: Members) -> None:
        await self._runner.questions.progress(
            message["params"], read_principal(message["principal"])
        )

    async def _attached(self, message: Members) -> None:
        await self._runner.ask_elsewhere(SessionId(message["session"]))

    async def _cancel(self, message: Members) -> None:
        connection_id = ConnectionId(message["connection"])
        join = self._joining.of_request(connection_id, message["id"])
        if join is not None:
            await self._joining.cancel(join)
        connection = self._hub.local(connection_id)
        running = connection.requests.get(message["id"]) if connection is not None else None
        if running is not None:
            await self._runner.abort(running, _CANCELLED)

    async def _cancel_keyed(self, message: Members) -> None:
        running = self._runner.by_key(SessionId(message["session"]), RequestKey(message["key"]))
        if running is not None:
            await self._runner.abort(running, _CANCELLED)

    async def _changed(self, message: Members) -> None:
        method, params = message["method"], message["params"]
        if not self._broadcaster.is_new(message.get("id")):
            return
        await self._broadcaster.tell_sessionless(method, params)
        await self._publish(method, params)

    async def _displaced(self, message: Members) -> None:
        session_id = SessionId(message["session"])
        previous = Attachment(ConnectionId(message["connection"]), FencingEpoch(message["epoch"]))
        connection = self._hub.local(previous.connection_id)
        if connection is not None:
            reason = Detached(message["reason"])
            await self._hub.check_attached(
                session_id,
                connection,
                reason=reason,
                newer=message["newer"],
                # A replica of the version before does not say it.
                instance=message.get("instance"),
            )

    async def _ended(self, message: Members) -> None:
        session_id = SessionId(message["session"])
        given = message["connection"]
        connection_id = ConnectionId(given) if given is not None else None
        knows = session_id in self._runner.held or self._hub.knows(session_id)
        known = connection_id is not None and self._hub.local(connection_id) is not None
        if (knows or known) and await self._store.load(session_id, now=0) is None:
            await self._forget(session_id, connection_id)

    async def _over(self, session_id: SessionId) -> None:
        await self._forget(session_id, None)

    async def _pushed(self, message: Members) -> None:
        session_id = SessionId(message["session"])
        connection = self._hub.local(ConnectionId(message["connection"]))
        if connection is None or connection.attached.get(session_id) != message["epoch"]:
            # It left meanwhile; what is open is asked again where it attaches next.
            return
        if message["method"] is not None and not may_ask(connection.peer, message["method"]):
            await self._bus.tell("unasked", to=message["from"], call=message["call"])
            return
        draft = Draft(message["text"].encode(), None, message.get("key"), session_id)
        await connection.send(draft)

    async def _unasked(self, message: Members) -> None:
        question = self._runner.questions.get(message["call"])
        if question is not None:
            text = f"the client cannot be asked {question.method!r}"
            self._runner.questions.fail(question, INVALID_REQUEST, text)

    async def _round(self) -> None:
        """Sessions at work here may have ended elsewhere, or left a connection of this
        process for one elsewhere, and nobody was heard to say so.
        """
        self._rounds += 1
        if self._rounds % _ATTACHED_EVERY == 0:
            for connection in self._hub.connections():
                for session_id in list(connection.attached):
                    await self._hub.check_attached(session_id, connection)
        for session_id in list(self._runner.held):
            if await self._store.head(session_id) is None:
                if await self._store.load(session_id, now=0) is None:
                    await self._forget(session_id, None)
