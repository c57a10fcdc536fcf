"""Count events, and measure, for OpenTelemetry. Nothing is exported, or costs anything, until it is
asked for.

The instruments are those of ``opentelemetry-api``, which the SDK brings along. They do nothing
until the application sets a meter provider, or ``serve`` does (``mcp_sessions.cli.telemetry``).
They are made with the first thing that is counted, so that a command that serves nothing does not
wait for the import.

================================ ========================================== ====================
counter                          counts                                     attributes
================================ ========================================== ====================
mcp_sessions.sessions            sessions made                              mode
mcp_sessions.ended               sessions over                              mode, reason
mcp_sessions.attaches            connections that joined a session          transport
mcp_sessions.replays             events sent again                          transport
mcp_sessions.refusals            positions from which nothing is replayed   reason
mcp_sessions.coalesced           events that replaced an older one
mcp_sessions.detached            sessions taken from their connection       reason
mcp_sessions.slow                connections cut since they took nothing
mcp_sessions.denials             requests without a good credential         reason
mcp_sessions.limited             requests that a limit refused              limit
mcp_sessions.store_errors        calls that the store failed                store
mcp_sessions.background_failures work that nobody awaits failed             work, error
mcp_sessions.children            processes, or sessions of a URL, that were outcome
                                 begun for the wrapped server
mcp_sessions.children_running    those that there are (up and down)
mcp_sessions.children_over       those that are no more                     reason
================================ ========================================== ====================

Gauges are read when an exporter asks, from numbers that the process has: see :data:`_GAUGES`. The
histograms are those of OpenTelemetry's conventions for MCP: see :data:`_HISTOGRAMS`.

No attribute names a session, a principal or a resource: there is one time series for each
combination of them, for ever. So an attribute has a bounded number of values (:func:`bounded`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from opentelemetry.metrics import (
        CallbackOptions,
        Counter,
        Histogram,
        Observation,
        UpDownCounter,
    )

SCOPE = "mcp_sessions"
"""The name of the instrumentation scope."""

measures = False
"""Whether a meter provider is set, as far as :func:`look_for_provider` saw. What is measured for
each request is measured only then."""


def look_for_provider() -> None:
    """Look whether the application, or ``serve``, has set a meter provider."""
    global measures
    from opentelemetry.metrics import get_meter_provider

    measures = not type(get_meter_provider()).__module__.startswith("opentelemetry.metrics")


def session_made(mode: str) -> None:
    _counter("sessions").add(1, {"mode": mode})


def session_ended(mode: str, reason: str) -> None:
    """Count a session that ended: ``ended``, ``expired``, ``evicted`` to make room, or ``lost``."""
    _counter("ended").add(1, {"mode": mode, "reason": reason})


def attached(transport: str, replayed: int, refusal: str | None) -> None:
    """Count a connection that attached to a session.

    Args:
        replayed: Events that it is sent again.
        refusal: Why there are none; None: all that it missed are.
    """
    _counter("attaches").add(1, {"transport": transport})
    if replayed:
        _counter("replays").add(replayed, {"transport": transport})
    # A client that named no position was refused nothing.
    if refusal not in (None, "no_position"):
        _counter("refusals").add(1, {"reason": refusal})


def coalesced() -> None:
    _counter("coalesced").add(1)


def detached(reason: str) -> None:
    _counter("detached").add(1, {"reason": reason})


def too_slow() -> None:
    """Count a connection that was cut: its peer read nothing while its buffer was full."""
    _counter("slow").add(1)


def denied(reason: str) -> None:
    _counter("denials").add(1, {"reason": reason})


def limited(limit: str) -> None:
    _counter("limited").add(1, {"limit": limit})


def store_failed(store: str, calls: int = 1) -> None:
    """Count calls that the store answered with an error. Any thread may call this."""
    _counter("store_errors").add(calls, {"store": store})


def background_failed(work: str, error: str) -> None:
    """Count a failure of background work. A loop starts again; other work is lost.

    Args:
        work: Its name, one of a few.
        error: The exception's type.
    """
    _counter("background_failures").add(1, {"work": work, "error": error})


def child_begun(outcome: str) -> None:
    """Count a child of the wrapped server that ``started``, or ``failed`` to."""
    _counter("children").add(1, {"outcome": outcome})


def child_runs() -> None:
    _up_down("children_running").add(1)


def child_ended(reason: str) -> None:
    """Count a child that is gone: it ``died``, or was ``ended`` here."""
    _up_down("children_running").add(-1)
    _counter("children_over").add(1, {"reason": reason})


# --- durations -----------------------------------------------------------------------------------

_OTHER = "_OTHER"
"""Stands for the values of an attribute that are too many."""

_MOST_VALUES = 100
"""Values of one attribute."""

_values: dict[str, set[str]] = {}
"""Attribute → the values that it had so far."""


def bounded(attribute: str, value: str) -> str:
    """Return a value of an attribute; ``_OTHER`` if the attribute had too many others before."""
    known = _values.setdefault(attribute, set())
    if value not in known:
        if len(known) >= _MOST_VALUES:
            return _OTHER
        known.add(value)
    return value


def lasted(histogram: str, seconds: float, attributes: Mapping[str, str]) -> None:
    """Record how long a request or a session took.

    Args:
        histogram: One of :data:`_HISTOGRAMS`.
        attributes: As the conventions name them. Each has few values, or is bounded here.
    """
    _histogram(histogram).record(
        seconds, {name: bounded(name, value) for name, value in attributes.items()}
    )


_OF_CONVENTION = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_HOURS = (600, 1_800, 3_600, 7_200, 14_400)
_DAYS = (43_200, 86_400, 604_800, 2_592_000)

_HISTOGRAMS = {
    "mcp.client.operation.duration": (
        "The time from sending an MCP request to its answer",
        (*_OF_CONVENTION, *_HOURS),
    ),
    "mcp.server.operation.duration": (
        "The time from receiving an MCP request to sending its answer",
        (*_OF_CONVENTION, *_HOURS),
    ),
    "mcp.client.session.duration": (
        "The duration of an MCP session, as its client sees it",
        (*_OF_CONVENTION, *_HOURS, *_DAYS),
    ),
    "mcp.server.session.duration": (
        "The duration of an MCP session, as its server sees it",
        (*_OF_CONVENTION, *_HOURS, *_DAYS),
    ),
}
"""Name → what it says, and its buckets in seconds: the convention's, and longer ones."""


