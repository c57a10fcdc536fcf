"""Turn the questions of a handshake-era server into results that need input, for modern clients.

Rules:

1. A call is made once. A question of the server is the result of the client's request. The call
   waits for the request that brings the answers, and continues with it.
2. The name of a waiting call is random, and used once. Another principal, another session or
   another request cannot use it. If it comes too late, the answer is -31012.
3. A call whose client does not come back is cancelled: after a while, or if too many wait.
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
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mcp_sessions.background import Background
from mcp_sessions.core.messages import encode, members_of, wire_error
from mcp_sessions.core.unheard import Unheard
from mcp_sessions.errors import (
    OutcomeUnknown,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.upstream.external.asks import Asks
from mcp_sessions.server.upstream.external.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.external.modern import NAMED
from mcp_sessions.server.upstream.port import Call, UpstreamError

logger = logging.getLogger(__name__)

_PREFIX: Final = "mcp-sessions-call:"
"""Prefix of a ``requestState``. The rest names a call that waits here."""

_PASSED: Final = "mcp-sessions-passed:"
"""Prefix of a server's own ``requestState`` that begins with one of these prefixes: the server is
behind another layer.
"""

_KEPT: Final = 65_536
"""Bytes of a result, at most, that is kept for a client that was asked and may never fetch it."""

AWAY: Final = 60.0
"""Seconds that a client has to come back, even if others need the room of its call."""

AWAY_IN_SMALL: Final = 15.0
"""The same if its call keeps most of the room, or all of it, from others."""

_SMALL: Final = 4
_SHARE: Final = 4
"""Part of the bytes that one session or principal may use: one fourth."""

_CANCELLING: Final = 5.0
"""Seconds that the cancellation of a call has."""


def waiting_call(params: Mapping[str, Any] | None) -> str | None:
    """Return the name of the call that a request continues. None: it begins a call."""
    state: object = (params or {}).get("requestState")
    is_ours = isinstance(state, str) and state.startswith(_PREFIX)
    return state.removeprefix(_PREFIX) if isinstance(state, str) and is_ours else None


def set_apart(result: dict[str, Any]) -> dict[str, Any]:
    """Return a server's result with a ``requestState`` that cannot be taken for one of this
    layer's.
    """
    state: object = result.get("requestState")
    if not (isinstance(state, str) and state.startswith((_PREFIX, _PASSED))):
        return result
    return {**result, "requestState": _PASSED + state}


def put_back(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a request's params with the original ``requestState`` from before
    :func:`set_apart`.
    """
    state: object = (params or {}).get("requestState")
    if not (isinstance(state, str) and state.startswith(_PASSED)):
        return params
    return {**(params or {}), "requestState": state.removeprefix(_PASSED)}


@dataclass(eq=False)
class _Held:
    """A call in rounds, and its outcome."""

    call: CallInRounds
    whose: Hashable
    """Session or principal of the call."""

    what: Hashable
    """Client and object of the call, which each round has to match."""

    task: asyncio.Task[None]
    outcome: asyncio.Future[dict[str, Any]]
    size: int = 0
    """Bytes of its request and its questions."""


