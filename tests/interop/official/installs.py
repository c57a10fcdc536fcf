"""What the official suites need, fetched once into ``.cache/``: nothing of it is committed.

Everything is pinned with its digest, in ``package-lock.json`` and ``everything-server.txt``.
A missing prerequisite is a failure that names it.

Both suites import ``fs.globSync``, so they need Node.js 22, also the older one. It comes from
the registry: the npm package ``node`` is a script that runs a second, unlocked ``npm install``
for ``node-<platform>-<arch>``, so those packages, which hold the binary, are named directly.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.interop.environments import MissingPrerequisite

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = ROOT / ".cache" / "interop" / "official"
INSTALL_SECONDS = 300.0

EXAMPLE = "examples/servers/everything-server/"


@dataclass(frozen=True, slots=True)
class Installed:
    node: Path
    modules: Path
    """``node_modules``, with the suites under the names that ``package.json`` gives them."""

    everything_server: Path
    """The folder with the package ``mcp_everything_server``."""


def install() -> Installed:
    """Install what is not there yet, and say where it is.

    Raises:
        MissingPrerequisite: npm or pip is missing or cannot reach its registry, or there is
            no Node.js for this platform.
    """
    modules = _npm_packages()
    return Installed(_node(modules), modules, _everything_server())


def _npm_packages() -> Path:
    home = CACHE / "npm"
    modules = home / "node_modules"
    wanted = [HERE / "package.json", HERE / "package-lock.json"]
    digest = _digest(*wanted)
    if not _is_installed(modules, digest):
        npm = shutil.which("npm")
        if npm is None:
            raise MissingPrerequisite("the official conformance suites need npm on the PATH")
        _empty(home)
        for file in wanted:
            shutil.copy(file, home)
        # No scripts: what is installed is what the lock names, and nothing else.
        _run(
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=home,
            needs="npm, with a registry it can reach",
        )
        _remember(modules, digest)
    return modules


def _node(modules: Path) -> Path:
    for package in sorted(modules.glob("node-*")):
        binary = package / "bin" / "node"
        if binary.is_file():
            return binary
    raise MissingPrerequisite(
        "the official conformance suites need Node.js 22 or newer; package.json names none "
        f"for {sys.platform} on {platform.machine()}"
    )


def _everything_server() -> Path:
    home = CACHE / "everything-server"
    requirement = HERE / "everything-server.txt"
    digest = _digest(requirement)
    if not _is_installed(home, digest):
        _empty(home)
        _run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            + ["--no-deps", "--no-binary", "mcp", "--require-hashes"]
            + ["--requirement", str(requirement), "--dest", str(home)],
            cwd=home,
            needs="pip, with a package index it can reach",
        )
        [sdist] = home.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            for member in archive.getmembers():
                _, _, name = member.name.partition("/")
                if name.startswith(EXAMPLE):
                    member.name = name.removeprefix(EXAMPLE)
                    archive.extract(member, home, filter="data")
        if not (home / "mcp_everything_server" / "server.py").is_file():
            raise MissingPrerequisite(f"{sdist.name} has no {EXAMPLE}mcp_everything_server")
        _remember(home, digest)
    return home


def _digest(*files: Path) -> str:
    # The machine too: a kept folder may be seen from another one.
    parts = [platform.machine().encode(), sys.platform.encode(), *(f.read_bytes() for f in files)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _is_installed(folder: Path, digest: str) -> bool:
    stamp = folder / ".official-stamp"
    return stamp.is_file() and stamp.read_text() == digest


def _remember(folder: Path, digest: str) -> None:
    (folder / ".official-stamp").write_text(digest)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _run(command: list[str], *, cwd: Path, needs: str) -> None:
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
        raise MissingPrerequisite(f"the official suites need {needs}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise MissingPrerequisite(
            f"the official suites need {needs}: {' '.join(command)} failed:\n"
            f"{error.stdout[-1000:]}{error.stderr[-2000:]}"
        ) from error
