"""SIGHUP while ``serve --config FILE`` runs: what the file names now is served."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.support.children import CHILD, children_of
from tests.support.serving import INITIALIZE, serving

ACCEPT = {"Accept": "application/json, text/event-stream"}
COMMAND: dict[str, Any] = {"command": sys.executable, "args": ["-S", CHILD]}


def post(url: str, message: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """The answer to one request, on a connection of its own."""
    return httpx.post(url, json=message, headers=headers, timeout=30, trust_env=False)


class Client:
    """A session of the handshake era."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = dict(ACCEPT)
        answered = post(url, INITIALIZE, ACCEPT)
        self._headers["Mcp-Session-Id"] = answered.headers["mcp-session-id"]

    def call(self, tool: str) -> Any:
        params = {"name": tool}
        asked = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        answered = post(self._url, asked, self._headers)
        # As JSON, or on a stream if the server sent something before.
        lines = [line.removeprefix("data: ") for line in answered.text.splitlines()]
        [answer] = [json.loads(line) for line in lines if '"id":2' in line]
        return answer["result"]["content"][0]["text"]

    def marked(self) -> str | None:
        """The variable MARK of its process."""
        return json.loads(self.call("environ"))["env"].get("MARK")


class Server:
    def __init__(self, file: Path, process: "subprocess.Popen[str]") -> None:
        self.file = file
        self.process = process
        self.root = ""
        assert process.stderr is not None
        self._log = process.stderr

    def until(self, pattern: str) -> str:
        """The next line of the log with that in it."""
        for line in self._log:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"it ended, and did not say {pattern}")

    def write(self, servers: dict[str, Any] | str) -> None:
        text = servers if isinstance(servers, str) else json.dumps({"mcpServers": servers})
        self.file.write_text(text)

    def reload(self, servers: dict[str, Any] | str) -> str:
        """Write the file, and return what the log says of its reload."""
        self.write(servers)
        self.process.send_signal(signal.SIGHUP)
        return self.until("reloaded")

    def url(self, name: str) -> str:
        return f"{self.root}/{name}/mcp"

    def status(self, name: str) -> int:
        """The answer to a request to a server of the file."""
        return post(self.url(name), INITIALIZE, ACCEPT).status_code


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests: each leaves the servers ``one`` and ``two``."""
    here = tmp_path_factory.mktemp("reload")
    file = here / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"one": COMMAND, "two": COMMAND}}))
    given = ("--config", str(file), "--health", "/", "--lazy", "--grace", "1")
    with serving(here, *given, within=170) as process:
        server = Server(file, process)
        server.root = re.findall(r"(http://\S+)/one/mcp", server.until("at .*/one/mcp"))[0]
        server.until("store ")
        yield server


@pytest.fixture
def as_before(server: Server) -> Iterator[Server]:
    """The servers ``one`` and ``two`` before and after a test."""
    yield server
    server.reload({"one": COMMAND, "two": COMMAND})


def changed(mark: str, **more: Any) -> dict[str, Any]:
    return {**COMMAND, "env": {"MARK": mark}, **more}


def test_a_new_server_is_served_and_a_removed_one_is_not(as_before: Server) -> None:
    server = as_before
    stays = Client(server.url("one"))
    process = stays.call("pid")
    assert server.status("two") == 200 and server.status("three") == 404
    said = server.reload({"one": COMMAND, "three": changed("third")})
    assert "new /three/mcp; removed /two/mcp" in said
    assert Client(server.url("three")).marked() == "third"
    # Refused while it drains, and unknown then.
    while server.status("two") != 404:
        assert server.status("two") in (404, 503)
    assert stays.call("pid") == process, "the other session did not notice"
    ready = httpx.get(f"{server.root}/readyz", timeout=30, trust_env=False)
    assert ready.status_code == 200


def test_a_changed_server_has_new_processes_for_new_sessions(as_before: Server) -> None:
    server = as_before
    before = Client(server.url("one"))
    process = before.call("pid")
    said = server.reload({"one": changed("new"), "two": COMMAND})
    assert said.rstrip().endswith("reloaded: changed /one/mcp")
    assert Client(server.url("one")).marked() == "new"
    assert before.call("pid") == process and before.marked() is None


def test_a_shared_process_is_replaced_and_its_sessions_continue(as_before: Server) -> None:
    """One that becomes shared is drained, and served anew."""
    server = as_before
    server.reload({"one": COMMAND, "two": changed("first", per="shared")})
    while server.status("two") != 200:
        assert server.process.poll() is None
    client = Client(server.url("two"))
    assert client.marked() == "first"
    server.reload({"one": COMMAND, "two": changed("second", per="shared")})
    assert client.marked() == "second"


def test_a_wrong_file_changes_nothing_and_its_line_is_named(server: Server) -> None:
    client = Client(server.url("one"))
    process = client.call("pid")
    said = server.reload('{"mcpServers": {\n  "one": {"command": "no-such-command"},\n "two": 1}}')
    assert "not reloaded, everything is served as before: " in said
    assert "servers.json, line 2: one: command not found: no-such-command" in said
    said = server.reload('{"mcpServers": {\n  "one": {"command" "true"}}}')
    assert "servers.json, line 2, column" in said
    server.file.unlink()
    server.process.send_signal(signal.SIGHUP)
    assert "no such file or directory" in server.until("reloaded")
    assert client.call("pid") == process and server.status("two") == 200
    server.reload({"one": COMMAND, "two": COMMAND})


def test_a_hundred_signals_in_a_second_while_processes_start(as_before: Server) -> None:
    server = as_before
    stays = Client(server.url("two"))
    process = stays.call("pid")
    new: list[Client] = []
    for number in range(100):
        server.write({"one": changed(str(number)), "two": COMMAND})
        server.process.send_signal(signal.SIGHUP)
        if number % 40 == 0:
            new.append(Client(server.url("one")))
    assert len({each.call("pid") for each in new}) == 3, "each that began has a process"
    # The last one is read, whatever came together before.
    while Client(server.url("one")).marked() != "99":
        assert server.process.poll() is None
    assert stays.call("pid") == process
    assert len(children_of(server.process.pid)) < 60, "what is not needed has ended"


def test_a_file_that_changes_is_read_by_itself_and_a_certificate_with_it(tmp_path: Path) -> None:
    authority = trustme.CA()
    file, own = tmp_path / "servers.json", tmp_path / "own.pem"
    own.touch(0o600)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(own))
    file.write_text(json.dumps({"mcpServers": {"one": COMMAND}}))
    given = ("--config", str(file), "--lazy", "--ssl-certfile", str(own), "--reload-config")
    with serving(tmp_path, *given, within=90) as process:
        server = Server(file, process)
        server.until("at .*https://")
        server.write({"one": COMMAND, "two": COMMAND})
        assert "new /two/mcp" in server.until("reloaded: ")
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(own))
        assert "reloaded: the certificate" in server.until("reloaded: |not reloaded")
        own.write_text("nothing")
        said = server.until("not reloaded")
        assert "the certificate was not reloaded, the one before is used: " in said
        assert "there is no certificate in PEM format in it" in said


def test_a_certificate_that_expired_keeps_no_server_from_being_reloaded(tmp_path: Path) -> None:
    """Nobody renewed it, and a server must be removed now."""
    authority = trustme.CA()
    file, own = tmp_path / "servers.json", tmp_path / "own.pem"
    own.touch(0o600)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(own))
    file.write_text(json.dumps({"mcpServers": {"one": COMMAND}}))
    given = ("--config", str(file), "--lazy", "--ssl-certfile", str(own))
    with serving(tmp_path, *given, within=90) as process:
        server = Server(file, process)
        server.until("at .*https://")
        now = datetime.now(UTC)
        expired = authority.issue_cert(
            "127.0.0.1", not_before=now - timedelta(days=9), not_after=now - timedelta(days=2)
        )
        expired.private_key_and_cert_chain_pem.write_to_path(str(own))
        server.write({"one": COMMAND, "two": COMMAND})
        process.send_signal(signal.SIGHUP)
        said = server.until("not reloaded, the one before is used")
        assert "it expired on" in said
        assert "reloaded: new /two/mcp" in server.until("reloaded: ")


def test_a_signal_while_the_server_starts_does_not_end_it(tmp_path: Path) -> None:
    """A tool that manages files may send one at any time. The start waits for its file here."""
    file = tmp_path / "servers.json"
    os.mkfifo(file)
    text = json.dumps({"mcpServers": {"one": COMMAND}})
    with serving(tmp_path, "--config", str(file), "--lazy", within=90) as process:
        server = Server(file, process)
        with open(file, "w") as writer:
            # It has been opened by the server, which waits for what is in it.
            process.send_signal(signal.SIGHUP)
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(file)
            writer.write(text)
        assert "nothing has changed" in server.until("reloaded: ")
