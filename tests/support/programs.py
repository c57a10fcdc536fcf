"""Programs of the system that the long tests need."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"


def system_program(name: str, package: str, other_path: str) -> str:
    """The path of a program; from Debian if it is not there and this is root on Debian.

    Args:
        package: Debian's.
        other_path: How it is installed on another system.
    """
    found = shutil.which(name, path=_PATH)
    if found:
        return found
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        pytest.fail(f"missing: {name} (apt-get install {package}, or {other_path})")
    # apt-get fails if another process of the tests installs something.
    with (Path(tempfile.gettempdir()) / "mcp-sessions-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := shutil.which(name, path=_PATH):
            return found
        _install(apt, name, package)
    return shutil.which(name, path=_PATH) or pytest.fail(f"missing: {name}")


def _install(apt: str, name: str, package: str) -> None:
    sys.stderr.write(f"{name} is missing: installing Debian's {package}\n")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["install", "-qy", "--no-install-recommends", *package.split()]
    for command in (["update", "-q"], install):
        done = subprocess.run(
            [apt, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"apt-get {' '.join(command)} failed: {done.stderr[-500:]}")
