import asyncio
import itertools
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from mcp_sessions_conformance.blame import blamed
from mcp_sessions_conformance.loader import OPTIONAL, Conditions, Vector
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
from mcp_sessions_conformance.values import EXTENSION, Json

_FEATURES = {"features": f"/capabilities/extensions/{EXTENSION.replace('/', '~1')}/features"}
_KINDS: Json = {
    "step": "send",
    "on": "a",
    "method": "tools/call",
    "params": {"name": "beside", "arguments": {}},
    # A server may say in a result that it has no such tool. That text names no kinds.
    "result": {"isError": {"$not": True}},
    "capture": {"kinds": "/content/0/text"},
}
ASKS = Vector(
    id="what-the-server-has",
    suite="",
    clauses=("CAP3",),
    keyword="MUST",
    description="The server says which features it has.",
    effect="",
    steps=(
        {
            "step": "open",
            "only": {"eras": ["handshake"]},
            "on": "a",
            "stream": False,
            "capture": _FEATURES,
        },
        {"step": "open", "only": {"eras": ["modern"]}, "on": "a"},
        {
            "step": "send",
            "only": {"eras": ["modern"]},
            "on": "a",
            "method": "server/discover",
            "params": {},
            "capture": _FEATURES,
        },
        _KINDS,
    ),
    when=Conditions(),
)
"""Played on each way before all others."""

LISTS = replace(
    ASKS,
    id="the-tools-of-the-server",
    description="The server lists its tools.",
    steps=(
        {"step": "open", "on": "a"},
        {
            "step": "send",
            "on": "a",
            "method": "tools/list",
            "params": {},
            "capture": {"tools": "/tools"},
        },
    ),
)
"""Played next, where the server starts no other one: it may have none of the tools."""

LACKS_TOOLS = (
    "the server has no tool `echo`: conformance/README.md says which tools a server under test has"
)


@dataclass(frozen=True)
class Offered:
    features: frozenset[str] | None = None
    """The advertised features (CAP3); None: the server says none, and is tested for all."""

    other_servers: frozenset[str] | None = None
    """The kinds of servers that it starts in addition to itself; None: it was not asked."""

    lacks_tools: bool = False
    """It lists tools, and not those that the vectors call."""


def offered_in(player: Player) -> Offered:
    found: Any = player.scene.names.get("features")
    listed = cast("list[Any]", found) if isinstance(found, list) else []
    # A value that is no list of names does not count: the server is tested for everything.
    named = frozenset(listed) if listed and all(isinstance(f, str) for f in listed) else None
    if not player.has_received:
        return Offered(named)
    return Offered(named, frozenset(str(player.scene.names.get("kinds", "")).split()))


def lacks_tools(player: Player) -> bool:
    tools: Any = player.scene.names.get("tools")
    listed = cast("list[Any]", tools) if isinstance(tools, list) else None
    return listed is not None and not any(
        isinstance(tool, dict) and cast("Json", tool).get("name") == "echo" for tool in listed
    )


ONE_VECTOR = 20.0
"""Seconds for one vector, whatever its steps may take."""

_ASKED_FOR = frozenset(suite for suites in OPTIONAL.values() for suite in suites)
"""They are loaded only if their option was named."""

LEAVING = 10.0
"""Seconds for ending what it made."""

Verdict = Literal["passed", "failure", "warning"]


@dataclass(frozen=True)
class Outcome:
    vector: Vector
    way: str
    verdict: Verdict
    sentence: str = ""
    """The fault that was found."""

    seconds: float = 0.0
    wire: tuple[str, ...] = ()
    """The messages on the wire; kept if a fault was found."""

    clauses: tuple[str, ...] = ()
    """What the step that failed checks."""

    in_vain: bool = False
    """It failed, and either nothing came at all or the whole time for an answer went by."""


@dataclass(frozen=True)
class LeftOut:
    vector: Vector
    way: str
    reason: str


@dataclass
class Run:
    targets: list[str]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    not_selected: list[LeftOut] = field(default_factory=list[LeftOut])
    """Vectors that do not apply, or were not asked for."""

    not_played: list[LeftOut] = field(default_factory=list[LeftOut])
    """Vectors that were not played, because the server did not answer."""

    seconds: float = 0.0
    is_complete: bool = False
    """The run came to its end; else it was interrupted."""

    def count(self, verdict: Verdict) -> int:
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    @property
    def is_conformant(self) -> bool:
        """Whether everything was played, something at all, and no MUST failed."""
        return (
            self.is_complete
            and bool(self.outcomes)
            and not self.not_played
            and self.count("failure") == 0
        )


@dataclass(frozen=True)
class Selection:
    suites: frozenset[str] = frozenset()
    transports: frozenset[str] = frozenset()
    eras: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    """Ids of vectors, or of clauses."""

    levels: frozenset[str] = frozenset()
    """Of vectors; the suites of an option that was asked for come along."""

    def admits(self, vector: Vector) -> bool:
        return (
            (not self.suites or vector.suite in self.suites)
            and (not self.only or bool(self.only & {vector.id, *vector.clauses}))
            and (not self.levels or vector.level in self.levels or vector.suite in _ASKED_FOR)
        )


