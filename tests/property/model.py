"""A small model of what a store remembers, simple enough to be right by looking at it.

Lists, and a scan of them for every question. The tables and counters of the real code must give the
same results.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from mcp_sessions.core.log import Window
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal


@dataclass(frozen=True)
class Event:
    number: int
    size: int
    at: float
    key: Hashable | None = None
    origin: str | None = None


@dataclass
class LogModel:
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
class KeyModel:
    name: str
    digest: bytes
    scopes: frozenset[str]
    runner: tuple[str, str]
    """The process that runs it, and which run of it."""

    at: float
    """When it began, then when it finished."""

    state: str = "running"
    answer: bytes | None = None


@dataclass
class KeysModel:
    """A session's request keys: what runs, and then what finished, oldest first."""

    max_bytes: int
    lifetime: float
    cost: int
    """Bytes of a key, whatever its name."""

    known: list[KeyModel] = field(default_factory=list[KeyModel])

    def begin(
        self,
        name: str,
        digest: bytes,
        now: float,
        *,
        scopes: frozenset[str],
        runner: str,
        run: str,
        instead_of: str,
    ) -> tuple[str, bytes | None, tuple[str, str] | None]:
        """The state of a key that a request finds, the answer that it gets, and who runs it."""
        self.expire(now)
        for entry in self.known:
            if entry.name == name:
                if entry.digest != digest:
                    return "other_content", None, None
                if entry.scopes - scopes:
                    return "fewer_scopes", None, None
                if entry.state == "running" and entry.runner[1] == instead_of:
                    entry.scopes, entry.runner, entry.at = scopes, (runner, run), now
                    return "first", None, None
                return entry.state, entry.answer, entry.runner if entry.state == "running" else None
        if not self.make_room(self.cost):
            return "full", None, None
        self.known.append(KeyModel(name, digest, scopes, (runner, run), now))
        return "first", None, None

    def finish(self, name: str, answer: bytes | None, now: float) -> bool:
        self.expire(now)
        for entry in self.known:
            if entry.name == name and entry.state == "running":
                if answer is not None and not self.make_room(len(answer)):
                    answer = None
                entry.state = "dropped" if answer is None else "answered"
                entry.answer, entry.at = answer, now
                self.known.remove(entry)
                self.known.append(entry)
                return answer is not None
        return False

    def make_room(self, wanted: int) -> bool:
        """Drop answers, oldest first, but none if that is not enough."""
        if len(self.known) * self.cost + wanted > self.max_bytes:
            return False
        for entry in self.known:
            answers = sum(len(each.answer or b"") for each in self.known)
            if len(self.known) * self.cost + answers + wanted <= self.max_bytes:
                break
            if entry.answer is not None:
                entry.state, entry.answer = "dropped", None
        return True

    def expire(self, now: float) -> None:
        """Forget what finished, in that order."""
        for entry in [entry for entry in self.known if entry.state != "running"]:
            if entry.at >= now - self.lifetime:
                return
            self.known.remove(entry)

    def drop_running(self) -> None:
        """The only process ends. What ran is known for a lifetime after it began; where several
        ran, nobody says which of them finished first: here it is the first name.
        """
        for entry in sorted(self.known, key=lambda entry: entry.name):
            if entry.state == "running":
                entry.state = "dropped"
                self.known.remove(entry)
                self.known.append(entry)


@dataclass
class SessionModel:
    principal: str
    mode: Mode
    expires_at: float
    ends_at: float
    log: LogModel
    keys: KeysModel
    attachment: tuple[str, int] | None = None
    fencing_epoch: int = 0
    waits_from: str | None = None
    log_level: str | None = None
    subscriptions: set[str] = field(default_factory=set[str])
    data: int | None = None
    data_version: int = 0

    def is_overdue(self, now: float) -> bool:
        return now >= self.expires_at

    def move_deadline(self, now: float, idle: float) -> None:
        """A request came, or ended."""
        if self.mode is not Mode.AGENT:
            self.expires_at = min(now + idle, self.ends_at)

    def process_ends(self) -> bool:
        """The only process ends; whether an attachment ends with it."""
        self.keys.drop_running()
        was_attached, self.attachment = self.attachment is not None, None
        return was_attached

    def admits(
        self, principal: str, mode: Mode, now: float, *, held: bool, epoch: int | None
    ) -> str | None:
        """The answer to a request: ``admitted``, ``displaced``, ``other mode`` or nothing."""
        if principal != self.principal or now >= (self.ends_at if held else self.expires_at):
            return None
        if mode is not self.mode:
            return None if Mode.AGENT in (mode, self.mode) else "other mode"
        return "displaced" if epoch not in (None, self.fencing_epoch) else "admitted"

    def attach(self, connection: str | None) -> str | None:
        """Raise the fencing epoch; the newest attachment is the only one. The position where its
        listen stream starts.
        """
        self.fencing_epoch += 1
        if connection is None:
            self.attachment = None
            return None
        self.attachment = (connection, self.fencing_epoch)
        waits_from, self.waits_from = self.waits_from, None
        return waits_from

    def detach(self, fencing_epoch: int) -> bool:
        """Let go, if it is that attachment that holds."""
        if self.attachment is None or self.attachment[1] != fencing_epoch:
            return False
        self.attachment = None
        return True
