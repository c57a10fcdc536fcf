"""An encrypted store: what is in it, with which keys it opens, and beside what was there before."""

import asyncio
import inspect
import logging
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions import SessionLayer, SessionSecurity
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import EventTemplate, encode
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, StoreRefused
from mcp_sessions.ids import ConnectionId, Position, RequestKey, SessionId, StreamName
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.sealing import SealedValues
from mcp_sessions.stores import encrypted
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.encrypted import check_is_open
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.record_changes import SetFilter
from mcp_sessions.stores.records import ServerChange
from mcp_sessions.stores.sealed_forms import OVERHEAD, Sealing
from mcp_sessions.stores.urls import open_store
from mcp_sessions.testing.parts import Process, ReceivedItems
from tests.stores.every_store import encrypted_store_over
from tests.stores.opening import NOW, new, opened
from tests.support.modern import ModernClient, session_meta
from tests.support.postgres_server import postgres_server, schema, shared_postgres
from tests.support.raw import Json, keyed, text_of
from tests.support.redis_server import namespace, redis_server, shared_redis
from tests.support.world import Ctx, Toolbox, world

OLD, NEW, OTHER = ("o" * 32, "n" * 32, "x" * 32)

MakeUrl = Callable[[Path], str]
Bytes = Callable[[], bytes]


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder}/sessions.db"


def redis_url(_: Path) -> str:
    return f"{shared_redis().url}?namespace={namespace()}"


def postgres_url(_: Path) -> str:
    return f"{shared_postgres().url}?schema={schema()}"


EVERY = [
    pytest.param(sqlite_url, id="sqlite"),
    pytest.param(redis_url, id="redis", marks=pytest.mark.redis),
    pytest.param(postgres_url, id="postgres", marks=pytest.mark.postgres),
]


def store_of(url: str, *keys: str) -> SessionStore:
    """The store at a URL, encrypted with these keys; with none, as it is."""
    return encrypted_store_over(open_store(url), keys) if keys else open_store(url)


