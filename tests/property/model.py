"""A small model of what a store remembers, simple enough to be right by looking at it.

Lists, and a scan of them for every question. What the real code finds by tables and
counters must come out the same.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from mcp_sessions.core.log import Window
from mcp_sessions.errors import Refusal


@dataclass(frozen=True)
class Event:
    """One event that was issued."""

    number: int
    size: int
    at: float
    key: Hashable | None = None
    origin: str | None = None


@dataclass
class LogModel:
    """An event log."""

    window: Window
    head: int = 0
    floor: int = 0
    lost_to_space: int = 0
    kept: list[Event] = field(default_factory=list[Event])

    def append(
        self, size: int, now: float, key: Hashable | None = None, origin: str | None = None
    ) -> None:
        """Issue the next number; replace the older event of the key; keep the bounds."""
        self.head += 1
        self.kept = [event for event in self.kept if key is None or event.key != key]
        self.kept.append(Event(self.head, size, now, key, origin))
        self.evict(now)

    def evict(self, now: float) -> None:
        """Take the oldest away while a bound is exceeded."""
        window = self.window
        while self.kept:
            oldest = self.kept[0]
            size = sum(event.size for event in self.kept)
            too_old = window.max_age is not None and oldest.at < now - window.max_age
            too_many = window.max_events is not None and len(self.kept) > window.max_events
            too_big = window.max_bytes is not None and size > window.max_bytes
            if not (too_old or too_many or (too_big and len(self.kept) > 1)):
                return
            self.floor = oldest.number
            if not too_old:
                self.lost_to_space = oldest.number
            del self.kept[0]

    def drop(self, origin: str) -> None:
        """Take one session's events away."""
        self.kept = [event for event in self.kept if event.origin != origin]

    def replay(self, number: int, now: float) -> list[int] | Refusal:
        """The numbers after a position of this log's own epoch, or why not."""
        self.evict(now)
        if number > self.head:
            return Refusal.AHEAD
        if number < self.floor:
            return Refusal.EVICTED if number < self.lost_to_space else Refusal.EXPIRED
        return [event.number for event in self.kept if event.number > number]


@dataclass
class SessionModel:
    """A session, alive."""

    principal: str
    expires_at: float
    ends_at: float
    log: LogModel
    attachment: tuple[str, int] | None = None
    fencing_epoch: int = 0
    subscriptions: set[str] = field(default_factory=set[str])
    keys: dict[str, tuple[bytes, str]] = field(default_factory=dict[str, tuple[bytes, str]])
    """Key → digest and ``running``, ``answered`` or ``dropped``."""

    data: int | None = None
    data_version: int = 0

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return now >= self.expires_at

    def move_deadline(self, now: float, idle: float) -> None:
        """A request came, or ended."""
        self.expires_at = min(now + idle, self.ends_at)

    def attach(self, connection: str | None) -> None:
        """Raise the fencing epoch; the newest attachment is the only one."""
        self.fencing_epoch += 1
        self.attachment = (connection, self.fencing_epoch) if connection is not None else None

    def detach(self, fencing_epoch: int) -> bool:
        """Let go, if it is that attachment that holds."""
        if self.attachment is None or self.attachment[1] != fencing_epoch:
            return False
        self.attachment = None
        return True
