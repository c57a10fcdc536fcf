"""For tests of yours: a client in memory, and the store contract as checks.

:func:`connect` is for tests of a server whose tools use their session. The rest is for authors
of stores.

Every store of this project passes them, and so must yours::

    from mcp_sessions.testing import check_session_store

    async def test_my_store() -> None:
        await check_session_store(lambda: MyStore(...))

A store that processes share has an exchange, and :func:`check_exchange` is for that.

They need no test framework and read no clock: time is passed in, so nothing waits for it.
They assert what :class:`~mcp_sessions.stores.contract.SessionStore` promises and no more: where
it leaves a choice (what becomes of a session between its deadline and the next ``expire``)
they do not look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio

from mcp_sessions.testing import (
    admission_checks,
    belongings_checks,
    change_checks,
    life_checks,
    log_checks,
    sleeping,
    whole_checks,
)
from mcp_sessions.testing.parts import Check, MakeStore, MakeTwoStores

if TYPE_CHECKING:
    from mcp_sessions.testing.memory_client import connect

__all__ = [
    "EXCHANGE_CHECKS",
    "STORE_CHECKS",
    "Check",
    "MakeStore",
    "MakeTwoStores",
    "check_exchange",
    "check_session_store",
    "connect",
]


def _checks(*modules: ModuleType, of: str) -> Sequence[Callable[[Any], Awaitable[None]]]:
    """The functions of these modules that take this and nothing else."""
    return [
        value
        for module in modules
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__
        and list(getattr(value, "__annotations__", ())) == [of, "return"]
    ]


STORE_CHECKS: Sequence[Check] = _checks(
    life_checks,
    sleeping,
    admission_checks,
    log_checks,
    belongings_checks,
    change_checks,
    whole_checks,
    of="make",
)
"""The rules, by name. Run them one by one to see which of them a store breaks."""

EXCHANGE_CHECKS: Sequence[Callable[[MakeTwoStores], Awaitable[None]]] = _checks(
    change_checks, of="make_two"
)
"""The rules of an exchange, by name."""


async def check_session_store(make: MakeStore) -> None:
    """Run every check of :data:`STORE_CHECKS`, each on a store that ``make`` makes for it.

    Raises:
        AssertionError: The contract is broken; the traceback names the check.
        TimeoutError: A check did not come to its end within a minute.
        RuntimeError: Python runs with ``-O``, which leaves out what the checks assert.
    """
    if not __debug__:
        raise RuntimeError("the checks assert nothing under python -O")
    for check in STORE_CHECKS:
        with anyio.fail_after(60):
            await check(make)


async def check_exchange(make_two: MakeTwoStores) -> None:
    """Run every check of :data:`EXCHANGE_CHECKS`, for stores that processes share.

    Raises:
        AssertionError: The contract of :class:`~mcp_sessions.stores.exchange.Exchange` is broken.
        TimeoutError: An expected message did not come within a minute.
        RuntimeError: Python runs with ``-O``, which leaves out what the checks assert.
    """
    if not __debug__:
        raise RuntimeError("the checks assert nothing under python -O")
    for check in EXCHANGE_CHECKS:
        with anyio.fail_after(60):
            await check(make_two)


def __getattr__(name: str) -> object:
    # The checks of a store need no SDK, which takes over a second to import.
    if name != "connect":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mcp_sessions.testing.memory_client import connect

    return connect
