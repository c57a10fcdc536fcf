"""Bound the number of a process's connections, and the time that one may keep the server waiting.

The protocols of ``protocols.py`` report to it.

Rules:

1. A request, header and body, arrives within ``receive_timeout``. Otherwise it is answered 408.
2. A peer that takes nothing is cut: after ``receive_timeout``, or after ``slow_timeout`` if its
   connection is closed already and only the rest of an answer is left. Data that the system has
   taken and the peer has not is the system's to watch (on Linux).
3. A connection counts from its start, before its TLS handshake. At the bound a new connection
   replaces one whose client sent a bad credential and waits for the refusal. Otherwise it replaces
   one that waits for a handshake, for a request, or for the rest of a request: one of the address
   that has most connections, and there the one that was silent for longest. If none waits, the new
   one gets answers of health checks. Its first other request replaces a busy connection, if another
   address has more connections than its own has. Otherwise it gets 503.
4. At most :data:`MOST_DELAYED` connections wait for a refusal, however many connections there may
   be. One more replaces the first of them.
5. What came of requests and messages that are not whole has a bound in bytes. Beyond it the largest
   of the address that has most bytes is refused: its request with 503, its WebSocket with 1013. It
   counts with at most ``max_message``, since an application may pass on what it reads.
6. A line in the log says so, at most once in :data:`QUIET` seconds.

The bound is ``max_connections``, or the rest of the limit of file descriptors. The last few are for
the server's own files, and for health checks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.core.addresses import address_of
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.turns import Steps

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

QUIET = 60.0
"""Seconds between two lines in the log."""

LOOKS = 4
"""Looks at all connections in the shorter one of their limits.

