"""CPU of one ``tools/call`` to a command, next to other proxies.

    python -m bench.bench_children [CALLS]

Each program serves a stdio server over HTTP. The stdio server is ``tests/support/child_server.py``,
in plain Python, as small as such a server can be. One client has one connection and makes one call
at a time. The figure is the CPU time of the program between the client and the stdio server. The
programs take turns, and the median round counts.

The rows with *first call* show how much longer the first call of a session takes than its second.
Without ``--warm`` the first call starts a process. With ``--warm 2`` the process runs already.

The other programs come from PyPI and npm, and are installed into ``.cache/bench``. If one cannot be
installed, its row says so.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.bench_calls import HANDSHAKE, MODERN, Case, Client
from bench.rows import Row, report
from bench.stores import cpu_of
from tests.support.children import CHILD
from tests.support.processes import free_port, wait_until_it_listens

ROUNDS = 5
STARTS = 20
WARM = 2
COMMAND = [sys.executable, "-S", CHILD]
CACHE = Path(__file__).parents[1] / ".cache" / "bench"
MCP_PROXY, SUPERGATEWAY = "mcp-proxy==0.13.0", "supergateway@4.0.0"

FASTMCP = """
import sys
from fastmcp.client.transports import StdioTransport
from fastmcp.server import create_proxy
port, command, *arguments = sys.argv[1:]
proxy = create_proxy(StdioTransport(command, arguments))
proxy.run("http", port=int(port), log_level="ERROR", show_banner=False)
"""


class Absent(Exception):
    """Another proxy is not installed on this machine, and cannot be."""


class Proxy:
    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        wait_until_it_listens(self.process, port)

    def cpu(self) -> float:
        """Seconds of CPU that it used so far, of its threads and of no child of it."""
        return cpu_of(self.process.pid)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ours(*options: str) -> Proxy:
    port = free_port()
    command = [sys.executable, "-m", "mcp_sessions.cli", "serve", "--port", str(port)]
    return Proxy([*command, "--log-level", "error", *options, "--", *COMMAND], port)


def bare() -> Proxy:
    """Bare ASGI, orjson and a pipe: no MCP at all."""
    port = free_port()
    command = [sys.executable, "-m", "bench.bench_servers", "pipe", str(port), *COMMAND]
    return Proxy(command, port)


def mcp_proxy() -> Proxy:
    home = CACHE / "mcp-proxy"
    program = home / "bin" / "mcp-proxy"
    if not program.exists():
        install([sys.executable, "-m", "venv", str(home)])
        install([str(home / "bin" / "pip"), "install", "--quiet", MCP_PROXY])
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"]
    return Proxy([str(program), *options, "--", *COMMAND], port)


def supergateway() -> Proxy:
    home = CACHE / "supergateway"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Absent("there is no node, or no npm")
    package = home / "node_modules" / "supergateway"
    if not package.exists():
        home.mkdir(parents=True, exist_ok=True)
        install([npm, "install", "--silent", "--prefix", str(home), SUPERGATEWAY])
    port = free_port()
    options = ["--outputTransport", "streamableHttp", "--stateful", "--logLevel", "none"]
    options += ["--port", str(port), "--stdio", " ".join(COMMAND)]
    return Proxy([node, str(package / "dist" / "index.js"), *options], port)


def fastmcp() -> Proxy:
    port = free_port()
    return Proxy([sys.executable, "-c", FASTMCP, str(port), *COMMAND], port)


def install(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=240)
    except (OSError, subprocess.SubprocessError) as failed:
        raise Absent(str(failed)) from failed


OURS = Case("ours, 2025 era, in a session", "ours", HANDSHAKE, session=True)

CASES = [
    (Case("floor (bare ASGI + orjson + a pipe)", "pipe", HANDSHAKE), bare),
    (Case("ours, 2025 era, no session", "ours", HANDSHAKE), ours),
    (OURS, ours),
    (Case("ours, 2026 era, in a session", "ours", MODERN, session=True), ours),
    (Case("mcp-proxy", "mcp-proxy", HANDSHAKE), mcp_proxy),
    (Case("supergateway", "supergateway", HANDSHAKE), supergateway),
    (Case("FastMCP's proxy", "fastmcp", HANDSHAKE), fastmcp),
]


def measure(calls: int) -> dict[str, float | Absent]:
    """Microseconds of CPU per call, by the name of the case: the median round."""
    figures: dict[str, float | Absent] = {}
    proxies: dict[str, Proxy] = {}
    try:
        clients: dict[Case, Client] = {}
        for case, make in CASES:
            try:
                proxy = proxies.get(case.server) or make()
            except Absent as absent:
                figures[case.name] = absent
                continue
            proxies[case.server] = proxy
            clients[case] = Client(case, proxy.port)
        for client in clients.values():
            client.wake()
            for _ in range(200):
                client.call()
        rounds: dict[Case, list[float]] = {case: [] for case in clients}
        for _ in range(ROUNDS):
            for case, client in clients.items():
                client.wake()
                before = proxies[case.server].cpu()
                for _ in range(calls):
                    client.call()
                spent = proxies[case.server].cpu() - before
                rounds[case].append(spent / calls * 1_000_000)
        figures |= {case.name: statistics.median(values) for case, values in rounds.items()}
        return figures
    finally:
        for proxy in proxies.values():
            proxy.stop()


def first_calls(proxy: Proxy) -> float:
    """Milliseconds by which a session's first call takes longer than its second: the median."""
    longer: list[float] = []
    for _ in range(STARTS):
        client = Client(Case("", "ours", MODERN, session=True), proxy.port)
        # One that waits is there by then; the connection is open.
        time.sleep(0.3)
        times = [time.perf_counter()]
        for _ in range(2):
            client.call()
            times.append(time.perf_counter())
        longer.append((times[1] - times[0]) - (times[2] - times[1]))
    return statistics.median(longer) * 1_000


def starts() -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, options in (("without --warm", ()), (f"--warm {WARM}", ("--warm", str(WARM)))):
        proxy = ours("--max-children", "64", *options)
        try:
            figures[name] = first_calls(proxy)
        finally:
            proxy.stop()
    return figures


def rows(calls: int) -> Iterator[Row]:
    figures = measure(calls)
    ours = figures[OURS.name]
    assert not isinstance(ours, Absent)
    for case, _ in CASES:
        figure = figures[case.name]
        if isinstance(figure, Absent):
            yield Row(name=case.name, absent=str(figure))
        else:
            is_ours = case.server == "ours"
            yield Row(
                name=case.name,
                measured=figure,
                unit="µs",
                ratio=None if is_ours else figure / ours,
                basis="times ours, 2025 era, in a session",
            )
    for name, figure in starts().items():
        yield Row(
            name=f"first call of a session, {name}",
            measured=figure,
            unit="ms",
            includes=f"by how much longer than its second, the median of {STARTS}",
        )


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000))


if __name__ == "__main__":
    main()
