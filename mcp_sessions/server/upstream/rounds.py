"""Turn the questions of a server into results that need input, for clients of the 2026 era.

Rules:

1. A call is made once. A question of the server is the result of the client's request. The call
   waits for the request that brings the answers, and continues with it.
2. The name of a waiting call is random, and used once. Another principal, fewer scopes, another
   session or another request cannot use it. If it comes too late, the answer is -31012. The same
   request, sent again, gets the same answer while that is kept.
3. A call whose client does not come back gets a timeout error for its questions. It asks nothing
   more. If it still runs after a while, it is cancelled.
4. A client that is away keeps the room of others for a while only. A call outside of sessions that
   waited for :data:`AWAY` seconds is given up if another client needs its room
   (:data:`AWAY_IN_SMALL` if there are fewer than four children). It is a call of the client that
   has most of them, if that has more than the other one. A session keeps its child.
5. Progress and log messages that come while the client has no request open wait for its next one.
6. Calls in rounds are bounded in number and in bytes, by clients (``core/fair_bound.py``). Who has
   most loses its oldest. A client is asked nothing if only a client with as many could lose one:
   the handler gets the error. Outside of sessions, one principal has fewer than half of the
   children that it may have, but at least one. All clients without authentication have half of
   them, by their addresses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Final, Protocol

from mcp_sessions.background import Background
from mcp_sessions.core.fair_bound import FairBound
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import encode, members_of, wire_error
from mcp_sessions.core.named import NAMED
from mcp_sessions.errors import LimitReached, OutcomeUnknown
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.accepted_questions import Askable, accepts
from mcp_sessions.server.upstream.call_in_rounds import CallInRounds, timed_out
from mcp_sessions.server.upstream.held_call import (
    KEPT,
    HeldCall,
    RepeatedRounds,
    may_continue,
    new_outcome,
    what_of,
)
from mcp_sessions.server.upstream.port import (
    NotAskable,
    PeerError,
    PeerRequest,
    UpstreamCall,
    UpstreamError,
)
from mcp_sessions.server.upstream.request_state import named

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

AWAY: Final = 60.0
"""Seconds that a client has to come back, even if others need the room of its call."""

AWAY_IN_SMALL: Final = 15.0
"""The same if its call keeps most of the room, or all of it, from others."""

_SMALL: Final = 4
_SHARE: Final = 4
"""Part of the bytes that one session or principal may use: one fourth."""

_CANCELLING: Final = 5.0
"""Seconds that the cancellation of a call has."""


class RemoteRounds(Protocol):
    async def go_on_in(
        self,
        waiting: str,
        session_id: SessionId | None,
        call: UpstreamCall,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """Continue a call that waits in another process. None: it waits in no other process.

        Args:
            waiting: The name of the call.
            session_id: Its session. None: it has none.

        Raises:
            UpstreamError: The call's error. -31012: the call is no longer there.
        """
        ...

    def cancel_in(
        self,
        waiting: str,
        session_id: SessionId | None,
        call: UpstreamCall,
        method: str,
        params: dict[str, Any] | None,
    ) -> bool:
        """Cancel a call that waits in another process. False: it waits in no other process."""
        ...


class Rounds:
    """Hold the calls of one layer whose clients are asked in results.

    Args:
        policy: Says how long a client has to answer, and bounds the calls that wait.
        room: Children that one principal may have. None: no children serve these calls.
        process: Name of this process, if an answer may reach others.
        other_replicas: Asks the process in which a call waits. None: there is no other.
    """

    def __init__(
        self,
        policy: SessionPolicy,
        room: int | None,
        process: str | None,
        *,
        other_replicas: RemoteRounds | None = None,
    ) -> None:
        self._other_replicas = other_replicas
        self._process = process
        self._patience = policy.question_timeout
        self._cancelled_after = policy.detached_timeout
        self._is_small = room is not None and room < _SMALL
        self._waiting: dict[str, tuple[HeldCall, asyncio.TimerHandle]] = {}
        """Calls between two rounds, by name."""

        self._policy = policy
        self._repeated = RepeatedRounds(
            most=policy.max_detached_requests,
            most_bytes=policy.max_unread_bytes // _SHARE,
            seconds=self._patience,
        )
        self._part_of_room = max(1, room // 2 - 1) if room is not None else math.inf
        self._most_of_one = min(policy.max_detached_requests_per_session, self._part_of_room)
        self._bound = FairBound[HeldCall](
            most=policy.max_detached_requests,
            most_bytes=policy.max_unread_bytes,
            most_of_one=self._most_of_one,
            most_bytes_of_one=policy.max_unread_bytes // _SHARE,
        )
        self._most_of_anyone = max(min(2, room), room // 2) if room is not None else math.inf
        self._of_anyone = FairBound[HeldCall](most=self._most_of_anyone)
        """Those of clients without authentication and outside of sessions."""

        self._limits = ReachedLimits(time.monotonic)
        self._background = Background()
        self._is_closing = False

    def begin(
        self,
        call: UpstreamCall,
        asked: PeerRequest,
        owner: Hashable,
        asks: Askable,
        request: Message,
        answer: Callable[[dict[str, Any]], Awaitable[None]],
        cancel: Callable[[], object],
    ) -> HeldCall:
        """Begin rounds in the middle of a call: its handler asks.

        Args:
            asked: The first question.
            owner: Its session, or its principal.
            asks: Requests that its client accepts.
            request: The call's request.
            answer: Answers the call's request. Its handler runs on.
            cancel: Cancels its handler.

        Returns:
            The call. Its owner says what became of it.

        Raises:
            NotAskable: Its client does not accept the question, or the method has no rounds.
            PeerError: Its client has too many calls in rounds.
        """
        method, params = request.method, request.params
        if method not in NAMED or not accepts(asks, asked.method, asked.params):
            raise NotAskable(asked.method)
        what = what_of(call, owner, method, params)
        held = HeldCall(CallInRounds(call, asks), owner, what, cancel, new_outcome(), call.share)
        if not self._holds(held):
            raise self._too_many(held)
        held.outcome.add_done_callback(lambda _: self._let_go(held))
        self._background.run("the first round of a call", self._first(held, params, answer))
        return held

    async def go_on(
        self,
        name: str,
        call: UpstreamCall,
        owner: Hashable,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Serve another round of a call.

        Args:
            name: The name of the call; see :func:`waiting_call`.
            owner: Its session, or its principal.

        Raises:
            UpstreamError: The call's error. -31012: the call is no longer there.
        """
        what = what_of(call, owner, method, params)
        answers = members_of((params or {}).get("inputResponses"))
        if self._other_replicas is not None:
            session_id = SessionId(owner) if isinstance(owner, str) else None
            served = await self._other_replicas.go_on_in(name, session_id, call, method, params)
            if served is not None:
                return served
        copied = await self._repeated.copy(name, what, answers)
        if copied is not None:
            return copied
        held = self._resumed(name, what)
        try:
            held.call.carry_on(call, answers)
        except UpstreamError:
            self._wait(held, name)
            raise
        return await self._repeated.serve(name, held, answers, partial(self._turn, held, params))

    def cancel(
        self,
        name: str,
        call: UpstreamCall,
        owner: Hashable,
        method: str,
        params: dict[str, Any] | None,
    ) -> None:
        """Cancel a call that waits for this round: its client has left. The round may have come
        before, and have been cancelled, or its answer may have been lost. See :meth:`go_on`.
        """
        session_id = SessionId(owner) if isinstance(owner, str) else None
        there = self._other_replicas
        if there is not None and there.cancel_in(name, session_id, call, method, params):
            return
        waiting = self._waiting.get(name)
        held = waiting[0] if waiting is not None else self._repeated.answered_once(name)
        is_its = held is not None and held.what == what_of(call, owner, method, params)
        if held is not None and held.name is not None and is_its:
            self._removed(held.name).cancel()

    async def give_up_oldest(self, share: Hashable, of: Principal | None = None) -> bool:
        """Give up a call outside of sessions whose client is away, to make room: the oldest of the
        client that has most.

        Args:
            share: The client that needs the room. It gets nothing of a client with as many calls.
            of: A user whose call it is to be. None: anybody's.

        Returns:
            Whether a call was given up.
        """
        held = self._away(share, of)
        if held is None:
            return False
        self._give_up(held)
        await asyncio.wait({held.outcome}, timeout=_CANCELLING)
        return True

    def gives_up_at(self, share: Hashable) -> float:
        """Return when :meth:`give_up_oldest` gives up the next call, if its client stays away.
        Infinite: there is none.
        """
        return min(map(self._may_go_at, self._replaceable(share)), default=math.inf)

    def _away(self, share: Hashable, of: Principal | None = None) -> HeldCall | None:
        now = asyncio.get_running_loop().time()
        away = [name for name in self._replaceable(share, of) if self._may_go_at(name) <= now]
        return self._waiting[max(away, key=self._count_of)][0] if away else None

    def _replaceable(self, share: Hashable, of: Principal | None = None) -> list[str]:
        """The calls that may make room for a client, oldest first."""
        has = self._bound.count(share)
        return [
            name
            for name, (held, _) in self._waiting.items()
            if isinstance(held.owner, Principal)
            and (of is None or held.owner.user == of.user)
            and (held.share == share or self._count_of(name) > has)
        ]

    def _count_of(self, name: str) -> int:
        return self._bound.count(self._waiting[name][0].share)

    def _may_go_at(self, name: str) -> float:
        _, timer = self._waiting[name]
        return timer.when() - self._patience + (AWAY_IN_SMALL if self._is_small else AWAY)

    def waits_in(self, session_id: Hashable) -> bool:
        return any(held.owner == session_id for held, _ in self._waiting.values())

    def session_ended(self, session_id: Hashable) -> None:
        self._give_up(*(h for h, _ in self._waiting.values() if h.owner == session_id))

    def leave(self) -> None:
        """Cancel the calls that wait, and those that begin to wait from now on: no client can come
        back to this process.
        """
        self._is_closing = True
        self._give_up(*(held for held, _ in self._waiting.values()))

    async def close(self) -> None:
        self.leave()
        await self._repeated.close()
        await self._background.close()

    async def _first(
        self,
        held: HeldCall,
        params: dict[str, Any] | None,
        answer: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        try:
            asked = self._asked(held, params, await held.call.turn())
            if asked is not None:
                await answer(asked)
        except Exception:
            # Its client would wait for questions that do not come.
            held.cancel()
            raise

    async def _turn(self, held: HeldCall, params: dict[str, Any] | None) -> dict[str, Any]:
        await held.tells()
        asked = self._asked(held, params, await held.call.turn())
        return asked if asked is not None else await asyncio.shield(held.outcome)

    def _asked(
        self, held: HeldCall, params: dict[str, Any] | None, questions: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return the result that asks. None: the call has ended, or may not ask any more."""
        if questions is None:
            return None
        held.asked(params, questions)
        self._let_go(held)
        if not self._holds(held):
            held.call.end(partial(self._too_many, held))
            return None
        name = mint_request_id(self._process)
        self._wait(held, name)
        return {
            "resultType": "input_required",
            "inputRequests": questions,
            "requestState": named(name),
        }

    def _resumed(self, name: str, what: Hashable) -> HeldCall:
        waiting = self._waiting.get(name)
        if waiting is None or not may_continue(what, waiting[0].what):
            raise UpstreamError(wire_error(OutcomeUnknown()))
        return self._removed(name)

    def _wait(self, held: HeldCall, name: str) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[name] = held, loop.call_later(self._patience, self._timed_out, name)
        held.name = name
        held.outcome.add_done_callback(lambda outcome: self._ended(name, outcome))
        if self._is_closing:
            self._give_up(held)

    def _holds(self, held: HeldCall) -> bool:
        """Count a call, and give up those that go for it. False: it is refused itself."""
        if self._is_counted(held):
            return True
        away = self._away(held.share)
        if away is None:
            return False
        self._give_up(away)
        return self._is_counted(held)

    def _is_counted(self, held: HeldCall) -> bool:
        is_anyones = held.owner == ANONYMOUS
        session = held.owner if not is_anyones else None
        for bound in (self._bound, self._of_anyone) if is_anyones else (self._bound,):
            for gone in bound.add(held, held.share, session, held.size):
                if gone is held:
                    self._let_go(held)
                    return False
                self._give_up(gone)
        return True

    def _let_go(self, held: HeldCall) -> None:
        self._bound.remove(held)
        self._of_anyone.remove(held)

    def _too_many(self, held: HeldCall) -> PeerError:
        policy, of_one = self._policy, "max_detached_requests_per_session"
        if len(self._of_anyone) >= self._most_of_anyone:
            refused = LimitReached("max_children", self._most_of_anyone)
        elif self._most_of_one == self._part_of_room and self._bound.is_full(
            held.share, held.owner
        ):
            refused = LimitReached("max_children", self._part_of_room)
        elif len(self._bound) >= policy.max_detached_requests:
            refused = LimitReached("max_detached_requests", policy.max_detached_requests)
        elif self._bound.is_full(held.share, held.owner):
            refused = LimitReached(of_one, self._most_of_one)
        else:
            refused = LimitReached("max_unread_bytes", policy.max_unread_bytes)
        self._limits.reached(refused)
        return PeerError(refused.code, refused.message, refused.data)

    def _ended(self, name: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        """Give up a large answer: its server did not wait for the answers of the client."""
        if name not in self._waiting or outcome.cancelled():
            return
        failed = outcome.exception()
        answer = outcome.result() if failed is None else getattr(failed, "error", {})
        if len(encode(answer)) > KEPT:
            self._give_up(self._waiting[name][0])

    def _timed_out(self, name: str) -> None:
        held = self._removed(name)
        logger.warning(
            "a client was asked and did not come back in %g seconds (question_timeout); its call "
            "gets a timeout error",
            self._patience,
        )
        held.call.end(timed_out)
        timer = asyncio.get_running_loop().call_later(self._cancelled_after, held.cancel)
        held.outcome.add_done_callback(lambda _: timer.cancel())

    def _give_up(self, *some: HeldCall) -> None:
        for held in some:
            self._let_go(held)
            if held.name is not None:
                self._removed(held.name)
            held.cancel()
        if some:
            logger.warning("cancelled, since no client came back that was asked: %d", len(some))

    def _removed(self, name: str) -> HeldCall:
        held, timer = self._waiting.pop(name)
        timer.cancel()
        held.name = None
        return held
