"""Requests that must not run twice: the keys of one session and what became of each.

Rules that must hold, and that ``tests/core/test_request_keys.py`` owns:

1. A key that is known is never begun again. An answer that is gone leaves its key behind:
   the caller learns that the outcome is unknown, and nothing runs (KEY3).
2. Keys and answers are bounded in bytes and time. Answers go first, oldest first. When even the
   bare keys fill the space, a new key is refused; a known one never is forgotten early.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson

from mcp_sessions.core.messages import compact
from mcp_sessions.errors import InvalidParams
from mcp_sessions.ids import RequestKey

KEY_COST = 96
"""Bytes accounted for a key in addition to its own: digest, times, table entry."""


class KeyState(Enum):
    RUNNING = "running"
    ANSWERED = "answered"
    DROPPED = "dropped"
    """It ran; its answer was not kept."""


class Begun(Enum):
    FIRST = "first"
    """Never seen: it is recorded now, and the caller runs it."""

    RUNNING = "running"
    ANSWERED = "answered"
    DROPPED = "dropped"
    OTHER_CONTENT = "other_content"
    FEWER_SCOPES = "fewer_scopes"
    """Known, but begun by a credential with scopes that this one lacks (SEC3)."""

    FULL = "full"
    """No room for another key; nothing was recorded."""


@dataclass(slots=True)
class KeyedRequest:
    digest: bytes
    runner: str
    """Names the process that runs it; another one cannot know how it goes."""

    at: float
    """Seconds on the session clock: when it was first seen, then when it finished."""

    state: KeyState = KeyState.RUNNING
    outcome: bytes = b""
    """``"result":…`` or ``"error":…``, encoded."""

    scopes: frozenset[str] = frozenset()
    """Those of the credential that began it."""

    run: str = ""
    """The id of its runner's attempt that recorded it; empty: unknown."""


@dataclass(frozen=True, slots=True)
class KeyUse:
    key: RequestKey
    digest: bytes
    runner: str
    scopes: frozenset[str] = frozenset()
    """Those of the credential that sent it. A sender with fewer scopes than the first one does not
    get the answer (SEC3).
    """

    run: str = ""
    """Names this sending among all that its runner admits: the reply to an admission may be
    lost, and the key be recorded for a handler that never starts."""

    instead_of: str = ""
    """A run that is known to have begun nothing, and never will: if it has the key, and nothing
    was kept of it, this use has it now, as if it were the first. Empty: none."""


