"""Requests with a key, which run at most once in their session.

One that comes again gets what the first has: the answer that was kept; if it still runs, the
same answer when it is there, here or in the process where it runs. Whatever happens, the
handler does not run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.core.messages import decode_kept
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import InvalidReason, InvalidRequest, LimitReached, OutcomeUnknown
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.locks import Locks
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.dispatch.association import Associations
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.requests.joining import BeginAnew, Joining
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.records import Admitted


@dataclass(eq=False, repr=False)
class Idempotency:
    """Serves those that were begun before."""

    _runner: RequestRunner
    _associations: Associations
    _sealed: SealedState
    _bus: ClusterBus
    _most_key_bytes: int

    def __post_init__(self) -> None:
        self.begin_of = Locks[tuple[SessionId, RequestKey]]().of
        """A lock that is held until a request runs or is refused. The same key again, in the same
        session, waits that long: recorded in the store, but at work nowhere yet, the first would
        look lost.
        """

        self.joining = Joining(
            self._bus, self._runner, self._admit_again, self._answer_kept, self.begin_of
        )
        """Those that run in other processes."""

    def never_began(self, admitted: Admitted) -> bool:
        """Whether a key is recorded for a run of this process that never began: the reply to
        its admission was lost, or something failed before its handler started. Asked by who
        holds :attr:`begin_of`.
        """
        is_ours = admitted.key is Begun.RUNNING and admitted.runner == self._runner.process
        return is_ours and self._runner.runs.never_began(admitted.run)

    async def again(
        self, waiter: Call, key: RequestKey | None, admitted: Admitted, begin_anew: BeginAnew
    ) -> None:
        """Serve a request whose key is known.

        Args:
            begin_anew: Serves it in place of a run that never began.

        Raises:
            InvalidRequest: ``KEY_REUSED``: the key was used with other content.
            LimitReached: The session keeps no more keys.
            OutcomeUnknown: It was begun, and nobody can know how it ended.
        """
        record = admitted.record
        match admitted.key:
            case Begun.OTHER_CONTENT:
                raise InvalidRequest(
                    InvalidReason.KEY_REUSED, "this request key was used with other content"
                )
            case Begun.FULL:
                raise LimitReached("request_key_bytes", self._most_key_bytes)
            case Begun.ANSWERED:
                await self._answer_kept(waiter, admitted)
                return
            case Begun.RUNNING if key is not None:
                if waiter.named:
                    # First: it asks the store, and meanwhile the request may end.
                    await self._associations.attach_if_free(record, waiter.inbound)
                running, runner = self._runner.calls.by_key(record.session_id, key), admitted.runner
                if running is not None:
                    await running.join(waiter)
                    return
                if self._bus.is_elsewhere(runner):
                    self.joining.begin(
                        waiter, record.session_id, key, runner, admitted.run, begin_anew
                    )
                    return
                # It does not run here; but it did when the store was asked, perhaps.
                admitted = await self._admit_again(waiter, record.session_id, key)
                if admitted.key is Begun.ANSWERED:
                    await self._answer_kept(waiter, admitted)
                    return
            case _:
                # Dropped, or begun with scopes that this credential lacks: for its sender
                # nobody can know how it ended.
                pass
        raise OutcomeUnknown

    async def _answer_kept(self, waiter: Call, admitted: Admitted) -> None:
        inbound, request_id = waiter.inbound, waiter.request.id
        kept = decode_kept(admitted.outcome or b"")
        if "error" in kept:
            error = kept["error"]
            await inbound.answer(inbound.error(request_id, error), code=error["code"])
            return
        result = kept["result"]
        if waiter.named:
            result = self._sealed.stamp(result, admitted.record)
        await inbound.answer(inbound.result(request_id, inbound.of_its_era(result)))

    async def _admit_again(self, waiter: Call, session_id: SessionId, key: RequestKey) -> Admitted:
        admitted = await self._associations.admit(session_id, waiter.inbound, waiter.request, key)
        if admitted.key is Begun.FIRST and admitted.run is not None:
            # Known before and forgotten since: what that run did, nobody knows.
            self._runner.runs.settle(admitted.run)
        return admitted
