"""``serve`` behind a name of its own: who may call it, what is asked of it, what it logs."""

import http.client
import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.serving import INITIALIZE, read_lines, serving

APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'
FASTMCP_APP = 'from fastmcp import FastMCP\nmcp = FastMCP("notes")\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "fast.py").write_text(FASTMCP_APP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Setup:
    def __init__(self, port: int) -> None:
        self.port = port
        self.said = ""

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: str = ""
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body or None, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def initialize(self, **headers: str) -> int:
        """The status of an ``initialize`` with these headers as well."""
        given = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        return self.ask("POST", "/mcp", given, json.dumps(INITIALIZE))[0]


@contextmanager
def served(here: Path, *arguments: str) -> Generator[Setup]:
    """It, until the block ends; then also what it said."""
    with serving(here, *arguments) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", read_lines(process, 5))
        assert found is not None
        setup = Setup(int(found[1]))
        yield setup
        process.terminate()
        assert process.stderr is not None
        setup.said = process.stderr.read()


def test_what_is_refused_for_its_host_or_origin_is_logged_with_what_allows_it(here: Path) -> None:
    """421 and 403 alone do not say what an operator has to do."""
    with served(here, "app.py") as setup:
        assert setup.initialize(Host="mcp.example.com") == 421
        assert setup.initialize(Origin="https://app.example.com") == 403

    host, origin = [line for line in setup.said.splitlines() if "refused a request" in line]
    assert "--allowed-host NAME" in host and "--allowed-origin URL" in origin


@pytest.mark.parametrize("app", ["app.py", "fast.py"])
def test_what_is_allowed_comes_in(here: Path, app: str) -> None:
    """Names with any port and with none, a name with a port with that one, and this machine's
    own names; pages from where they are allowed.
    """
    options = ("--allowed-host", "MCP.example.com", "--allowed-host", "other.example:81")
    with served(here, app, *options, "--allowed-origin", "https://app.example.com") as setup:
        for host, status in [
            ("mcp.example.com", 200),
            ("mcp.example.com:8443", 200),
            ("other.example:81", 200),
            ("other.example:82", 421),
            ("other.example", 421),
            (f"localhost:{setup.port}", 200),
            ("evil.example", 421),
        ]:
            assert setup.initialize(Host=host) == status, host
        assert setup.initialize(Host="mcp.example.com", Origin="https://app.example.com") == 200
        assert setup.initialize(Host="mcp.example.com", Origin="https://evil.example") == 403


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--allowed-host", "https://mcp.example.com"), "must be a name that clients call"),
        (("--allowed-host", "mcp.example.com/mcp"), "must be a name that clients call"),
        (("--allowed-host", "a:b"), "must be a name that clients call"),
        # What no client sends would be allowed in silence, and refuse everybody.
        (("--allowed-host", "*"), "must be a name that clients call"),
        (("--allowed-host", "*.example.com"), "must be a name that clients call"),
        (("--allowed-host", "b\u00fccher.example"), "must be a name that clients call"),
        (("--allowed-origin", "https://*.example.com"), "must be an origin"),
        (("--allowed-origin", "https://b\u00fccher.example"), "must be an origin"),
        (("--allowed-origin", "app.example.com"), "must be an origin"),
        (("--allowed-origin", "https://app.example.com/"), "must be an origin"),
        (
            ("--host", "0.0.0.0", "--allowed-origin", "https://a.example"),
            "needs --allowed-host NAME, too",
        ),
        (("--health", "healthz"), "must be a path"),
        (("--grace", "-1"), "must be a time, such as 30s"),
        (("--stdio", "--health", "/"), "--health: --stdio serves no HTTP"),
    ],
)
def test_what_makes_no_sense_is_refused(
    refused: Callable[..., str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused("serve", "app.py", *arguments)


def test_an_orchestrator_asks_whether_it_lives_and_may_be_sent_requests(here: Path) -> None:
    """By its address: no name of it is allowed, and no credential is there to be sent."""
    with served(here, "app.py", "--health", "/internal") as setup:
        whoever = {"Host": "10.0.0.7"}
        assert setup.ask("GET", "/internal/healthz", whoever) == (200, "alive\n")
        assert setup.ask("GET", "/internal/readyz", whoever) == (200, "ready\n")
        assert setup.ask("HEAD", "/internal/readyz", whoever) == (200, "")
        assert setup.ask("POST", "/internal/readyz", whoever)[0] == 405
        assert setup.ask("GET", "/readyz", whoever)[0] == 404
    with served(here, "app.py") as setup:
        assert setup.ask("GET", "/readyz")[0] == 404


def test_each_request_has_a_line_in_the_log_without_its_query(here: Path) -> None:
    """A query may hold a code of OAuth."""
    with served(here, "app.py", "--access-log", "--log-level", "warning") as setup:
        setup.initialize()
        setup.ask("GET", "/no%0Asuch?code=secret")

    lines = [line for line in setup.said.splitlines() if "mcp_sessions.access" in line]
    opened = r"127.0.0.1 POST /mcp 200 initialize session [0-9a-f]{12} \d+ ms"
    assert re.fullmatch(rf"\S+ INFO mcp_sessions.access: {opened}", lines[0])
    assert re.search(r" 127.0.0.1 GET /no%0Asuch 404 - session - \d+ ms$", lines[1])
    assert len(lines) == 2 and "secret" not in setup.said


@pytest.mark.parametrize(
    ("trusted", "shown"),
    [("127.0.0.1", "203.0.113.9"), ("10.0.0.0/8, 127.0.0.0/8", "203.0.113.9"), ("10.0.0.1", None)],
)
def test_the_client_is_what_a_trusted_proxy_says_and_no_other(
    here: Path, trusted: str, shown: str | None
) -> None:
    given = ("--access-log", "--forwarded-allow-ips", trusted)
    with served(here, "app.py", *given) as setup:
        setup.initialize(X_Forwarded_For="203.0.113.9")
    [line] = [each for each in setup.said.splitlines() if "mcp_sessions.access" in each]
    assert f"mcp_sessions.access: {shown or '127.0.0.1'} POST /mcp 200 initialize" in line


def test_draining_and_stopping_have_one_line_each(here: Path) -> None:
    with served(here, "app.py", "--drain-delay", "0.1", "--grace", "3") as setup:
        setup.initialize()
    said = [line for line in setup.said.splitlines() if "mcp_sessions.serve.uvicorn_server" in line]
    assert len(said) == 2, said
    assert "draining after SIG" in said[0] and said[0].endswith("calls may run for 3 s")
    assert said[1].endswith("stopped: every connection is closed")
