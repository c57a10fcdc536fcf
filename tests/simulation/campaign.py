"""Many seeds, in several processes: which of them break a rule."""

import multiprocessing
import traceback
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.defects import DEFECTS
from tests.simulation.plan import plan_of
from tests.simulation.rules import Violation, violations
from tests.simulation.runner import play

Json = dict[str, Any]

Found = tuple[int, list[Violation]]
"""A seed, and what is wrong with it."""


def broken_rules(plan: Json) -> list[Violation]:
    """What goes wrong in a plan. A run that raises is a violation, too."""
    try:
        return violations(play(plan))
    except Exception as raised:
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        text = f"{raised!s:.300} ({Path(frame.filename).name}:{frame.lineno})"
        return [Violation(f"raised {type(raised).__name__}", text)]


def of_seed(seed: int) -> Found:
    return seed, broken_rules(plan_of(seed))


def of_seeds(seeds: Iterable[int], jobs: int) -> Iterator[Found]:
    """Each seed, in any order."""
    if jobs == 1:
        yield from map(of_seed, seeds)
        return
    # Not forked: a process begins without what another one has in it.
    with multiprocessing.get_context("spawn").Pool(jobs, quiet) as pool:
        yield from pool.imap_unordered(of_seed, seeds, chunksize=20)


def quiet() -> None:
    """Print no warning: of a deprecated method, some hundred a second."""
    warnings.simplefilter("ignore")


def finds(defect: str, seeds: Iterable[int], jobs: int) -> tuple[int, Violation] | None:
    """The first seed that breaks a rule with a defect, and breaks none without it.

    Args:
        defect: A name in `tests.simulation.defects`.
    """
    if jobs == 1:
        found = map(partial(_with_defect, defect), seeds)
        return next((each for each in found if each is not None), None)
    with multiprocessing.get_context("spawn").Pool(jobs, quiet) as pool:
        for each in pool.imap(partial(_with_defect, defect), seeds, chunksize=10):
            if each is not None:
                return each
    return None


def _with_defect(defect: str, seed: int) -> tuple[int, Violation] | None:
    with DEFECTS[defect].put_back():
        found = broken_rules(plan_of(seed))
    if not found:
        return None
    right = {violation.rule for violation in broken_rules(plan_of(seed))}
    new = [violation for violation in found if violation.rule not in right]
    return (seed, new[0]) if new else None
