"""Selects vectors, plays them on every way to the server, and keeps what came of it."""

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.peer import Era, Failure, Limits, Transport
from mcp_sessions_conformance.play import Player
from mcp_sessions_conformance.targets import (
    Credentials,
    Pipe,
    PipeWay,
    RunningWay,
    Target,
    UrlWay,
)

ONE_VECTOR = 20.0
"""Seconds for one vector, whatever its steps may take."""

Verdict = Literal["passed", "failure", "warning"]


@dataclass(frozen=True)
class Outcome:
    """What came of one vector on one way."""

    vector: Vector
    way: str
    verdict: Verdict
    sentence: str = ""
    """What was wrong."""

    seconds: float = 0.0
    wire: tuple[str, ...] = ()
    """What went over the wire; kept where something was wrong."""


@dataclass(frozen=True)
class NotSelected:
    """A vector that was not played on a way, and why."""

    vector: Vector
    way: str
    reason: str


@dataclass
class Run:
    """Everything that came of a run."""

    targets: list[str]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    not_selected: list[NotSelected] = field(default_factory=list[NotSelected])
    seconds: float = 0.0

    def count(self, verdict: Verdict) -> int:
        """How many outcomes of that kind there are."""
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    @property
    def is_conformant(self) -> bool:
        """Whether something was played, and no MUST failed."""
        return bool(self.outcomes) and self.count("failure") == 0


@dataclass(frozen=True)
class Selection:
    """What the user asked for; empty: everything."""

    suites: frozenset[str] = frozenset()
    transports: frozenset[str] = frozenset()
    eras: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()

    def admits(self, vector: Vector) -> bool:
        """Whether the user asked for this vector."""
        return (not self.suites or vector.suite in self.suites) and (
            not self.only or vector.id in self.only
        )


Progress = Callable[[str, int, int, str], None]
"""Gets the way, how many of how many were played there (first 0), and what was wrong with the
last: its id and a sentence, or nothing.
"""


@dataclass(frozen=True)
class _Place:
    """Where vectors are played: one way, or an ordered pair of ways."""

    here: RunningWay
    other: RunningWay | None

    @property
    def name(self) -> str:
        return self.here.name if self.other is None else f"{self.here.name} + {self.other.name}"


