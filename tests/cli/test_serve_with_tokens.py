"""``serve --auth-issuer``: tokens of an authorization server, asked over HTTP."""

import http.client
import json
import re
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli import logs
from mcp_sessions.cli.main import main
from tests.support.children import CHILD
from tests.support.issuers import Login, jwk
from tests.support.serving import INITIALIZE, read_lines, serving
from tests.support.world import Clock

COMMAND = ("--lazy", "--", sys.executable, "-S", CHILD)


class Place:
    """A server that runs, behind an authorization server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(
        self, method: str, path: str, token: str | None = None, body: Any = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of an answer."""
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

    def initialize(self, token: str | None, path: str = "/mcp") -> int:
        """The status of an ``initialize``."""
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
def served(here: Path, issuer: str, audience: str, *arguments: str) -> Generator[Place]:
    """A server on the network's address that wants tokens of the issuer."""
    asked = ("--auth-issuer", issuer, "--auth-audience", audience, "--auth-scope", "use")
    with serving(here, "--host", "0.0.0.0", *asked, *arguments) as process:
        found = re.search(r"http://0\.0\.0\.0:(\d+)/", read_lines(process, 5))
        assert found is not None
        yield Place(int(found[1]))


def token(issuer: str, audience: str, **claims: Any) -> str:
    """A token of the issuer."""
    return Login(Clock(time.time())).token("P-256", iss=issuer, aud=audience, **claims)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by way of a proxy that the environment may name."""

    def nothing(**_: object) -> None:
        """The command configures the logs of its process; this process is pytest's."""

    monkeypatch.setattr(logs, "configure", nothing)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.chdir(tmp_path)


def test_a_client_is_told_where_tokens_are_and_comes_in_with_one(tmp_path: Path) -> None:
    """RFC 9728, 5: the answer 401 leads to the metadata, and that to the authorization server."""
    audience = "https://mcp.example/mcp"
    with issuing() as issuer, served(tmp_path, issuer, audience, *COMMAND) as place:
        status, headers, _ = place.ask("POST", "/mcp", None, INITIALIZE)
        assert status == 401
        metadata = re.search(r'resource_metadata="([^"]+)"', headers["www-authenticate"])
        assert metadata is not None
        assert metadata[1] == "https://mcp.example/.well-known/oauth-protected-resource/mcp"
        _, _, said = place.ask("GET", "/.well-known/oauth-protected-resource/mcp")
        assert (said["resource"], said["authorization_servers"]) == (audience, [issuer])
        assert said["scopes_supported"] == ["use"]
        assert place.initialize(token(issuer, audience)) == 200
        assert place.initialize(token(issuer, "https://mcp.example/other")) == 401
        assert place.initialize(token("https://evil.example", audience)) == 401
        assert place.initialize(token(issuer, audience, exp=int(time.time()) - 300)) == 401
        assert place.initialize(token(issuer, audience, scope="other")) == 403


def test_an_issuer_that_is_away_is_503(tmp_path: Path) -> None:
    with issuing() as issuer:
        pass
    audience = "https://mcp.example/mcp"
    with served(tmp_path, issuer, audience, *COMMAND) as place:
        status, headers, _ = place.ask("POST", "/mcp", token(issuer, audience), INITIALIZE)
        assert (status, headers["retry-after"]) == (503, "5")
        assert place.initialize("opaque") == 401


def test_a_token_for_one_server_of_a_file_is_not_good_at_another(tmp_path: Path) -> None:
    server = {"command": sys.executable, "args": ["-S", CHILD]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"one": server, "two": server}}))
    audience = "https://mcp.example/{server}/mcp"
    arguments = ("--lazy", "--config", "mcp.json")
    with issuing() as issuer, served(tmp_path, issuer, audience, *arguments) as place:
        good = token(issuer, "https://mcp.example/one/mcp")
        assert place.initialize(good, "/one/mcp") == 200
        status, headers, _ = place.ask("POST", "/two/mcp", good, INITIALIZE)
        assert status == 401
        path = "/.well-known/oauth-protected-resource/two/mcp"
        assert f"https://mcp.example{path}" in headers["www-authenticate"]
        status, _, said = place.ask("GET", path)
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
            "{server} goes with --config",
        ),
        (
            ("--auth-issuer", "https://a", "--auth-audience", "https://a", "--no-auth"),
            "--auth-issuer asks for a credential; leave out one of them",
        ),
        (
            ("--stdio", "--auth-issuer", "https://a", "--auth-audience", "https://a"),
            "--auth-issuer: for HTTP",
        ),
    ],
)
def test_weak_or_half_settings_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["serve", *arguments, *COMMAND]) == 2
    assert said in capsys.readouterr().err
