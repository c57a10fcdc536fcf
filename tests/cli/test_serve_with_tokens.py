"""``serve --auth-issuer``: tokens of an authorization server, asked over HTTP."""

import base64
import contextlib
import http.client
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from mcp_sessions.cli.main import main
from tests.support.children import CHILD
from tests.support.duplex import websocket
from tests.support.issuers import Login, jwk
from tests.support.serving import INITIALIZE, read_lines, serving
from tests.support.world import Clock

COMMAND = ("--lazy", "--", sys.executable, "-S", CHILD)

AUDIENCE = "https://mcp.example/mcp"
BASIC = f"Basic {base64.b64encode(b'layer:secret').decode()}"


class Setup:
    """A server that runs, behind an authorization server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(
        self, method: str, path: str, token: str | None = None, body: Any = None
    ) -> tuple[int, dict[str, str], Any]:
        fields = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            **({"Authorization": f"Bearer {token}"} if token is not None else {}),
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, fields)
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, headers, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def status_of_raw(self, method: str, token: str) -> int:
        """The status of an answer that may come before the whole request is sent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            head = f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            with contextlib.suppress(ConnectionError):
                connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
            return int(connection.recv(64).split()[1])

    def initialize(self, token: str | None, path: str = "/mcp") -> int:
        return self.ask("POST", path, token, INITIALIZE)[0]


