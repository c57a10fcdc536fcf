"""The tests of the SDK and of FastMCP, as their sdists have them, and an environment to run them.

Both are fetched once into ``.cache/``, of the release that the list of expected differences is
of: the next one has other tests, and may be there before all of its parts are. Nothing of them is
committed. The environment holds what their tests need next to this project, in the versions that
this one runs with. A missing prerequisite is a failure that names it.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import requires
from importlib.metadata import version as installed
from pathlib import Path

from packaging.requirements import Requirement

from tests.interop import environments
from tests.interop.environments import ROOT, MissingPrerequisite

HERE = Path(__file__).parent
CACHE = environments.CACHE / "theirs"
NEEDS = "Python's venv, and pip with a package index it can reach"

OURS = "mcp-sessions"


@dataclass(frozen=True, slots=True)
class Installed:
    """Where the tests of one distribution are, and who runs them."""

    version: str
    sources: Path
    """The folder that its sdist unpacks to."""

    python: Path


def install(distribution: str, version: str) -> Installed:
    """Fetch and install what is not there yet.

    Args:
        distribution: ``mcp`` or ``fastmcp``.
        version: Its release.

    Raises:
        MissingPrerequisite: ``venv`` or ``pip`` cannot be used here, or pip reaches no index.
    """
    with environments.one_at_a_time(CACHE):
        sources = _sources(distribution, version)
        return Installed(version, sources, _environment(distribution, version))


def _sources(distribution: str, version: str) -> Path:
    name = f"{distribution}-{version}"
    home = CACHE / name
    if not (home / ".complete").is_file():
        shutil.rmtree(home, ignore_errors=True)
        download = CACHE / f"{name}.download"
        shutil.rmtree(download, ignore_errors=True)
        # No dependencies and nothing built: an archive, and what is in it.
        environments.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            + ["--no-deps", "--no-binary", ":all:", "--dest", str(download)]
            + [f"{distribution}=={version}"],
            needs=NEEDS,
        )
        [sdist] = download.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(CACHE, filter="data")
        shutil.rmtree(download)
        if not (home / "tests").is_dir():
            raise MissingPrerequisite(f"the sdist of {name} has no tests in it")
        (home / ".complete").write_text("")
    return home


def _environment(distribution: str, version: str) -> Path:
    home = CACHE / f"environment-{distribution}"
    python = home / "bin" / "python"
    requirements = HERE / f"requirements-{distribution}.txt"
    # The parts that the distribution consists of are of one release.
    others = {name for name in _needed_by(OURS) if not f"{name}-".startswith(f"{distribution}-")}
    pins = [
        f"{distribution}=={version}",
        *(f"{name}=={installed(name)}" for name in sorted(others)),
    ]
    wanted = environments.digest("\n".join([sys.version, requirements.read_text(), *pins]).encode())
    if not environments.is_installed(home, wanted):
        shutil.rmtree(home, ignore_errors=True)
        environments.run([sys.executable, "-m", "venv", str(home)], needs=NEEDS)
        constraints = home / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        environments.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            + ["--constraint", str(constraints), "--requirement", str(requirements)]
            + ["--editable", f"{ROOT}[fastmcp]"],
            needs=NEEDS,
        )
        environments.remember(home, wanted)
    return python


def _needed_by(distribution: str) -> set[str]:
    """What it cannot do without, and what that needs."""
    needed, left = set[str](), [distribution]
    while left:
        for text in requires(left.pop()) or ():
            found = Requirement(text)
            is_here = found.marker is None or found.marker.evaluate({"extra": ""})
            if is_here and found.name not in needed:
                needed.add(found.name)
                left.append(found.name)
    return needed
