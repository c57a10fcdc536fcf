"""Assign the children of sessions to replicas, and send requests to them.

Rules:

1. The store has the holder of a session's child, under a name that is used once. It changes by one
   atomic step, and only from a dead process, or from this process under an older name.
2. A process checks its lease before it asks a child. A process that stood still for longer than
   the lease checks again. If others took it for dead, it asks its old child nothing.
3. A request is sent to one process, and runs once (``relay.py``). If the process dies, or does not
   know of it, the outcome is unknown: -31012. If the request did not run, because the process is
   dead or has the child no more, the next process serves it.
4. A process that speaks another version of the messages counts as dead. It lives, and may ask its
   child something for as long as its lease lasts. The next process waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.messages import error_body, wire_error
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown, SessionNotFound
from mcp_sessions.ids import SessionId, process_of
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster.codec import understands
from mcp_sessions.server.cluster.relay import Asker, Deaf, RelayedOutcome, RequestRelay, Unserved
from mcp_sessions.server.cluster.replica_messages import (
    Caller,
    ChildNotification,
    ChildRequest,
    ClientRequest,
)
from mcp_sessions.server.upstream.external.child_requests import NOT_STARTED
from mcp_sessions.server.upstream.external.other_replicas import (
    Lease,
    Moved,
    RemoteRequest,
    ServedResult,
)
from mcp_sessions.server.upstream.port import (
    NOTHING_WANTED,
    TOO_FAR,
    PeerError,
    PeerRequest,
    UpstreamCall,
    UpstreamError,
    Wanted,
    wanted_by,
)
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import LIVENESS, Exchange

LEASE = LIVENESS / 2
"""Seconds that a look at who has a child is good for: who lived then is not taken for dead before
that has ended, even if its last sign of life was not the newest.
"""


class RemoteChildren:
    def __init__(self, relay: RequestRelay, store: SessionStore, exchange: Exchange) -> None:
        self._relay = relay
        self._bus = relay.bus
        self._store = store
        self._exchange = exchange
        self._held: dict[SessionId, str] = {}
        self._inherited: dict[SessionId, Wanted] = {}
        self._used_until: dict[SessionId, float] = {}
        """Sessions taken from a process that lives: until then it may ask its child something."""

        self._taken = 0
        self._lost = 0
        self._asking: dict[str, UpstreamCall] = {}
        """The calls that another process serves, by their names there."""

    def moved(self) -> tuple[int, int]:
        """How many sessions this process took from others that are not alive, and how many it
        lost to others, since this was asked last.
        """
        moved = self._taken, self._lost
        self._taken = self._lost = 0
        return moved

    @property
    def held(self) -> Mapping[SessionId, str]:
        """The sessions that this process has, had when it last looked, or is claiming."""
        return self._held

    async def lease(self, session_id: SessionId) -> Lease:
        loop = asyncio.get_running_loop()
        instead_of: str | None = None
        while True:
            was_here = session_id in self._held
            # Known before it is claimed: of two requests that come at once each claims for both.
            name = self._held.setdefault(session_id, mint_request_id(self._bus.process))
            until = loop.time() + LEASE
            holder = await self._exchange.claim(session_id, name, instead_of=instead_of)
            if loop.time() >= until:
                continue
            if holder == name and (left := self._used_until.get(session_id, 0) - loop.time()) > 0:
                await asyncio.sleep(left)
                continue
            if holder == name:
                # The process that handed it over named no successor.
                self._taken += instead_of is not None and process_of(instead_of) is not None
                return Lease(session_id, name, True, until, self._inherited.get(session_id))
            if self._held.get(session_id) == name:
                self._lost += was_here and holder is not None and instead_of is None
                self.release(session_id)
            if holder is None:
                raise UpstreamError(wire_error(SessionNotFound(session_id)))
            process = process_of(holder)
            if self._bus.is_remote(process) and await self._bus.is_alive(process):
                if understands(process):
                    return Lease(session_id, holder, False, until, None)
                now = loop.time()
                self._used_until = {s: at for s, at in self._used_until.items() if at > now}
                self._used_until[session_id] = now + LEASE
            instead_of = holder
            record = await self._store.load(session_id, now=0)
            self._inherited[session_id] = (
                wanted_by(record) if record is not None else NOTHING_WANTED
            )

    async def check(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        until = lease.until
        while loop.time() >= until:
            until = loop.time() + LEASE
            if await self._exchange.claim(lease.session_id, None) != lease.holder:
                raise Moved
        if self._held.get(lease.session_id) != lease.holder:
            raise Moved

    def release(self, session_id: SessionId) -> None:
        self._held.pop(session_id, None)
        self._inherited.pop(session_id, None)

    async def give_up(self, session_id: SessionId, holder: str) -> None:
        """Release a session that this process holds by that name. The next claim gets it.

        Raises:
            StoreUnavailable: Unknown whether the release is stored. This process serves it no more.
        """
        self.release(session_id)
        # By the name of nobody, who is not alive anywhere.
        await self._exchange.claim(session_id, mint_request_id(), instead_of=holder)

    async def lost(self) -> list[SessionId]:
        """Return the sessions that another process took. Their children end here.

        Raises:
            StoreUnavailable: Unknown.
        """
        lost: list[SessionId] = []
        for session_id, name in list(self._held.items()):
            holder = await self._exchange.claim(session_id, None)
            if holder not in (name, None) and self._held.get(session_id) == name:
                self.release(session_id)
                self._lost += 1
                lost.append(session_id)
        return lost

    async def notify(
        self, session_id: SessionId, method: str, params: dict[str, Any] | None
    ) -> bool:
        holder = await self._exchange.claim(session_id, None)
        process = process_of(holder) if holder is not None else None
        if not self._bus.is_remote(process):
            return False
        notification = ChildNotification(session_id=session_id, method=method, params=params)
        with suppress(Unserved, OutcomeUnknown):
            # Otherwise the child has ended with its process.
            await self._relay.ask(process, notification, is_repeatable=True)
        return True

    # --- what is asked at another replica ---------------------------------------------------------

    async def ask(self, lease: Lease, call: UpstreamCall, asked: RemoteRequest) -> ServedResult:
        process = process_of(lease.holder)
        if process is None:
            raise AssertionError("a lease names its process")
        request = _request(lease.session_id, lease.holder, call, asked)
        return await self._ask(process, call, request)

    async def go_on_in(
        self,
        waiting: str,
        session_id: SessionId | None,
        call: UpstreamCall,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        process = process_of(waiting)
        if process is None or not self._bus.is_remote(process):
            return None
        request = _round(session_id, waiting, call, method, params)
        try:
            # It may come twice: the second time it gets the same answer.
            served = await self._ask(process, call, request, is_repeatable=True)
        except Moved:
            # The call that waited there has ended.
            raise UpstreamError(wire_error(OutcomeUnknown())) from None
        except asyncio.CancelledError:
            self.cancel_in(waiting, session_id, call, method, params)
            raise
        return served[0]

    def cancel_in(
        self,
        waiting: str,
        session_id: SessionId | None,
        call: UpstreamCall,
        method: str,
        params: dict[str, Any] | None,
    ) -> bool:
        """See `RemoteRounds.cancel_in`."""
        process = process_of(waiting)
        if process is None or not self._bus.is_remote(process):
            return False
        request = replace(_round(session_id, waiting, call, method, params), is_cancelled=True)
        self._bus.spawn(self._cancel(process, request))
        return True

    async def _cancel(self, process: str, request: ChildRequest) -> None:
        with suppress(Unserved, OutcomeUnknown):
            # Otherwise the call has ended with its process.
            await self._relay.ask(process, request, is_repeatable=True)

    async def _ask(
        self,
        process: str,
        call: UpstreamCall,
        request: ChildRequest,
        *,
        is_repeatable: bool = False,
    ) -> ServedResult:

        async def pass_on(message: Mapping[str, Any]) -> None:
            method, params = message["method"], message["params"]
            if method == method_names.PROGRESS:
                await call.report(params or {})
            else:
                await call.notify(method, dict(params) if params is not None else None)

        async def ask_client(asker: Asker, asked: ClientRequest) -> RelayedOutcome:
            known = (self._asking.get(each) for each in asked.about)
            about = [each for each in known if each is not None and each.can_send_request]
            reach = max(each.reach for each in about or [call])
            if reach < asked.least:
                return None, error_body(INTERNAL_ERROR, "the client is away", TOO_FAR)
            there = PeerRequest(
                asked.method, asked.params, about=about, id=asked.id, may_move=asked.id is not None
            )
            able = [each for each in about or [call] if each.reach == reach]
            way = call if call in able else able[-1]
            return await _asked_of(way, asker, there)

        name = mint_request_id(self._bus.process)
        self._asking[name] = call
        try:
            answer = await self._relay.ask(
                *(process, request, pass_on),
                serve=ask_client,
                name=name,
                is_repeatable=is_repeatable,
            )
        except Unserved:
            raise Moved from None
        except Deaf:
            data = {"reason": NOT_STARTED, "started": False}
            text = "the replica that has its process does not listen"
            raise UpstreamError(error_body(INTERNAL_ERROR, text, data)) from None
        except OutcomeUnknown as unknown:
            raise UpstreamError(wire_error(unknown)) from unknown
        finally:
            del self._asking[name]
        if answer.result is None:
            raise UpstreamError(dict(answer.error or {}))
        return dict(answer.result["result"]), answer.result["handshake"]


def _round(
    session_id: SessionId | None,
    waiting: str,
    call: UpstreamCall,
    method: str,
    params: dict[str, Any] | None,
) -> ChildRequest:
    return _request(session_id, waiting, call, RemoteRequest({}, method, params, None, {}))


def _request(
    session_id: SessionId | None, holder: str, call: UpstreamCall, asked: RemoteRequest
) -> ChildRequest:
    return ChildRequest(
        session_id=session_id,
        holder=holder,
        client=asked.client,
        method=asked.method,
        params=asked.params,
        level=asked.level,
        caller=Caller(call.principal, call.can_send_request),
        asks=asked.asks,
        scopes=sorted(call.principal.scopes),
    )


async def _asked_of(call: UpstreamCall, asker: Asker, asked: PeerRequest) -> RelayedOutcome:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        params = {"progress": progress, "total": total, "message": message}
        await asker.update({"method": method_names.PROGRESS, "params": params})

    try:
        return await call.send_request(replace(asked, on_progress=report)), None
    except PeerError as refused:
        return None, {"code": refused.code, "message": refused.message, "data": refused.data}
