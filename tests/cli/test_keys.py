"""``mcp-sessions keys``, and a server that asks for them."""

import http.client
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcp_sessions.cli.main import main
from tests.support.children import CHILD
from tests.support.duplex import websocket
from tests.support.serving import INITIALIZE, read_lines, serving

COMMAND = ("--lazy", "--", sys.executable, "-S", CHILD)
APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'
FILE = "keys.json"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keys(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    """Run ``keys``, and return what it printed and what it said."""
    assert main(["keys", *arguments]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def add(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    return keys(capsys, "add", name, "--file", FILE, *arguments)[0].removesuffix("\n")


def test_a_key_is_printed_once_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = keys(capsys, "add", "ci", "--file", FILE)
    assert re.fullmatch(r"mcp_sessions_key_[0-9a-f]{8}_[0-9a-f]{64}\n", out)
    assert "it cannot be shown again" in err and out.strip() not in err
    assert os.stat(FILE).st_mode & 0o777 == 0o600
    listed, _ = keys(capsys, "list", "--file", FILE)
    assert out.strip() not in listed and out.strip()[26:] not in Path(FILE).read_text()


def test_keys_are_listed_with_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    add(capsys, "ci", "--scope", "use", "--scope", "more", "--expires", "90d")
    add(capsys, "bob")
    listed, _ = keys(capsys, "list", "--file", FILE)
    head, bob, ci = listed.splitlines()
    assert head.split() == ["ID", "NAME", "SCOPES", "CREATED", "EXPIRES"]
    assert re.fullmatch(r"[0-9a-f]{8}  bob   -         \S+ \S+  never", bob)
    ends = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 90 * 86_400))
    assert re.fullmatch(rf"[0-9a-f]{{8}}  ci    use more  \S+ \S+  {ends} \S+", ci)


def test_a_name_may_have_two_keys_and_one_of_them_is_revoked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that a key is replaced without a gap."""
    first = add(capsys, "ci")
    _, said = keys(capsys, "add", "ci", "--file", FILE)
    assert "ci has 2 keys now; they own the same sessions" in said
    out, _ = keys(capsys, "revoke", "ci", "--id", first[17:25], "--file", FILE)
    assert out == f"{first[17:25]} ci revoked\n"
    assert first[17:25] not in keys(capsys, "list", "--file", FILE)[0]
    add(capsys, "other")
    assert keys(capsys, "revoke", "ci", "--file", FILE)[0].count("revoked") == 1
    assert " other " in keys(capsys, "list", "--file", FILE)[0]
    keys(capsys, "revoke", "--all", "--file", FILE)
    assert keys(capsys, "list", "--file", FILE)[0].count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list",), "which file? Give --file FILE, or set MCP_SESSIONS_API_KEYS"),
        (("list", "--file", "none"), "none: no such file"),
        (("list", "--file", "."), "this is a folder"),
        (("revoke", "bob", "--file", FILE), "has no such key"),
        (("revoke", "ci", "--id", "00000000", "--file", FILE), "has no such key"),
        (("revoke", "--file", FILE), "revoke NAME"),
        (("revoke", "ci", "--all", "--file", FILE), "revoke NAME"),
        (("add", " ", "--file", FILE), "printable ASCII"),
        (("add", "ci", "--scope", "a b", "--file", FILE), "scopes cannot have"),
        (("add", "ci", "--file", "no/such/folder/keys"), "there is no folder"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    add(capsys, "ci")
    out, err = keys(capsys, *arguments, status=2)
    assert out == "" and err.count("\n") == 1 and said in err


def test_the_variable_of_serve_names_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SESSIONS_API_KEYS", FILE)
    keys(capsys, "add", "ci")
    assert " ci " in keys(capsys, "list")[0]


# --- a server that asks for them ----------------------------------------------------------


def status_of(port: int, key: str | None, path: str = "/mcp") -> int:
    fields = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **({"Authorization": f"Bearer {key}"} if key is not None else {}),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, json.dumps(INITIALIZE), fields)
        return connection.getresponse().status
    finally:
        connection.close()


def ports(said: str) -> Iterator[int]:
    return map(int, re.findall(r"http://0\.0\.0\.0:(\d+)/", said))


@pytest.mark.parametrize("target", [COMMAND, ("app.py",)], ids=["command", "server"])
def test_a_server_for_the_network_asks_for_a_key(
    here: Path, capsys: pytest.CaptureFixture[str], target: tuple[str, ...]
) -> None:
    """The key is good at once; a second after it was revoked it is not."""
    (here / "app.py").write_text(APP)
    first = add(capsys, "first")
    weak = add(capsys, "weak", "--scope", "other")
    options = ("--host", "0.0.0.0", "--api-keys", FILE)
    with serving(here, *options, *target) as process:
        said = read_lines(process, 5)
        assert "can call its tools" not in said
        [port] = ports(said)
        assert status_of(port, None) == status_of(port, "wrong") == 401
        assert status_of(port, first) == status_of(port, weak) == 200
        second = add(capsys, "second", "--scope", "use")
        keys(capsys, "revoke", "first", "--file", FILE)
        until = time.monotonic() + 20
        while status_of(port, first) == 200 and time.monotonic() < until:
            # Each look is a line of the log. Lines that a full pipe does not take are left out.
            threading.Event().wait(0.1)
        assert (status_of(port, first), status_of(port, second)) == (401, 200)
        process.terminate()
        assert process.stderr is not None
        rest = process.stderr.read()
    assert "the file of API keys was read: it has 2" in rest
    assert not any(key[26:] in said + rest for key in (first, second, weak))


def test_each_server_of_a_file_asks_for_a_key_with_the_scopes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = {"command": sys.executable, "args": ["-S", CHILD]}
    (here / "mcp.json").write_text(json.dumps({"mcpServers": {"one": server, "two": server}}))
    weak, strong = add(capsys, "weak"), add(capsys, "strong", "--scope", "use")
    options = ("--host", "0.0.0.0", "--api-keys", FILE, "--auth-scope", "use", "--lazy")
    with serving(here, *options, "--config", "mcp.json") as process:
        [port, _] = ports(read_lines(process, 6))
        for path in ("/one/mcp", "/two/mcp"):
            found = [status_of(port, key, path) for key in (None, weak, strong)]
            assert found == [401, 403, 200]


async def test_a_websocket_needs_a_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = add(capsys, "ci")
    with serving(here, "--host", "0.0.0.0", "--api-keys", FILE, *COMMAND) as process:
        [port] = ports(read_lines(process, 5))
        url = f"ws://127.0.0.1:{port}/mcp"
        async with websocket(url, headers={"Authorization": f"Bearer {key}"}) as peer:
            await peer.initialize()
        with pytest.raises(Exception, match="401"):
            async with websocket(url):
                pass
        process.terminate()
        assert process.stderr is not None
        assert "ERROR" not in process.stderr.read(), "a refusal is no error of the server"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--api-keys", "none", *COMMAND), "make it with mcp-sessions keys add NAME --file none"),
        (("--api-keys", ".", *COMMAND), "--api-keys .: this is a folder"),
        (("--api-keys", FILE, "--no-auth", *COMMAND), "leave out one of them"),
        (("--auth-scope", "use", *COMMAND), "--auth-scope needs --api-keys"),
        (("--stdio", "--api-keys", FILE, *COMMAND), "--stdio serves no HTTP"),
        (("--api-keys", FILE, "guarded.py"), "authentication of its own"),
    ],
)
def test_what_would_lock_nothing_is_refused(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    refused: Callable[..., str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    (here / "layer.py").write_text(
        APP + "from mcp_sessions import SessionLayer\nlayer = SessionLayer(mcp)\n"
    )
    (here / "guarded.py").write_text(
        "from fastmcp import FastMCP\n"
        "from fastmcp.server.auth.providers.jwt import StaticTokenVerifier\n"
        "mcp = FastMCP('notes', auth=StaticTokenVerifier({}))\n"
    )
    add(capsys, "ci")
    port = () if "--stdio" in arguments else ("--port", "0")
    assert said in refused("serve", *port, *arguments)


def test_check_says_that_clients_need_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    add(capsys, "ci")
    given = ("--host", "0.0.0.0", "--port", "0", "--api-keys", FILE)
    assert main(["serve", "--check", *given, *COMMAND]) == 0
    assert f"access      clients with a key of {FILE}\n" in capsys.readouterr().out
    os.chmod(FILE, 0o644)
    assert main(["serve", "--check", *given, *COMMAND]) == 2
    assert "other users may read or change the file" in capsys.readouterr().out
