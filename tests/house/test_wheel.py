"""The distributions for users: the packages, typed and licensed, and nothing else."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mcp_sessions import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def build(target: str, directory: Path, of: str = "") -> Path:
    """The path of what hatchling builds; without the network, as it is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    done = subprocess.run(
        [*command, "--directory", str(directory)],
        cwd=ROOT / of,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    [path] = directory.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("runner"), "conformance"))


def test_only_uniquely_named_packages_land_in_site_packages(
    wheel: zipfile.ZipFile, runner: zipfile.ZipFile
) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "mcp_sessions",
        "mcp_sessions_transports",
        f"mcp_sessions-{__version__}.dist-info",
    }
    assert {name.split("/")[0] for name in runner.namelist()} == {
        "mcp_sessions_conformance",
        f"mcp_sessions_conformance-{__version__}.dist-info",
    }


def needed(roots: Iterable[str]) -> Iterator[Distribution]:
    """The packages that these requirements bring into an environment, as far as they are here."""
    waiting, seen = [Requirement(text) for text in roots], set[str]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or name == PROJECT["name"]:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield found
        waiting += [
            each
            for each in map(Requirement, found.requires or ())
            if each.marker is None
            or any(each.marker.evaluate({"extra": extra}) for extra in requirement.extras or {""})
        ]


def test_no_package_takes_a_name_that_is_a_folder_of_many() -> None:
    """``import docs`` would else find a stranger's, and a tool that looks for ours finds it."""
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    common = ours - {"mcp_sessions", "conformance"} | {"build", "dist", "src", "test", "tools"}
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    found = {
        (str(each.name), file.parts[0])
        for each in needed([*PROJECT["dependencies"], *chain(*extras.values())])
        for file in each.files or ()
        if file.parts[0] in common
    }

    assert {"docs", "tests", "examples", "scripts"} <= common
    assert found == set()


def test_the_packages_tell_type_checkers_that_they_are_typed(
    wheel: zipfile.ZipFile, runner: zipfile.ZipFile
) -> None:
    packages = ("mcp_sessions", "mcp_sessions_transports")
    assert {f"{package}/py.typed" for package in packages} <= set(wheel.namelist())
    assert "mcp_sessions_conformance/py.typed" in runner.namelist()


def test_the_vectors_travel_inside_the_runner(runner: zipfile.ZipFile) -> None:
    folder = ROOT / "conformance" / "vectors"
    shipped = {name for name in runner.namelist() if name.endswith(".json")}
    there = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    files = {f"mcp_sessions_conformance/vectors/{path}" for path in there}
    # The level of a vector is that of its clauses.
    assert shipped == files | {"mcp_sessions_conformance/clauses.json"}


def test_the_scripts_of_the_redis_store_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    scripts = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("mcp_sessions/stores/redis/lua/*.lua")
    }

    assert scripts and scripts <= set(wheel.namelist())


def test_the_wheel_has_the_version_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = f"mcp_sessions-{__version__}.dist-info"

    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    assert "mcp-sessions = mcp_sessions.cli.__main__:run" in commands


def test_the_source_distribution_leaves_out_caches_and_environments(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        inside = {name.split("/")[1] for name in archive.getnames()}
    assert {"mcp_sessions", "transports", "conformance", "tests", "LICENSE", "README.md"} <= inside
    unwanted = {".venv", ".cache", ".import_linter_cache", ".pytest_cache", ".ruff_cache"}
    assert not inside & (unwanted | {".git", "dist", "__pycache__"})
