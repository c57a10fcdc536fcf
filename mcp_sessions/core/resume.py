"""The client half: where it stands in its session, and what to do after a loss.

Rules that must hold, and that ``tests/core/test_resume.py`` owns:

1. Nothing is sent twice unless the server promised to run it once: what has no request key, or one
   older than the server remembers, is never sent again (KEY3). A request that certainly never ran
   may always be sent. The transport proves that (``Failure.never_ran``); a text does not.
2. The position moves with each event that is new, also with replayed ones (CUP2), and
   an event that was seen is not given on again.
3. Position and memory are reset together, when a resume says that there was a gap
   (CLI4): ids of another log mean nothing next to those of the old one.
4. A session is started again after a loss, once: not again before it was of use, or time
   has passed.
5. A takeover by a late request of this client's own is not another client's (TKO13).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeGuard

from mcp_sessions import method_names
from mcp_sessions.core.messages import (
    EXTENSION,
    ROUTE_HEADER,
    SESSION_META,
    members_of,
    meta_of,
    texts_of,
)

EventId = str | int
"""The allowed types of ``sessionEventId`` (EVT8); opaque to a client."""

REMEMBERED_EVENTS = 4_096
"""Ids of events by which a duplicate is known: more than any replay window's default."""


MAX_ID = 1_024
"""Characters of an id that a server gives: of a session, of an event."""

MAX_SECONDS = 31_536_000.0
"""No promise or request of a server is believed for longer: a year."""

_SENDABLE = re.compile(r"[\x21-\x7e]+", re.ASCII)


def is_sendable(text: str) -> bool:
    return len(text) <= MAX_ID and _SENDABLE.fullmatch(text) is not None


def is_event_id(value: object) -> TypeGuard[EventId]:
    if isinstance(value, str):
        return len(value) <= MAX_ID
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MAX_ID


