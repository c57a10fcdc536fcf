"""Turn the questions of a server into results that need input, for clients of the 2026 era.

Rules:

1. A call is made once. A question of the server is the result of the client's request. The call
   waits for the request that brings the answers, and continues with it.
2. The name of a waiting call is random, and used once. Another principal, another session or
   another request cannot use it. If it comes too late, the answer is -31012. The same request, sent
   again, gets the same answer while that is kept.
3. A call whose client does not come back gets a timeout error for its questions. It asks nothing
   more. If it still runs after a while, it is cancelled. It is cancelled at once if too many wait.
4. A client that is away does not keep room or questions from others. Outside of sessions, one
   principal has fewer waiting calls than children that it may keep busy (``sharing.py``). The
   oldest is given up if another client needs its room and it waited for :data:`AWAY` seconds, or
   for :data:`AWAY_IN_SMALL` if there are fewer than four children.
5. Waiting calls are bounded in bytes, for one session or principal and in all. The oldest goes
   first, and the newest stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Final, Protocol

from mcp_sessions.background import Background
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import encode, members_of, wire_error
from mcp_sessions.core.named import NAMED
from mcp_sessions.core.without_listener import WithoutListener
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.upstream.asks import Asks, accepts
from mcp_sessions.server.upstream.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.copies import KEPT, Copies
from mcp_sessions.server.upstream.held_call import HeldCall, new_outcome, what_of
from mcp_sessions.server.upstream.port import NotAskable, PeerRequest, UpstreamCall, UpstreamError
from mcp_sessions.server.upstream.request_state import named

logger = logging.getLogger(__name__)

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
        self._has_room = room is not None
        self._patience = policy.question_timeout
        self._cancelled_after = policy.detached_timeout
        self._is_small = room is not None and room < _SMALL
        self._waiting: dict[str, tuple[HeldCall, asyncio.TimerHandle]] = {}
        """Calls between two rounds, by name."""

        self._most_bytes = policy.max_unread_bytes
        self._copies = Copies(
            most=policy.max_detached_requests,
            most_bytes=self._most_bytes // _SHARE,
            seconds=self._patience,
        )
        of_one = policy.max_detached_requests_per_session
        self._bound = WithoutListener[str](
            most=policy.max_detached_requests,
            most_of_one=of_one if room is None else min(of_one, max(1, room // 2 - 1)),
        )
        self._background = Background()
        self._is_closing = False

    def begin(
        self,
        call: UpstreamCall,
        asked: PeerRequest,
        owner: Hashable,
        asks: Asks,
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
        """
        method, params = request.method, request.params
        if method not in NAMED or not accepts(asks, asked.method, asked.params):
            raise NotAskable(asked.method)
        what = what_of(call, owner, method, params)
        held = HeldCall(CallInRounds(call, asks), owner, what, cancel, new_outcome())
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
        copied = await self._copies.copy(name, what, answers)
        if copied is not None:
            return copied
        held = self._resumed(name, what)
        try:
            held.call.carry_on(call, answers)
        except UpstreamError:
            self._wait(held, name)
            raise
        return await self._copies.serve(name, held, answers, partial(self._turn, held, params))

    async def give_up_oldest(self, of: Principal | None) -> bool:
        """Give up the oldest call outside of sessions whose client is away, to make room.

        Args:
            of: Its principal. None: any.

        Returns:
            Whether a call was given up.
        """
        name = self._oldest(of)
        if name is None or asyncio.get_running_loop().time() < self._may_go_at(name):
            return False
        held, _ = self._waiting[name]
        self._give_up(name)
        await asyncio.wait({held.outcome}, timeout=_CANCELLING)
        return True

    def gives_up_at(self, of: Principal | None) -> float:
        """Return when :meth:`give_up_oldest` gives up the next call, if its client stays away.
        Infinite: there is none.
        """
        name = self._oldest(of)
        return self._may_go_at(name) if name is not None else math.inf

    def _oldest(self, of: Principal | None) -> str | None:
        owner = ((name, held.owner) for name, (held, _) in self._waiting.items())
        own = (name for name, it in owner if isinstance(it, Principal) and it.is_user_of(of))
        return next(own, None)

    def _may_go_at(self, name: str) -> float:
        _, timer = self._waiting[name]
        return timer.when() - self._patience + (AWAY_IN_SMALL if self._is_small else AWAY)

    def waits_in(self, session_id: Hashable) -> bool:
        return any(held.owner == session_id for held, _ in self._waiting.values())

    def session_ended(self, session_id: Hashable) -> None:
        for name, (held, _) in list(self._waiting.items()):
            if held.owner == session_id:
                self._give_up(name)

    def leave(self) -> None:
        """Cancel the calls that wait, and those that begin to wait from now on: no client can come
        back to this process.
        """
        self._is_closing = True
        for name in list(self._waiting):
            self._give_up(name)

    async def close(self) -> None:
        self.leave()
        await self._copies.close()
        await self._background.close()

    async def _first(
        self,
        held: HeldCall,
        params: dict[str, Any] | None,
        answer: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        try:
            questions = await held.call.turn()
            if questions is not None:
                await answer(self._asked(held, params, questions))
        except Exception:
            # Its client would wait for questions that do not come.
            held.cancel()
            raise

    async def _turn(self, held: HeldCall, params: dict[str, Any] | None) -> dict[str, Any]:
        questions = await held.call.turn()
        if questions is None:
            return await asyncio.shield(held.outcome)
        return self._asked(held, params, questions)

    def _asked(
        self, held: HeldCall, params: dict[str, Any] | None, questions: dict[str, Any]
    ) -> dict[str, Any]:
        name = mint_request_id(self._process)
        held.asked(params, questions)
        self._wait(held, name)
        return {
            "resultType": "input_required",
            "inputRequests": questions,
            "requestState": named(name),
        }

    def _resumed(self, name: str, what: Hashable) -> HeldCall:
        waiting = self._waiting.get(name)
        if waiting is None or waiting[0].what != what:
            raise UpstreamError(wire_error(OutcomeUnknown()))
        held, timer = waiting
        timer.cancel()
        del self._waiting[name]
        self._bound.remove(name)
        return held

    def _wait(self, held: HeldCall, name: str) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience, self._timed_out, name)
        self._waiting[name] = held, timer
        given_up = self._bound.add(name, held.call.newest.principal, self._share_of(held))
        if given_up is not None:
            self._give_up(given_up)
        while (loser := self._has_too_many_bytes(self._share_of(held))) is not None:
            self._give_up(loser)
        held.outcome.add_done_callback(lambda outcome: self._ended(name, outcome))
        if self._is_closing and name in self._waiting:
            self._give_up(name)

    def _has_too_many_bytes(self, newest: Hashable) -> str | None:
        sizes = Counter[Hashable]()
        for held, _ in self._waiting.values():
            sizes[self._share_of(held)] += held.size
        if sizes[newest] > self._most_bytes // _SHARE:
            owner = newest
        elif sizes.total() > self._most_bytes:
            owner = max(sizes, key=sizes.__getitem__)
        else:
            return None
        *older, _ = self._waiting.items()
        return next((name for name, (held, _) in older if self._share_of(held) == owner), None)

    def _share_of(self, held: HeldCall) -> Hashable:
        """Return what a call is counted for. Clients that nobody authenticated are one principal:
        one of them must not end the calls of the others. Where room is bounded they share it.
        """
        return held if held.owner == ANONYMOUS and not self._has_room else held.owner

    def _ended(self, name: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        """Give up a large answer: its server did not wait for the answers of the client."""
        if name not in self._waiting or outcome.cancelled():
            return
        failed = outcome.exception()
        answer = outcome.result() if failed is None else getattr(failed, "error", {})
        if len(encode(answer)) > KEPT:
            self._give_up(name)

    def _timed_out(self, name: str) -> None:
        held = self._removed(name)
        logger.warning(
            "a client was asked and did not come back in %g seconds (question_timeout); its call "
            "gets a timeout error",
            self._patience,
        )
        held.call.end(timed_out=True)
        timer = asyncio.get_running_loop().call_later(self._cancelled_after, held.cancel)
        held.outcome.add_done_callback(lambda _: timer.cancel())

    def _give_up(self, name: str) -> None:
        held = self._removed(name)
        logger.warning("a call whose client was asked and did not come back is cancelled")
        held.cancel()

    def _removed(self, name: str) -> HeldCall:
        held, timer = self._waiting.pop(name)
        timer.cancel()
        self._bound.remove(name)
        return held
