"""Sessions between runs: for one server and one user, private, whole, and for several processes."""

import json
import os
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from mcp import Client
from mcp.server import MCPServer

from mcp_sessions import ConfigurationError, SessionLayer, current_session
from mcp_sessions.client.jar import FileJar, SavedSession
from mcp_sessions.client_transport import resumable
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.resuming import MODES, QUICK, Received, serving, subscribe, text_of
from tests.support.servers import RunningServer, serve

SESSION = SavedSession("s-1", state="grün\u2028\N{SNOWMAN}", expires_at="later", position="7")
HERE = "https://host/mcp"


def saved(jar: FileJar, target: str, session: SavedSession | None, user: str = "") -> None:
    slot = jar.open(target, user)
    assert slot is not None
    with closing(slot):
        slot.save(session)


def loaded(jar: FileJar, target: str, user: str = "") -> SavedSession | None:
    slot = jar.open(target, user)
    assert slot is not None
    found = slot.load()
    slot.close()
    return found


@pytest.fixture
def jar(tmp_path: Path) -> FileJar:
    return FileJar(tmp_path / "jar.json")


def test_a_session_comes_back_as_it_was(jar: FileJar) -> None:
    saved(jar, HERE, SESSION)

    assert loaded(FileJar(jar.path), HERE) == SESSION


def test_a_session_is_never_offered_to_another_server(jar: FileJar) -> None:
    """The data-layer document: "securely associate retained sessions with the issuing Server"."""
    saved(jar, HERE, SESSION)

    for other in (
        "http://host/mcp",
        "https://host:444/mcp",
        "https://host/mcp/",
        "https://host/",
        "https://hos/tmcp",
        "",
    ):
        assert loaded(jar, other) is None


def test_a_session_is_never_offered_to_another_user(jar: FileJar) -> None:
    saved(jar, HERE, SESSION, user="ann")

    assert loaded(jar, HERE, "bob") is None
    assert loaded(jar, HERE) is None
    assert loaded(FileJar(jar.path, user="ann"), HERE) == SESSION
    # No two pairs of server and user look alike, however they are written.
    assert loaded(jar, HERE + '", "ann', "") is None


def test_every_file_is_for_its_owner_alone(jar: FileJar) -> None:
    os.umask(0)
    try:
        saved(jar, HERE, SESSION)
    finally:
        os.umask(0o022)

    files = list(jar.path.parent.iterdir())
    assert jar.path in files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_session_that_has_ended_leaves_the_jar(jar: FileJar) -> None:
    saved(jar, HERE, SESSION)
    saved(jar, HERE, None)

    assert loaded(jar, HERE) is None
    assert "s-1" not in jar.path.read_text()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"version": 2}', '{"version": 1, "sessions": []}', "\xff"]
)
def test_a_jar_that_is_damaged_meanwhile_is_an_empty_one(jar: FileJar, content: str) -> None:
    jar.path.write_bytes(content.encode("latin-1"))

    assert loaded(jar, HERE) is None
    saved(jar, HERE, SESSION)
    assert loaded(jar, HERE) == SESSION


@pytest.mark.parametrize("content", ["a = 1", "[]", '{"mcpServers": {}}', '{"version": "1.0"}'])
def test_a_file_that_is_no_jar_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    """Somebody named the wrong file, and may need what is in it."""
    (tmp_path / "mcp.json").write_text(content)

    with pytest.raises(ConfigurationError, match=r"mcp\.json: this file is no jar: name another"):
        FileJar(tmp_path / "mcp.json")
    assert (tmp_path / "mcp.json").read_text() == content


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a directory"):
        FileJar(tmp_path)


@pytest.mark.parametrize("content", ["", '{"version": 2}'])
def test_an_empty_file_and_the_jar_of_another_release_are_taken(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "jar.json").write_text(content)
    jar = FileJar(tmp_path / "jar.json")

    assert loaded(jar, HERE) is None
    saved(jar, HERE, SESSION)
    assert loaded(FileJar(jar.path), HERE) == SESSION


@pytest.mark.parametrize("entry", [None, 3, {}, {"session_id": 3}, {"session_id": "s", "state": 1}])
def test_an_entry_that_is_none_is_passed_over(jar: FileJar, entry: object) -> None:
    saved(jar, HERE, SESSION)
    content = json.loads(jar.path.read_text())
    [name] = content["sessions"]
    content["sessions"][name] = entry
    jar.path.write_text(json.dumps(content))

    found = loaded(jar, HERE)
    assert found is None or found == SavedSession("s")


def test_a_write_that_fails_leaves_what_was(jar: FileJar, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(jar, HERE, SESSION)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        saved(jar, HERE, SavedSession("s-2"))
    monkeypatch.undo()

    jar = FileJar(jar.path)
    assert json.loads(jar.path.read_text())["sessions"]
    assert [file for file in jar.path.parent.iterdir() if not file.name.endswith(".lock")] == [
        jar.path
    ]


def test_who_comes_second_gets_a_file_of_its_own(jar: FileJar) -> None:
    """A session has one connection: two processes with one session would take turns at it."""
    first, second = jar.open(HERE), jar.open(HERE)
    assert first is not None
    assert second is not None
    first.save(SavedSession("first"))
    second.save(SavedSession("second"))
    first.close()
    second.close()

    again, also = jar.open(HERE), jar.open(HERE)
    assert again is not None
    assert also is not None
    assert again.load() == SavedSession("first")
    assert also.load() == SavedSession("second")
    again.close()
    also.close()


WRITER = """
import sys
from mcp_sessions.client.jar import FileJar, SavedSession
jar = FileJar(sys.argv[1])
slots = [jar.open(f"https://{sys.argv[2]}/{number}") for number in range(5)]
for round in range(20):
    for number, slot in enumerate(slots):
        slot.save(SavedSession(f"{sys.argv[2]}-{number}-{round}"))
"""


def test_two_processes_write_one_jar_and_nothing_is_lost(jar: FileJar) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(jar.path), name], text=True)
        for name in ("one", "two")
    ]
    for writer in writers:
        assert writer.wait(timeout=50) == 0

    for name in ("one", "two"):
        for number in range(5):
            found = loaded(jar, f"https://{name}/{number}")
            assert found == SavedSession(f"{name}-{number}-19")


