"""One body, every store: ``mcp_sessions.testing`` is what the store contract means."""

import ast
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mcp_sessions.testing import (
    EXCHANGE_CHECKS,
    STORE_CHECKS,
    Check,
    MakeStore,
    MakeTwoStores,
)
from tests.stores.every_store import (
    every_encrypted_exchange,
    every_encrypted_store,
    every_exchange,
    every_store,
)

ROOT = Path(__file__).parents[2]


def every_check_of_every_store() -> Iterator[object]:
    for check in STORE_CHECKS:
        yield from every_store(check, name=check.__name__)
        yield from every_encrypted_store(check, name=check.__name__)


# Some checks take 2,000 steps of a store, one after the other.
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("make", "check"), list(every_check_of_every_store()))
async def test_a_store_keeps_the_contract(make: MakeStore, check: Check) -> None:
    """The name of the check is the rule; its docstring cites the clauses."""
    await check(make)


def every_check_of_every_exchange() -> Iterator[object]:
    for check in EXCHANGE_CHECKS:
        yield from every_exchange(check, name=check.__name__)
        yield from every_encrypted_exchange(check, name=check.__name__)


@pytest.mark.parametrize(("make_two", "check"), list(every_check_of_every_exchange()))
async def test_an_exchange_keeps_its_contract(
    make_two: MakeTwoStores, check: Callable[[MakeTwoStores], Awaitable[None]]
) -> None:
    """As above."""
    await check(make_two)


@pytest.mark.parametrize(
    ("checks", "argument"), [(STORE_CHECKS, "make"), (EXCHANGE_CHECKS, "make_two")]
)
def test_every_check_that_is_written_is_run(
    checks: Sequence[Callable[..., object]], argument: str
) -> None:
    """A check that nobody runs passes for ever."""
    written = [
        node
        for path in (ROOT / "mcp_sessions/testing").glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.AsyncFunctionDef)
        and [each.arg for each in node.args.args] == [argument]
        and not node.decorator_list
        and path.stem != "__init__"
    ]

    assert sorted(check.__name__ for check in checks) == sorted(node.name for node in written)
    assert all(map(ast.get_docstring, written))


def test_the_checks_need_no_test_framework_and_no_sdk() -> None:
    """They are for authors of stores outside this repository."""
    script = (
        "import sys, mcp_sessions.testing as testing; "
        "print({'pytest', 'hypothesis', 'mcp'} & {name.split('.')[0] for name in sys.modules})"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )

    assert done.stdout.strip() == "set()"