def _all_bytes(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@contextmanager
def _in_a_file(folder: Path) -> Generator[tuple[str, Bytes]]:
    yield sqlite_url(folder), lambda: _all_bytes(folder)


@contextmanager
def _in_redis(folder: Path) -> Generator[tuple[str, Bytes]]:
    # Each command is written to the file as it is.
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server.url, lambda: _all_bytes(server.directory)


@contextmanager
def _in_postgres(folder: Path) -> Generator[tuple[str, Bytes]]:
    with postgres_server() as server:

        def content() -> bytes:
            server.stop()
            return _all_bytes(server.directory)

        yield server.url, content


SERVERS = [
    pytest.param(_in_a_file, id="sqlite"),
    pytest.param(_in_redis, id="redis", marks=pytest.mark.redis),
    pytest.param(_in_postgres, id="postgres", marks=pytest.mark.postgres),
]
MARKS = ("data", "state", "event", "answer", "question", "modern-question", "change", "relayed")


def mark(what: str) -> str:
    """What no store has by itself."""
    return f"the {what} mark of this test"


async def _remember(ctx: Ctx, arguments: Json) -> str:
    from mcp_sessions import current_session

    async with current_session().data.edit() as data:
        data["note"] = mark("data")
    current_session().state["note"] = mark("state")
    return "remembered"


async def _use(store: SessionStore) -> None:
    """Clients of both eras leave something of each kind in the store."""
    box = Toolbox()
    box.tools["remember"] = _remember
    security = SessionSecurity([OLD])
    async with world(store=store, box=box, security=security) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        session = (await client.start())["sessionId"]
        await client.text("remember")
        await w.produce(session, 1, text=mark("event"))
        meta = keyed("k", session)
        assert await client.text("echo", meta=meta, text=mark("answer")) == mark("answer")
        asked = client.call("ask", question=mark("question"))
        (question,) = await asked.reply.has(1)
        await client.respond(question, {"action": "accept", "content": {"answer": "two"}})
        assert "two" in text_of(await asked.result())

        modern = ModernClient(w.carrier, capabilities={"elicitation": {}})
        meta = session_meta((await modern.create())["sessionId"], key="m")
        params: Json = {"name": "ask", "arguments": {"question": mark("modern-question")}}
        first = await modern.send("tools/call", params, meta=meta).result()
        assert mark("modern-question") in str(first)

        subscribed = await new(store)
        await store.change(subscribed, SetFilter(frozenset({"note://1"}), frozenset()))
        members = {"uri": "note://1", "text": mark("change")}
        template = EventTemplate("notifications/resources/updated", members, None)
        bare = Draft(encode(members))
        change = ServerChange("c", NOW, "note://1", None, template, bare)
        (appended,) = await store.append_change([subscribed], change, now=w.clock())
        assert mark("change").encode() in appended.event.payload

        connection, origin = await new(store, Mode.TRANSPORT), await new(store)
        attached = await store.attach(origin, ConnectionId(connection), now=w.clock())
        assert attached is not None
        start = await store.head(origin)
        assert start is not None
        assert await store.carry(connection, origin, attached.fencing_epoch, start)
        event = LoggedEvent(
            Position(start.log_epoch, 1).event_id(), 1, mark("relayed").encode(), NOW, None, None
        )
        relayed = await store.relay(
            connection, origin, attached.fencing_epoch, event, now=w.clock()
        )
        assert relayed.event is not None and relayed.event.payload == event.payload


@pytest.mark.parametrize("server", SERVERS)
async def test_what_is_encrypted_is_found_nowhere_in_the_store(server: Any, tmp_path: Path) -> None:
    """The owner's name and the session's id are, so that an operator finds a session."""
    with server(tmp_path) as (url, content):
        await _use(store_of(url, OLD))
        found = content()
    assert [each for each in MARKS if mark(each).encode() in found] == []
    assert b"note://1" in found


@pytest.mark.parametrize("server", SERVERS)
async def test_without_encryption_all_of_it_is_there(server: Any, tmp_path: Path) -> None:
    """So the test above looks where it is."""
    with server(tmp_path) as (url, content):
        await _use(store_of(url))
        found = content()
    # A question of the 2026 era is in no store: its client brings it back with the answer.
    there = {each for each in MARKS if mark(each).encode() in found}
    assert there >= {*MARKS} - {"modern-question"}


# --- between processes ---------------------------------------------------------------------------


class _Sent:
    """An exchange that keeps what it is to send."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.listener: Any = None

    async def join(self, process: str, listener: Any) -> None:
        self.listener = listener

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        self.messages.append(message)
        return True


async def _exchanged(*keys: str) -> tuple[Any, _Sent]:
    sent = _Sent()
    store: Any = _Remembering()
    store.exchange = sent
    sealed = encrypted_store_over(store, keys)
    await sealed.open(SessionPolicy())
    return sealed.exchange, sent


async def test_a_message_between_processes_is_encrypted() -> None:
    """A store may keep it until the other process takes it."""
    exchange, sent = await _exchanged(NEW, OLD)
    process = Process("p", MemoryStore(), exchange, ReceivedItems(), ReceivedItems())
    await exchange.join("p", process)
    assert await exchange.send(mark("message").encode(), to="q")
    (message,) = sent.messages
    assert mark("message").encode() not in message
    sent.listener.on_message(message)
    assert process.messages.received == [mark("message").encode()]


async def test_what_another_process_sealed_with_an_unknown_key_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs, wire = await _exchanged(OTHER)
    await theirs.send(b"secret")
    ours, sent = await _exchanged(OLD)
    process = Process("p", MemoryStore(), ours, ReceivedItems(), ReceivedItems())
    await ours.join("p", process)
    with caplog.at_level(logging.ERROR):
        sent.listener.on_message(wire.messages[0])
    assert process.messages.received == []
    assert "a message of another replica is left out" in caplog.text
    assert "secret" not in caplog.text


# --- keys ----------------------------------------------------------------------------------------

SECRET = Draft(b'{"secret":"', b'"}')
KEY = KeyUse(RequestKey("k"), b"digest", "process-1")
ANSWER = b'"result":{}'
ALICE = Principal("app", "https://issuer.example", "alice")


async def filled(url: str, *keys: str) -> SessionId:
    """A session with data, an event and an answer."""
    async with opened(store_of(url, *keys)) as store:
        session_id = await new(store, principal=ALICE)
        await store.append(session_id, SECRET, now=NOW)
        await store.admit(session_id, ALICE, mode=Mode.PROTOCOL, now=NOW, key=KEY)
        assert await store.finish_request(session_id, KEY.key, ANSWER, now=NOW)
        assert await store.replace_data(session_id, {"a": 1}, expected_version=0)
        assert await store.change_state(session_id, {"b": 1}, ())
    return session_id


async def has_all(url: str, session_id: SessionId, *keys: str) -> None:
    async with opened(store_of(url, *keys)) as store:
        data = await store.load_data(session_id)
        assert data is not None and data.value == {"a": 1}
        admitted = await store.admit(session_id, ALICE, mode=Mode.PROTOCOL, now=NOW, key=KEY)
        assert admitted is not None
        assert (admitted.key, admitted.outcome) == (Begun.ANSWERED, ANSWER)
        loaded = await store.load(session_id, now=NOW)
        listed = [each for each in await store.all_sessions() if each.session_id == session_id]
        for record in (admitted.record, loaded, *listed):
            assert record is not None and record.state.values == {"b": 1}
        head = await store.head(session_id)
        assert head is not None
        start = Position(head.log_epoch, head.number - 1)
        (event,), _ = await store.read(session_id, start.event_id(), now=NOW)
        assert event.payload == SECRET.encode(event.event_id)
        attached = await store.attach(session_id, None, now=NOW, position=start)
        assert attached is not None and attached.replay == [event]


@pytest.mark.parametrize("make_url", EVERY)
async def test_keys_are_rotated_as_those_of_state_tokens(make_url: MakeUrl, tmp_path: Path) -> None:
    """The first seals, all open; and what the old one sealed needs it as long as it is there."""
    url = make_url(tmp_path)
    older = await filled(url, OLD)
    for keys in ((OLD, NEW), (NEW, OLD)):
        await has_all(url, older, *keys)
    newer = await filled(url, NEW, OLD)
    await has_all(url, newer, NEW)
    async with opened(store_of(url, NEW)) as store:
        with pytest.raises(StoreRefused, match="a key that is not in the ring"):
            await store.load_data(older)
        with pytest.raises(StoreRefused, match="a key that is not in the ring"):
            await store.load(older, now=NOW)
        # The list is there all the same, and the session can be ended.
        assert {each.session_id: each.state.values for each in await store.all_sessions()} == {
            older: {},
            newer: {"b": 1},
        }
        assert await store.end(older) is not None


@pytest.mark.parametrize("make_url", EVERY)
async def test_a_wrong_key_is_one_line_at_the_start(make_url: MakeUrl, tmp_path: Path) -> None:
    url = make_url(tmp_path)
    session_id = await filled(url, OLD)
    with pytest.raises(ConfigurationError, match="was encrypted with another key: set MCP_") as it:
        async with opened(store_of(url, OTHER)):
            raise AssertionError("it is served")
    assert OLD not in str(it.value) and "\n" not in str(it.value)
    await has_all(url, session_id, OLD)


@pytest.mark.parametrize("make_url", EVERY)
async def test_an_encrypted_store_is_not_served_without_the_option(
    make_url: MakeUrl, tmp_path: Path
) -> None:
    url = make_url(tmp_path)
    await filled(url, OLD)
    layer = SessionLayer(Toolbox().server, store=url, security=SessionSecurity([OLD]))
    with pytest.raises(ConfigurationError, match="is encrypted: start with --encrypt-store"):
        async with layer.lifespan():
            raise AssertionError("it is served")


@pytest.mark.parametrize("make_url", EVERY)
async def test_what_was_there_before_is_read_and_what_comes_is_encrypted(
    make_url: MakeUrl, tmp_path: Path
) -> None:
    url = make_url(tmp_path)
    before = await filled(url)
    layer = SessionLayer(
        Toolbox().server, store=url, security=SessionSecurity([OLD]), encrypt_store=True
    )
    async with layer.lifespan():
        pass
    await has_all(url, before, OLD)
    async with opened(store_of(url, OLD)) as store:
        data = await store.load_data(before)
        assert data is not None
        await store.replace_data(before, {"a": 1}, expected_version=data.version)
        assert await store.change_state(before, {"c": 1}, ("b",))
        assert await store.change_state(before, {"b": 1}, ("c",))
    async with opened(store_of(url)) as raw:
        record = await raw.load(before, now=NOW)
        assert record is not None and not {"b", "c"} & record.state.values.keys()
        data = await raw.load_data(before)
        assert data is not None and data.value != {"a": 1}
    await has_all(url, before, OLD)


@pytest.mark.redis
async def test_a_store_that_was_emptied_is_known_to_be_encrypted_again(tmp_path: Path) -> None:
    """The rounds over sessions ask when it was made."""
    with redis_server() as server:
        async with opened(store_of(server.url, OLD)) as store:
            assert await store.made(now=NOW) is not None
            server.ask("FLUSHALL")
            made = await store.made(now=NOW)
            assert made is not None and made.is_new
            await new(store)
        async with opened(store_of(server.url)) as raw:
            with pytest.raises(ConfigurationError, match="is encrypted"):
                await check_is_open(raw)


async def test_an_applications_own_member_of_that_name_is_data(tmp_path: Path) -> None:
    """It was stored before the store was encrypted, and looks like what is sealed."""
    url = sqlite_url(tmp_path)
    values: Sequence[Any] = ("AAAA", "no base64!", 7, None, "/w==")
    ids: list[SessionId] = []
    async with opened(store_of(url)) as raw:
        for value in values:
            ids.append(await new(raw))
            own = {"mcp_sessions.sealed": value}
            assert await raw.replace_data(ids[-1], own, expected_version=0)
            assert await raw.change_state(ids[-1], own, ())
    async with opened(store_of(url, OLD)) as store:
        for session_id, value in zip(ids, values, strict=True):
            data = await store.load_data(session_id)
            assert data is not None and data.value == {"mcp_sessions.sealed": value}
            record = await store.load(session_id, now=NOW)
            assert record is not None and record.state.values == data.value


async def test_keys_that_end_with_the_process_encrypt_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)
    with pytest.raises(ConfigurationError, match="keys that outlive this process: set MCP_"):
        SessionLayer(Toolbox().server, store="redis://localhost", encrypt_store=True)


@pytest.mark.parametrize("store", ["memory://", None])
async def test_a_store_that_ends_with_the_process_is_not_encrypted(store: str | None) -> None:
    with pytest.raises(ConfigurationError, match="use SQLite, Postgres or Redis"):
        SessionLayer(
            Toolbox().server, store=store, security=SessionSecurity([OLD]), encrypt_store=True
        )


async def test_a_sqlite_file_is_encrypted_with_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gave a key. Without that file the store is not served."""
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)

    def layer() -> SessionLayer:
        return SessionLayer(Toolbox().server, store=tmp_path / "sessions.db", encrypt_store=True)

    for _ in range(2):
        first = layer()
        async with first.lifespan():
            session_id = await new(first.store)
            assert await first.store.replace_data(session_id, {"a": 1}, expected_version=0)
    raw = sqlite3.connect(tmp_path / "sessions.db")
    assert raw.execute("SELECT count(*) FROM meta WHERE name LIKE 'sealed by %'").fetchone() == (1,)
    raw.close()
    (tmp_path / "sessions.db-key").unlink()
    with pytest.raises(ConfigurationError, match="was encrypted with another key"):
        async with layer().lifespan():
            raise AssertionError("it is served")


