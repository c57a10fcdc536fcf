"""``constraints-lowest.txt`` and the ranges of ``pyproject.toml`` say the same."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lowest(requirement: Requirement) -> str:
    [bound] = [specifier for specifier in requirement.specifier if specifier.operator == ">="]
    return bound.version


def pins() -> dict[str, str]:
    """Name → exact version, of ``constraints-lowest.txt``."""
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_tested_lower_bounds_are_those_that_users_may_install() -> None:
    runtime = [Requirement(text) for text in PROJECT["dependencies"]]
    # The extras whose packages the tests for everybody use.
    for extra in ("acp", "dashboard", "fastmcp", "otel", "postgres", "redis"):
        runtime += [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]

    bounds = {requirement.name: Version(lowest(requirement)) for requirement in runtime}

    assert bounds == {name: Version(pin) for name, pin in pins().items()}


def test_every_requirement_has_a_lower_bound() -> None:
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(text for extra in extras.values() for text in extra)]:
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            operators = {specifier.operator for specifier in requirement.specifier}
            assert operators & {">=", "=="}, text


def test_what_works_on_other_systems_is_asked_for_only_where_it_can_be_installed() -> None:
    """The fast event loop, uvloop, exists for CPython outside of Windows."""
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        if requirement.name == "uvloop":
            assert requirement.marker is not None
            here = {"platform_python_implementation": "CPython", "sys_platform": "linux"}
            assert requirement.marker.evaluate(here)
            assert not requirement.marker.evaluate(here | {"sys_platform": "win32"})
            assert not requirement.marker.evaluate(
                here | {"platform_python_implementation": "PyPy"}
            )
