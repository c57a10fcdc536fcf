"""A small disk of a test's own, which can be full."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def mounted(folder: Path, megabytes: int) -> bool:
    """Put a disk on a folder, made if it is not there. False: this user may mount none."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    return (
        os.geteuid() == 0
        and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    )


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Generator[None]:
    """No byte is free on its disk until the block ends."""
    filler = folder / "filler"
    try:
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65_536))
        except OSError:
            # It is full.
            yield
    finally:
        filler.unlink(missing_ok=True)