# --- always --------------------------------------------------------------------------------------


class _Remembering(MemoryStore):
    """A store in memory that can be encrypted."""

    name, survives_process = "remembering", True

    def __init__(self) -> None:
        super().__init__()
        self.known: frozenset[str] = frozenset()

    async def sealing_keys(self, *, add: str | None = None) -> frozenset[str]:
        if add is not None:
            self.known |= {add}
        return self.known


TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXT, each, max_size=3),
    max_leaves=8,
)  # fmt: skip


async def _round(
    before: bytes, after: bytes | None, stream: str, data: dict[str, Any], outcome: bytes
) -> None:
    store = _Remembering()
    async with opened(encrypted_store_over(store, (NEW, OLD))) as sealed:
        session_id = await new(sealed)
        draft = Draft(before, after)
        appended = await sealed.append(session_id, draft, now=NOW, stream=StreamName(stream))
        assert appended is not None
        assert appended.event.payload == draft.encode(appended.event.event_id)
        start = Position(appended.event.position.log_epoch, 0).event_id()
        events, _ = await sealed.read(session_id, start, now=NOW, stream=StreamName(stream))
        assert list(events) == [appended.event]
        assert await sealed.replace_data(session_id, data, expected_version=0)
        loaded = await sealed.load_data(session_id)
        assert loaded is not None and encode(loaded.value) == encode(data)
        changed = await sealed.change_state(session_id, data, ())
        assert changed is not None and encode(dict(changed.state.values)) == encode(data)
        await sealed.admit(session_id, Principal(), mode=Mode.PROTOCOL, now=NOW, key=KEY)
        assert await sealed.finish_request(session_id, KEY.key, outcome, now=NOW)
        admitted = await sealed.admit(session_id, Principal(), mode=Mode.PROTOCOL, now=NOW, key=KEY)
        assert admitted is not None and admitted.outcome == outcome


