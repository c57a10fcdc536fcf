"""``mcp-sessions serve --check``: what a start would do and what is wrong with it."""

import asyncio
import http.client
import json
import re
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme

from mcp_sessions.cli.main import main
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.sqlite import SQLiteStore, schema
from tests.stores.every_store import encrypted_store_over
from tests.support.children import CHILD
from tests.support.postgres_server import postgres_server, shared_postgres
from tests.support.postgres_server import schema as schema_name
from tests.support.redis_server import redis_server, shared_redis
from tests.support.serving import INITIALIZE, read_lines, serving

APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'
FASTMCP_APP = 'from fastmcp import FastMCP\nmcp = FastMCP("notes")\n'
COMMAND = ("--", sys.executable, "-S", CHILD)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """The exit status, and what stands behind each name; without one: behind ``''``."""
    status = main(["serve", "--check", *arguments])
    lines: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        name, text = line[:12].rstrip(), line[12:]
        lines[name] = f"{lines[name]}\n{text}" if name in lines else text
    return status, lines


def test_what_a_start_would_do_is_said_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SESSIONS_IDLE_TIMEOUT", "77")
    monkeypatch.setenv("MCP_SESSIONS_NOTHING", "1")
    noted = tmp_path / "calls"
    status, lines = checked(
        capsys, "--port", "0", "--store", "sqlite:///a.db", "--env", f"CALLS={noted}", *COMMAND
    )
    assert (status, lines["result"]) == (0, "it can start")
    assert lines["serves"] == sys.executable and "starts: it is child 1" in lines["server"]
    assert lines["store"] == "sqlite:///a.db: a new file"
    assert lines["engine"] == f"SQLite {sqlite3.sqlite_version}, durability normal"
    assert "?durability=full" in lines["loses"]
    assert lines["address"] == "127.0.0.1, any free port: free"
    assert lines["environment"] == "MCP_SESSIONS_IDLE_TIMEOUT"
    assert lines["ignored"] == "MCP_SESSIONS_NOTHING: sets no option"
    said = "an unused session sleeps after 77s, and expires after 30d"
    assert lines["limits"] == said
    assert lines["origins"] == "pages of this machine" and lines["hosts"] == "loopback names"
    assert noted.read_text() == "started\n", "once"
    assert list(tmp_path.iterdir()) == [noted]


