"""Fixtures: what is installed, and what each suite says of each server."""

from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.interop.official import installs, servers, suites
from tests.interop.official.installs import Installed
from tests.interop.official.servers import Kind, Stack
from tests.interop.official.suites import Outcome, Suite

OutcomeOf = Callable[[Suite, Kind, Stack], Outcome]


@pytest.fixture(scope="session")
def installed() -> Installed:
    """The suites, their Node.js and the everything-server."""
    return installs.install()


@pytest.fixture(scope="session")
def outcome_of(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> OutcomeOf:
    """Runs a suite against a server started for it, once; later it remembers."""
    known: dict[tuple[Suite, Kind, Stack], Outcome] = {}

    def outcome(suite: Suite, kind: Kind, stack: Stack) -> Outcome:
        asked = suite, kind, stack
        if asked not in known:
            folder: Path = tmp_path_factory.mktemp(f"{suite}-{kind}-{stack}", numbered=False)
            results = folder / "results"
            results.mkdir()
            source = installed.everything_server
            with ExitStack() as stack_of:
                behind = None
                if kind.startswith("url"):
                    log = folder / "behind.log"
                    behind = stack_of.enter_context(
                        servers.everything_server(source, "bare", "h11", log=log)
                    )
                url = stack_of.enter_context(
                    servers.everything_server(
                        source, kind, stack, log=folder / "server.log", behind=behind
                    )
                )
                known[asked] = suites.run(suite, url, installed=installed, into=results)
        return known[asked]

    return outcome


@pytest.fixture(scope="session")
def sdk_version() -> str:
    """The SDK that serves. The counts are those of 2.3.0."""
    return f"mcp {version('mcp')}"