def is_session_id(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID:
        return False
    # JSON may hold what UTF-8 does not: a lone surrogate.
    return not any("\ud800" <= character <= "\udfff" for character in value)


def seconds_of(value: object, *, most: float = MAX_SECONDS) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        return 0.0
    # Compared before it is converted: an integer may be too large to be a float.
    return float(min(max(value, 0), most))


class FailureCause(Enum):
    UNREACHABLE = "unreachable"
    """It could not be opened: nothing was sent."""

    CUT = "cut"
    """It broke after the request may have been sent."""

    SILENT = "silent"
    """Nothing came for too long."""

    STATUS = "status"
    """An HTTP status that is no success."""

    CLOSED = "closed"
    """The server closed it."""


class Step(Enum):
    REPORT = "report"
    """The failure is the answer: give it to whoever asked."""

    RETRY = "retry"
    """The same connection, after a delay."""

    RECONNECT = "reconnect"
    """A new connection, which resumes the session; if that is refused, a new session."""


AWAY = (502, 503, 504)
"""HTTP statuses that speak of one server, not of the request: another address may serve it."""

_SESSION_UNKNOWN = (404, 410)
_TOO_MANY = 429
_BUSY_PATIENCE = 2
"""How often a busy server is asked again on the same connection."""


def is_away(cause: FailureCause, status: int | None) -> bool:
    """Whether a failure says that no server is there. Otherwise a server has answered.

    Args:
        status: The HTTP status; None: there was none. A proxy answers some of `AWAY` for a server
            that it cannot reach.
    """
    return status in AWAY if status is not None else cause is not FailureCause.STATUS


def after_status(status: int, *, failures: int, is_answer: bool) -> Step:
    """Decide the next step after an HTTP status on a session that the server knew.

    Args:
        status: 400 or above.
        failures: Attempts that failed since the last progress.
        is_answer: The body is a JSON-RPC error that answers this very request.
    """
    if status in _SESSION_UNKNOWN:
        # 2026-07-28 answers an unknown method with 404 and a proper error.
        return Step.REPORT if is_answer else Step.RECONNECT
    if status in AWAY:
        return Step.RECONNECT
    if status == _TOO_MANY:
        return Step.RETRY if failures < _BUSY_PATIENCE else Step.RECONNECT
    return Step.REPORT


def may_send_again(
    *, is_keyed: bool, first_sent: float | None, same_session: bool, now: float, key_lifetime: float
) -> bool:
    """Whether a request that has no answer may be sent (again).

    Args:
        is_keyed: It went out with a request key.
        first_sent: When it first may have reached the server; None: it never ran.
        same_session: The session it was sent in is still there.
        now: Seconds, on the clock of ``first_sent``.
        key_lifetime: Seconds for which the server knows a key.
    """
    if first_sent is None:
        return True
    # A tenth less than the server remembers: the way there takes time, and clocks drift.
    return is_keyed and same_session and now - first_sent < key_lifetime * 0.9


class Follower:
    __slots__ = ("_limit", "_seen", "position")

    def __init__(self, *, remembered: int = REMEMBERED_EVENTS) -> None:
        self.position: EventId | None = None
        """The last event that was processed; what ``session/resume`` sends."""
        self._seen: OrderedDict[EventId, None] = OrderedDict()
        self._limit = remembered

    def admits(self, event_id: EventId) -> bool:
        """Note an event. False: it was seen before and must be dropped."""
        if event_id in self._seen:
            return False
        self._seen[event_id] = None
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        self.position = event_id
        return True

    def restart(self, position: EventId | None) -> None:
        """Continue at ``position``, after a gap or with another session."""
        self._seen.clear()
        self.position = position


LATE_ATTEMPT = 300.0
"""Seconds for which an attempt that was given up may be served late, at a server that does not name
the client of the attempt.
"""

_ATTEMPTS_KEPT = 16


@dataclass(slots=True, eq=False, repr=False)
class Attempts:
    """This client's requests that take its session, of which some were given up.

    A server may serve one of those late, and displace the connection that replaced it.

    Args:
        instance: How this client calls itself (TKO12): no other one does.
    """

    instance: str
    _given_up: list[float] = field(default_factory=list[float])

    def gave_up(self, *, now: float) -> None:
        """Note an attempt without an answer. It may still be served."""
        self._given_up.append(now)
        del self._given_up[:-_ATTEMPTS_KEPT]

    def is_own(self, instance: object, *, now: float) -> bool:
        """Whether this client took the session over.

        Args:
            instance: The client that took it, as the server says; not a string: the server does not
                say. Then each attempt that was given up explains one takeover.
            now: Seconds.
        """
        if isinstance(instance, str):
            return instance == self.instance
        self._given_up = [then for then in self._given_up if now - then < LATE_ATTEMPT]
        if not self._given_up:
            return False
        self._given_up.pop(0)
        return True


@dataclass(slots=True, eq=False, repr=False)
class Lives:
    """Allows one new session for each session that was of use."""

    generation: int = 0
    """Counts the sessions; a loss that names an older one was dealt with already."""

    _may: bool = True
    _last: float = 0.0

    def used(self) -> None:
        """Note that the session answered: if it is lost, there may be another one."""
        self._may = True

    def restart(self, *, now: float, rest: float) -> bool:
        """Ask for another session; False: the last one was of no use either.

        Args:
            now: Seconds.
            rest: Seconds after which a session that nobody used may be replaced as well.
        """
        if not self._may and now - self._last < rest:
            return False
        self._may = False
        self._last = now
        self.generation += 1
        return True


@dataclass(frozen=True, slots=True)
class Abilities:
    has_sessions: bool = False
    is_ours: bool = False
    """It advertises this project's extension."""

    features: frozenset[str] = frozenset()
    key_lifetime: float = 0.0
    """Seconds; 0: it knows no request keys."""

    lists: tuple[str, ...] = ()
    """The lists that it has, out of ``tools``, ``prompts``, ``resources``."""

    routes: bool = False
    """It wants to know which session a request is of, in a header (RTE1)."""

    def may(self, feature: str) -> bool:
        """Whether to try ``feature``: always, at a server that does not list its own."""
        return feature in self.features if self.is_ours else self.has_sessions


def abilities(capabilities: object) -> Abilities:
    """Read raw capabilities; whatever is malformed is not there."""
    members = members_of(capabilities)
    extension = members_of(members.get("extensions")).get(EXTENSION)
    keys = members_of(members_of(extension).get("requestKeys"))
    return Abilities(
        has_sessions=isinstance(members.get("sessions"), dict),
        is_ours=isinstance(extension, dict),
        features=frozenset(texts_of(members_of(extension).get("features"))),
        key_lifetime=seconds_of(keys.get("lifetime")),
        routes=members_of(members_of(extension).get("routing")).get("header") == ROUTE_HEADER,
        lists=tuple(n for n in method_names.LISTED if isinstance(members.get(n), dict)),
    )


@dataclass(slots=True)
class SessionView:
    session_id: str
    state: str | None = None
    """Echoed as it came: never read, never changed."""

    expires_at: str | None = None
    resumable: bool = True
    """Made by ``session/start``: ``session/resume`` takes it up. Otherwise it is only named."""

    def metadata(self) -> dict[str, Any]:
        named: dict[str, Any] = {"sessionId": self.session_id}
        if self.state is not None:
            named["state"] = self.state
        return named

    def renewed(self, expires_at: object) -> None:
        if isinstance(expires_at, str):
            self.expires_at = expires_at

    def drop_state(self) -> None:
        self.state = None

    def merge(self, result: Mapping[str, Any]) -> bool:
        """Take over what a result says of the session; whether something changed.

        A missing ``state`` keeps the old one; another session's id is ignored.
        """
        named = members_of(meta_of(result).get(SESSION_META))
        if named.get("sessionId") != self.session_id:
            return False
        before = (self.state, self.expires_at)
        state = named.get("state")
        if isinstance(state, str):
            self.state = state
        self.renewed(named.get("expiresAt"))
        return (self.state, self.expires_at) != before


def event_id_of(params: Mapping[str, Any] | None, session_id: str) -> EventId | None:
    value = (params or {}).get("sessionEventId")
    if not is_event_id(value):
        return None
    named = members_of(meta_of(params).get(SESSION_META)).get("sessionId", session_id)
    return value if named == session_id else None
