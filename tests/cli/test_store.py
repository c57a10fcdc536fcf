"""``mcp-sessions store``: sessions are checked, dumped, loaded, copied and backed up."""

import asyncio
import contextlib
import errno
import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli.main import main
from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, Refusal
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, RequestKey, SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.encrypted import check_is_open
from mcp_sessions.stores.postgres import PostgresStore
from mcp_sessions.stores.record_changes import SetWaitsFrom
from mcp_sessions.stores.sqlite import SQLiteStore
from mcp_sessions.stores.urls import open_store
from mcp_sessions.testing.parts import subscribers_of
from tests.stores import opening as stores_opening
from tests.stores.every_store import encrypted_store_over
from tests.support.postgres_server import schema, shared_postgres
from tests.support.processes import free_port
from tests.support.redis_server import namespace, shared_redis

ALICE = Principal("app", "https://issuer.example", "alice")

MakeUrl = Callable[[Path], str]


def sqlite(folder: Path) -> str:
    number = len(list(folder.glob("*.db")))
    return f"sqlite:///{folder}/sessions-{number}.db"


def postgres(_: Path) -> str:
    return f"{shared_postgres().url}?schema={schema()}"


def redis(_: Path) -> str:
    return f"{shared_redis().url}?namespace={namespace()}"


SQLITE = pytest.param(sqlite, id="sqlite")
POSTGRES = pytest.param(postgres, id="postgres", marks=pytest.mark.postgres)
REDIS = pytest.param(redis, id="redis", marks=pytest.mark.redis)
EVERY = [SQLITE, POSTGRES, REDIS]


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[SessionStore]:
    store = open_store(url)
    await store.open(SessionPolicy())
    try:
        yield store
    finally:
        await store.close()


async def run(*arguments: str) -> int:
    """The command, as another process would be: it has an event loop of its own."""
    return await asyncio.to_thread(main, ["store", *arguments])


async def filled(url: str) -> dict[str, SessionId]:
    """A client's connection, what it is attached to, one of a pipe, and one that expired."""
    now = time.time()
    async with opened(url) as store:
        names: dict[str, SessionId] = {}
        for name, mode in (
            ("connection", Mode.TRANSPORT),
            ("attached", Mode.PROTOCOL),
            ("piped", Mode.PROTOCOL),
            ("agent", Mode.AGENT),
        ):
            names[name] = (await store.create(mode, ALICE, peer=None, now=now)).session_id
        old = await store.create(Mode.PROTOCOL, ALICE, peer=None, now=now - 10_000_000)
        names["expired"] = old.session_id
        attached, connection = names["attached"], names["connection"]
        await store.attach(attached, ConnectionId(connection), now=now)
        await store.attach(names["piped"], ConnectionId("stdio-1"), now=now)
        for name in ("attached", "agent"):
            for _ in range(3):
                await store.append(names[name], Draft(b'{"id":"', b'"}'), now=now)
        head = await store.head(attached)
        assert head is not None
        await store.carry(connection, attached, FencingEpoch(1), head)
        await store.change(names["piped"], SetWaitsFrom(head.event_id()))
        await store.change(
            attached, SetWaitsFrom(Position(head.log_epoch, head.number - 1).event_id())
        )
        for key in ("answered", "running"):
            use = KeyUse(RequestKey(key), b"d", "process-1")
            await store.admit(attached, ALICE, mode=Mode.PROTOCOL, now=now, key=use)
        await store.finish_request(attached, RequestKey("answered"), b'"result":{}', now=now)
        await store.change_state(attached, {"secret": "of the application"}, ())
        await store.replace_data(attached, {"notes": [1]}, expected_version=0)
        await store.subscribe(attached, "note://1")
    return names