async def run(
    targets: Sequence[Target],
    vectors: Sequence[Vector],
    *,
    selection: Selection | None = None,
    credentials: Credentials | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Run:
    """Play the vectors; it never raises for what a server does.

    Args:
        targets: Ways to one and the same server.
        vectors: From ``load_vectors``.
        selection: Which of them; None: all.
        credentials: For ``Authorization``.
        limits: How long to wait; the defaults if None.
        progress: Told of each outcome.
    """
    begun = time.monotonic()
    limits, selection = limits or Limits(), selection or Selection()
    done = Run([f"{'stdio:' if t.transport == 'stdio' else ''}{t.text}" for t in targets])
    wanted = [vector for vector in vectors if selection.admits(vector)]
    pipes: list[Pipe] = []
    ways = _ways(targets, selection, limits, credentials or Credentials(), pipes)
    try:
        waited_for: set[Target] = set()
        for way in sorted(ways, key=lambda way: way.transport != "stdio"):
            # Once for both eras: a server that is not there is not waited for twice.
            if way.target not in waited_for:
                waited_for.add(way.target)
                await way.reachable()
        for place in [_Place(way, None) for way in ways] + _pairs(ways):
            await _play_at(place, wanted, done, limits, progress)
        _note_what_needs_a_pair(ways, wanted, done)
    finally:
        for pipe in pipes:
            await pipe.stop()
    done.seconds = time.monotonic() - begun
    return done


def _ways(
    targets: Sequence[Target],
    selection: Selection,
    limits: Limits,
    credentials: Credentials,
    pipes: list[Pipe],
) -> list[RunningWay]:
    ways: list[RunningWay] = []
    eras: tuple[Era, ...] = ("handshake", "modern")
    for target in targets:
        if selection.transports and target.transport not in selection.transports:
            continue
        chosen: list[Era] = [e for e in eras if not selection.eras or e in selection.eras]
        if target.transport == "stdio":
            pipe = Pipe(target, limits)
            pipes.append(pipe)
            ways += [PipeWay(pipe, era) for era in chosen]
        else:
            ways += [UrlWay(target, era, limits, credentials) for era in chosen]
    return ways


def _pairs(ways: list[RunningWay]) -> list[_Place]:
    """Every ordered pair of different transports; those of one pipe's era together."""
    pairs = [
        _Place(here, other) for here in ways for other in ways if here.transport != other.transport
    ]

    def pipe_era(place: _Place) -> str:
        piped = [way.era for way in (place.here, place.other) if isinstance(way, PipeWay)]
        return piped[0] if piped else ""

    return sorted(pairs, key=pipe_era)


def why_not(vector: Vector, here: RunningWay, other: RunningWay | None) -> str | None:
    """Why a vector is not played there; None: it is."""
    if vector.crosses and other is None:
        return ""  # the pairs are looked at by themselves
    if not vector.crosses and other is not None:
        return ""
    if here.transport not in vector.transports:
        return f"it is about {' and '.join(vector.transports)}"
    if here.era not in vector.eras:
        return f"it is about the {' and '.join(vector.eras)} era"
    if vector.needs_other_principal and "other_token" not in here.tokens:
        return "it needs the credentials of two principals"
    if vector.needs_token and "token" not in here.tokens:
        return "it needs a credential"
    if isinstance(here, PipeWay) and len(vector.connections) > 1:
        return "it needs several connections to one server, and a pipe is one"
    return None


def _note_what_needs_a_pair(ways: list[RunningWay], wanted: Sequence[Vector], done: Run) -> None:
    if len({way.transport for way in ways}) > 1:
        return
    for vector in wanted:
        if vector.crosses:
            done.not_selected.append(
                NotSelected(vector, "", "it needs two targets of one server on two transports")
            )


async def _play_at(
    place: _Place,
    wanted: Sequence[Vector],
    done: Run,
    limits: Limits,
    progress: Progress | None,
) -> None:
    chosen: list[Vector] = []
    for vector in wanted:
        reason = why_not(vector, place.here, place.other)
        if reason is None:
            chosen.append(vector)
        elif reason:
            done.not_selected.append(NotSelected(vector, place.name, reason))
    begun = time.monotonic()
    if progress is not None and chosen:
        progress(place.name, 0, len(chosen), "")
    for number, vector in enumerate(chosen, start=1):
        if time.monotonic() - begun > limits.budget:
            sentence = f"not played: the vectors before it took {limits.budget:g} s"
            outcome = Outcome(vector, place.name, vector.severity, sentence)
        else:
            outcome = await play_one(vector, place.here, place.other, limits)
        done.outcomes.append(outcome)
        if progress is not None:
            passed = outcome.verdict == "passed"
            wrong = "" if passed else f"{vector.id}: {outcome.sentence}"
            progress(place.name, number, len(chosen), wrong)


async def play_one(
    vector: Vector, here: RunningWay, other: RunningWay | None, limits: Limits
) -> Outcome:
    """Play one vector once."""
    name = _Place(here, other).name
    player = Player(vector, here, other, limits)
    begun = time.monotonic()
    sentence = ""
    try:
        if vector.fresh:
            await here.renew()
        async with asyncio.timeout(ONE_VECTOR):
            await player.play()
    except Failure as failure:
        sentence = str(failure)
    except TimeoutError:
        sentence = f"the vector took longer than {ONE_VECTOR:g} s"
    # The boundary to a server that may do anything: one that finds a hole in the runner has
    # failed the vector, and the others are played all the same.
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        sentence = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    finally:
        await player.leave()
    seconds = time.monotonic() - begun
    if not sentence:
        return Outcome(vector, name, "passed", seconds=seconds)
    lines = [*player.transcript.lines]
    if player.transcript.left_out:
        lines.append(f"        … and {player.transcript.left_out} more")
    return Outcome(vector, name, vector.severity, sentence, seconds, tuple(lines))


def known_transports() -> tuple[Transport, ...]:
    """Transports, as ``--transport`` names them."""
    return ("http", "websocket", "stdio")
