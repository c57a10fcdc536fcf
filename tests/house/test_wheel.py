"""The distributions for users: the packages, typed and licensed, and nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mcp_sessions import __version__

ROOT = Path(__file__).parents[2]


def build(target: str, directory: Path) -> Path:
    """The path of what hatchling builds; without the network, as it is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    done = subprocess.run(
        [*command, "--directory", str(directory)],
        cwd=ROOT,
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


def test_only_uniquely_named_packages_land_in_site_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}

    assert top == {
        "mcp_sessions",
        "mcp_sessions_conformance",
        "mcp_sessions_transports",
        f"mcp_sessions-{__version__}.dist-info",
    }


def test_the_packages_tell_type_checkers_that_they_are_typed(wheel: zipfile.ZipFile) -> None:
    packages = ("mcp_sessions", "mcp_sessions_conformance", "mcp_sessions_transports")
    assert {f"{package}/py.typed" for package in packages} <= set(wheel.namelist())


def test_the_vectors_travel_inside_the_runner(wheel: zipfile.ZipFile) -> None:
    folder = ROOT / "conformance" / "vectors"
    shipped = {name for name in wheel.namelist() if name.endswith(".json")}
    there = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert shipped == {f"mcp_sessions_conformance/vectors/{path}" for path in there}


def test_the_scripts_of_the_redis_store_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    scripts = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("mcp_sessions/stores/redis/lua/*.lua")
    }

    assert len(scripts) > 20
    assert scripts <= set(wheel.namelist())


def test_the_wheel_has_the_version_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = f"mcp_sessions-{__version__}.dist-info"

    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    assert "mcp-sessions = mcp_sessions.cli.main:main" in commands


def test_the_source_distribution_leaves_out_caches_and_environments(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        inside = {name.split("/")[1] for name in archive.getnames()}
    assert {"mcp_sessions", "transports", "conformance", "tests", "LICENSE", "README.md"} <= inside
    unwanted = {".venv", ".cache", ".import_linter_cache", ".pytest_cache", ".ruff_cache"}
    assert not inside & (unwanted | {".git", "dist", "__pycache__"})
