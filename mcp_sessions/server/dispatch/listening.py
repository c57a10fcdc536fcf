"""Start ``subscriptions/listen`` in a session, and end it in order.

The binding owns the stream of the listen.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.listen_messages import Filter
from mcp_sessions.core.message import Message
from mcp_sessions.core.story import Why
from mcp_sessions.core.visibility import Visibility
from mcp_sessions.errors import LimitReached, SessionNotFound
from mcp_sessions.ids import SessionId
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection, Inbound
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.dispatch.stages.serving import UpstreamPeers
from mcp_sessions.server.dispatch.stages.tasks import listened
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.record_changes import SetFilter
from mcp_sessions.stores.records import SessionRecord

_NOTIFYING = 1.0
"""Seconds that a listen waits for a server outside to learn what it is about."""


class Listening:
    def __init__(
        self,
        replica: Replica,
        router: Router,
        peers: UpstreamPeers,
        *,
        attachments: Attachments,
        runner: RequestRunner,
        sealed: SealedState,
        visibility: Visibility,
    ) -> None:
        self._store, self._attachments, self._runner = replica.store, attachments, runner
        self._router, self._peers, self._upstream = router, peers, peers.upstream
        self._sealed, self._visibility = sealed, visibility

    async def admit(self, request: Message, inbound: Inbound) -> tuple[SessionRecord, Filter]:
        """The session that a listen names, with the listen's filter set.

        Raises:
            WireError: As for any request; ``SessionNotFound`` also for a credential with fewer
                scopes than the session was made with (SEC3).
            UpstreamError: The wrapped server's rules refuse the params.
        """
        self._upstream.validate(method_names.LISTEN, inbound.peer.protocol_version, request.params)
        try:
            self._runner.calls.take(inbound)
        except LimitReached as refused:
            self._router.limits.reached(refused)
            raise
        record = await self._router.admitted(request, inbound)
        if record is None or not inbound.principal.scopes >= record.principal.scopes:
            raise SessionNotFound(record.session_id if record is not None else "")
        task_ids: list[SessionId] | None = None
        if self._runner.tasks is not None:
            task_ids = await listened(self._runner.tasks, request, inbound, record.session_id)
        seen, _ = self._visibility.with_rules_in(record.state.values).concealed(
            method_names.LISTEN, request.params
        )
        wanted, before = Filter(seen or {}), record.client.subscriptions
        if not await self._store.change(record.session_id, SetFilter(wanted.uris, wanted.lists)):
            raise SessionNotFound(record.session_id)
        if self._upstream.is_outside and (wanted.uris or before):
            notifying = self._runner.spawn(self._notify_server(request, inbound, record, wanted))
            # Changes in the meantime would be missed. But a server may take long to start, and on
            # a shared connection other requests wait for this one.
            done, _ = await asyncio.wait({notifying}, timeout=_NOTIFYING)
            if done:
                notifying.result()
        return record, Filter(request.params or {}, task_ids or ())

    async def _notify_server(
        self, request: Message, inbound: Inbound, record: SessionRecord, wanted: Filter
    ) -> None:
        known = Call(request, inbound)
        known.record = record
        peer, call = self._peers.peer_and_call(known)
        try:
            await self._upstream.listen(peer, call, wanted.uris)
        finally:
            call.end()
            await peer.close()

    async def attach(
        self, request: Message, record: SessionRecord, connection: ClientConnection
    ) -> None:
        attached = await self._attachments.attach(
            record.session_id,
            connection,
            why=Why.LISTENS,
            instance=request.instance,
            had=record.attachment,
        )
        if attached is None:
            raise SessionNotFound(record.session_id)

    def result(self, members: dict[str, Any], record: SessionRecord) -> dict[str, Any]:
        return {**self._sealed.stamp(members, record), "resultType": "complete"}
