"""Decide whether a child may start: how earlier starts ended, and whether there is room.

Rules, owned by ``tests/server/upstream/external/test_failures.py``:

1. If a start fails, clients with the same description are refused for 1, 2, 4 … 30 seconds. Each
   description counts by itself, whether the server refused that client or died of it.
2. The others are refused only if the server fails for every client. Several descriptions that fail
   prove nothing: one client may make up as many as it likes. So the layer itself tries the server,
   with the last description that succeeded and with its own. Only if both fail, all clients of this
   principal are refused.
3. The failures of one principal do not affect another.
4. The kept data is bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Final, TypeVar

from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import encode
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import raised_anew
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.port import UpstreamError

ClientDescription = Mapping[str, Any]

_COUNTED: Final = 1_000
"""Principals, and descriptions, with counted failures, at most."""

_REMEMBERED: Final = 65_536
"""Bytes of a description that the layer uses to try a server, at most."""

_KEPT: Final = 8_192
"""Bytes of an error that other clients get as well, at most. Longer ones are cut."""

_BEGINNING: Final = 300
"""Characters of a cut error."""

_K = TypeVar("_K")
_Refusals = Recent[_K, tuple[Backoff, float, UpstreamError]]
"""Key → its back-off, the time of the next try, and the error until then."""


class Failures:
    """Count the failures of one layer. Times are seconds of any clock that does not go back.

    Args:
        ours: The layer's own description.
    """

    def __init__(self, ours: ClientDescription) -> None:
        self._ours = ours
        self._by_description = _Refusals[tuple[Principal, bytes]](_COUNTED)
        self._of_all = _Refusals[Principal](_COUNTED)
        self._doubted = Recent[Principal, bytes](_COUNTED)
        """Description that failed since another one succeeded."""

        self._served = Recent[Principal, ClientDescription](_COUNTED)
        """Last description that succeeded."""

        self._tried: set[Principal] = set()
        """Principals for which the layer tries at the moment."""

    def refusal(
        self, principal: Principal, client: ClientDescription, now: float
    ) -> UpstreamError | None:
        for known in (
            self._of_all.get(principal),
            self._by_description.get((principal, description_of(client))),
        ):
            if known is not None and now < known[1]:
                return raised_anew(known[2])
        return None

    def started(self, principal: Principal, client: ClientDescription) -> None:
        self._of_all.pop(principal, None)
        self._by_description.pop((principal, description_of(client)), None)
        self._doubted.pop(principal, None)
        if len(encode(client)) <= _REMEMBERED:
            self._served.keep(principal, client)

    def failed(
        self, principal: Principal, client: ClientDescription, failed: UpstreamError, now: float
    ) -> Sequence[ClientDescription]:
        """Note a failed start, and return the descriptions for a try of the server. They are tried
        one after the other until one succeeds. If there are any, :meth:`was_tried` takes the
        outcome.
        """
        described = description_of(client)
        _count(self._by_description, (principal, described), failed, now)
        first = self._doubted.get(principal, described)
        self._doubted.keep(principal, first)
        if first == described or principal in self._tried:
            return ()
        self._tried.add(principal)
        served = self._served.get(principal, self._ours)
        return (served,) if served == self._ours else (served, self._ours)

    def hung(
        self, principal: Principal, client: ClientDescription, failed: UpstreamError, now: float
    ) -> None:
        """Note that such a client's start hung. The server is not tried: it may serve others."""
        _count(self._by_description, (principal, description_of(client)), failed, now)

    def was_tried(self, principal: Principal, failed: UpstreamError | None, now: float) -> None:
        self._tried.discard(principal)
        if failed is None:
            self._of_all.pop(principal, None)
            self._doubted.pop(principal, None)
        else:
            _count(self._of_all, principal, failed, now)


def description_of(client: object) -> bytes:
    try:
        return sha256(encode(client)).digest()
    except TypeError:
        # It is nested too deeply to be sent to any server.
        return bytes(32)


