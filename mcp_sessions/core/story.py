"""The story of a session: what happened to it, for an operator who asks later.

A story is text with a line for each entry: when, what, and small facts. The store keeps it with its
session. Steps that attach and detach add to it. What else happens is added by the rounds of a
process. Old entries fold away: the first line then says how many. Redis does the same in
``lua/story.lua``.

A fact is a number or a word of this project: never an id, a key, or a text that a client sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcp_sessions.core.ends import duration
from mcp_sessions.ids import Position

MOST = 2_048
"""Bytes of a story, at most. A line has fewer than a hundred."""

_HEADER = 16
"""Bytes of the line that says how many entries are gone, at most."""

NOTHING = "-"
"""Stands for a fact that there is not."""


class Entry(NamedTuple):
    at: float
    """Seconds since 1970."""

    text: str
    """What happened and its facts, with a space between. :func:`told` adds the time."""


class Why:
    """Why a session was attached or detached. The words are in stories that are stored."""

    STARTED = "started"
    RESUMED = "resumed"
    NAMED = "named"
    """A request named it, and nobody received its events."""

    LISTENS = "listens"
    OPENED = "opened"
    """The GET stream of its connection was opened."""

    CLOSED = "closed"
    """Its connection, or the stream, was closed."""

    RESTARTED = "restarted"
    """A new GET stream of its connection did not say where to go on."""

    REPLICA_GONE = "replica-gone"
    """The replica that had its connection is gone."""

    CONNECTION_ENDED = "connection-ended"
    """The session of its connection ended."""

    SLOW = "slow"
    """Its client took nothing for too long."""

    DRAINING = "draining"
    CREDENTIAL_EXPIRED = "credential-expired"
    NOT_ATTACHED = "not-attached"
    """The attach did not come to its end."""


def detaches(at: float, why: str, replica: str, method: str = NOTHING) -> Entry:
    """Args:
    method: Of the last request of the connection.
    """
    last = "" if method == NOTHING else f" {method}"
    return Entry(at, f"detached {why} {replica}{last}")


def outcome(
    is_taken_over: bool,
    position: Position | None,
    *,
    head: int,
    replayed: int,
    evicted: int,
    refusal: str | None,
) -> str:
    """Return the facts that only the step that attaches knows.

    Args:
        is_taken_over: Another connection had it.
        position: The last event that the client has, as it says.
        head: The newest event's number.
        replayed: How many events it was sent.
        evicted: The newest number that space took.
        refusal: Why nothing was replayed.
    """
    after = NOTHING if position is None else position.number
    why = refusal or NOTHING
    return f" {'over' if is_taken_over else 'free'} {after} {head} {replayed} {evicted} {why}"


def told(story: str, at: float, text: str) -> str:
    """Return a story with one more entry. All of it is ASCII, so a character is a byte."""
    story = f"{story}{at:.0f} {text}\n"
    return story if len(story) <= MOST else _folded(story)


def _folded(story: str) -> str:
    count = 0
    if story.startswith("+"):
        first, _, story = story.partition("\n")
        count = int(first)
    while len(story) > MOST - _HEADER:
        _, _, story = story.partition("\n")
        count += 1
    return f"+{count}\n{story}"


# --- as people and programs read it --------------------------------------------------------------

_LINE = re.compile(r"([0-9]{1,15}) ([a-z]+) ?(.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Told:
    """An entry as it is shown."""

    at: float
    what: str
    facts: Mapping[str, Any]
    text: str
    """For people."""


def read(story: str) -> tuple[int, list[Told]]:
    """Return how many entries are gone, and the others. A line that a newer release wrote in
    another way is left out.
    """
    folded = 0
    entries: list[Told] = []
    for line in story.splitlines():
        found = _LINE.fullmatch(line)
        if line.startswith("+") and line[1:].isdecimal():
            folded = int(line)
        elif found is not None and (entry := _told(found)) is not None:
            entries.append(entry)
    return folded, entries


_ADVICE: Mapping[str, str] = {
    Why.SLOW: "look at the client, and for a proxy that buffers",
    Why.CREDENTIAL_EXPIRED: "the client has to come back with a new credential",
    Why.REPLICA_GONE: "look at the log of that replica: it died, or was killed",
}


def why_it_lives(story: str, *, is_attached: bool | None) -> tuple[str, str]:
    """Say of a session that lives who has it, or why nobody has, and what to do.

    Args:
        is_attached: None: only its story tells, as for a session of a connection over HTTP.
    """
    entry = next((each for each in reversed(read(story)[1]) if each.what in _MOVES), None)
    was_detached = entry is not None and entry.what == "detached"
    if is_attached or (is_attached is None and not was_detached):
        if entry is None or was_detached:
            return "it lives", "nothing"
        return f"it lives: {entry.text}", "nothing"
    why, advice = "it lives, and no connection has it", "nothing: its client can resume it"
    if entry is None or not was_detached:
        return why, advice
    return f"{why}: {entry.text}", _ADVICE.get(entry.facts["why"], advice)


def troubles(story: str, since: float) -> dict[str, int]:
    """Return what went wrong since a time, and how often: words of :class:`Why`, ``refused`` for
    requests, and ``not-replayed`` for a resume.

    It is asked for each session of a store, so it makes no sentences.
    """
    found: dict[str, int] = {}
    for line in story.splitlines():
        match line.split(" "):
            case [at, "detached", why, *_] if why in _ADVICE and float(at) >= since:
                found[why] = found.get(why, 0) + 1
            case [at, "refused", _, _, times, *_] if times.isdecimal() and float(at) >= since:
                found["refused"] = found.get("refused", 0) + int(times)
            case [at, "attached", _, _, _, _, position, _, _, _, refusal, *_] if (
                NOTHING not in (position, refusal) and float(at) >= since
            ):
                found["not-replayed"] = found.get("not-replayed", 0) + 1
            case _:
                """It went well, or a newer release wrote it in another way."""
    return found


def last_method(story: str) -> str | None:
    """Return the last request before the session was detached last. None: it is not known."""
    entries = (each for each in reversed(read(story)[1]) if each.what == "detached")
    return next((each.facts.get("method") for each in entries), None)


_MOVES = ("attached", "detached")


def _told(found: re.Match[str]) -> Told | None:
    at, what, facts = float(found[1]), found[2], found[3].split()
    names = _FACTS.get(what)
    if names is None or len(facts) < _LEAST.get(what, len(names)):
        return None
    members = dict(_members(names, facts))
    try:
        return Told(at, what, members, _SENTENCES[what](members))
    except (KeyError, TypeError):
        # A fact is missing, or a word stands for a number.
        return None


def _members(names: tuple[str, ...], facts: list[str]) -> Iterator[tuple[str, Any]]:
    for name, fact in zip(names, facts, strict=False):
        if fact != NOTHING:
            yield name, int(fact) if fact.isdecimal() and name not in _TEXTS else fact


_TEXTS = frozenset({"replica"})

_FACTS = {
    "attached": (
        *("transport", "replica", "why", "taken", "position", "head", "replayed", "evicted"),
        "refusal",
    ),
    "detached": ("why", "replica", "method"),
    "refused": ("why", "method", "times"),
    "long": ("method", "seconds"),
    "asked": ("method", "seconds"),
}
"""What can happen → the names of its facts. A release may add facts at the end."""

_LEAST = {"detached": 2}
"""Facts that an entry has at least, if they are not all."""


def _attached(facts: Mapping[str, Any]) -> str:
    where = f"by {facts['transport']}{_place(facts)}"
    match facts["why"]:
        case Why.RESUMED if "position" in facts:
            text = f"resumed {where} from event {facts['position']}"
        case Why.RESUMED:
            text = f"resumed {where} without a position"
        case Why.STARTED:
            text = f"attached {where} at its start"
        case Why.OPENED if "position" in facts:
            text = f"stream opened {where} from event {facts['position']}"
        case Why.OPENED:
            text = f"stream opened {where}"
        case Why.LISTENS:
            text = f"listens {where}"
        case _:
            text = f"attached {where}"
    refusal = facts.get("refusal")
    if "position" in facts and refusal is None and "replayed" in facts:
        missed = facts["head"] - facts["position"]
        text += f": {facts['replayed']} replayed, {missed - facts['replayed']} coalesced"
    elif refusal is not None and "position" in facts:
        text += f": nothing replayed ({refusal})"
    if facts.get("evicted"):
        text += f"; events up to {facts['evicted']} were evicted"
    return f"{text}; taken over from another connection" if facts["taken"] == "over" else text


def _place(facts: Mapping[str, Any]) -> str:
    return f" at replica {facts['replica']}" if "replica" in facts else ""


def _detached(facts: Mapping[str, Any]) -> str:
    last = f", after {facts['method']}" if "method" in facts else ""
    return f"detached{_place(facts)}: {facts['why']}{last}"


def _refused(facts: Mapping[str, Any]) -> str:
    return f"refused {facts['method']} ({facts['why']}), {facts['times']} times"


def _long(facts: Mapping[str, Any]) -> str:
    return f"{facts['method']} ran for {duration(facts['seconds'])} or longer"


def _asked(facts: Mapping[str, Any]) -> str:
    return f"{facts['method']} waited for its client for {duration(facts['seconds'])} or longer"


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "attached": _attached,
    "detached": _detached,
    "refused": _refused,
    "long": _long,
    "asked": _asked,
}