@given(
    before=st.binary(max_size=50),
    after=st.none() | st.binary(max_size=50),
    stream=TEXT,
    data=st.dictionaries(TEXT, JSON, max_size=3),
    outcome=st.binary(max_size=50),
)
def test_what_goes_in_comes_out(
    before: bytes, after: bytes | None, stream: str, data: dict[str, Any], outcome: bytes
) -> None:
    """Also what looks sealed, and texts that are no Unicode."""
    asyncio.run(_round(before, after, stream, data, outcome))


@given(
    value=st.binary(max_size=40),
    here=st.lists(st.none() | TEXT, max_size=3),
    there=st.lists(st.none() | TEXT, max_size=3),
    data=st.data(),
)
def test_a_value_opens_in_its_place_and_unchanged_or_not_at_all(
    value: bytes, here: list[str | None], there: list[str | None], data: st.DataObject
) -> None:
    sealing = Sealing()
    sealing.values = SealedValues([NEW, OLD])
    stored = sealing.seal(value, tuple(here))
    assert len(stored) == len(value) + OVERHEAD
    assert sealing.open(stored, tuple(here)) == value
    if here != there:
        with pytest.raises(StoreRefused):
            sealing.open(stored, tuple(there))
    at = data.draw(st.integers(2, len(stored) - 1))
    changed = bytearray(stored)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StoreRefused):
        sealing.open(bytes(changed), tuple(here))
    cut = data.draw(st.integers(2, len(stored) - 1))
    with pytest.raises(StoreRefused):
        sealing.open(stored[:cut], tuple(here))


