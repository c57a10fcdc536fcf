"""Make a failing plan small: take away entries as long as the same rule is broken."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.simulation.plan import KEPT

Json = dict[str, Any]

PLAYS: Final = 400
"""Plays of one shrinking, at most."""

_PLAIN: Final[Json] = {
    "starts": 0.0, "thinks": 0.0, "roams": False, "user": None, "silent": False, "at": 0,
}  # fmt: skip
_OPTIONAL: Final = ("cut", "twice", "resends", "background", "keyed", "abandons", "moves")


def shrunk(plan: Json, fails: Callable[[Json], bool]) -> Json:
    """The smallest plan that was found that still fails.

    Args:
        fails: Plays a plan; whether it breaks the rule.
    """
    best, plays, progressed = plan, 0, True
    while progressed:
        progressed = False
        for smaller in _smaller(best):
            plays += 1
            if plays > PLAYS:
                return best
            if fails(smaller):
                best, progressed = smaller, True
                break
    return best


def _smaller(plan: Json) -> Iterator[Json]:
    """Plans with one thing less, the large things first."""
    for at in range(len(plan["clients"])):
        if len(plan["clients"]) > 1:
            yield _with(plan, lambda p, at=at: p["clients"].pop(at))
    for at in range(len(plan["faults"])):
        yield _with(plan, lambda p, at=at: p["faults"].pop(at))
    for c, client in enumerate(plan["clients"]):
        for at in range(len(client["steps"])):
            yield _with(plan, lambda p, c=c, at=at: p["clients"][c]["steps"].pop(at))
    for name, plain in (("disorder", 0.0), ("window", 1000), ("kept", KEPT)):
        if plan.get(name, plain) != plain:
            yield _with(plan, lambda p, name=name, plain=plain: p.update({name: plain}))
    if plan["replicas"] > 1 and all(f.get("replica", 0) < 1 for f in plan["faults"]):
        yield _with(plan, lambda p: p.update(replicas=1))
    for c, client in enumerate(plan["clients"]):
        for s, step in enumerate(client["steps"]):
            for at in range(len(step.get("script", ()))):
                yield _with(
                    plan, lambda p, c=c, s=s, at=at: p["clients"][c]["steps"][s]["script"].pop(at)
                )
            for name in _OPTIONAL:
                if name in step and not (name == "keyed" and "twice" in step):
                    yield _with(
                        plan, lambda p, c=c, s=s, name=name: p["clients"][c]["steps"][s].pop(name)
                    )
        for name, plain in _PLAIN.items():
            if client[name] != plain:
                yield _with(
                    plan, lambda p, c=c, n=name, plain=plain: p["clients"][c].update({n: plain})
                )


def _with(plan: Json, change: Callable[[Json], object]) -> Json:
    changed = copy.deepcopy(plan)
    change(changed)
    return changed