The loop serves nobody during a look, so there are few.
"""

COUNTS_AFTER = 1.0
"""Seconds between two counts of the other descriptors."""

MOST_DELAYED = 4_000
"""Connections that wait for a refusal. Each takes some 20 kB."""

RETRY_AFTER = 5
"""Seconds after which a client that was refused tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections. Durations are in seconds."""

    max_message: int
    """Bytes of one message on a WebSocket."""

    max_unfinished: int
    """Bytes that came of all requests and messages that are not whole."""

    receive_timeout: float
    slow_timeout: float
    max_connections: int | None
    """None: as the file descriptors allow."""


def connection_limits(policies: Sequence[SessionPolicy]) -> ConnectionLimits:
    """Return the limits of a process that serves layers of these policies: the widest of each."""
    most = [policy.max_connections for policy in policies]
    max_message = max(policy.max_message for policy in policies)
    max_unread = max(policy.max_unread_bytes for policy in policies)
    return ConnectionLimits(
        max_message=max_message,
        # Otherwise two clients could never send one at the same time.
        max_unfinished=max(max_unread, 2 * max_message),
        receive_timeout=max(policy.receive_timeout for policy in policies),
        slow_timeout=max(policy.slow_timeout for policy in policies),
        max_connections=None if None in most else max(filter(None, most)),
    )


@dataclass(slots=True, eq=False)
class Looked:
    """The last look at a connection. Times are on the clock of the event loop."""

    address: Hashable = None
    """Of its peer. None: a socket of the file system."""

    received_at: float = 0.0
    """When it last sent something."""

    late_at: float | None = None
    """When what it is sending should be here; None: there is nothing to wait for."""

    unsent: int = 0
    """Bytes that its peer had not taken, when that was last looked at."""

    unsent_since: float = 0.0
    """Since when it has taken none of them; 0: it takes some."""

    unfinished: int = 0
    """Bytes that came of a request or message that is not whole."""

    sender: Hashable = None
    """The address of their sender, which a proxy may have named."""


class Open(Protocol):
    transport: asyncio.Transport
    looked: Looked

    def serve_only(self, paths: frozenset[str]) -> None:
        """Answer 503, except for these paths: there are too many connections."""
        ...

    def waits(self) -> bool:
        """Whether nothing runs on it: it waits for a request, or for the rest of one."""
        ...

    def is_stuck(self) -> bool: ...

    def drop(self) -> None:
        """Refuse what is not whole, and keep none of it."""
        ...

    def give_up(self) -> bool:
        """Refuse a request that is late. False: it runs already."""
        ...


class OpenConnections:
    def __init__(self, limits: ConnectionLimits, health: Collection[str]) -> None:
        self.limits = limits
        self.steps = Steps()
        """Turns of those that have sent much at once."""

        self._health = frozenset(health)
        self._open: dict[Open, None] = {}
        self._of_address: Counter[Hashable] = Counter()
        self._leaving: set[Open] = set()
        """Those that were closed to make room for others."""

        self._extra: set[Open] = set()
        """Those that came when all others were busy."""

        self._delayed: dict[Open, None] = {}
        """Those that wait for a refusal, the first that began to wait first."""

        self._unfinished: dict[Open, None] = {}
        """Those that send something that is not whole."""

        self._unfinished_of: Counter[Hashable] = Counter()
        """Address → bytes of the same."""

        self._unfinished_bytes = 0

        self._most = limits.max_connections or sys.maxsize
        self._descriptors = _limit()
        # 16 of 64 descriptors: to start a process takes 8 for a moment. 64 of 1,024.
        self._reserved = max(16, min(64, self._descriptors // 8))
        self._others = 0
        """Descriptors that are no connection's."""

        self._counted_at = -COUNTS_AFTER
        self._reasons: Counter[str] = Counter()
        self._logged_at = -QUIET
        self._every = min(limits.receive_timeout, limits.slow_timeout) / LOOKS
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Open) -> None:
        """Count an accepted connection. If there are too many, close another one."""
        peer = connection.transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            connection.looked.address = address_of({"client": peer})
        self._open[connection] = None
        self._of_address[connection.looked.address] += 1
        sock = connection.transport.get_extra_info("socket")
        if sock is not None:
            # The system gives each the lowest number that is free.
            self._count_others(sock.fileno(), connection.looked.received_at)
        left = self._descriptors - self._reserved - self._others
        most = max(1, min(self._most, left))
        while len(self._open) - len(self._leaving) > most:
            if self._delayed:
                self._close_delayed(next(iter(self._delayed)))
                continue
            others = (each for each in self._open if each is not connection)
            waiting = [each for each in others if each not in self._leaving and each.waits()]
            if not waiting:
                self._extra.add(connection)
                connection.serve_only(self._health)
                return
            self.count_reason("closed while idle, to make room")
            self._replace(waiting)

    def has_place(self, connection: Open) -> bool:
        """Whether a request may be served that is no health check."""
        if connection not in self._extra:
            return True
        own = self._of_address[connection.looked.address]
        others = self._open.keys() - self._leaving - self._extra
        larger = [each for each in others if self._of_address[each.looked.address] > own]
        if not larger:
            self.count_reason("refused: all other connections are busy")
            return False
        self._extra.remove(connection)
        self.count_reason("cut while busy: their address had most")
        self._replace(larger)
        return True

    def _replace(self, some: Sequence[Open]) -> None:
        first = min(some, key=self._goes_first)
        self._leaving.add(first)
        first.transport.abort()

    def arrived(self, connection: Open, size: int, sender: Hashable) -> None:
        """Note how many bytes came of a request or message that is not whole.

        Args:
            sender: The address of who sends it.
        """
        looked, size = connection.looked, min(size, self.limits.max_message)
        self._unfinished_bytes += size - looked.unfinished
        self._unfinished_of[looked.sender] -= looked.unfinished
        if not self._unfinished_of[looked.sender]:
            del self._unfinished_of[looked.sender]
        looked.unfinished, looked.sender = size, sender
        if size:
            self._unfinished[connection] = None
            self._unfinished_of[sender] += size
        else:
            self._unfinished.pop(connection, None)
        while self._unfinished_bytes > self.limits.max_unfinished:
            self._drop_one(sender)

    def closed(self, connection: Open) -> None:
        if connection.looked.unfinished:
            self.arrived(connection, 0, None)
        if connection in self._open:
            del self._open[connection]
            address = connection.looked.address
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]
        self._leaving.discard(connection)
        self._extra.discard(connection)
        self._delayed.pop(connection, None)

    def delayed(self, connection: Open, *, waits: bool) -> None:
        self._delayed.pop(connection, None)
        if waits and connection in self._open and connection not in self._leaving:
            self._delayed[connection] = None
            if len(self._delayed) > MOST_DELAYED:
                # Those that came before get their answers: a client without a token needs its own.
                self._close_delayed(connection)

    def count_reason(self, what: str) -> None:
        self._reasons[what] += 1

    def refused_header(self) -> None:
        self.count_reason("refused: the header of the request is too large (431)")

    def look(self, now: float) -> None:
        if now - self._looked_at < self._every:
            return
        self._looked_at = now
        for each in list(self._open):
            looked = each.looked
            if looked.late_at is not None and looked.late_at <= now:
                looked.late_at = None
                if each.give_up():
                    self.count_reason("closed: no complete request came in time")
            closes = each.transport.is_closing()
            if closes or each.is_stuck():
                self._look_at_unsent(each, now, closes)
            else:
                looked.unsent_since = 0.0
        if self._reasons and now - self._logged_at >= QUIET:
            self._logged_at = now
            descriptors = self._descriptors if self._descriptors < sys.maxsize else "none"
            said = "; ".join(f"{count} {what}" for what, count in sorted(self._reasons.items()))
            self._reasons.clear()
            logger.warning(
                "connections were %s. %d are open, the limit of file descriptors is %s, "
                "max_connections is %s, receive_timeout is %g s",
                said,
                len(self._open),
                descriptors,
                self.limits.max_connections or "not set",
                self.limits.receive_timeout,
            )

    def give_up(self) -> None:
        for each in list(self._open):
            each.give_up()

    def _drop_one(self, newest: Hashable) -> None:
        # Of two addresses with as many bytes, the newest goes first.
        sizes = self._unfinished_of.items()
        most, _ = max(sizes, key=lambda each: (each[1], each[0] == newest))
        of_it = [each for each in self._unfinished if each.looked.sender == most]
        largest = max(of_it, key=lambda each: each.looked.unfinished)
        self.arrived(largest, 0, None)
        self.count_reason("refused: too many bytes came of what was not whole")
        largest.drop()

    def _goes_first(self, connection: Open) -> tuple[int, float]:
        looked = connection.looked
        return -self._of_address[looked.address], looked.received_at

    def _close_delayed(self, connection: Open) -> None:
        del self._delayed[connection]
        self._leaving.add(connection)
        self.count_reason("closed before a bad credential was refused, to make room")
        connection.transport.abort()

    def _count_others(self, number: int, now: float) -> None:
        is_near = max(number, len(self._open) + self._others) >= (
            self._descriptors - 2 * self._reserved
        )
        if is_near and now - self._counted_at >= COUNTS_AFTER:
            self._counted_at = now
            self._others = max(0, _opened() - len(self._open))

    def _look_at_unsent(self, each: Open, now: float, closes: bool) -> None:
        size, looked = each.transport.get_write_buffer_size(), each.looked
        if not looked.unsent_since or size < looked.unsent:
            looked.unsent_since = now
        looked.unsent = size
        limits = self.limits
        most = limits.slow_timeout if closes else limits.receive_timeout
        if size and now - looked.unsent_since >= most:
            self.count_reason("cut: their peers read nothing")
            each.transport.abort()


class OnlyHealth:
    def __init__(self, app: ASGIApp, paths: frozenset[str], has_place: Callable[[], bool]) -> None:
        self._app, self._paths, self._has_place = app, paths, has_place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        if scope["path"] in self._paths:
            await self._app(scope, receive, last)
            return
        if self._has_place():
            await self._app(scope, receive, send)
            return
        headers = [(b"content-length", b"0"), (b"retry-after", str(RETRY_AFTER).encode())]
        await last({"type": "http.response.start", "status": 503, "headers": headers})
        await last({"type": "http.response.body", "body": b""})


def _limit() -> int:
    if sys.platform == "win32":
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _opened() -> int:
    try:
        # One of them is open for this.
        return len(os.listdir("/dev/fd")) - 1
    except OSError:
        return 0