Progress = Callable[[str, int, int, str], None]
"""Gets the way, how many of how many were played there (first 0), and what was wrong with the
last: its id and a sentence, or nothing.
"""


@dataclass(frozen=True)
class _Combination:
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
    done: Run | None = None,
) -> Run:
    """Play the vectors; it never raises for what a server does.

    Args:
        done: The run that gets the outcome, also if the run is cancelled; None: a new one.
        targets: Ways to one and the same server.
        vectors: From ``load_vectors``.
        selection: Which of them; None: all.
        credentials: For ``Authorization``.
        limits: How long to wait; the defaults if None.
        progress: Gets each outcome.
    """
    begun = time.monotonic()
    limits, selection = limits or Limits(), selection or Selection()
    done = Run([]) if done is None else done
    done.targets = [f"{'stdio:' if t.transport == 'stdio' else ''}{t.text}" for t in targets]
    wanted = [vector for vector in vectors if selection.admits(vector)]
    if len(selection.eras) == 1:
        # A server of one era is no less one (HTP1).
        both = "it speaks both eras, and one was asked for"
        done.not_selected += [
            LeftOut(vector, "", both) for vector in wanted if vector.when.both_eras
        ]
        wanted = [vector for vector in wanted if not vector.when.both_eras]
    pipes: list[Pipe] = []
    ways = _ways(targets, selection, limits, credentials or Credentials(), pipes)
    try:
        waited_for: set[Target] = set()
        for way in sorted(ways, key=lambda way: way.transport != "stdio"):
            # Once for both eras: a server that is not there is not waited for twice.
            if way.target not in waited_for:
                waited_for.add(way.target)
                await way.reachable()
        silent: dict[str, str] = {}
        offered: dict[str, Offered] = {}
        for combination in [_Combination(way, None) for way in ways] + _pairs(ways):
            await _play_at(combination, wanted, done, limits, progress, silent, offered)
        _note_what_needs_a_pair(ways, wanted, done)
        done.is_complete = True
    finally:
        done.seconds = time.monotonic() - begun
        for pipe in pipes:
            await pipe.stop()
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


def _pairs(ways: list[RunningWay]) -> list[_Combination]:
    pairs = [
        _Combination(here, other)
        for here in ways
        for other in ways
        if here.transport != other.transport
    ]

    def pipe_era(combination: _Combination) -> str:
        piped = [
            way.era for way in (combination.here, combination.other) if isinstance(way, PipeWay)
        ]
        return piped[0] if piped else ""

    return sorted(pairs, key=pipe_era)


async def _offered(way: RunningWay, limits: Limits) -> Offered:
    offered = offered_in(await _asked(ASKS, way, limits))
    if offered.other_servers is None or offered.other_servers:
        # It was not asked, or is a server under test.
        return offered
    return replace(offered, lacks_tools=lacks_tools(await _asked(LISTS, way, limits)))


async def _asked(vector: Vector, way: RunningWay, limits: Limits) -> Player:
    player = Player(vector, way, other=None, limits=limits)
    await _within(ONE_VECTOR, player.play(), "to ask what it has")
    await _within(LEAVING, player.leave(), "to leave the server")
    return player


def why_not(
    vector: Vector,
    here: RunningWay,
    other: RunningWay | None,
    offered: Offered | None = None,
) -> str | None:
    offered = offered or Offered()
    if vector.crosses and other is None:
        return ""  # the pairs are looked at by themselves
    if not vector.crosses and other is not None:
        return ""
    if here.transport not in vector.when.transports:
        return f"it is about {' and '.join(vector.when.transports)}"
    if here.era not in vector.when.eras:
        return f"it is about the {' and '.join(vector.when.eras)} era"
    if vector.when.loopback and not here.is_loopback:
        return "it is about servers on a loopback address"
    if vector.when.anonymous and here.tokens:
        return "it is about callers without a credential"
    if vector.needs_other_principal and "other_token" not in here.tokens:
        return "it needs the credentials of two principals"
    if vector.needs_weak_credential and "weak_token" not in here.tokens:
        return "it needs a second credential of the first principal, with fewer scopes"
    if vector.needs_token and "token" not in here.tokens:
        return "it needs a credential"
    if isinstance(here, PipeWay) and len(vector.connections) > 1:
        return "it needs several connections to one server, and a pipe is one"
    if vector.when.other_server is not None:
        if here.transport == "stdio":
            return "it is about a server at a URL"
        if (
            offered.other_servers is not None
            and vector.when.other_server not in offered.other_servers
        ):
            return f"the server starts no other one that is {vector.when.other_server}"
    # The one next to it may have others.
    known = offered.features if vector.when.other_server is None else None
    missing = vector.features - known if known is not None else ()
    if missing:
        return f"the server does not advertise {', '.join(sorted(missing))}"
    return None


