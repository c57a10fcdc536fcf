"""Where the stock clients of other languages and versions live.

Each is installed once, into a folder that is kept, and used again as long as what was asked
for has not changed. A missing prerequisite is a failure that names it, never a skip.
"""

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "interop"
INSTALL_SECONDS = 600.0


class MissingPrerequisite(AssertionError):
    """Something that the full tests need is not on this machine."""


def python1_command() -> list[str]:
    """The command that drives the Python 1.x client, installed if need be.

    Raises:
        MissingPrerequisite: ``venv`` or ``pip`` cannot be used here.
    """
    return python_command("python1", CACHE / "py1")


def python_command(project: str, home: Path) -> list[str]:
    """The command that runs the driver of a folder in an environment of its own.

    Args:
        project: The folder, with ``requirements.txt`` and ``driver.py``.
        home: Where the environment is.

    Raises:
        MissingPrerequisite: ``venv`` or ``pip`` cannot be used here.
    """
    requirements = HERE / project / "requirements.txt"
    python = home / "bin" / "python"
    wanted = digest(requirements.read_bytes(), sys.version.encode())
    with one_at_a_time(CACHE):
        if not is_installed(home, wanted):
            shutil.rmtree(home, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(home)], needs="Python's venv module")
            run(
                [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
                needs="pip, with a package index it can reach",
            )
            remember(home, wanted)
    return [str(python), str(HERE / project / "driver.py")]


def typescript_command(project: str = "typescript") -> list[str]:
    """The command that drives a TypeScript client, installed if need be.

    Args:
        project: The folder: ``typescript`` (1.x) or ``typescript2`` (v2).

    Raises:
        MissingPrerequisite: node or npm is missing, or npm cannot install.
    """
    home = HERE / project
    # Node 20 has the global WebSocket only under this flag; newer ones take the flag too.
    return [node_project(home), "--experimental-websocket", str(home / "driver.mjs")]


def node_project(home: Path) -> str:
    """The command `node`, with what the lock file of a project asks for installed next to it.

    Args:
        home: Where its ``package-lock.json`` is.

    Raises:
        MissingPrerequisite: node or npm is missing, or npm cannot install.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        missing = "node (20 or newer)" if node is None else "npm"
        raise MissingPrerequisite(f"the TypeScript tests need {missing} on the PATH")
    modules = home / "node_modules"
    wanted = digest((home / "package-lock.json").read_bytes())
    with one_at_a_time(CACHE):
        if not is_installed(modules, wanted):
            run([npm, "ci"], cwd=home, needs="npm, with a registry it can reach")
            remember(modules, wanted)
    return node


@contextmanager
def one_at_a_time(cache: Path) -> Generator[None]:
    """Several test processes may want the same at once."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def digest(*parts: bytes) -> str:
    # The machine too: a kept folder may be seen from another one.
    machine = [platform.machine().encode(), sys.platform.encode()]
    return hashlib.sha256(b"\0".join([*machine, *parts])).hexdigest()


def is_installed(folder: Path, wanted: str) -> bool:
    stamp = folder / ".interop-stamp"
    return stamp.is_file() and stamp.read_text() == wanted


def remember(folder: Path, wanted: str) -> None:
    (folder / ".interop-stamp").write_text(wanted)


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def run(command: list[str], *, needs: str, cwd: Path = ROOT) -> None:
    """Run a command that installs something.

    Raises:
        MissingPrerequisite: It failed, or took longer than `INSTALL_SECONDS`.
    """
    try:
        subprocess.run(
            command,
            cwd=cwd,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingPrerequisite(f"these tests need {needs}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise MissingPrerequisite(
            f"these tests need {needs}: {' '.join(command)} failed:\n"
            f"{error.stdout[-1000:]}{error.stderr[-2000:]}"
        ) from error
