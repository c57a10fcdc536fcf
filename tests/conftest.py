"""For all tests: the event loop they run on, and how hard Hypothesis searches.

The examples are the same in every run, so that no change is blamed for what it did not
break. They are few, which shows that a property holds at all. ``HYPOTHESIS_PROFILE=many`` has
more of them, as one run of ``scripts/test --all`` does. ``deep`` searches new ones, thousands.
``MCP_SESSIONS_TEST_STORE=sqlite`` runs what takes any store (`tests.support.world`) on that one.
``SESSIONS_TESTS_CASES=one`` runs one case of each test that has several and does more than decide.
"""

import gc
import logging
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mcp_sessions.seldom import Seldom
from tests.support.forking import fork_programs
from tests.support.postgres_server import stop_shared_postgres
from tests.support.redis_server import stop_shared_redis
from tests.support.unseen import Unseen

# Without it every run would rewrite the asserts of every file again, in each of its processes,
# and each server that a test starts would compile the library.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A program of ours sends what it prints itself.
os.environ.pop("PYTHONUNBUFFERED", None)

# The store contract is plain asserts without a test framework; here they explain themselves.
pytest.register_assert_rewrite("mcp_sessions.testing")

settings.register_profile(
    "few",
    max_examples=20,
    stateful_step_count=40,
    derandomize=True,
    # How long an example takes says something of the machine, not of the code.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("many", settings.get_profile("few"), max_examples=100)
settings.register_profile("deep", settings.get_profile("few"), max_examples=3000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))


def pytest_configure(config: pytest.Config) -> None:
    """No task may die unseen, in any test. What a test starts need not import the SDK again."""
    fork_programs()
    unseen = Unseen()
    unseen.watch()
    config.pluginmanager.register(unseen)


@pytest.fixture(autouse=True)
def all_lines_are_logged() -> None:
    """The tests of a minute have more refusals than a log shows in a minute."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            for each in [it for it in logger.filters if isinstance(it, Seldom)]:
                logger.removeFilter(each)
                logger.addFilter(Seldom())


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The library is written for asyncio."""
    return "asyncio"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count, what is about the store in memory only if there is another one, and
    all cases but one of each test if that is asked for.

    Files with a test that may take minutes come first: at the end of a run none of several test
    processes is alone with one.
    """
    if os.environ.get("MCP_SESSIONS_TEST_STORE", "memory") != "memory":
        _leave_out(config, items, {it for it in items if it.get_closest_marker("in_memory")})
    if os.environ.get("SESSIONS_TESTS_CASES") == "one":
        _leave_out(config, items, set(items) - _one_case_each(config, items))
    longest: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        allowed = marker.args[0] if marker is not None else 0
        longest[item.path] = max(longest.get(item.path, 0), allowed)
    items.sort(key=lambda item: -longest[item.path])


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _one_case_each(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Which case it is, a test's name decides: so each transport and each kind of server is the one
    of some tests. All cases run of what decides without I/O, of what any store promises, and of how
    the code is built.
    """
    tests = config.rootpath / "tests"
    whole = [tests / folder for folder in ("core", "house", "security", "spec")]
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        has_all = item.path.parent in (tests, tests / "stores")
        has_all = has_all or any(item.path.is_relative_to(folder) for folder in whole)
        cases[item.nodeid if has_all else item.nodeid.partition("[")[0]].append(item)
    return {each[zlib.crc32(name.encode()) % len(each)] for name, each in cases.items()}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """What a run collects stays to its end. To look for garbage among it, again and again as it
    grows, is a third of what each test process needs to begin.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup() -> None:
    """Each layer that starts collects garbage once. It need not look through the whole test run's
    heap each time: that would be nine tenths of the time that these tests take. Garbage goes
    before: what is frozen stays, and each event loop that ends looks at all tasks there are.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed may hold lone surrogates, which cannot travel from one of several
    test processes to the one that reports.
    """
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted (``record_property("counts", …)``), whichever process ran them."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "counts" and report.when == "call":
                terminalreporter.section(report.nodeid, "-")
                terminalreporter.write_line(str(value))


@pytest.fixture(scope="session", autouse=True)
def no_server_is_left() -> Generator[None]:
    """The servers that tests share are started by the first that needs them, and stopped here."""
    yield
    stop_shared_redis()
    stop_shared_postgres()