def _note_what_needs_a_pair(ways: list[RunningWay], wanted: Sequence[Vector], done: Run) -> None:
    if len({way.transport for way in ways}) > 1:
        return
    for vector in wanted:
        if vector.crosses:
            done.not_selected.append(
                LeftOut(vector, "", "it needs two targets of one server on two transports")
            )


async def _play_at(
    combination: _Combination,
    wanted: Sequence[Vector],
    done: Run,
    limits: Limits,
    progress: Progress | None,
    silent: dict[str, str],
    offered: dict[str, Offered],
) -> None:
    """Play the vectors for one way to the server.

    Args:
        offered: Name of a way → what the server has there. Added to.
        silent: Names of ways, and of pairs, on which nothing is played any more → why. Added to.
    """
    chosen: list[Vector] = []
    here = combination.here.name
    if here not in offered and any(
        why_not(v, combination.here, combination.other) is None for v in wanted
    ):
        offered[here] = await _offered(combination.here, limits)
        if offered[here].lacks_tools:
            silent[here] = LACKS_TOOLS
    for vector in wanted:
        reason = why_not(vector, combination.here, combination.other, offered.get(here))
        if reason is None:
            chosen.append(vector)
        elif reason:
            done.not_selected.append(LeftOut(vector, combination.name, reason))
    names = [
        combination.name,
        *(way.name for way in (combination.here, combination.other) if way is not None),
    ]
    if progress is not None and chosen:
        progress(combination.name, 0, len(chosen), "")
    played = itertools.count(1)

    async def in_turn(vectors: Iterable[Vector]) -> None:
        in_vain = 0
        for vector in vectors:
            why = next((silent[name] for name in names if name in silent), None)
            if why is not None:
                done.not_played.append(LeftOut(vector, combination.name, why))
                continue
            outcome = await play_one(vector, combination.here, combination.other, limits)
            done.outcomes.append(outcome)
            in_vain = in_vain + 1 if outcome.in_vain else 0
            if limits.give_up and in_vain == limits.give_up:
                silent[combination.name] = (
                    f"the server said nothing in time in {in_vain} vectors in a row"
                )
            if progress is not None:
                passed = outcome.verdict == "passed"
                wrong = "" if passed else f"{vector.id}: {outcome.sentence}"
                progress(combination.name, next(played), len(chosen), wrong)

    known = here in offered and offered[here].other_servers is not None
    # They mostly wait, and no other vector reaches their servers.
    beside = [v for v in chosen if known and v.when.other_server is not None]
    rest = [v for v in chosen if v not in beside]
    is_pipe = any(isinstance(w, PipeWay) for w in (combination.here, combination.other))
    at_once = limits.at_once if known and not is_pipe else 1
    together = iter([v for v in rest if at_once > 1 and not v.is_heard_by_all])

    async def all_others() -> None:
        async with asyncio.TaskGroup() as turns:
            for _ in range(at_once):
                # Each takes the next one.
                turns.create_task(in_turn(together))
        await in_turn([v for v in rest if at_once == 1 or v.is_heard_by_all])

    async with asyncio.TaskGroup() as turns:
        turns.create_task(all_others())
        turns.create_task(in_turn(beside))


async def play_one(
    vector: Vector, here: RunningWay, other: RunningWay | None, limits: Limits
) -> Outcome:
    """Play one vector once. It raises for nothing that a server does, and takes no longer than
    `ONE_VECTOR` and `LEAVING`.
    """
    player = Player(vector, here, other=other, limits=limits)
    begun = time.monotonic()
    # In tasks of their own: a library that is cancelled inside, or does not let itself be, ends
    # no more than this vector.
    sentence = await _within(ONE_VECTOR, _played(player, here), "the vector")
    took = time.monotonic() - begun
    has_responded = player.has_received
    untidy = await _within(LEAVING, player.leave(), "to leave the server")
    if untidy:
        player.transcript.note("", "--", f"not tidied up: {untidy}")
    seconds = time.monotonic() - begun
    name = _Combination(here, other).name
    if not sentence:
        return Outcome(vector, name, "passed", seconds=seconds)
    in_vain = not has_responded or took >= limits.wait
    lines = tuple(player.transcript.lines)
    other_error = player.found_other_error
    clauses = tuple(blamed(player.step, vector.steps, vector.clauses, is_other_error=other_error))
    return Outcome(vector, name, vector.severity, sentence, seconds, lines, clauses, in_vain)


async def _played(player: Player, here: RunningWay) -> None:
    if player.scene.vector.when.fresh:
        await here.renew()
    await player.play()


async def _within(seconds: float, work: Coroutine[Any, Any, None], what: str) -> str:
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1)
    if not task.done() or task.cancelled():
        return f"{what} took longer than {seconds:g} s"
    error = task.exception()
    if error is None:
        return ""
    if isinstance(error, Failure):
        return str(error)
    # The boundary to a server that may do anything: one that finds a hole in the runner has
    # failed the vector, and the others are played all the same.
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def known_transports() -> tuple[Transport, ...]:
    return ("http", "websocket", "stdio")