# --- gauges --------------------------------------------------------------------------------------


class Reading(NamedTuple):
    gauge: str
    """One of :data:`_GAUGES`."""

    value: float
    attribute: tuple[str, str] | None = None
    """Its name and value."""


Read = Callable[[], Iterable[Reading]]
"""Called by the thread of an exporter."""


class Unsent(Protocol):
    """A buffer for one peer."""

    full: bool

    @property
    def waiting(self) -> tuple[int, int]:
        """Messages that wait for the peer, and bytes."""
        ...


outboxes: dict[Unsent, None] = {}
"""The open buffers of this process."""


def read_outboxes() -> Iterator[Reading]:
    """Read what all layers of this process share."""
    each = [(outbox.waiting, outbox.full) for outbox in list(outboxes)]
    yield Reading("waiting_messages", sum(waiting[0] for waiting, _ in each), ("for", "client"))
    yield Reading("waiting", sum(waiting[1] for waiting, _ in each), ("for", "client"))
    yield Reading("slow_clients", sum(full for _, full in each))


_readers: dict[Read, None] = {}


@contextmanager
def observed(read: Read) -> Generator[None]:
    """Let exporters read the gauges of a layer while the block runs. The readings of several layers
    are added up.
    """
    for name in _GAUGES:
        _gauge(name)
    _readers[read] = None
    try:
        yield
    finally:
        del _readers[read]