class Rounds:
    """Hold the calls of one layer whose clients are asked in results.

    Args:
        policy: Bounds the calls that run without a client: here, between two rounds.
        room: Children that one principal may have.
        process: Name of this process, if an answer may reach others.
    """

    def __init__(self, policy: SessionPolicy, room: int, process: str | None) -> None:
        self._process = process
        self._patience = policy.detached_timeout
        self._is_small = room < _SMALL
        self._waiting: dict[str, tuple[_Held, asyncio.TimerHandle]] = {}
        """Calls between two rounds, by name."""

        self._most_bytes = policy.max_unread_bytes
        self._bound = Unheard[str](
            most=policy.max_detached_requests,
            most_of_one=min(policy.max_detached_requests_per_session, max(1, room // 2 - 1)),
        )
        self._background = Background()

    async def serve(
        self,
        call: Call,
        whose: Hashable,
        asks: Asks,
        method: str,
        params: dict[str, Any] | None,
        work: Callable[[Call], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Serve a request of a modern client: as a new call, or as another round of one.

        Args:
            whose: Its session, or its principal.
            asks: Requests that its client accepts. Empty: none.
            work: Makes the call; not called in a later round.

        Raises:
            UpstreamError: The call's error. -31012: the call is no longer there.
        """
        named: object = (params or {}).get(NAMED.get(method, ""))
        what = (call.principal, whose, method, named if isinstance(named, str) else None)
        name = waiting_call(params)
        if name is not None:
            held = self._resumed(name, what)
            try:
                held.call.carry_on(call, members_of((params or {}).get("inputResponses")))
            except UpstreamError:
                self._wait(held, name)
                raise
        elif asks and method in NAMED:
            held = self._begun(CallInRounds(call, asks), whose, what, work)
        else:
            return await work(call)
        try:
            questions = await held.call.turn()
        except asyncio.CancelledError:
            held.task.cancel()
            raise
        if questions is None:
            return await held.outcome
        name = mint_request_id(self._process)
        held.size = max(held.size, len(encode(params or {}))) + len(encode(questions))
        self._wait(held, name)
        return {
            "resultType": "input_required",
            "inputRequests": questions,
            "requestState": _PREFIX + name,
        }

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
        await asyncio.wait({held.task}, timeout=_CANCELLING)
        return True

    def gives_up_at(self, of: Principal | None) -> float:
        """Return when :meth:`give_up_oldest` gives up the next call, if its client stays away.
        Infinite: there is none.
        """
        name = self._oldest(of)
        return self._may_go_at(name) if name is not None else math.inf

    def _oldest(self, of: Principal | None) -> str | None:
        whose = ((name, held.whose) for name, (held, _) in self._waiting.items())
        own = (name for name, it in whose if isinstance(it, Principal) and of in (None, it))
        return next(own, None)

    def _may_go_at(self, name: str) -> float:
        _, timer = self._waiting[name]
        return timer.when() - self._patience + (AWAY_IN_SMALL if self._is_small else AWAY)

    async def close(self) -> None:
        """Cancel all of them."""
        for _, timer in self._waiting.values():
            timer.cancel()
        await self._background.close()

    def _begun(
        self,
        call: CallInRounds,
        whose: Hashable,
        what: Hashable,
        work: Callable[[Call], Awaitable[dict[str, Any]]],
    ) -> _Held:
        outcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # It may be that no request fetches it.
        outcome.add_done_callback(lambda it: it.cancelled() or it.exception())
        task = self._background.run("a call in rounds", _make(call, work, outcome))
        return _Held(call, whose, what, task, outcome)

    def _resumed(self, name: str, what: Hashable) -> _Held:
        waiting = self._waiting.get(name)
        if waiting is None or waiting[0].what != what:
            raise UpstreamError(wire_error(OutcomeUnknown()))
        held, timer = waiting
        timer.cancel()
        del self._waiting[name]
        self._bound.remove(name)
        return held

    def _wait(self, held: _Held, name: str) -> None:
        """Wait for the answers: the client has the questions."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience, self._give_up, name)
        self._waiting[name] = held, timer
        given_up = self._bound.add(name, held.call.principal, held.whose)
        if given_up is not None:
            self._give_up(given_up)
        while (loser := self._has_too_many_bytes(held.whose)) is not None:
            self._give_up(loser)
        held.outcome.add_done_callback(lambda outcome: self._ended(name, outcome))

    def _has_too_many_bytes(self, newest: Hashable) -> str | None:
        """Return the name of the call to give up. None: none."""
        sizes = Counter[Hashable]()
        for held, _ in self._waiting.values():
            sizes[held.whose] += held.size
        if sizes[newest] > self._most_bytes // _SHARE:
            whose = newest
        elif sizes.total() > self._most_bytes:
            whose = max(sizes, key=sizes.__getitem__)
        else:
            return None
        *older, _ = self._waiting.items()
        return next((name for name, (held, _) in older if held.whose == whose), None)

    def _ended(self, name: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        """Give up a large result: its server did not wait for the answers."""
        if name not in self._waiting or outcome.exception() is not None:
            return
        if len(encode(outcome.result())) > _KEPT:
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        held, timer = self._waiting.pop(name)
        timer.cancel()
        self._bound.remove(name)
        logger.warning("a call whose client was asked and did not come back is cancelled")
        held.task.cancel()


async def _make(
    call: CallInRounds,
    work: Callable[[Call], Awaitable[dict[str, Any]]],
    outcome: asyncio.Future[dict[str, Any]],
) -> None:
    try:
        outcome.set_result(await work(call))
    except Exception as failed:
        # This is the boundary to the request that fetches the result, which raises it.
        outcome.set_exception(failed)
    finally:
        if not outcome.done():
            outcome.set_exception(UpstreamError(wire_error(OutcomeUnknown())))
        call.end()
