"""Faults that are known and not cured yet: a campaign counts them and passes."""

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


def _asks_while_the_store_is_away(plan: Json) -> bool:
    asks = any(_asks(step) for client in plan["clients"] for step in client["steps"])
    return asks and any(
        fault["kind"] in ("store", "store call", "aimed") for fault in plan["faults"]
    )


def _loses_messages_between_replicas(plan: Json) -> bool:
    return any(fault["kind"] == "deaf" for fault in plan["faults"])


def _asks(step: Json) -> bool:
    return any("ask" in each for each in step.get("script", ()))


_WAITS: Final = frozenset(
    {
        "every_call_is_answered_in_time",
        "every_client_comes_to_its_end",
        "a_handler_that_asks_is_told",
    }
)

KNOWN: Final = (
    Known(
        "A question that is put while the store is away, and its reply is lost, is never asked.",
        _WAITS,
        _asks_while_the_store_is_away,
    ),
    Known(
        "An answer to a question is accepted at one replica and passed on in one message. If the "
        "replica that asked cannot hear then, its handler waits for ever.",
        _WAITS | {"a_question_is_put_once"},
        _loses_messages_between_replicas,
    ),
)


def is_known(plan: Json, violation: Violation) -> bool:
    return any(violation.rule in known.rules and known.may_happen(plan) for known in KNOWN)
