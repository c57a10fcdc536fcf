"""The tests of the SDK and of FastMCP, as their sdists have them, and an environment to run them.

Both are fetched once into ``.cache/``, for the versions that are installed here; nothing of
them is committed. The environment holds what their tests need beside this project, in the
versions that this one runs with. A missing prerequisite is a failure that names it.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from tests.interop.environments import MissingPrerequisite

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = ROOT / ".cache" / "interop" / "theirs"
INSTALL_SECONDS = 600.0

OURS = "mcp-sessions"


@dataclass(frozen=True, slots=True)
class Installed:
    """Where the tests of one distribution are, and who runs them."""

    version: str
    sources: Path
    """The folder that its sdist unpacks to."""

    python: Path


def install(distribution: str) -> Installed:
    """Fetch and install what is not there yet.

    Args:
        distribution: ``mcp`` or ``fastmcp``.

    Raises:
        MissingPrerequisite: ``venv`` or ``pip`` cannot be used here, or pip reaches no index.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time():
        return Installed(version(distribution), _sources(distribution), _environment(distribution))


def _sources(distribution: str) -> Path:
    name = f"{distribution}-{version(distribution)}"
    home = CACHE / name
    if not (home / ".complete").is_file():
        shutil.rmtree(home, ignore_errors=True)
        download = CACHE / f"{name}.download"
        shutil.rmtree(download, ignore_errors=True)
        # No dependencies and nothing built: an archive, and what is in it.
        _run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            + ["--no-deps", "--no-binary", ":all:", "--dest", str(download)]
            + [f"{distribution}=={version(distribution)}"],
        )
        [sdist] = download.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(CACHE, filter="data")
        shutil.rmtree(download)
        if not (home / "tests").is_dir():
            raise MissingPrerequisite(f"the sdist of {name} has no tests in it")
        (home / ".complete").write_text("")
    return home


def _environment(distribution: str) -> Path:
    home = CACHE / f"environment-{distribution}"
    python = home / "bin" / "python"
    requirements = HERE / f"requirements-{distribution}.txt"
    pins = sorted(
        {
            f"{found.metadata['Name']}=={found.version}"
            for found in distributions()
            if found.metadata["Name"] != OURS
        }
    )
    wanted = hashlib.sha256(
        "\n".join([sys.version, platform.machine(), requirements.read_text(), *pins]).encode()
    ).hexdigest()
    stamp = home / ".stamp"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(home)])
        constraints = home / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        _run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            + ["--constraint", str(constraints), "--requirement", str(requirements)]
            + ["--editable", f"{ROOT}[fastmcp]"],
        )
        stamp.write_text(wanted)
    return python


@contextmanager
def _one_at_a_time() -> Generator[None]:
    """Several test processes may want the same at once."""
    with (CACHE / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    needs = "these tests need Python's venv, and pip with a package index it can reach"
    try:
        subprocess.run(
            command,
            cwd=ROOT,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingPrerequisite(f"{needs}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise MissingPrerequisite(
            f"{needs}: {' '.join(command)} failed:\n{error.stdout[-1000:]}{error.stderr[-2000:]}"
        ) from error
