"""What replicas tell each other of sessions: taken over, ended, asked, answered, cancelled.

Each handler looks at the store, or at what this process knows itself, before it does what a
message says; see :mod:`mcp_sessions.server.cluster.bus`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import Answer, RequestId, error_body
from mcp_sessions.errors import INVALID_REQUEST, Detached
from mcp_sessions.ids import ConnectionId, FencingEpoch, RequestKey, SessionId, process_of
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.bus import Members, Replicas
from mcp_sessions.server.delivery.changes import Changes
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.requests.joining import Joining
from mcp_sessions.server.requests.questions import may_ask
from mcp_sessions.server.requests.runner import REQUEST_CANCELLED, Host
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attachment

logger = logging.getLogger(__name__)

_ATTACHED_EVERY = 4
"""Rounds between two looks at who has what is attached here. The next event would show it."""

_CANCELLED = error_body(REQUEST_CANCELLED, "Request cancelled")

Publish = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


class Telling:
    """Tells the other replicas, and does what they tell."""

    def __init__(
        self,
        replicas: Replicas,
        store: SessionStore,
        hub: Hub,
        changes: Changes,
        host: Host,
        joining: Joining,
        *,
        forget: Callable[[SessionId, ConnectionId | None], Awaitable[None]],
        publish: Publish,
    ) -> None:
        """Take what it works with.

        Args:
            replicas: The other processes.
            store: What they share.
            hub: The connections of this one.
            changes: Told to them.
            host: The requests of this one.
            joining: Those that wait here for another process.
            forget: Ends what is at work here for a session that is over in the store.
            publish: Puts a change on the server's own bus, and tells nobody else.
        """
        self._replicas = replicas
        self._store = store
        self._hub = hub
        self._changes = changes
        self._host = host
        self._joining = joining
        self._forget = forget
        self._publish = publish
        self._rounds = 0
        replicas.on("answer", self._answered)
        replicas.on("attached", self._attached)
        replicas.on("cancel", self._cancel)
        replicas.on("cancel_keyed", self._cancel_keyed)
        replicas.on("change", self._changed)
        replicas.on("displaced", self._displaced)
        replicas.on("ended", self._ended)
        replicas.on("progress", self._progressed)
        replicas.on("push", self._pushed)
        replicas.on("unasked", self._unasked)
        replicas.on_over = self._over
        replicas.each_round.append(self._round)

    # --- telling -----------------------------------------------------------------------------

    async def ended(self, session_id: SessionId, connection_id: ConnectionId | None) -> None:
        """A session is over in the store."""
        await self._replicas.tell("ended", session=session_id, connection=connection_id)

    async def answered(self, answer: Answer, principal: Principal) -> bool:
        """Hand on the answer to a request of another process; False if no such one lives.

        Raises:
            StoreUnavailable: Unknown whether it was handed on.
        """
        process = process_of(answer.id) if isinstance(answer.id, str) else None
        if process is None or process == self._replicas.process:
            return False
        if not await self._replicas.is_alive(process):
            return False
        await self._replicas.ask(
            "answer",
            to=process,
            id=answer.id,
            result=answer.result,
            error=answer.error,
            principal=_written(principal),
        )
        return True

    async def progressed(self, params: Mapping[str, Any] | None, principal: Principal) -> None:
        """Hand on a client's progress on a request of another process."""
        token = (params or {}).get("progressToken")
        process = process_of(token) if isinstance(token, str) else None
        if process is not None and process != self._replicas.process:
            await self._replicas.tell(
                "progress", to=process, params=params, principal=_written(principal)
            )

    async def cancel(self, connection_id: ConnectionId, request_id: RequestId) -> None:
        """Cancel what a connection asked for, wherever it runs: its owner wants it."""
        await self._replicas.tell("cancel", connection=connection_id, id=request_id)

    async def cancel_keyed(self, session_id: SessionId, key: RequestKey) -> None:
        """Cancel a keyed request, wherever it runs: its session's owner wants it."""
        await self._replicas.tell("cancel_keyed", session=session_id, key=key)

    # --- being told --------------------------------------------------------------------------

    async def _answered(self, message: Members) -> None:
        answer = Answer(message["id"], message["result"], message["error"])
        self._host.calls.resolve(answer, _read(message["principal"]))

    async def _progressed(self, message: Members) -> None:
        await self._host.calls.progress(message["params"], _read(message["principal"]))

    async def _attached(self, message: Members) -> None:
        await self._host.ask_elsewhere(SessionId(message["session"]))

    async def _cancel(self, message: Members) -> None:
        connection_id = ConnectionId(message["connection"])
        join = self._joining.of_request(connection_id, message["id"])
        if join is not None:
            await self._joining.cancel(join)
        connection = self._hub.local(connection_id)
        running = connection.requests.get(message["id"]) if connection is not None else None
        if running is not None:
            await self._host.abort(running, _CANCELLED)

    async def _cancel_keyed(self, message: Members) -> None:
        running = self._host.by_key(SessionId(message["session"]), RequestKey(message["key"]))
        if running is not None:
            await self._host.abort(running, _CANCELLED)

    async def _changed(self, message: Members) -> None:
        method, params = message["method"], message["params"]
        if not self._changes.is_new(message.get("id")):
            return
        await self._changes.tell_bare(method, params)
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
        knows = session_id in self._host.held or self._hub.knows(session_id)
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
            await self._replicas.tell("unasked", to=message["from"], call=message["call"])
            return
        draft = Draft(message["text"].encode(), None, message.get("key"), session_id)
        await connection.send(draft)

    async def _unasked(self, message: Members) -> None:
        call = self._host.calls.get(message["call"])
        if call is not None:
            text = f"the client cannot be asked {call.method!r}"
            self._host.calls.fail(call, INVALID_REQUEST, text)

    async def _round(self) -> None:
        """Sessions at work here may have ended elsewhere, or left a connection of this
        process for one elsewhere, and nobody was heard to say so.
        """
        self._rounds += 1
        if self._rounds % _ATTACHED_EVERY == 0:
            for connection in self._hub.connections():
                for session_id in list(connection.attached):
                    await self._hub.check_attached(session_id, connection)
        for session_id in list(self._host.held):
            if await self._store.head(session_id) is None:
                if await self._store.load(session_id, now=0) is None:
                    await self._forget(session_id, None)


def _written(principal: Principal) -> list[str | None]:
    return [principal.client_id, principal.issuer, principal.subject]


def _read(written: list[str | None]) -> Principal:
    client_id, issuer, subject = written
    return Principal(client_id, issuer, subject)
