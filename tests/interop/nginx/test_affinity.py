"""What docs/replicas.md says of nginx, run: the requests of one session come to one server."""

import re
from collections.abc import Generator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.support import nginx as shipped
from tests.support.processes import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

PAGE = Path(__file__).parents[3] / "docs" / "replicas.md"


class Backend(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = str(self.connection.getsockname()[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        # None that nginx keeps outlives the one that it is to.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def documented(configuration: str) -> str:
    maps, line = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert configuration.count("upstream mcp {\n") == 1
    return configuration.replace("upstream mcp {\n", f"{maps}upstream mcp {{\n{line}")


@pytest.fixture
def fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[httpx.Client, dict[str, ThreadingHTTPServer]]]:
    """A client of nginx, and the servers behind that by their names."""
    config = tmp_path / "documented.conf"
    config.write_text(documented(shipped.CONFIG.read_text()))
    monkeypatch.setattr(shipped, "CONFIG", config)
    with ExitStack() as stack:
        servers: dict[str, ThreadingHTTPServer] = {}
        for _ in range(3):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Backend))
            server.daemon_threads = True
            Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            servers[str(server.server_address[1])] = server
        front = free_port()
        stack.enter_context(shipped.nginx(tmp_path, [int(name) for name in servers], front))
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{front}", timeout=20, trust_env=False)
        )
        yield client, servers


def where(client: httpx.Client, **headers: str) -> str:
    """Which server a request comes to."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/mcp", content=b"{}", headers=named).text


def test_a_sessions_requests_come_to_one_server_and_sessions_to_all(
    fleet: tuple[httpx.Client, dict[str, ThreadingHTTPServer]],
) -> None:
    """Whatever connection they are of; stock clients' by connection; the rest anywhere."""
    client, servers = fleet
    used = set[str]()
    for n in range(40):
        route = f"{n:012x}"
        positions = {
            where(client, Mcp_Session_Route=route),
            where(client, Mcp_Session_Route=route, Mcp_Session_Id="one connection"),
            where(client, Mcp_Session_Route=route, Mcp_Session_Id="another"),
        }
        assert len(positions) == 1
        used |= positions
        assert len({where(client, Mcp_Session_Id=route) for _ in range(3)}) == 1
    assert used == servers.keys()
    assert {where(client) for _ in range(60)} == servers.keys()


def test_a_server_that_is_gone_takes_no_session_with_it(
    fleet: tuple[httpx.Client, dict[str, ThreadingHTTPServer]],
) -> None:
    client, servers = fleet
    gone = where(client, Mcp_Session_Route="one session")
    servers[gone].shutdown()
    servers[gone].server_close()
    positions = {where(client, Mcp_Session_Route="one session") for _ in range(5)}
    assert positions < servers.keys() and gone not in positions