def _count(failures: _Refusals[_K], key: _K, failed: UpstreamError, now: float) -> None:
    known = failures.get(key)
    backoff = known[0] if known is not None else Backoff(base=1, cap=30)
    until = now + backoff.failed(1.0)
    error = failed.error
    if len(encode(error)) > _KEPT:
        message = str(error.get("message"))[:_BEGINNING]
        error = {"code": error.get("code", INTERNAL_ERROR), "message": message}
    failures.keep(key, (backoff, until, raised_anew(failed, error)))


_SEVERAL: Final = 3.0
_LEAST: Final = 5.0
"""Seconds in which no start hangs."""

WAITS: Final = 15.0
"""Seconds that a start waits for room. Most hosts wait longer for an answer."""

EVICTABLE: Final = 60.0
"""Seconds after its last request in which a child is not ended to make room for another."""

LOOKS: Final = 0.5
"""Seconds between two checks for room."""


class Starts:
    """Track the starts that have not succeeded yet, and find those that hang.

    Args:
        timeout: Seconds that a start has.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._longest: float | None = None
        """Seconds of the longest start that succeeded."""

        self._began: dict[Slot, float] = {}
        self._made_room: set[Slot] = set()

    @contextmanager
    def one(self, slot: Slot) -> Generator[None]:
        loop = asyncio.get_running_loop()
        began = self._began[slot] = loop.time()
        try:
            yield
            self._longest = max(self._longest or 0.0, loop.time() - began)
        finally:
            del self._began[slot]

    def oldest(self) -> asyncio.Task[Any] | None:
        """Return the oldest start that hangs, to make room now. None: none hangs."""
        patience = self._timeout / 2
        if self._longest is not None:
            patience = min(patience, max(_LEAST, _SEVERAL * self._longest))
        now = asyncio.get_running_loop().time()
        for slot, began in self._began.items():
            if now - began < patience:
                return None
            if slot not in self._made_room and slot.starting is not None:
                self._made_room.add(slot)
                return slot.starting
        return None

    def made_room(self, slot: Slot) -> bool:
        try:
            self._made_room.remove(slot)
        except KeyError:
            return False
        return True


class Room:
    """Count the children of one layer against its limit, and choose which of them ends first.

    Args:
        server: Returns the server, which has the limit.
        slots: All slots of the layer.
    """

    def __init__(
        self, server: Callable[[], ExternalServer], slots: Mapping[Hashable, Slot]
    ) -> None:
        self.living: dict[Child, Principal] = {}
        """Child → the principal that it was started for."""

        self.ending: set[Child] = set()
        """Living children that are ending. A start that needs their room waits for it."""

        self._server, self._slots = server, slots
        self._starts = 0

    @contextmanager
    def of_start(self) -> Generator[None]:
        """Count a child that is started."""
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1

    @property
    def count(self) -> int:
        return len(self.living) + self._starts

    @property
    def left(self) -> int:
        """How many more there is room for, without ending a child."""
        return self._server().max_children - self.count

    def ended(self) -> Child | None:
        """Return a child that has ended or is ending."""
        return next((it for it in self.living if it.has_ended or it in self.ending), None)

    def first(self) -> Slot | None:
        """Return the slot whose child may end first: one whose client has left, then one outside of
        sessions, then the one that is idle for longest. None: none may end.
        """
        now = asyncio.get_running_loop().time()
        idle = (
            slot for slot in self._idle() if slot.is_replaceable or now - slot.used_at >= EVICTABLE
        )
        return min(
            idle,
            key=lambda it: (not it.is_left, not it.is_replaceable, it.used_at),
            default=None,
        )

    def free_at(self) -> float:
        """Return the time at which one may end."""
        return min((slot.used_at + EVICTABLE for slot in self._idle()), default=math.inf)

    def _idle(self) -> list[Slot]:
        return [it for it in self._slots.values() if it.child is not None and not it.calls]
