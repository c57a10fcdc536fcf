"""What the official suites need, fetched once into ``.cache/``: nothing of it is committed.

Everything is pinned with its digest, in ``package-lock.json`` and ``everything-server.txt``.
A missing prerequisite is a failure that names it.

Both suites import ``fs.globSync``, so they need Node.js 22, also the older one. It comes from
the registry: the npm package ``node`` is a script that runs a second, unlocked ``npm install``
for ``node-<platform>-<arch>``, so those packages, which hold the binary, are named directly.
"""

import platform
import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.interop import environments
from tests.interop.environments import MissingPrerequisite

HERE = Path(__file__).parent
CACHE = environments.CACHE / "official"

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
    digest = environments.digest(*(file.read_bytes() for file in wanted))
    if not environments.is_installed(modules, digest):
        npm = shutil.which("npm")
        if npm is None:
            raise MissingPrerequisite("the official conformance suites need npm on the PATH")
        environments.empty(home)
        for file in wanted:
            shutil.copy(file, home)
        # No scripts: what is installed is what the lock names, and nothing else.
        environments.run(
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=home,
            needs="npm, with a registry it can reach",
        )
        environments.remember(modules, digest)
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
    digest = environments.digest(requirement.read_bytes())
    if not environments.is_installed(home, digest):
        environments.empty(home)
        environments.run(
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
        environments.remember(home, digest)
    return home