@given(JSON)
def test_what_is_not_sealed_is_as_it_was(value: Any) -> None:
    """No JSON begins as what is sealed does."""
    sealing = Sealing()
    sealing.values = SealedValues([OLD])
    stored = encode(value)
    assert sealing.open(stored, ("anywhere",)) == stored


def test_every_method_that_has_what_is_sealed_seals_it() -> None:
    """A method that is added to the contract is looked at: it goes through as it is otherwise."""
    has_nothing_sealed = {
        *("touch", "end", "expire", "evict", "evict_own", "evict_heavy"),
        *("sleep", "audience", "head", "heads", "open_stream", "drop_stream", "drop_origin"),
        *("carry", "detach", "change", "subscribe", "unsubscribe"),
        "close",
        *("remember_ends", "ended_outside", "ends", "session_ids"),
    }
    moves_it_as_it_is = {"whole", "add_whole"}
    contract = {
        name
        for part in inspect.getmro(SessionStore)
        for name, value in vars(part).items()
        if callable(value) and not name.startswith("_")
    }
    own = {name for name in vars(encrypted.EncryptedStore) if not name.startswith("_")}
    assert contract - own == has_nothing_sealed | moves_it_as_it_is
    for name in own & contract:
        asked = inspect.signature(getattr(SessionStore, name)).parameters
        takes = inspect.signature(getattr(encrypted.EncryptedStore, name)).parameters.values()
        named = {
            each.name: each
            for each in takes
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        # What it does not name goes through.
        assert named.items() <= asked.items(), name
        assert named.keys() == asked.keys() or any(each.kind is each.VAR_KEYWORD for each in takes)