def content_digest(method: str, params: Mapping[str, Any] | None) -> bytes:
    """Digest the method and the params of a request, to compare two requests.

    ``_meta`` is left out: progress token and ``state`` differ when a request is sent again.
    """
    members = {name: value for name, value in (params or {}).items() if name != "_meta"}
    try:
        body = orjson.dumps([method, members], option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # An integer beyond 64 bits, a lone surrogate, many levels: JSON has them.
        try:
            body = json.dumps([method, members], sort_keys=True).encode()
        except RecursionError as failed:
            raise InvalidParams("params are nested too deeply for a request key") from failed
    return hashlib.blake2b(body, digest_size=32).digest()


def key_cost(key: RequestKey) -> int:
    # JSON may hold what UTF-8 does not: a lone surrogate.
    return len(key.encode("utf-8", "surrogatepass")) + KEY_COST


def sent_again(known: KeyedRequest, use: KeyUse) -> Begun:
    """Decide the outcome of a request with a known key.

    Only ``FIRST`` changes anything: the key is recorded again, for this request.
    """
    if known.digest != use.digest:
        return Begun.OTHER_CONTENT
    if not known.scopes <= use.scopes:
        return Begun.FEWER_SCOPES
    if known.state is KeyState.RUNNING and use.instead_of and known.run == use.instead_of:
        return Begun.FIRST
    return Begun(known.state.value)


class FoundKey(NamedTuple):
    begun: Begun
    outcome: bytes | None = None
    """The kept answer, if ``begun`` is ``ANSWERED``."""

    runner: str | None = None
    run: str | None = None


def found(begun: Begun, entry: KeyedRequest | None) -> FoundKey:
    """Return the answer for a key. For another sender's key it says only that."""
    if entry is None or begun in (Begun.OTHER_CONTENT, Begun.FEWER_SCOPES):
        return FoundKey(begun)
    outcome = entry.outcome if begun is Begun.ANSWERED else None
    return FoundKey(begun, outcome, entry.runner, entry.run)


def has_room(wanted: int, *, size: int, answers: int, max_bytes: int) -> bool:
    """Whether so many bytes more fit when older answers go (KEY12). If not, nothing has to go,
    and a new key is refused (KEY13).

    Args:
        wanted: Bytes of what comes.
        size: Bytes of all that is there.
        answers: Of these, the bytes of kept answers.
        max_bytes: How many there may be.
    """
    return size - answers + wanted <= max_bytes


def is_forgotten(finished_at: float, *, now: float, lifetime: float) -> bool:
    """Whether a key has been known for long enough since its request finished (KEY12)."""
    return finished_at < now - lifetime


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class RequestKeys:
    max_bytes: int
    lifetime: float
    """Seconds for which a key is known after its request finished."""

    size: int = 0
    """Bytes accounted for."""

    _answers: int = 0
    """The bytes of kept answers, included above."""

    _known: dict[RequestKey, KeyedRequest] = field(default_factory=dict[RequestKey, KeyedRequest])
    # In the order in which they finished, which is the order in which they are forgotten,
    # and before that their answers. Each step looks at the oldest only: a session at its
    # bound is as quick as one below it.
    _finished: deque[RequestKey] = field(default_factory=deque[RequestKey])
    _answered: deque[RequestKey] = field(default_factory=deque[RequestKey])

    @classmethod
    def restored(
        cls,
        *,
        max_bytes: int,
        lifetime: float,
        size: int,
        answers: int,
        known: dict[RequestKey, KeyedRequest],
        finished: deque[RequestKey],
        answered: deque[RequestKey],
    ) -> RequestKeys:
        """Return keys as a store kept them.

        Args:
            answers: Of ``size``, the bytes of kept answers.
            known: It may be a part of them. Whatever changes is put into it, or popped.
            finished: Those that finished, oldest first. It may be the beginning, which raises an
                error of its own at its end.
            answered: In the same way, those whose answer is kept.
        """
        keys = cls(max_bytes=max_bytes, lifetime=lifetime, size=size)
        keys._answers, keys._known = answers, known
        keys._finished, keys._answered = finished, answered
        return keys

    @classmethod
    def of(
        cls,
        entries: Sequence[tuple[RequestKey, KeyedRequest]],
        *,
        max_bytes: int,
        lifetime: float,
    ) -> RequestKeys:
        """Return all keys of a session.

        Args:
            entries: As :meth:`in_order` has them.
        """
        answers = sum(len(entry.outcome) for _, entry in entries)
        return cls.restored(
            max_bytes=max_bytes,
            lifetime=lifetime,
            size=answers + sum(key_cost(key) for key, _ in entries),
            answers=answers,
            known=dict(entries),
            finished=deque(key for key, entry in entries if entry.state is not KeyState.RUNNING),
            answered=deque(key for key, entry in entries if entry.state is KeyState.ANSWERED),
        )

    def in_order(self) -> list[tuple[RequestKey, KeyedRequest]]:
        """Those that finished, in that order, and then those that run."""
        running = [key for key, entry in self._known.items() if entry.state is KeyState.RUNNING]
        return [(key, self._known[key]) for key in (*self._finished, *running)]

    @property
    def answer_bytes(self) -> int:
        """The bytes of kept answers."""
        return self._answers

    @property
    def known(self) -> Mapping[RequestKey, KeyedRequest]:
        return self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: RequestKey) -> KeyedRequest | None:
        return self._known.get(key)

    def begin(self, use: KeyUse, *, now: float) -> tuple[Begun, KeyedRequest | None]:
        """Record a key before its handler starts, or say what is known of it.

        Returns:
            ``FIRST`` with the new entry; ``FULL`` with None; else what :func:`sent_again` says of
            the known entry.
        """
        self._expire(now)
        known = self.get(use.key)
        if known is not None:
            begun = sent_again(known, use)
            if begun is Begun.FIRST:
                known.runner, known.run = use.runner, use.run
                known.scopes, known.at = use.scopes, now
                self._known[use.key] = known
            return begun, known
        cost = key_cost(use.key)
        if not self._make_room(cost):
            return Begun.FULL, None
        entry = KeyedRequest(use.digest, use.runner, now, scopes=use.scopes, run=use.run)
        self._known[use.key] = entry
        self.size += cost
        return Begun.FIRST, entry

    def finish(self, key: RequestKey, outcome: bytes | None, *, now: float) -> bool:
        """Keep the outcome of ``key`` (None: it cannot be known); whether it was kept.

        Its lifetime begins now, however long the request took.
        """
        self._expire(now)
        entry = self._known.get(key)
        if entry is None or entry.state is not KeyState.RUNNING:
            return False
        entry.at = now
        self._known[key] = entry
        self._finished.append(key)
        if outcome is None or not self._make_room(len(outcome)):
            entry.state = KeyState.DROPPED
            return False
        entry.state, entry.outcome = KeyState.ANSWERED, compact(outcome)
        self._answered.append(key)
        self.size += len(outcome)
        self._answers += len(outcome)
        return True

    def _make_room(self, wanted: int) -> bool:
        if not has_room(wanted, size=self.size, answers=self._answers, max_bytes=self.max_bytes):
            return False
        while self.size + wanted > self.max_bytes:
            key = self._answered.popleft()
            entry = self._known[key]
            self.size -= len(entry.outcome)
            self._answers -= len(entry.outcome)
            entry.state, entry.outcome = KeyState.DROPPED, b""
            self._known[key] = entry
        return True

    def _expire(self, now: float) -> None:
        # A running request is known until it ends, however long that takes.
        while self._finished and is_forgotten(
            self._known[self._finished[0]].at, now=now, lifetime=self.lifetime
        ):
            key = self._finished.popleft()
            oldest = self._known.pop(key)
            if oldest.state is KeyState.ANSWERED:
                # The oldest that finished is the oldest that is answered.
                self._answered.popleft()
            self.size -= key_cost(key) + len(oldest.outcome)
            self._answers -= len(oldest.outcome)
