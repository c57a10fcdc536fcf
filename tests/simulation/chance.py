"""Everything that differs from run to run, put under the control of a seed.

A run draws no number, reads no clock and makes no id that the seed does not decide. One source is
left: the order of sets of texts, which ``PYTHONHASHSEED`` decides before Python starts.
`scripts/simulate` sets it.
"""

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, cast

from mcp_sessions import security
from mcp_sessions.server.requests.blocking import LoopWatch

EPOCH: Final = 1_800_000_000.0
"""Seconds since 1970 at the begin of a run."""


# The SDK imports it when its first server is made, and it draws a number then.
if find_spec("rich") is not None:
    import_module("rich.logging")


def is_reproducible() -> bool:
    """Whether another process plays a seed in the same way."""
    return sys.flags.hash_randomization == 0 or os.environ.get("PYTHONHASHSEED", "") == "0"


def _collects_nothing(*generation: int) -> int:
    return 0


def _no_thread(watch: LoopWatch) -> None: ...


@contextmanager
def decided_by(seed: str, now: Callable[[], float]) -> Generator[None]:
    """Randomness of ``random``, ``secrets``, ``uuid`` and ``os`` comes from a seed, and every clock
    of ``time`` is ``now``.
    """
    source = random.Random(seed)
    as_it_was = random.getstate()
    random.seed(source.random())
    places: list[tuple[Any, str, Any]] = [
        (os, "urandom", source.randbytes),
        (random, "_urandom", source.randbytes),
        (time, "monotonic", now),
        (time, "perf_counter", now),
        (time, "time", lambda: EPOCH + now()),
        (time, "time_ns", lambda: int((EPOCH + now()) * 1e9)),
        # The layer collects garbage by the clock, and a finalizer is a step like any other.
        (gc, "enable", lambda: None),
        (gc, "collect", _collects_nothing),
        (gc, "freeze", lambda: None),
        # It watches real time, in a thread.
        (LoopWatch, "start", _no_thread),
        (LoopWatch, "close", _no_thread),
        # What a process minted last: each run is a process that begins.
        (security, "_last_epoch", 0),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    for where, name, ours in places:
        setattr(where, name, ours)
    try:
        yield
    finally:
        for where, name, theirs in before:
            setattr(where, name, theirs)
        random.setstate(cast(Any, as_it_was))