def test_one_problem_hides_no_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("something else, as long as the header of a file\n" * 9)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = ("--port", port, "--store", "sqlite:///a.db", "--audit", "/no/such/audit")
        status, lines = checked(capsys, *given, *COMMAND, "dies", "key")
    assert status == 2 and lines["result"].startswith("4 wrong")
    assert "the port is in use" in lines["address"]
    assert "a.db is not a SQLite file" in lines["store"]
    assert "there is no folder /no/such" in lines["audit"]
    assert "does not start: it ended with status 1: the key is missing" in lines["server"]
    for name in ("address", "store", "audit", "server"):
        assert lines[name].startswith("WRONG: ")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", "it ended with status 0: an MCP server runs until its input ends"),
        ("cat", "it repeats its input: it is no MCP server"),
    ],
)
def test_a_command_that_is_no_mcp_server_is_called_so(
    command: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status alone, and an error of our own that came back, said nothing."""
    status, lines = checked(capsys, "--port", "0", "--", command)
    assert status == 2
    assert lines["server"].endswith(f"does not start: {why}")


def test_each_server_of_a_file_is_started_and_each_url_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good: dict[str, Any] = {"command": sys.executable, "args": ["-S", CHILD, "secret"]}
    dies = {**good, "args": ["-S", CHILD, "dies", "key"]}
    url = {"url": "http://127.0.0.1:1/mcp?key=secret"}
    (tmp_path / "mcp.json").write_text(
        json.dumps({"mcpServers": {"good": good, "dies": dies, "url": url}})
    )
    status, lines = checked(capsys, "--port", "0", "--config", "mcp.json")
    assert (status, lines["result"][:7]) == (2, "2 wrong")
    assert lines["path"] == "/good/mcp\n/dies/mcp\n/url/mcp"
    first, second, third = lines["server"].splitlines()
    assert "it is child 1" in first and "the key is missing" in second
    assert "http://127.0.0.1:1/mcp cannot be used" in third and "connection refused" in third
    assert "secret" not in str(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")
def test_the_memory_of_one_process_is_measured_and_that_of_all_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    takes = ("-c", f"held = b'x' * {200 * 2**20}; exec(open({CHILD!r}).read())")
    _, lines = checked(
        capsys, "--port", "0", "--max-children", "3", "--", sys.executable, "-S", *takes
    )
    found = re.fullmatch(r"after its start one takes (\d+) MiB: (\d+) MiB for 3", lines["memory"])
    assert found is not None, lines
    one, three = int(found[1]), int(found[2])
    assert 200 <= one <= 260 and abs(three - 3 * one) <= 3


def test_the_memory_of_all_servers_of_a_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry: dict[str, Any] = {"command": sys.executable, "args": ["-S", CHILD], "maxChildren": 4}
    servers = {"a": entry, "b": {**entry, "per": "shared"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    _, lines = checked(capsys, "--port", "0", "--config", "mcp.json")
    each, shared, total = lines["memory"].splitlines()
    assert each.endswith(" for 4") and shared.endswith(" for 1")
    numbers = [int(re.findall(r"(\d+) MiB", line)[-1]) for line in (each, shared, total)]
    assert abs(numbers[0] + numbers[1] - numbers[2]) <= 2


def test_a_file_that_is_served_from_is_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, "--lazy", "--store", "sqlite:///a.db", *COMMAND) as process:
        read_lines(process, 5)
        status, lines = checked(capsys, "--port", "0", "--store", "sqlite:///a.db", *COMMAND)
        assert status == 2
        assert lines["store"].startswith(f"WRONG: a.db is in use by process {process.pid}")


def test_a_file_of_an_older_version_is_not_migrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.db"
    connection = schema.open_file(file, "normal")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    before = file.read_bytes()
    status, lines = checked(capsys, "--port", "0", "--store", "sqlite:///a.db", *COMMAND)
    assert status == 0 and "a start migrates it from version 1" in lines["store"]
    assert file.read_bytes() == before


@pytest.mark.redis
def test_a_redis_is_reached_and_asked_whether_it_takes_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = shared_redis().url
    status, lines = checked(capsys, "--port", "0", "--store", url, *COMMAND)
    assert (status, lines["store"]) == (0, f"{url}: reached, and takes writes")
    with redis_server() as other:
        other.ask("CONFIG SET requirepass right")
        wrong = other.url.replace("redis://", "redis://:wrong@")
        status, lines = checked(capsys, "--port", "0", "--store", wrong, *COMMAND)
    assert status == 2 and lines["store"].startswith("WRONG: ") and "wrong@" not in lines["store"]


def facts_of(capsys: pytest.CaptureFixture[str], store: str) -> tuple[str, list[str]]:
    """What is said of a store's engine, and what its settings lose. Its round trip is said, too."""
    status, lines = checked(capsys, "--port", "0", "--store", store, *COMMAND)
    assert status == 0, lines
    assert re.fullmatch(r"\d+\.\d\d ms", lines["round trip"])
    assert re.match(r"(Redis|Valkey|Postgres|SQLite) \d", lines["engine"])
    return lines["engine"], lines.get("loses", "").splitlines()


def test_a_file_with_full_durability_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema.open_file(tmp_path / "a.db", "full").close()
    engine, loses = facts_of(capsys, "sqlite:///a.db?durability=full")
    assert engine == f"SQLite {sqlite3.sqlite_version}, durability full" and loses == []


@pytest.mark.redis
def test_what_the_settings_of_a_redis_lose_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server() as server:
        server.ask("CONFIG SET appendonly yes")
        server.ask("CONFIG SET appendfsync always")
        server.ask("CONFIG SET maxmemory-policy noeviction")
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
        assert engine.endswith(", appendonly yes, appendfsync always") and loses == []
        server.ask("CONFIG SET appendfsync everysec")
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
        assert engine.endswith(", appendonly yes, appendfsync everysec")
        assert loses == ["the last second before a crash: appendfsync always keeps it"]
        server.ask("CONFIG SET appendfsync no")
        server.ask("CONFIG SET maxmemory-policy allkeys-lru")
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
        assert engine.endswith("appendfsync no") and len(loses) == 2
        assert "appendfsync" in loses[1] and "noeviction" in loses[0]
        server.ask("CONFIG SET appendonly no")
        server.ask("ACL SETUSER default -config")
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
        assert engine.endswith(", appendonly no") and "appendonly yes" in loses[1]


@pytest.mark.redis
def test_a_redis_that_refuses_config_has_an_unknown_fsync(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with redis_server() as server:
        server.ask("CONFIG SET appendonly yes")
        server.ask("ACL SETUSER default -config")
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
    assert engine.endswith(", appendonly yes, appendfsync unknown") and loses == []


@pytest.mark.postgres
def test_what_the_settings_of_a_postgres_lose_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    # The server of the tests has no fsync.
    with postgres_server("-c", "synchronous_commit=off") as server:
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
    assert engine.endswith(", synchronous_commit off, fsync off, full_page_writes on")
    assert [loss.rpartition("set ")[2] for loss in loses] == ["synchronous_commit on", "fsync on"]


@pytest.mark.postgres
def test_a_postgres_that_waits_for_its_disk_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with postgres_server("-c", "fsync=on") as server:
        engine, loses = facts_of(capsys, f"{server.url}?timeout=30")
    assert engine.endswith(", synchronous_commit on, fsync on, full_page_writes on")
    assert loses == []


@pytest.mark.postgres
def test_a_new_postgres_gets_its_tables_from_the_first_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is changed. A user who may not make them learns it here."""
    url = f"{shared_postgres().url}?schema={schema_name()}"
    for _ in range(2):
        status, lines = checked(capsys, "--port", "0", "--store", url, *COMMAND)
        assert (status, lines["store"].rpartition(": ")[2]) == (
            0,
            "reached; the first start makes its tables",
        )
    asyncio.run(_user_without_rights(shared_postgres().url))
    url = url.replace("sessions@", "nobody_much@")
    status, lines = checked(capsys, "--port", "0", "--store", url, *COMMAND)
    assert status == 2 and "grant CREATE on the database" in lines["store"]


async def _user_without_rights(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE USER nobody_much")
    await connection.close()


KEY_OF = "MCP_SESSIONS_KEYS"


async def _encrypt(path: Path, key: str) -> None:
    store = encrypted_store_over(SQLiteStore(path), (key,))
    await store.open(SessionPolicy())
    await store.close()


def test_the_keys_of_an_encrypted_store_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_encrypt(tmp_path / "a.db", "k" * 32))
    arguments = ("--port", "0", "--store", "sqlite:///a.db")
    monkeypatch.setenv(KEY_OF, "k" * 32)
    status, lines = checked(capsys, *arguments, *COMMAND)
    assert status == 2 and "is encrypted: start with --encrypt-store" in lines["store"]
    status, lines = checked(capsys, *arguments, "--encrypt-store", *COMMAND)
    assert (status, lines["encrypted"]) == (0, "events, answers and data")
    monkeypatch.setenv(KEY_OF, "o" * 32)
    status, lines = checked(capsys, *arguments, "--encrypt-store", *COMMAND)
    assert status == 2 and "was encrypted with another key" in lines["store"]
    monkeypatch.setenv(KEY_OF, f"{'o' * 32},{'k' * 32}")
    status, lines = checked(capsys, *arguments, "--encrypt-store", *COMMAND)
    assert status == 0
    monkeypatch.delenv(KEY_OF)
    # A start would make a key beside the file, which is another one.
    status, lines = checked(capsys, *arguments, "--encrypt-store", *COMMAND)
    assert status == 2 and "was encrypted with another key" in lines["store"]


def test_a_python_server_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.py").write_text(
        "from mcp.server import MCPServer\nmcp = MCPServer('notes')\n"
    )
    status, lines = checked(capsys, "--port", "0", "notes.py")
    assert (status, lines["server"]) == (0, "loaded")
    status, lines = checked(capsys, "--port", "0", "--workers", "2", "notes.py")
    assert status == 2 and "--workers needs redis://" in lines["store"]
    status, lines = checked(capsys, "--port", "0", "none.py")
    assert status == 2 and lines["server"] == "WRONG: no such file: none.py"


def test_the_certificate_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    issued = trustme.CA().issue_cert("mcp.example.com")
    own = tmp_path / "own.pem"
    own.touch(0o600)
    issued.private_key_and_cert_chain_pem.write_to_path(str(own))
    status, lines = checked(capsys, "--port", "0", "--ssl-certfile", str(own), *COMMAND)
    assert status == 0
    assert lines["tls"].startswith("certificate for mcp.example.com, until ")
    missing = tmp_path / "none.pem"
    status, lines = checked(capsys, "--port", "0", "--ssl-certfile", str(missing), *COMMAND)
    assert (status, lines["tls"]) == (
        2,
        f"WRONG: certificate {missing}: no such file or directory",
    )


LOOPBACK, LOCAL_PAGES = "loopback names", "pages of this machine"
ANYWHERE = ("--host", "0.0.0.0", "--no-auth")
MCP, PAGE = "mcp.example.com", "https://app.example.com"


@pytest.mark.parametrize(
    ("options", "hosts", "origins"),
    [
        (("app.py",), LOOPBACK, LOCAL_PAGES),
        (("app.py", "--allowed-origin", PAGE), LOOPBACK, PAGE),
        (("app.py", *ANYWHERE), "any", "any"),
        (("app.py", *ANYWHERE, "--allowed-host", MCP), f"{MCP}, {LOOPBACK}", LOCAL_PAGES),
        (
            ("app.py", "--allowed-host", f"{MCP}:80", "--allowed-origin", PAGE),
            f"{MCP}:80, {LOOPBACK}",
            PAGE,
        ),
        (("--config", "mcp.json", "--allowed-host", MCP), f"{MCP}, {LOOPBACK}", LOCAL_PAGES),
        (("fast.py",), "any", f"HTTP: any; WebSocket: {LOCAL_PAGES}"),
        (("fast.py", *ANYWHERE), "any", "any"),
        (("fast.py", "--allowed-host", MCP), f"{MCP}, {LOOPBACK}", LOCAL_PAGES),
    ],
)
def test_the_hosts_and_origins_are_those_that_the_server_accepts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    hosts: str,
    origins: str,
) -> None:
    """It once said "no check" where a page of another machine is refused."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "fast.py").write_text(FASTMCP_APP)
    servers = {"one": {"command": sys.executable, "args": ["-S", CHILD]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    _, lines = checked(capsys, "--port", "0", *options)
    assert (lines["hosts"], lines["origins"]) == (hosts, origins)
    with serving(tmp_path, *options) as process:
        port, path = address_of(process)
        for is_websocket in (False, True):
            for host in (f"localhost:{port}", MCP, f"{MCP}:80", f"{MCP}:81", "other.example"):
                said = host_is_said(lines["hosts"], host)
                assert is_accepted(port, path, {"Host": host}, is_websocket) == said, host
            for origin in ("http://localhost:3000", PAGE, "http://evil.example"):
                said = origin_is_said(lines["origins"], origin, is_websocket)
                assert is_accepted(port, path, {"Origin": origin}, is_websocket) == said, origin


def address_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    while line := read_lines(process, 1):
        found = re.search(r"http://[\d.]+:(\d+)(/\S+)", line)
        if found is not None:
            return int(found[1]), found[2]
    raise AssertionError("it ended")


def host_is_said(line: str, host: str) -> bool:
    """Whether the line of the hosts says that this one is accepted."""
    entries = line.split(", ")
    is_local = LOOPBACK in entries and host.startswith("localhost:")
    # No port is port 80.
    is_default = f"{host}:80" in entries
    named = host in entries or host.partition(":")[0] in entries
    return line == "any" or is_local or named or is_default


def origin_is_said(line: str, origin: str, is_websocket: bool) -> bool:
    found = re.fullmatch("HTTP: (.*); WebSocket: (.*)", line)
    entries = (line if found is None else found[2 if is_websocket else 1]).split(", ")
    is_local = LOCAL_PAGES in entries and origin.startswith("http://localhost:")
    return entries == ["any"] or is_local or origin in entries


def is_accepted(port: int, path: str, headers: dict[str, str], is_websocket: bool) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        if is_websocket:
            upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
            handshake = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x" * 22 + "=="}
            offered = {"Sec-WebSocket-Protocol": "mcp"}
            connection.request("GET", path, headers=upgrade | handshake | offered | headers)
        else:
            accepts = {"Accept": "application/json, text/event-stream"}
            sent = {"Content-Type": "application/json"} | accepts | headers
            connection.request("POST", path, json.dumps(INITIALIZE), sent)
        status = connection.getresponse().status
    finally:
        connection.close()
    assert status in (101 if is_websocket else 200, 403, 421)
    return status in (101, 200)


@pytest.mark.parametrize("given", [(), ("--allowed-host", MCP)])
def test_fastmcps_own_guard_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
) -> None:
    """Over HTTP and WebSocket FastMCP decides first."""
    guarded = "from fastmcp import settings\nsettings.http_host_origin_protection = True\n"
    (tmp_path / "guarded.py").write_text(guarded + FASTMCP_APP)
    monkeypatch.setattr("fastmcp.settings.http_host_origin_protection", False)
    _, lines = checked(capsys, "--port", "0", "guarded.py", *given)
    allowed = (f"{MCP}, {LOOPBACK}", LOCAL_PAGES) if given else ("any", "any")
    expected = tuple(f"{each}, if FastMCP allows it" for each in allowed)
    assert (lines["hosts"], lines["origins"]) == expected
    with serving(tmp_path, "guarded.py", *given) as process:
        port, path = address_of(process)
        for is_websocket in (False, True):
            for host in (MCP, "other.example"):
                assert not is_accepted(port, path, {"Host": host}, is_websocket)
            assert is_accepted(port, path, {"Host": f"localhost:{port}"}, is_websocket)
            origin = {"Origin": "http://evil.example"}
            assert not is_accepted(port, path, origin, is_websocket)
