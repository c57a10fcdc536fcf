"""nginx with the configuration that is shipped, on the ports of a test."""

import os
import re
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import wait_until_it_listens
from tests.support.programs import system_program

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"


def configuration(backends: Sequence[int], front: int) -> str:
    """The shipped one with other ports: a line for each server that there is."""
    text, servers = CONFIG.read_text(), 0

    def one_of_ours(line: re.Match[str]) -> str:
        nonlocal servers
        servers += 1
        port = backends[servers - 1] if servers <= len(backends) else None
        return line[0].replace(line[1], str(port)) if port is not None else ""

    text = re.sub(r"^ +server 127\.0\.0\.1:(\d+).*\n", one_of_ours, text, flags=re.M)
    assert servers >= len(backends) and "listen 127.0.0.1:8080;" in text
    # As root nginx works as another user, who may not enter a temporary folder.
    user = "user root;\n" if os.geteuid() == 0 else ""
    return user + text.replace("127.0.0.1:8080", f"127.0.0.1:{front}")


@contextmanager
def nginx(folder: Path, backends: Sequence[int], front: int) -> Generator[None]:
    """It, until the block ends. What it has to say is in ``folder/said``."""
    (folder / "nginx.conf").write_text(configuration(backends, front))
    command = [
        system_program("nginx", "nginx-light", "brew install nginx"),
        "-p",
        str(folder),
        "-c",
        "nginx.conf",
        "-g",
        "daemon off;",
    ]
    with open(folder / "said", "wb") as said:
        proxy = subprocess.Popen(command, stderr=said)
        try:
            wait_until_it_listens(proxy, front)
            yield
        finally:
            proxy.terminate()
            proxy.wait(timeout=30)