def _observations(name: str, options: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    readers = list(_readers)
    if not readers:
        return
    sums: dict[tuple[str, str] | None, float] = {}
    for read in (read_outboxes, *readers):
        for reading in read():
            if reading.gauge == name:
                sums[reading.attribute] = sums.get(reading.attribute, 0) + reading.value
    for attribute, value in sums.items():
        yield Observation(value, dict([attribute]) if attribute is not None else {})


_GAUGES = {
    "attached": ("Sessions that are attached to a connection of this process", ""),
    "streams": ("Connections and streams of this process on which a client can get events", ""),
    "open_calls": ("Requests of this process that are not answered", ""),
    "longest_call": ("The age of the oldest request that runs in this process", "s"),
    "waiting_messages": ("Messages that wait in this process", ""),
    "waiting": ("Bytes of the messages that wait in this process", "By"),
    "slow_clients": ("Clients of this process whose buffer is full", ""),
    "store_sessions": ("Sessions in the store", ""),
    "store": ("Bytes that the store takes", "By"),
    "store_away": ("The time for which the store is away from this process", "s"),
}
"""Name → what it says, and its unit."""


_DESCRIPTIONS = {
    "sessions": "Sessions made",
    "ended": "Sessions over",
    "attaches": "Connections that joined a session",
    "replays": "Events sent again",
    "refusals": "Positions from which nothing is replayed",
    "coalesced": "Events that replaced an older one",
    "detached": "Sessions taken from their connection",
    "denials": "Requests without a good credential",
    "limited": "Requests that a limit refused",
    "slow": "Connections cut since they took nothing",
    "store_errors": "Calls that the store failed",
    "background_failures": "Work that nobody awaits failed",
    "children": "Children of the wrapped server that were begun",
    "children_running": "Children of the wrapped server that there are",
    "children_over": "Children of the wrapped server that are no more",
}


# --- for the page --------------------------------------------------------------------------------

_tally: dict[str, int] | None = None
"""What was counted since somebody asked. None: nobody did."""


def tally() -> dict[str, int]:
    """Return what was counted in this process, in words, since the first call of this."""
    global _tally
    if _tally is None:
        _tally = {}
        # From now on each counter has a second reader.
        _counter.cache_clear()
    return dict(_tally)


class _Tallied:
    def __init__(self, name: str, counter: Counter) -> None:
        self._what, self._counter = _DESCRIPTIONS[name], counter

    def add(self, amount: int, attributes: dict[str, str] | None = None) -> None:
        self._counter.add(amount, attributes)
        words = ", ".join((attributes or {}).values())
        what = f"{self._what} ({words})" if words else self._what
        if _tally is not None and (what in _tally or len(_tally) < _MOST_TALLIED):
            _tally[what] = _tally.get(what, 0) + amount


_MOST_TALLIED = 200


@cache
def _histogram(name: str) -> Histogram:
    from opentelemetry.metrics import get_meter

    description, buckets = _HISTOGRAMS[name]
    return get_meter(SCOPE).create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=buckets
    )


@cache
def _gauge(name: str) -> None:
    from opentelemetry.metrics import get_meter

    description, unit = _GAUGES[name]
    get_meter(SCOPE).create_observable_gauge(
        f"{SCOPE}.{name}", [partial(_observations, name)], unit, description
    )


@cache
def _counter(name: str) -> Counter | _Tallied:
    made = _instrument(name)
    return made if _tally is None else _Tallied(name, made)


@cache
def _instrument(name: str) -> Counter:
    from opentelemetry.metrics import get_meter

    return get_meter(SCOPE).create_counter(f"{SCOPE}.{name}", description=_DESCRIPTIONS[name])


@cache
def _up_down(name: str) -> UpDownCounter:
    from opentelemetry.metrics import get_meter

    meter = get_meter(SCOPE)
    return meter.create_up_down_counter(f"{SCOPE}.{name}", description=_DESCRIPTIONS[name])