def without_epochs(path: Path) -> dict[str, Any]:
    """The sessions of a dump by id, without what is another one in another store."""
    found: dict[str, Any] = {}
    for line in path.read_text("ascii").splitlines():
        session = json.loads(line).get("session")
        if session is None:
            continue
        for log in session["logs"].values():
            for event in log["events"]:
                event[5] = event[5].replace(log["epoch"], "EPOCH")
            log["epoch"] = "EPOCH"
        for carried in session["carried"].values():
            carried[1] = "EPOCH"
        if session["waitsFrom"] is not None:
            session["waitsFrom"] = session["waitsFrom"].partition("-")[2]
        # A file has it to a hundredth of the idle timeout, and Redis its data under other versions.
        session["life"] = [round(each or 0) for each in session["life"]]
        found[session["id"]] = session
    return found


@pytest.mark.parametrize("make_target", EVERY)
@pytest.mark.parametrize("make_source", EVERY)
async def test_each_store_is_copied_to_each(
    make_source: MakeUrl, make_target: MakeUrl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole sessions. A position of before is refused, and is not answered with a hole (CUP8)."""
    source = make_source(tmp_path)
    names = await filled(source)
    async with opened(source) as store:
        head = await store.head(names["attached"])
    assert head is not None
    target = make_target(tmp_path)

    assert await run("copy", source, target) == 0
    assert capsys.readouterr().out == "4 sessions copied\n"
    assert await run("copy", source, target) == 0
    assert capsys.readouterr().out == (
        "0 sessions copied; 4 sessions there already, and left as they are\n"
    )

    async with opened(target) as store:
        now = time.time()
        attached, connection = names["attached"], names["connection"]
        there = {record.session_id: record for record in await store.all_sessions()}
        assert set(there) == set(names.values()) - {names["expired"]}
        assert await store.read(attached, head.event_id(), now=now) == ((), Refusal.LOG_REPLACED)
        newer = await store.head(attached)
        assert newer is not None and newer.log_epoch > head.log_epoch
        assert newer.number == head.number == 3
        # What the next listen stream of its client begins after is there, under its new id.
        waits = there[attached].client.waits_from
        assert waits == Position(newer.log_epoch, 2).event_id()
        ((event,), refusal) = await store.read(attached, waits, now=now)
        assert refusal is None
        assert event.payload == b'{"id":"' + event.event_id.encode() + b'"}'
        # A connection that came along goes on, and one of a process that is gone does not.
        attachment = there[attached].attachment
        assert attachment is not None and attachment.connection_id == connection
        assert there[names["piped"]].attachment is None
        relayed = await store.append(attached, Draft(b"next"), now=now)
        assert relayed is not None
        sent = await store.relay(connection, attached, FencingEpoch(1), relayed.event, now=now)
        assert sent.event is not None
        for key, begun in (("answered", Begun.ANSWERED), ("running", Begun.DROPPED)):
            use = KeyUse(RequestKey(key), b"d", "process-2")
            admitted = await store.admit(attached, ALICE, mode=Mode.PROTOCOL, now=now, key=use)
            assert admitted is not None and admitted.key is begun
        data = await store.load_data(attached)
        assert data is not None and data.value == {"notes": [1]}
        assert await subscribers_of(store, "note://1") == [attached]
        start = Position((await head_of(store, names["agent"])).log_epoch, 0).event_id()
        agent, _ = await store.read(names["agent"], start, now=now)
        assert [each.number for each in agent] == [1, 2, 3]


async def head_of(store: SessionStore, session_id: SessionId) -> Position:
    head = await store.head(session_id)
    assert head is not None
    return head


@pytest.mark.parametrize("make", EVERY)
async def test_a_dump_is_the_same_after_a_load(
    make: MakeUrl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the epochs of its logs. Nobody else can read the file."""
    source, target = make(tmp_path), f"sqlite:///{tmp_path}/loaded.db"
    names = await filled(source)
    first, second = tmp_path / "first", tmp_path / "second"
    before = os.umask(0)
    try:
        assert await run("dump", source, str(first)) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert await run("load", str(first), target) == 0
    assert await run("dump", target, str(second)) == 0

    one, other = without_epochs(first), without_epochs(second)
    attached = one[names["attached"]]
    # Nobody runs it any more; a SQLite file says so when it is opened.
    for key in (*attached["keys"], *other[names["attached"]]["keys"]):
        key[6] = key[6].replace("running", "dropped")
    one[names["piped"]]["connection"] = None
    assert one == other
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == [f"4 sessions dumped to {first}", "4 sessions loaded"]
    assert "secret" not in said.out + said.err


async def test_a_store_says_how_sessions_ended_after_it_moved(tmp_path: Path) -> None:
    source, target = sqlite(tmp_path), f"sqlite:///{tmp_path}/target.db"
    names = await filled(source)
    command = ["sessions", "end", "--store", source, names["agent"]]
    assert await asyncio.to_thread(main, command) == 0

    assert await run("copy", source, target) == 0

    async with opened(target) as store:
        (end,) = await store.ends(now=time.time())
    assert end.session == digest(names["agent"])


# --- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EVERY)
async def test_a_good_store_is_as_it_should_be(
    make: MakeUrl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = make(tmp_path)
    await filled(url)
    assert await run("check", url) == 0
    assert capsys.readouterr() == ("5 sessions are as they should be\n", "")


async def test_one_session_is_as_it_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = sqlite(tmp_path)
    async with opened(url) as store:
        await store.create(Mode.PROTOCOL, ALICE, peer=None, now=time.time())
    assert await run("check", url) == 0
    assert capsys.readouterr() == ("1 session is as it should be\n", "")


async def faults(url: str, capsys: pytest.CaptureFixture[str], status: int = 1) -> list[str]:
    capsys.readouterr()
    assert await run("check", url) == status
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("DELETE FROM events WHERE number = 2", "2 events are there, and it counts 3"),
        ("UPDATE events SET number = 9 WHERE number = 3", "an event outside of its range"),
        ("UPDATE events SET payload = 'x' WHERE number = 3", "other sizes than it counts"),
        ("UPDATE sessions SET state = '{'", "a row of the database cannot be read"),
        ("UPDATE keys SET scopes = '7'", "a row of the database cannot be read"),
    ],
)
async def test_what_is_wrong_in_a_file_is_named(
    statement: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the session's digest. The others are read all the same, also for a dump."""
    url = sqlite(tmp_path)
    names = await filled(url)
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        (sid,) = connection.execute(
            "SELECT sid FROM sessions WHERE session_id = ?", (names["attached"],)
        ).fetchone()
        of_one = f"log IN (SELECT log FROM logs WHERE sid = {sid})"
        if "events" not in statement:
            of_one = f"sid = {sid}"
        joined = " AND " if " WHERE " in statement else " WHERE "
        connection.execute(f"{statement}{joined}{of_one}")
        connection.commit()

    (line,) = await faults(url, capsys)

    assert line.startswith(f"session {digest(names['attached'])}: ") and fault in line
    assert names["attached"] not in line
    if "cannot be read" in fault:
        assert await run("dump", url, str(tmp_path / "dump")) == 1
        assert "3 sessions dumped" in capsys.readouterr().out


@pytest.mark.postgres
async def test_what_is_wrong_in_postgres_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncpg

    url = postgres(tmp_path)
    names = await filled(url)
    own = url.partition("?schema=")
    connection: Any = await asyncpg.connect(own[0])
    gone = f"number = 2 AND sid = '{names['agent']}'"
    await connection.execute(f"DELETE FROM {own[2]}.events WHERE {gone}")
    await connection.execute(
        f"UPDATE {own[2]}.sessions SET body = 'nothing' WHERE sid = '{names['attached']}'"
    )
    await connection.close()

    found = {line.split()[1].rstrip(":"): line for line in await faults(url, capsys)}

    assert "2 events are there, and it counts 3" in found[digest(names["agent"])]
    assert "cannot be read" in found[digest(names["attached"])]
    assert len(found) == 2


@pytest.mark.redis
async def test_what_is_wrong_in_redis_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = redis(tmp_path)
    names = await filled(url)
    async with opened(url) as store:
        asked: Any = store
        key = asked._key(names["attached"])
        await asked._command("HSET", key, "mode", "nothing")

    (line,) = await faults(url, capsys)

    assert line.startswith(f"session {digest(names['attached'])}: ") and "cannot be read" in line


async def test_a_damaged_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = sqlite(tmp_path)
    await filled(url)
    path = Path(url.removeprefix("sqlite:///"))
    content = bytearray(path.read_bytes())
    for at in range(4_096, len(content), 4_096):
        content[at : at + 64] = b"\xff" * 64
    path.write_bytes(content)

    (line,) = await faults(url, capsys, 1 if "locked" in url else 2)

    assert "damaged" in line


# --- backup --------------------------------------------------------------------------------------


async def test_a_file_is_backed_up_while_a_server_has_it(tmp_path: Path) -> None:
    """By another process, without its lock. The server goes on, and the copy is whole."""
    url, target = sqlite(tmp_path), tmp_path / "backup.db"
    names = await filled(url)
    async with opened(url) as store:
        await store.append(names["agent"], Draft(b"before"), now=time.time())
        command = [sys.executable, "-m", "mcp_sessions.cli", "store", "backup", url, str(target)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done
        await store.append(names["agent"], Draft(b"after"), now=time.time())
    async with opened(url) as store:
        assert (await head_of(store, names["agent"])).number == 5

    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    async with opened(f"sqlite:///{target}") as store:
        assert {record.session_id for record in await store.all_sessions()} == set(names.values())
        assert (await head_of(store, names["agent"])).number == 4
    left = {each.name for each in tmp_path.iterdir()}
    assert not [name for name in left if name.startswith(".")], left


# --- what goes wrong -----------------------------------------------------------------------------


async def refused(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    capsys.readouterr()
    assert await run(*arguments) == status
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    assert said.err.startswith("mcp-sessions store: ")
    return said.err


async def test_a_wrong_url_or_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is made for it."""
    missing, new = f"sqlite:///{tmp_path}/missing.db", str(tmp_path / "new")
    for arguments in (
        ("check", missing),
        ("dump", missing, new),
        ("copy", missing, f"sqlite:///{new}"),
        ("backup", missing, new),
    ):
        assert "no such file" in await refused(capsys, 2, *arguments)
        assert list(tmp_path.iterdir()) == []
    for command in ("check", "dump", "load", "copy", "backup"):
        arguments = {
            "check": ("floppy://a:secret@b",),
            "dump": ("floppy://a:secret@b", new),
            "load": (new, "floppy://a:secret@b"),
            "copy": ("floppy://a:secret@b", "floppy://a:secret@b"),
            "backup": ("floppy://a:secret@b", new),
        }[command]
        line = await refused(capsys, 2, command, *arguments)
        assert "secret" not in line
        assert "unknown store" in line or "no such file" in line
    assert "nobody else sees it" in await refused(capsys, 2, "check", "memory://")
    assert "pg_dump" in await refused(capsys, 2, "backup", "redis://a:secret@b", new)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
async def test_a_store_that_is_away_is_one_line(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, source = f"{scheme}://127.0.0.1:{free_port()}/0", sqlite(tmp_path)
    await filled(source)
    for arguments in (("check", url), ("dump", url, str(tmp_path / "d")), ("copy", source, url)):
        await refused(capsys, 1, *arguments)
    assert not (tmp_path / "d").exists()


async def test_a_file_that_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, there = sqlite(tmp_path), tmp_path / "there"
    await filled(url)
    there.write_text("mine")
    for command in ("dump", "backup"):
        assert "is there already" in await refused(capsys, 2, command, url, str(there))
        line = await refused(capsys, 2, command, url, str(tmp_path / "no" / "file"))
        assert "there is no folder" in line
    assert there.read_text() == "mine"


async def test_a_wrong_dump_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is read to its end before the first session is added."""
    url, dump = sqlite(tmp_path), tmp_path / "dump"
    await filled(url)
    await run("dump", url, str(dump))
    lines = dump.read_text("ascii").splitlines(keepends=True)
    broken = json.loads(lines[1])
    broken["session"]["logs"] = 7
    wrong = {
        "the dump is not complete": lines[:-1],
        "line 3: this is no line of a dump": [*lines[:2], lines[2][:40] + "\n", *lines[3:]],
        "line 2: this is no line of a dump": [lines[0], json.dumps(broken) + "\n", *lines[2:]],
        "line 1: this is no line of a dump": lines[1:],
        "another release wrote this dump": [lines[0].replace('"version":1', '"version":2')],
    }
    target = tmp_path / "target.db"
    for text, content in wrong.items():
        dump.write_text("".join(content), "ascii")
        assert text in await refused(capsys, 2, "load", str(dump), f"sqlite:///{target}")
    assert not target.exists()


async def test_a_file_that_is_served_gets_no_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes never write to one file. It can be dumped meanwhile."""
    url, other, dump = sqlite(tmp_path), f"sqlite:///{tmp_path}/other.db", tmp_path / "dump"
    await filled(url)
    async with opened(url):
        assert await run("dump", url, str(dump)) == 0
        assert await run("copy", url, other) == 0
        line = await refused(capsys, 2, "load", str(dump), url)
        assert "is in use by process" in line


@pytest.mark.parametrize("make", EVERY)
async def test_two_loads_at_once_add_each_session_once(
    make: MakeUrl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both are of this process here, and it waits for its own lock only shortly.
    monkeypatch.setattr("mcp_sessions.stores.sqlite.file_lock._QUIET", 60.0)
    source, target, dump = sqlite(tmp_path), make(tmp_path / "t"), str(tmp_path / "dump")
    (tmp_path / "t").mkdir()
    names = await filled(source)
    await run("dump", source, dump)

    ends = await asyncio.gather(*(run("load", dump, target) for _ in range(2)))

    assert set(ends) <= {0, 1} and 0 in ends
    async with opened(target) as store:
        there = [record.session_id for record in await store.all_sessions()]
    assert sorted(there) == sorted(set(names.values()) - {names["expired"]})
    assert await run("check", target) == 0


@pytest.mark.parametrize("command", ["dump", "backup"])
async def test_a_full_disk_leaves_no_file(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = sqlite(tmp_path)
    await filled(url)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if command == "dump":
        # Its own copy of the file is written first.
        fsync, left = os.fsync, [1]

        def full_later(file: int) -> None:
            if not left:
                full(file)
            left.pop()
            fsync(file)

        monkeypatch.setattr(os, "fsync", full_later)
    else:
        monkeypatch.setattr(os, "fsync", full)
    line = await refused(capsys, 2, command, url, str(tmp_path / "out"))

    assert "no space left on device" in line
    assert not [each for each in tmp_path.iterdir() if "out" in each.name or each.is_dir()]


async def test_a_copy_says_where_the_sealing_key_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it no server finds the conversations again."""
    url = sqlite(tmp_path)
    await filled(url)
    key = Path(url.removeprefix("sqlite:///") + "-key")
    key.write_text("k" * 43)
    for command, target in (("backup", "b"), ("dump", "d"), ("copy", "sqlite:///c.db")):
        place = target if ":" not in target else f"sqlite:///{tmp_path}/c.db"
        assert await run(command, url, place if ":" in place else str(tmp_path / place)) == 0
        assert str(key) in capsys.readouterr().out


def test_the_store_of_the_file_is_as_it_was(tmp_path: Path) -> None:
    """To read from it changes nothing in it, and leaves nothing beside it."""
    url = sqlite(tmp_path)
    asyncio.run(filled(url))
    path = Path(url.removeprefix("sqlite:///"))
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for arguments in (["check", url], ["dump", url, str(tmp_path / "dump")]):
        assert main(["store", *arguments]) == 0
    (tmp_path / "dump").unlink()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert isinstance(open_store(url), SQLiteStore) and path.exists()


# --- encrypted -----------------------------------------------------------------------------------

KEYS, OTHERS = ("k" * 32,), ("o" * 32,)


@asynccontextmanager
async def opened_encrypted(url: str, keys: Sequence[str] = KEYS) -> AsyncGenerator[SessionStore]:
    async with stores_opening.opened(
        encrypted_store_over(open_store(url), keys), SessionPolicy()
    ) as store:
        yield store


async def filled_encrypted(url: str, keys: Sequence[str] = KEYS) -> SessionId:
    now = time.time()
    async with opened_encrypted(url, keys) as store:
        session_id = (await store.create(Mode.PROTOCOL, ALICE, peer=None, now=now)).session_id
        draft = Draft(b'{"secret":true,"id":"', b'"}')
        for _ in range(2):
            await store.append(session_id, draft, now=now)
        use = KeyUse(RequestKey("k"), b"d", "process-1")
        await store.admit(session_id, ALICE, mode=Mode.PROTOCOL, now=now, key=use)
        await store.finish_request(session_id, use.key, b'"result":"secret"', now=now)
        await store.replace_data(session_id, {"secret": True}, expected_version=0)
    return session_id


@pytest.mark.parametrize("make_target", EVERY)
@pytest.mark.parametrize("make_source", EVERY)
async def test_an_encrypted_store_is_copied_without_its_keys(
    make_source: MakeUrl, make_target: MakeUrl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With them a server serves from the copy. Without them none does."""
    source, target = make_source(tmp_path), make_target(tmp_path)
    if source == target:
        target = target.replace(".db", "-copy.db")
    session_id = await filled_encrypted(source)
    assert await run("check", source) == 0
    assert await run("copy", source, target) == 0
    assert "1 session copied" in capsys.readouterr().out
    async with opened(target) as raw:
        with pytest.raises(ConfigurationError, match="is encrypted"):
            await check_is_open(raw)
    with pytest.raises(ConfigurationError, match="another key"):
        async with opened_encrypted(target, OTHERS):
            raise AssertionError("it is served")
    async with opened_encrypted(target) as store:
        now = time.time()
        data = await store.load_data(session_id)
        assert data is not None and data.value == {"secret": True}
        head = await head_of(store, session_id)
        start = Position(head.log_epoch, 1).event_id()
        ((event,), _) = await store.read(session_id, start, now=now)
        # It has the id that it has here.
        assert event.payload == b'{"secret":true,"id":"' + event.event_id.encode() + b'"}'
        use = KeyUse(RequestKey("k"), b"d", "process-1")
        admitted = await store.admit(session_id, ALICE, mode=Mode.PROTOCOL, now=now, key=use)
        assert admitted is not None and admitted.outcome == b'"result":"secret"'


async def test_a_dump_of_an_encrypted_store_is_encrypted(tmp_path: Path) -> None:
    source, target = sqlite(tmp_path), f"sqlite:///{tmp_path}/target.db"
    session_id = await filled_encrypted(source)
    file = tmp_path / "dump"
    assert await run("dump", source, str(file)) == 0
    assert "secret" not in file.read_text("ascii") and session_id in file.read_text("ascii")
    assert await run("load", str(file), target) == 0
    async with opened_encrypted(target) as store:
        data = await store.load_data(session_id)
        assert data is not None and data.value == {"secret": True}


async def test_sessions_of_two_keys_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server has one ring of keys for all that is in its store."""
    source, target = sqlite(tmp_path), f"sqlite:///{tmp_path}/target.db"
    await filled_encrypted(source)
    await filled_encrypted(target, OTHERS)
    line = await refused(capsys, 2, "copy", source, target)
    assert "encrypted with other keys" in line
    async with opened(target) as store:
        assert len(await store.session_ids()) == 1


@pytest.mark.postgres
async def test_to_read_from_a_postgres_that_no_server_used_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres(tmp_path)
    for command in (["check", url], ["dump", url, str(tmp_path / "dump")], ["copy", url, url]):
        assert "no server has made a postgres store there" in await refused(capsys, 2, *command)
    assert await asyncio.to_thread(main, ["sessions", "list", "--store", url]) == 2
    assert "no server has made a postgres store there" in capsys.readouterr().err
    store = PostgresStore(url)
    assert not await store.open_if_made(SessionPolicy())
    await store.close()