def test_a_file_is_free_again_when_its_process_was_killed(jar: FileJar) -> None:
    code = WRITER + "\nprint('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(jar.path), "one"]
    pipe = subprocess.PIPE
    writer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert writer.stdin is not None and writer.stdout is not None
    with writer.stdin, writer.stdout:
        assert writer.stdout.readline() == "ready\n"
        slot = jar.open("https://one/0")
        assert slot is not None
        assert slot.load() is None, "the first place is taken"
        slot.close()
        writer.kill()
        writer.wait(timeout=10)

    assert loaded(jar, "https://one/0") == SavedSession("one-0-19")


# --- with the client --------------------------------------------------------------------------


def client_of(server: RunningServer, jar: FileJar, mode: str, received: Received) -> Client:
    """One run of an application."""
    transport = resumable(server.url(), jar=jar, policy=QUICK, on_resume=received.on_resume)
    return Client(transport, mode=mode, message_handler=received.on_message)


@pytest.mark.parametrize("mode", MODES)
async def test_the_next_run_continues_with_the_session(jar: FileJar, mode: str) -> None:
    with serving() as (_, layer, server):
        async with client_of(server, jar, mode, Received()) as client:
            first = text_of(await client.call_tool("session_id", {}))
            if mode == "legacy":
                await subscribe(client, "note://1")
        await server.call(layer.notify_resource_updated, "note://1")

        received = Received()
        async with client_of(server, jar, mode, received) as client:
            assert text_of(await client.call_tool("session_id", {})) == first
            assert (await received.outcome()).recovered
            if mode == "legacy":
                await received.has(lambda: received.updates == ["note://1"], "what came in between")


async def test_a_session_that_is_gone_by_the_next_run_is_started_over(jar: FileJar) -> None:
    with serving() as (_, _, server):
        port = server.port
        async with client_of(server, jar, "legacy", Received()) as client:
            first = text_of(await client.call_tool("session_id", {}))
    with serving(port=port) as (_, _, server):
        received = Received()
        async with client_of(server, jar, "legacy", received) as client:
            second = text_of(await client.call_tool("session_id", {}))
        assert second != first
        assert (await received.outcome()).is_new_session
        found = loaded(jar, server.url())
        assert found is not None
        assert found.session_id == second


def remembering(folder: Path) -> SessionLayer:
    """A server on a file, with keys of its own each time."""
    server = MCPServer("remembering")

    @server.tool()
    def remember(text: str) -> str:
        current_session().state["text"] = text
        return text

    @server.tool()
    def recall() -> str:
        return f"{current_session().id} {current_session().state.get('text')}"

    return SessionLayer(server, store=SQLiteStore(folder / "sessions.db"))


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_lost_its_keys_continues_with_the_session(
    jar: FileJar, tmp_path: Path, mode: str
) -> None:
    """The server keeps the state itself; only the token that the client has is of no use."""
    with serve(remembering(tmp_path).asgi_app()) as server:
        port = server.port
        async with client_of(server, jar, mode, Received()) as client:
            await client.call_tool("remember", {"text": "milk"})
            first = text_of(await client.call_tool("recall", {}))
    assert first.endswith(" milk")

    layer = remembering(tmp_path)
    with serve(layer.asgi_app(), port=port) as server:
        received = Received()
        with anyio.fail_after(30):
            async with client_of(server, jar, mode, received) as client:
                if mode != "legacy":
                    # The listen stream carries the token too, and is the first that does.
                    async with client.listen(resource_subscriptions=["note://1"]) as changes:
                        await server.call(layer.notify_resource_updated, "note://1")
                        assert await anext(changes)
                assert text_of(await client.call_tool("recall", {})) == first
                await client.call_tool("remember", {"text": "bread"})
                again = text_of(await client.call_tool("recall", {}))
    assert again == first.replace("milk", "bread")
    assert {outcome.is_new_session for outcome in received.outcomes} == {False}
    found = loaded(jar, server.url())
    assert found is not None and found.state is not None, "the new token is kept"


async def test_another_server_is_not_notified_of_the_session(jar: FileJar) -> None:
    with serving() as (_, _, one), serving() as (_, _, two):
        async with client_of(one, jar, "legacy", Received()) as client:
            first = text_of(await client.call_tool("session_id", {}))
        async with client_of(two, jar, "legacy", Received()) as client:
            assert text_of(await client.call_tool("session_id", {})) != first
        bodies = b"".join(bytes(exchange.request_body) for exchange in two.wire.exchanges)
        assert first.encode() not in bodies
