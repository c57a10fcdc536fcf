"""Faults that are known and not cured yet: a campaign counts them and passes. There are none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.rules import Violation

Json = dict[str, Any]


@dataclass(frozen=True)
class Known:
    story: str
    rules: frozenset[str]
    may_happen: Callable[[Json], bool]
    """Whether a plan has what the fault needs."""


KNOWN: Final[tuple[Known, ...]] = ()


def is_known(plan: Json, violation: Violation) -> bool:
    return any(violation.rule in known.rules and known.may_happen(plan) for known in KNOWN)
