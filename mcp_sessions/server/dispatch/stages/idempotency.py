"""Requests with a key, which run at most once in their session.

One that comes again gets what the first has: the answer that was kept; if it still runs, the same
answer when it is there, here or in the process where it runs. The handler never runs again.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.core.messages import decode_kept
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import (
    KEY_BYTES,
    InvalidReason,
    InvalidRequest,
    LimitReached,
    OutcomeUnknown,
)
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.locks import Locks
from mcp_sessions.server.calls.table import ANSWERED, Call, Keyed, Outcome, Stage
from mcp_sessions.server.cluster.relay import RequestRelay
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.dispatch.stages.association import Association
from mcp_sessions.server.requests.joining import BeginAnew, Joining
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.records import Admitted


class Idempotency:
    def __init__(
        self,
        replica: Replica,
        runner: RequestRunner,
        association: Association,
        *,
        sealed: SealedState,
        relay: RequestRelay,
    ) -> None:
        self._bus, self._runner = replica.bus, runner
        self._most_key_bytes = replica.policy.request_key_bytes
        self.association, self._sealed = association, sealed
        self.begin_of = Locks[tuple[SessionId, RequestKey]]().of
        """A lock that is held until a request runs or is refused. The same key again, in the same
        session, waits that long: recorded in the store, but running nowhere yet, the first would
        look lost.
        """

        self.joining = Joining(
            relay, self._runner, self._admit_again, self._answer_kept, self.begin_of
        )
        """Those that run in other processes."""

    async def lock(self, call: Call) -> None:
        """Take the lock of a key, if the call is in a session.

        Raises:
            InvalidParams: The metadata that names the session is malformed.
            OutcomeUnknown: It was begun in another session.
        """
        inbound, session_id = call.inbound, None
        # If it is admitted with its connection, the lock is held.
        joint = inbound.http.joint
        is_admitted = joint is not None and joint.is_admitted
        if not is_admitted:
            session_id = await self.association.session_of(call.request, inbound)
        keyed = call.keyed = call.keyed or Keyed()
        key = call.request.key or keyed.of_host
        is_outside = session_id is None and keyed.of_host is not None
        if keyed.known_in is not None and session_id != keyed.known_in and not is_outside:
            # Its connection went on to another session.
            raise OutcomeUnknown
        call.key = key
        if session_id is not None and key is not None:
            await self.hold(keyed, session_id, key)

    async def hold(self, keyed: Keyed, session_id: SessionId, key: RequestKey) -> None:
        lock = self.begin_of((session_id, key))
        await lock.acquire()
        keyed.lock = lock

    async def again(self, call: Call, begin_anew: BeginAnew) -> Outcome | None:
        """Serve a request whose key is known. None: it is not.

        Args:
            begin_anew: Serves it in place of a run that never began.

        Raises:
            InvalidRequest: ``KEY_REUSED``: the key was used with other content.
            LimitReached: The session keeps no more keys.
            OutcomeUnknown: It was begun, and nobody can know how it ended.
            StoreUnavailable: Its outcome is known here, and still waits for the store.
        """
        admitted, keyed = call.admitted, call.keyed
        if keyed is None:
            return None
        if admitted is not None and self._never_began(admitted):
            keyed.instead_of = admitted.run or ""
            if keyed.scope is not None and call.key is not None:
                call.admitted = await self.admit(call, keyed.scope.session_id, call.key)
            else:
                await self.association.before(call)
            admitted = call.admitted
        if admitted is None or admitted.key is None or admitted.key is Begun.FIRST:
            return None
        keyed.was_seen = True
        record, key = admitted.record, call.key
        match admitted.key:
            case Begun.OTHER_CONTENT:
                raise InvalidRequest(
                    InvalidReason.KEY_REUSED, "this request key was used with other content"
                )
            case Begun.FULL:
                raise LimitReached(KEY_BYTES, self._most_key_bytes)
            case Begun.ANSWERED:
                await self._answer_kept(call, admitted)
                return ANSWERED
            case Begun.RUNNING if key is not None:
                if call.named:
                    # First: it asks the store, and meanwhile the request may end.
                    await self.association.attach_if_free(record, call.inbound)
                running, runner = self._runner.calls.by_key(record.session_id, key), admitted.runner
                if running is not None:
                    await running.join(call)
                    return ANSWERED
                if self._bus.is_remote(runner):
                    self.joining.begin(
                        call, record.session_id, key, runner, admitted.run, begin_anew
                    )
                    return ANSWERED
                # It does not run here. It did when the store was asked, or its outcome waits for a
                # store that was away.
                await self._runner.shared.outcomes.flush(record.session_id, key)
                admitted = await self._admit_again(call, record.session_id, key)
                if admitted.key is Begun.ANSWERED:
                    await self._answer_kept(call, admitted)
                    return ANSWERED
            case _:
                # Dropped, or begun with scopes that this credential lacks: for its sender
                # nobody can know how it ended.
                pass
        raise OutcomeUnknown

    def _never_began(self, admitted: Admitted) -> bool:
        """Whether a key is recorded for a run of this process that never began: the reply to
        its admission was lost, or something failed before its handler started. Asked by who
        holds :attr:`begin_of`.
        """
        is_ours = admitted.key is Begun.RUNNING and admitted.runner == self._runner.process
        return is_ours and self._runner.runs.never_began(admitted.run)

    async def _answer_kept(self, call: Call, admitted: Admitted) -> None:
        kept = decode_kept(admitted.outcome or b"")
        if "error" in kept:
            await call.answer(Outcome(None, kept["error"]))
            return
        result = kept["result"]
        if call.named:
            result = self._sealed.stamp(result, admitted.record)
        await call.answer(Outcome(call.inbound.of_its_era(result), None))

    async def admit(self, call: Call, session_id: SessionId, key: RequestKey) -> Admitted:
        keyed = call.keyed or Keyed()
        return await self.association.admit(
            session_id,
            call.inbound,
            call.request,
            key,
            instead_of=keyed.instead_of,
            scope=keyed.scope,
        )

    async def _admit_again(self, call: Call, session_id: SessionId, key: RequestKey) -> Admitted:
        admitted = await self.association.admit(
            session_id,
            call.inbound,
            call.request,
            key,
            scope=call.keyed.scope if call.keyed is not None else None,
        )
        if admitted.key is Begun.FIRST and admitted.run is not None:
            # Known before and forgotten since: what that run did, nobody knows.
            self._runner.runs.settle(admitted.run)
        return admitted


@dataclass(slots=True, eq=False, repr=False)
class KeyLock(Stage):
    """Lets one request with a key at a time pass from its admission to its start."""

    _idempotency: Idempotency

    async def before(self, call: Call) -> Outcome | None:
        await self._idempotency.lock(call)
        return None


@dataclass(slots=True, eq=False, repr=False)
class KnownKey(Stage):
    """Answers a request whose key is known without running it again.

    Args:
        begin_anew: Serves one whose run in another process never began, and never will.
    """

    _idempotency: Idempotency
    _begin_anew: BeginAnew

    async def before(self, call: Call) -> Outcome | None:
        return await self._idempotency.again(call, self._begin_anew)

    def may_have_begun(self, call: Call) -> bool:
        return call.keyed is not None and call.keyed.was_seen