@contextmanager
def issuing() -> Generator[str]:
    """The URL of an authorization server, in a thread, until the block ends."""

    class Documents(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {
                "/.well-known/oauth-authorization-server": {
                    "issuer": url,
                    "jwks_uri": f"{url}/keys",
                },
                "/keys": {"keys": [jwk("P-256", "one")]},
            }.get(self.path)
            body = json.dumps(found).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            """Say about a token whether it is good, to the layer only."""
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            said = {"iss": url, "aud": AUDIENCE, "sub": "alice", "scope": "use"}
            is_good = form["token"] == ["opaque"]
            body = json.dumps({"active": True, **said} if is_good else {"active": False}).encode()
            self.send_response(200 if self.headers["Authorization"] == BASIC else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Documents) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield url
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(here: Path, issuer: str, audience: str, *arguments: str) -> Generator[Setup]:
    """A server on the network's address that wants tokens of the issuer."""
    asked = ("--auth-issuer", issuer, "--auth-audience", audience, "--auth-scope", "use")
    with serving(here, "--host", "0.0.0.0", *asked, *arguments) as process:
        found = re.search(r"http://0\.0\.0\.0:(\d+)/", read_lines(process, 5))
        assert found is not None
        yield Setup(int(found[1]))


def token(issuer: str, audience: str, **claims: Any) -> str:
    return Login(Clock(time.time())).token("P-256", iss=issuer, aud=audience, **claims)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by way of a proxy that the environment may name."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.chdir(tmp_path)


def test_a_client_is_notified_where_tokens_are_and_comes_in_with_one(tmp_path: Path) -> None:
    """RFC 9728, 5: the answer 401 leads to the metadata, and that to the authorization server."""
    audience = "https://mcp.example/mcp"
    with issuing() as issuer, served(tmp_path, issuer, audience, *COMMAND) as setup:
        status, headers, _ = setup.ask("POST", "/mcp", None, INITIALIZE)
        assert status == 401
        metadata = re.search(r'resource_metadata="([^"]+)"', headers["www-authenticate"])
        assert metadata is not None
        assert metadata[1] == "https://mcp.example/.well-known/oauth-protected-resource/mcp"
        _, _, said = setup.ask("GET", "/.well-known/oauth-protected-resource/mcp")
        assert (said["resource"], said["authorization_servers"]) == (audience, [issuer])
        assert said["scopes_supported"] == ["use"]
        assert setup.initialize(token(issuer, audience)) == 200
        assert setup.initialize(token(issuer, "https://mcp.example/other")) == 401
        assert setup.initialize(token("https://evil.example", audience)) == 401
        assert setup.initialize(token(issuer, audience, exp=int(time.time()) - 300)) == 401
        assert setup.initialize(token(issuer, audience, scope="other")) == 403


def test_an_issuer_that_is_away_is_503(tmp_path: Path) -> None:
    with issuing() as issuer:
        pass
    audience = "https://mcp.example/mcp"
    with served(tmp_path, issuer, audience, *COMMAND) as setup:
        status, headers, _ = setup.ask("POST", "/mcp", token(issuer, audience), INITIALIZE)
        assert (status, headers["retry-after"]) == (503, "5")
        assert setup.initialize("opaque") == 401


@pytest.fixture
def as_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that hold the credential for the introspection endpoint."""
    monkeypatch.setenv("MCP_SESSIONS_INTROSPECT_CLIENT_ID", "layer")
    monkeypatch.setenv("MCP_SESSIONS_INTROSPECT_CLIENT_SECRET", "secret")


def test_the_authorization_server_is_asked_about_an_opaque_token(
    tmp_path: Path, as_layer: None
) -> None:
    """RFC 7662. If it is away, a token that is not known is answered 503."""
    with issuing() as issuer:
        asked = ("--auth-introspect", f"{issuer}/introspect", *COMMAND)
        with served(tmp_path, issuer, AUDIENCE, *asked) as setup:
            status, headers, _ = setup.ask("POST", "/mcp", "bad", INITIALIZE)
            assert status == 401
            assert "resource_metadata" in headers["www-authenticate"]
            assert setup.initialize("opaque") == 200
        with served(tmp_path, issuer, "https://mcp.example/other", *asked) as setup:
            assert setup.initialize("opaque") == 401
    with served(tmp_path, issuer, AUDIENCE, *asked) as setup:
        status, headers, _ = setup.ask("POST", "/mcp", "opaque", INITIALIZE)
        assert (status, headers["retry-after"]) == (503, "5")


def test_check_asks_about_a_token(
    capsys: pytest.CaptureFixture[str], as_layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--check", "--host", "0.0.0.0", "--port", "0", "--auth-audience", AUDIENCE)
    with issuing() as issuer:
        asked = (*given, "--auth-issuer", issuer, "--auth-introspect", f"{issuer}/introspect")
        assert main(["serve", *asked, *COMMAND]) == 0
        assert f"issuer      {issuer}/introspect answers about tokens" in capsys.readouterr().out
        monkeypatch.setenv("MCP_SESSIONS_INTROSPECT_CLIENT_SECRET", "wrong")
        assert main(["serve", *asked, *COMMAND]) == 2
        said = capsys.readouterr().out
        assert f"issuer      WRONG: {issuer}/introspect answers 401" in said
        assert "ignored" not in said


def test_without_its_credential_it_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SESSIONS_INTROSPECT_CLIENT_ID", "layer")
    asked = ("--auth-issuer", "https://a", "--auth-audience", AUDIENCE)
    assert main(["serve", *asked, "--auth-introspect", "https://a/ask", *COMMAND]) == 2
    said = capsys.readouterr().err
    assert "--auth-introspect: set MCP_SESSIONS_INTROSPECT_CLIENT_SECRET: " in said


@pytest.mark.parametrize("length", [8_192, 17_000, 60_000, 1_000_000])
async def test_a_long_token_is_refused_by_every_way_in_and_the_server_continues(
    tmp_path: Path, length: int
) -> None:
    """O: a token of 1 MB. It is neither read nor kept."""
    audience = "https://mcp.example/mcp"
    long = f"{'a' * length}.b.c"
    encoded = base64.urlsafe_b64encode(long.encode()).decode().rstrip("=")
    with issuing() as issuer, served(tmp_path, issuer, audience, *COMMAND) as setup:
        url = f"ws://127.0.0.1:{setup.port}/mcp"
        for method in ("POST", "GET", "DELETE"):
            status = setup.status_of_raw(method, long)
            assert status == (401 if length < 65_000 else 431)
        for fields, offered in (
            ({"Authorization": f"Bearer {long}"}, ()),
            ({}, (f"mcp.bearer.{encoded}",)),
        ):
            # The server may close the connection while the client still writes.
            closed = (OSError, InvalidMessage, ConnectionClosed)
            with pytest.raises((InvalidStatus, *closed)) as refused:
                async with websocket(url, headers=fields, subprotocols=("mcp", *offered)):
                    pass
            if isinstance(refused.value, InvalidStatus):
                assert refused.value.response.status_code in (401, 431)
        assert setup.initialize(token(issuer, audience)) == 200


def test_a_token_for_one_server_of_a_file_is_not_good_at_another(tmp_path: Path) -> None:
    server = {"command": sys.executable, "args": ["-S", CHILD]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"one": server, "two": server}}))
    audience = "https://mcp.example/{server}/mcp"
    arguments = ("--lazy", "--config", "mcp.json")
    with issuing() as issuer, served(tmp_path, issuer, audience, *arguments) as setup:
        good = token(issuer, "https://mcp.example/one/mcp")
        assert setup.initialize(good, "/one/mcp") == 200
        status, headers, _ = setup.ask("POST", "/two/mcp", good, INITIALIZE)
        assert status == 401
        path = "/.well-known/oauth-protected-resource/two/mcp"
        assert f"https://mcp.example{path}" in headers["www-authenticate"]
        status, _, said = setup.ask("GET", path)
        assert (status, said["resource"]) == (200, "https://mcp.example/two/mcp")


def test_check_reaches_the_issuer(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--check", "--host", "0.0.0.0", "--port", "0", "--auth-audience", "https://a/mcp")
    with issuing() as issuer:
        assert main(["serve", *given, "--auth-issuer", issuer, *COMMAND]) == 0
        said = capsys.readouterr().out
        assert f"access      clients with a token of {issuer}\n" in said
        assert f"issuer      {issuer}: keys that can be used: 1\n" in said
    assert main(["serve", *given, "--auth-issuer", issuer, *COMMAND]) == 2
    assert "issuer      WRONG: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--auth-issuer", "https://a"), "--auth-issuer and --auth-audience go together"),
        (("--auth-audience", "https://a"), "--auth-issuer and --auth-audience go together"),
        (
            ("--auth-issuer", "http://a", "--auth-audience", "https://a"),
            "--auth-issuer: must be an https URL",
        ),
        (
            ("--auth-issuer", "https://a", "--auth-audience", "api://a"),
            "--auth-audience: must be an https URL",
        ),
        (
            ("--auth-issuer", "https://a", "--auth-audience", "https://a/{server}"),
            "{server} is only for --config",
        ),
        (("--auth-introspect", "https://a/ask"), "--auth-introspect needs --auth-issuer"),
        (
            (
                *("--auth-issuer", "https://a", "--auth-audience", "https://a"),
                *("--auth-introspect", "http://a/ask"),
            ),
            "--auth-introspect: must be an https URL",
        ),
        (
            ("--auth-issuer", "https://a", "--auth-audience", "https://a", "--no-auth"),
            "--auth-issuer asks for a credential; leave out one of them",
        ),
        (
            ("--stdio", "--auth-issuer", "https://a", "--auth-audience", "https://a"),
            "--auth-issuer: --stdio serves no HTTP",
        ),
    ],
)
def test_weak_or_half_settings_are_refused(
    refused: Callable[..., str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused("serve", *arguments, *COMMAND)
