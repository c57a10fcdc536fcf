"""Chromium without a window, for the long tests that need a real browser."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.programs import system_program


def chromium_program() -> str:
    return system_program("chromium", "chromium fonts-liberation", "brew install chromium")


@contextmanager
def browsing(
    chromium: str, profile: Path, url: str, *, options: tuple[str, ...] = ()
) -> Generator[None]:
    """Keep a page open until the block ends."""
    always = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command = [chromium, *always, *options, f"--user-data-dir={profile}", url]
    with (profile.parent / "chromium.log").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)
