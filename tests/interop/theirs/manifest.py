"""What is expected of somebody else's tests: which come out otherwise here, and why."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Manifest:
    version: str
    """Of the distribution whose tests these are."""

    ran: Mapping[str, int]
    """How many tests take part, for each leg."""

    differences: Mapping[str, Mapping[str, str]]
    """For each leg: test → why it comes out otherwise."""

    files: Sequence[str] = ()
    """Which of the tests run, where not all do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    outcome: str
    """``passed``, ``failed``, ``skipped``, or ``error``: it could not be collected."""

    text: str
    """The end of what it said."""


def read(path: Path) -> Manifest:
    """A manifest.

    Raises:
        ValueError: It names a test twice in one leg, a leg that does not run, or gives no
            reason.
    """
    content = tomllib.loads(path.read_text("utf-8"))
    ran = cast("dict[str, int]", content["ran"])
    differences: dict[str, dict[str, str]] = {leg: {} for leg in ran}
    for entry in cast("list[dict[str, Any]]", content.get("difference", [])):
        if not entry["why"].strip():
            raise ValueError(f"{path.name} gives no reason for {entry['tests']}")
        for leg in entry["legs"]:
            if leg not in ran:
                raise ValueError(f"{path.name} names the leg {leg!r}, which does not run")
            for test in entry["tests"]:
                if test in differences[leg]:
                    raise ValueError(f"{path.name} names {test} twice for {leg}")
                differences[leg][test] = " ".join(entry["why"].split())
    return Manifest(content["version"], ran, differences, content.get("files", ()))


def findings(manifest: Manifest, leg: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    """What is not as the manifest says, in words; empty: all is.

    Args:
        outcomes: By the test's name, from the folder of the tests on.
    """
    expected = manifest.differences[leg]
    found: list[str] = []
    for test, seen in outcomes.items():
        # What is skipped was not run: that is a difference, and needs its reason.
        if seen.outcome != "passed" and test not in expected:
            found.append(f"{test} {seen.outcome}, and is not expected to:\n{seen.text}")
    for test in expected:
        seen = outcomes.get(test)
        if seen is None:
            found.append(f"{test} is expected to differ, and there is no such test")
        elif seen.outcome == "passed":
            found.append(f"{test} is expected to differ, and passes: take it off the list")
    if len(outcomes) != manifest.ran[leg]:
        found.append(f"{len(outcomes)} tests ran, not {manifest.ran[leg]}")
    return found
