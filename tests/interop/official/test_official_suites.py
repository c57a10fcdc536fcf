"""The official conformance suites find the same in a wrapped server as in a bare one.

The server is the everything-server of the SDK's sdist. Each suite is run against it on the
SDK's own Streamable HTTP, and in our layer, and the two are compared check by check.

The bare one runs on h11, as the SDK alone would have it. httptools, which our dependencies
bring along, leaves whitespace at the end of header values, on which the bare server fails one
check of 2026-07-28; wrapped it has to pass on either.
"""

import pytest

from tests.interop.official.conftest import OutcomeOf
from tests.interop.official.servers import Kind, Stack
from tests.interop.official.suites import CLOSES_STREAM, SUITES, Suite, differences

# The first test installs. Afterwards all of them together take less than a minute.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


ASKS = "input-required-result-"
"""Scenarios whose handlers ask by a result."""


@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_the_bare_server_passes_what_it_is_known_to(
    suite: Suite, outcome_of: OutcomeOf, sdk_version: str
) -> None:
    """Else the comparison below would compare with something else."""
    bare = outcome_of(suite, "bare", "h11")

    counts = {"passed": bare.count("SUCCESS"), "failed": bare.count("FAILURE")}
    assert counts == {"passed": suite.passed, "failed": 0}, (
        f"{suite} on the bare everything-server with {sdk_version}:\n{bare.not_passed()}"
    )


@pytest.mark.parametrize(
    ("suite", "kind", "stack"),
    [
        pytest.param(suite, kind, stack, id=f"{suite}-{kind}-{stack}")
        for suite in SUITES
        for kind, stack in (
            ("wrapped", "h11"),
            ("wrapped", "httptools"),
            ("bound", "httptools"),
            ("command", "httptools"),
            ("url", "httptools"),
            ("command-2026", "httptools"),
            ("url-2026", "httptools"),
        )
        # A suite of the handshake era is not for those that speak the other one only.
        if not (kind.endswith("-2026") and suite.spec_version < "2026")
    ],
)
def test_the_wrapped_server_is_found_to_be_the_same(
    suite: Suite, kind: Kind, stack: Stack, outcome_of: OutcomeOf
) -> None:
    """Promised: "wrapped it has the same, check by check"; with conversations bound, too."""
    bare = outcome_of(suite, "bare", "h11")
    wrapped = outcome_of(suite, kind, stack)

    departures = suite.departures
    if kind.startswith("command"):
        # On a pipe nobody can close the stream of one request: the suite says that the server
        # does not do it.
        departures = tuple(each for each in departures if each.check != CLOSES_STREAM.check)
        if suite.closes_stream:
            departures = (*departures, CLOSES_STREAM)

    different, departures_gone = differences(bare, wrapped, but=departures)
    if kind in ("command", "url"):
        # With the default, the first call of a handler that asks by a result fails.
        different = [each for each in different if not each.name.scenario.startswith(ASKS)]

    if different:
        counts = [(o.count("SUCCESS"), o.count("FAILURE")) for o in (bare, wrapped)]
        text = "{} has {} passed and {} failed bare, {} passed and {} failed wrapped on {}:\n{}"
        listed = "\n".join(map(str, different))
        pytest.fail(text.format(suite, *counts[0], *counts[1], stack, listed), pytrace=False)
    assert not departures_gone, f"no longer so, take it off the list: {departures_gone}"
