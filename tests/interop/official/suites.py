"""The official suites: which there are, how one is run, and what it says of a server.

A *check* is one assertion of a scenario. It is *judged* if its status is one of ``JUDGED``;
the suites also write ``INFO`` entries, a log of what went over the wire, whose number depends
on the timing, and checks they found not applicable (``SKIPPED``, or again ``INFO``).
"""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.interop.official.installs import Installed

JUDGED = ("SUCCESS", "WARNING", "FAILURE")
ABSENT = "absent"
SUITE_SECONDS = 100.0
"""Ten times what a run takes on a slow machine."""

DETAILS_SHOWN = 700
"""Characters."""

_FOLDER = re.compile(r"server-(?P<scenario>.+)-\d{4}-\d\d-\d\dT[\dZ-]+")
_TOTAL = re.compile(r"^Total: (\d+) passed, (\d+) failed", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Departure:
    """A check on which the layer is known, and meant, to come out otherwise."""

    scenario: str
    check: str
    bare: str
    wrapped: str


@dataclass(frozen=True, slots=True)
class Suite:
    """One pinned release of the official suite, at one revision of the protocol."""

    package: str
    """Its name in ``package.json``."""

    spec_version: str
    passed: int
    """Checks that the bare everything-server passes. It fails none."""

    departures: tuple[Departure, ...] = ()
    closes_stream: bool = False
    """It looks at a stream that the server closes in the middle of a call, and finds it."""

    def __str__(self) -> str:
        return f"{self.package}-at-{self.spec_version}"


SUITES = (
    Suite(
        "conformance-0.1",
        "2025-11-25",
        passed=44,
        # This release negotiates 2025-11-25 and then names 2025-03-26 in the header of its
        # POST. The SDK goes by the header and falls back to what 2025-03-26 knew; the layer
        # goes by what the session negotiated, so that this POST can be resumed as well.
        departures=(
            Departure("server-sse-polling", "server-sse-priming-event", "WARNING", "SUCCESS"),
            Departure("server-sse-polling", "server-sse-retry-field", "WARNING", "SUCCESS"),
            Departure("server-sse-polling", "server-sse-disconnect-resume", "INFO", "SUCCESS"),
        ),
    ),
    Suite("conformance-0.2", "2025-11-25", passed=84, closes_stream=True),
    Suite("conformance-0.2", "2026-07-28", passed=152),
)


NEWEST = SUITES[-1].package

CLOSES_STREAM = Departure("server-sse-polling", "server-sse-disconnect-resume", "SUCCESS", "INFO")


@dataclass(frozen=True, slots=True, order=True)
class CheckName:
    """Which check: some scenarios make the same one several times."""

    scenario: str
    check: str
    time: int

    def __str__(self) -> str:
        return f"{self.scenario} / {self.check}" + (f" ({self.time})" if self.time > 1 else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    status: str
    message: str
    details: str
    """JSON: what the suite saw on the wire."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}\n            saw {self.details[:DETAILS_SHOWN]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A suite's verdicts on one server."""

    judged: dict[CheckName, Verdict]
    others: dict[tuple[str, str], Verdict]
    """The last entry that is no verdict, by scenario and check."""

    def count(self, status: str) -> int:
        return sum(verdict.status == status for verdict in self.judged.values())

    def verdict_on(self, name: CheckName) -> Verdict:
        judged = self.judged.get(name)
        if judged is not None:
            return judged
        nothing = Verdict(ABSENT, "the suite did not make this check", "null")
        return self.others.get((name.scenario, name.check), nothing)

    def not_passed(self) -> str:
        """The checks that failed or warned, for reading."""
        lines = (f"  {n}\n    {v}" for n, v in self.judged.items() if v.status != "SUCCESS")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Difference:
    """A check on which two servers come out differently."""

    name: CheckName
    bare: Verdict
    wrapped: Verdict

    def __str__(self) -> str:
        return f"  {self.name}\n    bare    {self.bare}\n    wrapped {self.wrapped}"

    @property
    def as_departure(self) -> Departure:
        """What would have to be listed if it is meant."""
        return Departure(self.name.scenario, self.name.check, self.bare.status, self.wrapped.status)


def run(suite: Suite, url: str, *, installed: Installed, into: Path) -> Outcome:
    """Run ``suite`` against the server at ``url``.

    Args:
        into: An empty folder for what it writes.

    Raises:
        AssertionError: It did not finish, or its summary is not what it wrote.
    """
    which = ["--suite", "all", "--spec-version", suite.spec_version]
    done = _run(suite.package, url, which, installed=installed, into=into)
    total = _TOTAL.search(done.stdout)
    assert total is not None, (
        f"{suite} ended with {done.returncode} and no summary:\n{done.stdout[-3000:]}"
    )
    outcome = read(into)
    counted = (outcome.count("SUCCESS"), outcome.count("FAILURE"))
    assert counted == tuple(int(number) for number in total.groups()), (
        f"{suite} says {total[0]!r}, but wrote {counted}"
    )
    return outcome


def run_scenario(scenario: str, url: str, *, installed: Installed, into: Path) -> Outcome:
    """Run one scenario of the newest suite. It raises as :func:`run` does."""
    done = _run(NEWEST, url, ["--scenario", scenario], installed=installed, into=into)
    outcome = read(into)
    assert outcome.judged, f"{scenario} ended with {done.returncode}:\n{done.stdout[-3000:]}"
    return outcome


def _run(
    package: str, url: str, which: Sequence[str], *, installed: Installed, into: Path
) -> subprocess.CompletedProcess[str]:
    program = installed.modules / package / "dist" / "index.js"
    command = [str(installed.node), str(program), "server", "--url", url, *which]
    command += ["--output-dir", str(into)]
    try:
        # It exits with 1 if a check failed; what counts is what it wrote.
        return subprocess.run(
            command,
            cwd=into,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=SUITE_SECONDS,
        )
    except subprocess.TimeoutExpired as hung:
        output = (hung.output or b"").decode("utf-8", "replace")
        raise AssertionError(
            f"{package} did not finish within {SUITE_SECONDS:g} s:\n{output[-3000:]}"
        ) from None


def read(folder: Path) -> Outcome:
    """The verdicts that a suite wrote into ``folder``."""
    judged: dict[CheckName, Verdict] = {}
    others: dict[tuple[str, str], Verdict] = {}
    for file in sorted(folder.glob("server-*/checks.json")):
        named = _FOLDER.fullmatch(file.parent.name)
        assert named is not None, f"an unknown kind of folder name: {file.parent.name}"
        times: Counter[str] = Counter()
        for entry in cast("list[dict[str, Any]]", json.loads(file.read_text("utf-8"))):
            scenario, check = named["scenario"], cast(str, entry["id"])
            verdict = Verdict(
                cast(str, entry["status"]),
                cast(str, entry.get("errorMessage") or entry["description"]),
                json.dumps(entry.get("details")),
            )
            if verdict.status in JUDGED:
                times[check] += 1
                judged[CheckName(scenario, check, times[check])] = verdict
            else:
                others[scenario, check] = verdict
    return Outcome(judged, others)


def differences(
    bare: Outcome, wrapped: Outcome, *, but: Sequence[Departure] = ()
) -> tuple[list[Difference], list[Departure]]:
    """Where two servers come out differently; and those of ``but`` where they do not."""
    found = [
        Difference(name, bare.verdict_on(name), wrapped.verdict_on(name))
        for name in sorted(bare.judged.keys() | wrapped.judged.keys())
        if bare.verdict_on(name).status != wrapped.verdict_on(name).status
    ]
    seen = [difference.as_departure for difference in found]
    unexpected = [difference for difference in found if difference.as_departure not in but]
    return unexpected, [departure for departure in but if departure not in seen]
