"""What only the store in Redis promises: its settings, its keys, what each call costs."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, LimitReached, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.exchange import LIVENESS
from mcp_sessions.stores.record_changes import SetFilter
from mcp_sessions.stores.records import Attachment, Peer
from mcp_sessions.stores.redis import lists
from mcp_sessions.stores.redis.lists import MARGIN
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.stores.urls import open_store
from mcp_sessions.testing.parts import change_of, subscribers_of
from tests.stores import opening
from tests.stores.opening import NOW, POLICY, new
from tests.support.duplex import duplex_world
from tests.support.modern import ModernClient, session_meta
from tests.support.raw import keyed
from tests.support.redis_server import (
    answers_of,
    asked,
    binary,
    dies_after,
    keys_of,
    namespace,
    redis_server,
    redis_store,
    sent_by,
    shared_redis,
)

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.redis

KEY = KeyUse(RequestKey("key"), b"digest", "process-1")


def opened(own: str | None = None, **limits: Any) -> AbstractAsyncContextManager[RedisStore]:
    durations: dict[str, Any] = {"idle_timeout": 100, "max_lifetime": 1_000}
    return opening.opened(redis_store(own=own), SessionPolicy(**(durations | limits)))


class Deaf:
    """Hears others, and does nothing about it."""

    def on_message(self, message: bytes) -> None: ...

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None: ...

    def on_gap(self) -> None: ...


async def use_everything(store: RedisStore, mode: Mode = Mode.PROTOCOL) -> SessionId:
    peer = Peer("2025-11-25", {"clientInfo": {"name": "client"}})
    session_id = (await store.create(mode, ANONYMOUS, peer=peer, now=NOW)).session_id
    for stream in (EVENTS, GET_STREAM):
        for key in (None, "key"):
            await store.append(session_id, Draft(b"{}", key=key), now=NOW, stream=stream)
    await store.admit(session_id, ANONYMOUS, mode=mode, now=NOW, key=KEY)
    await store.finish_request(session_id, KEY.key, b'"result":{}', now=NOW)
    if mode is not Mode.AGENT:
        # ACP has no resources.
        await store.subscribe(session_id, "note://1")
    await store.change_state(session_id, {"a": 1}, ())
    await store.replace_data(session_id, {"b": 2}, expected_version=0)
    head = await store.head(session_id)
    assert head is not None
    await store.carry(session_id, SessionId("other"), FencingEpoch(1), head)
    await store.attach(session_id, ConnectionId("here"), now=NOW)
    return session_id


# --- settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
async def test_a_url_opens_it_whatever_the_server_is_called(scheme: str) -> None:
    url = shared_redis().url.replace("redis", scheme, 1)
    store = open_store(f"{url}/0?namespace={namespace()}&timeout=2.5")

    await store.open(POLICY)
    await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
    await store.close()

    assert isinstance(store, RedisStore)


async def test_a_unix_socket_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with redis_server("--unixsocket", str(path)):
        store = open_store(f"unix://{path}")
        await store.open(POLICY)
        assert not await store.all_sessions()
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@localhost/0?namespace=a{b}",
        "redis://user:secret@localhost/0?namespace=",
        "redis://user:secret@localhost/0?timeout=0",
        "redis://user:secret@localhost/0?timeout=soon",
        "redis://user:secret@localhost/0?no_such_option=1",
        "redis://user:secret@localhost:port/0",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store(url)

    assert "secret" not in str(refused.value)


def ran(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50
    )


def test_without_its_library_the_error_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['redis'] = None\n"
        "from mcp_sessions.errors import ConfigurationError\n"
        "from mcp_sessions.stores.urls import open_store\n"
        "try: open_store('rediss://user:secret@localhost')\n"
        "except ConfigurationError as refused: print(refused)\n"
    )

    done = ran(script)

    assert "pip install 'mcp-sessions[redis]'" in done.stdout, done.stderr
    assert "secret" not in done.stdout


def test_what_does_not_use_it_does_not_load_its_library() -> None:
    script = "import sys, mcp_sessions.layer; print('redis' in sys.modules)"

    done = ran(script)

    assert done.stdout.strip() == "False", done.stderr


@contextmanager
def server_that_says(version: str) -> Generator[int]:
    """The port of what answers like a Redis of another age."""
    info = f"redis_version:{version}\r\nmaxmemory_policy:noeviction\r\nmaster_replid:0\r\n".encode()

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection, connection.makefile("rwb") as stream:
            for line in stream:
                if line.startswith(b"*"):
                    parts = [
                        stream.read(int(stream.readline()[1:]) + 2) for _ in range(int(line[1:]))
                    ]
                    said = {
                        b"INFO\r\n": b"$%d\r\n%s\r\n" % (len(info), info),
                        b"TIME\r\n": b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n",
                    }
                    stream.write(said.get(parts[0], b"+OK\r\n"))
                    stream.flush()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,), daemon=True)
        answering.start()
        yield listener.getsockname()[1]
        answering.join(10)


@pytest.mark.parametrize(("version", "is_too_old"), [("6.2.14", True), ("7.0.0", False)])
async def test_a_server_that_is_too_old_is_refused_by_name(version: str, is_too_old: bool) -> None:
    with server_that_says(version) as port:
        store = RedisStore(f"redis://127.0.0.1:{port}")
        try:
            await store.open(POLICY)
        except ConfigurationError as refused:
            assert is_too_old
            assert version in str(refused) and "7" in str(refused)
        else:
            assert not is_too_old
        finally:
            await store.close()


async def test_a_server_that_may_evict_sessions_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with redis_server("--maxmemory-policy", "volatile-ttl") as server:
        store = RedisStore(server.url)
        with caplog.at_level(logging.WARNING):
            await store.open(POLICY)
        await store.close()

    assert "volatile-ttl" in caplog.text and "noeviction" in caplog.text


async def test_nobody_there_is_an_error_at_once() -> None:
    """HTP5: not a server that starts, and answers errors."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = RedisStore(f"redis://user:secret@127.0.0.1:{port}")

    with pytest.raises(StoreUnavailable) as refused:
        await store.open(POLICY)

    assert "secret" not in str(refused.value)
    await store.close()


# --- keys --------------------------------------------------------------------------------


async def test_namespaces_share_a_server_and_nothing_else() -> None:
    own = namespace()
    async with opened(own) as one, opened() as other, opened(own) as again:
        session_id = await use_everything(one)

        assert await other.load(session_id, now=NOW) is None
        assert not await other.all_sessions()
        assert not await subscribers_of(other, "note://1")
        assert await again.load(session_id, now=NOW) is not None


async def test_a_key_names_no_session_and_no_resource() -> None:
    """SEC2: names of keys turn up in monitors, slow logs and listings."""
    async with opened() as store:
        session_id = await use_everything(store)

        keys = await keys_of(store)

    assert len(keys) > 10
    assert not [key for key in keys if session_id in key or "note" in key]


async def test_every_key_goes_by_itself_when_no_server_comes_back() -> None:
    """But nothing goes before its session has ended, however late that is looked at."""
    async with opened() as store:
        session_id = await use_everything(store)
        of_session = [key for key in await keys_of(store) if f"{store_name(store)}:{{" in key]
        others = [
            key for key in await keys_of(store) if key not in of_session and ":uri:" not in key
        ]

        async def lifetimes(keys: list[str]) -> list[float]:
            return [await asked(store, "PTTL", key) / 1000 for key in keys]

        of_session = [key for key in of_session if ":uri:" not in key]
        assert len(of_session) == 12 and len(others) == 2
        for left in await lifetimes(of_session):
            assert 100 < left <= 100 + MARGIN
        for left in await lifetimes(others):
            assert 1_000 < left <= 1_000 + MARGIN
        for now in range(100, 1_000, 90):
            await store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW + now)
            for left in await lifetimes(of_session):
                assert 100 + MARGIN / 2 - 60 < left <= 100 + MARGIN


async def test_response_streams_of_a_dead_process_give_back_their_room() -> None:
    """Nobody is left who drops them, and their session may go on for days."""
    async with opened(max_age=50) as store:
        of = await new(store, Mode.TRANSPORT)

        async def streams() -> set[str]:
            return {key.rpartition(":e:")[2] for key in await keys_of(store) if ":e:" in key}

        for name in ("events", "get", "post-1", "post-2"):
            await store.append(of, Draft(b"x", key="k"), now=NOW, stream=StreamName(name))
        head = await store.head(of, stream=StreamName("post-1"))
        later = NOW + 49
        await store.append(of, Draft(b"y"), now=later, stream=StreamName("post-3"))
        assert await streams() == {"events", "get", "post-1", "post-2", "post-3"}
        await store.append(of, Draft(b"y"), now=later + 2, stream=StreamName("post-4"))
        # The events of the session and its GET stream are looked at when they are used.
        assert await streams() == {"events", "get", "post-3", "post-4"}
        assert not [key for key in await keys_of(store) if ":k:post-" in key]
        # It is the same log, and goes on where it was.
        assert await store.head(of, stream=StreamName("post-1")) == head
        again = await store.append(of, Draft(b"z"), now=later + 2, stream=StreamName("post-1"))
        assert again is not None and again.event.number == 2


async def streams_of(store: RedisStore, session_id: SessionId, count: int) -> None:
    """Open that many response streams in a session."""
    for first in range(0, count, 500):
        names = [StreamName(f"post-{n}") for n in range(first, min(first + 500, count))]
        await asyncio.gather(*(store.open_stream(session_id, name) for name in names))


@pytest.mark.parametrize("by", ["end", "expire"])
async def test_a_session_with_more_keys_than_lua_unpacks_is_ended_and_expired(by: str) -> None:
    """Its process died and left its response streams: each has two keys."""
    async with opened() as store:
        large = await new(store, Mode.TRANSPORT)
        await streams_of(store, large, 4_100)

        if by == "end":
            ended = [await store.end(large)]
        else:
            # Many deadlines are moved before that, and with them the lives of all keys.
            await store.touch([large], now=NOW + 600)
            ended = list(await store.expire(now=NOW + 1_000, held=(), limit=9))

        assert [each and each.session_id for each in ended] == [large]
        assert await keys_of(store) == []


async def test_the_first_event_of_a_stream_costs_the_same_however_many_others_are_open() -> None:
    """Else a client with many calls makes each of its calls slower than the one before."""
    async with opened() as store:
        of = await new(store, Mode.TRANSPORT)
        names = [StreamName(f"post-{number}") for number in range(200)]
        await asyncio.gather(
            *(store.append(of, Draft(b"x"), now=NOW, stream=name) for name in names)
        )
        server = shared_redis()
        before = {name: server.executed(name) for name in ("info", "xlen", "hget", "hkeys")}

        await store.append(of, Draft(b"x"), now=NOW, stream=StreamName("post-new"))

        for name, count in before.items():
            # Notifier what was executed is an INFO itself.
            most = 1 + len(before) if name == "info" else 10
            assert server.executed(name) - count <= most, name


@pytest.mark.parametrize("broken", ["of another kind", "without a deadline", "no record"])
async def test_a_session_that_cannot_be_read_stops_no_round_for_the_others(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever expires and touches goes on with the next, and says that there was one."""
    async with opened() as store:
        first, bad, held, last = [await new(store) for _ in range(4)]
        key = store_key(store, bad)
        if broken == "of another kind":
            await asked(store, "SET", key, "x")
            await store.touch([bad, held], now=NOW + 90)
        else:
            field = "mode" if broken == "no record" else "expires"
            await asked(store, "HSET", key, field, "not one of ours")
        ended = [await store.expire(now=NOW + 100, held=[held], limit=1) for _ in range(3)]

        assert [each.session_id for found in ended for each in found] in (
            [first, last],
            [last, first],
        )
        assert {each for each in await ids(store, [first, held, last])} == {held}
        assert "session" in caplog.text


@pytest.mark.parametrize("by", ["end", "expire"])
async def test_who_ended_a_session_learns_so_although_its_entry_could_not_be_removed(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended: what runs for it has to end. The place is found by who looks next."""
    async with opened(max_sessions=1) as store:
        # Once before: where the server has a script already, running it is one command.
        before = await new(store)
        if by == "end":
            await store.end(before)
        else:
            await store.expire(now=NOW + 100, held=(), limit=9)
        of = await new(store)
        await store.subscribe(of, "note://1")
        call = store._link.call  # pyright: ignore[reportPrivateUsage]
        died = dies_after(store, 1 if by == "end" else 2)

        if by == "end":
            ended = [await store.end(of)]
        else:
            ended = list(await store.expire(now=NOW + 100, held=(), limit=9))

        assert died() and [each and each.session_id for each in ended] == [of]
        monkeypatch.setattr(store._link, "call", call)  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(lists, "IN_FLIGHT", -10)
        await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
        assert await subscribers_of(store, "note://1") == []


async def ids(store: RedisStore, session_ids: Sequence[SessionId]) -> list[SessionId]:
    return [each for each in session_ids if await store.load(each, now=NOW) is not None]


def store_key(store: RedisStore, session_id: SessionId) -> str:
    return store._key(session_id)  # pyright: ignore[reportPrivateUsage]


async def test_an_agents_session_does_not_go_by_itself() -> None:
    async with opened() as store:
        session_id = await use_everything(store, Mode.AGENT)
        kept = await keys_of(store)
        assert {await asked(store, "PTTL", key) for key in kept} == {-1}

        await store.end(session_id)

        assert await keys_of(store) == []


@pytest.mark.parametrize("mode", [Mode.PROTOCOL, Mode.TRANSPORT])
async def test_what_ended_leaves_no_key(mode: Mode) -> None:
    """END2."""
    async with opened() as store:
        session_id = await use_everything(store, mode)
        await use_everything(store, mode)
        await store.end(session_id)
        assert len(await store.expire(now=NOW + 1_000, held=(), limit=9)) == 1

        assert await keys_of(store) == []


def store_name(store: RedisStore) -> str:
    return store._namespace  # pyright: ignore[reportPrivateUsage]


async def test_what_a_script_refuses_is_reported_without_what_it_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SEC2. A full Redis is an error; nothing half written."""
    with redis_server() as server:
        store = RedisStore(server.url)
        await store.open(POLICY)
        session_id = await use_everything(store)
        server.ask("CONFIG SET maxmemory 1")

        with pytest.raises(StoreUnavailable) as refused:
            await store.append(session_id, Draft(b"secret"), now=NOW)

        server.ask("CONFIG SET maxmemory 0")
        head = await store.head(session_id)
        await store.close()
    assert head is not None and head.number == 2
    notified = f"{refused.value!r} {caplog.text}"
    assert "is full" in notified
    assert session_id not in notified and "secret" not in notified


# --- what each call costs ----------------------------------------------------------------


async def test_each_step_of_a_request_is_one_script() -> None:
    """One to admit it, one to keep its answer, one per event; and no other command."""
    async with opened() as store:
        principal = Principal("client", "issuer", "alice", frozenset({"read"}))
        made = await store.create(Mode.PROTOCOL, principal, peer=None, now=NOW)
        session_id = made.session_id
        # From here on the server knows the scripts.
        await store.admit(session_id, principal, mode=Mode.PROTOCOL, now=NOW, key=KEY)
        await store.finish_request(session_id, KEY.key, b"{}", now=NOW)
        await store.append(session_id, Draft(b"{}"), now=NOW)
        server, sent = shared_redis(), sent_by(store)
        again = KeyUse(RequestKey("again"), b"digest", "process-1")
        for name, call in (
            ("admit", store.admit(session_id, principal, mode=Mode.PROTOCOL, now=NOW, key=again)),
            ("finish", store.finish_request(session_id, again.key, b"{}", now=NOW)),
            ("append", store.append(session_id, Draft(b"{}", key="k"), now=NOW)),
        ):
            before = server.executed("evalsha")
            sent.clear()
            await call
            assert sent == [name]
            assert server.executed("evalsha") == before + 1


async def test_a_request_costs_one_script_for_each_session_it_is_of() -> None:
    """And one more if its answer is kept, one for each event; on the wire, in both eras."""
    store = redis_store()
    async with duplex_world(store=store) as w:
        handshake, modern, websocket = (
            await w.inner.connected(),
            ModernClient(w.inner.carrier),
            await w.connected(),
        )
        await handshake.text("echo", text="a")
        await handshake.start()
        of_modern, of_websocket = await modern.start(), await websocket.start()
        # From here on the server knows the scripts.
        await modern.text("echo", {"text": "a"}, meta=session_meta(of_modern["sessionId"], key="0"))
        sent = sent_by(store)

        async def cost(call: Awaitable[object]) -> list[str]:
            sent.clear()
            await call
            return list(sent)

        call, key = {"text": "a"}, session_meta(of_modern["sessionId"], key="1")
        assert await cost(modern.text("echo", call, meta=key)) == ["admit", "finish"]
        named = session_meta(of_modern["sessionId"])
        assert await cost(modern.text("echo", call, meta=named)) == ["admit"]
        assert await cost(websocket.text("echo", text="a")) == ["admit"]
        keyed_call = websocket.text("echo", text="a", meta=keyed("1", of_websocket["sessionId"]))
        assert await cost(keyed_call) == ["admit", "finish"]
        # The connection is a session, and what it started is another.
        assert await cost(handshake.text("echo", text="a")) == ["admit", "admit"]
        assert await cost(w.publish(of_modern["sessionId"], "note://1", wait=True)) == ["append"]


async def test_a_request_is_not_notified_all_subscriptions_again() -> None:
    """A session may have thousands; another process's change is seen all the same."""
    own = namespace()
    async with opened(own) as store, opened(own) as other:
        session_id = await new(store)
        uris = frozenset(f"note://{number}" for number in range(2_000))
        await store.change(session_id, SetFilter(uris, frozenset()))
        asked_for = [await admitted(each, session_id) for each in (store, other)]
        assert asked_for == [uris, uris]

        answers = answers_of(store)
        assert await admitted(store, session_id) == uris
        assert len(str(answers)) < 2_000

        await other.unsubscribe(session_id, "note://1")
        assert await admitted(store, session_id) == uris - {"note://1"}
        await other.change(session_id, SetFilter(frozenset({"note://1"}), frozenset()))
        assert await admitted(store, session_id) == {"note://1"}
        await other.subscribe(session_id, "note://2")
        assert await admitted(store, session_id) == {"note://1", "note://2"}
        await store.change(session_id, SetFilter(frozenset(), frozenset()))
        assert await admitted(store, session_id) == await admitted(other, session_id) == frozenset()


async def test_who_changes_its_subscriptions_is_not_notified_all_of_them_for_that() -> None:
    """It may do so all the time, and others wait while thousands of them are read."""
    own = namespace()
    async with opened(own) as store, opened(own) as other:
        session_id = await new(store)
        uris = frozenset(f"note://{number}" for number in range(2_000))
        await store.change(session_id, SetFilter(uris, frozenset()))
        assert await admitted(store, session_id) == uris

        answers = answers_of(store)
        assert await store.subscribe(session_id, "note://x")
        assert await admitted(store, session_id) == uris | {"note://x"}
        assert await store.unsubscribe(session_id, "note://1")
        assert await admitted(store, session_id) == (uris | {"note://x"}) - {"note://1"}
        assert len(str(answers)) < 4_000

        # Unless another process changed them in between.
        await other.subscribe(session_id, "note://y")
        await store.subscribe(session_id, "note://z")
        assert await admitted(store, session_id) >= {"note://x", "note://y", "note://z"}
        fresh = await new(store)
        await store.subscribe(fresh, "note://x")
        assert await admitted(store, fresh) == await admitted(other, fresh) == {"note://x"}


@pytest.mark.parametrize("kept", [None, 4_000_000], ids=["of this version", "of an older one"])
async def test_a_request_is_not_notified_again_what_its_client_said_of_itself(
    kept: int | None,
) -> None:
    """It never changes, and a small request would move all of it. An older version kept whatever
    a client sent, without a bound, and that is read once.
    """
    own = namespace()
    async with opened(own) as store, opened(own) as other:
        peer = Peer("2025-11-25", {"clientInfo": {"name": "x" * 60_000}})
        of = (await store.create(Mode.TRANSPORT, ANONYMOUS, peer=peer, now=NOW)).session_id
        if kept is not None:
            peer = Peer("2025-11-25", {"anything": "x" * kept})
            packed = orjson.dumps(["2025-11-25", peer.initialize_params, False])
            await asked(store, "HSET", store_key(store, of), "peer", packed)
        for each in (store, other) if kept is None else (other,):
            answers = answers_of(each)
            for number in range(3):
                use = KeyUse(RequestKey(f"key-{number}"), b"digest", "process-1")
                request = await each.admit(of, ANONYMOUS, mode=Mode.TRANSPORT, now=NOW, key=use)
                assert request is not None
                found = [
                    request.record,
                    await each.load(of, now=NOW),
                    await each.change_state(of, {"number": number}, ()),
                ]
                assert [record and record.client.peer for record in found] == [peer] * 3
            notified = ["x" * 60_000 in str(answer) for answer in answers]
            assert notified == [each is other, *(False for _ in answers[1:])]


async def test_the_bytes_of_subscriptions_are_counted() -> None:
    async with opened(max_subscription_bytes=100) as store:
        of = await new(store)
        for uri in ("a" * 40, "b" * 40, "a" * 40):
            await store.subscribe(of, uri)
        assert await store.subscribe(of, "c" * 20)
        with pytest.raises(LimitReached):
            await store.subscribe(of, "d")
        await store.unsubscribe(of, "c" * 20)
        assert await store.subscribe(of, "d" * 20)
        assert await store.change(of, SetFilter(frozenset({"a" * 99}), frozenset()))
        assert await store.subscribe(of, "d")
        with pytest.raises(LimitReached):
            await store.subscribe(of, "e")


async def admitted(store: RedisStore, session_id: SessionId) -> frozenset[str]:
    """The subscriptions that a request receives."""
    admitted = await store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW)
    assert admitted is not None
    return admitted.record.client.subscriptions


async def test_a_server_that_forgot_the_scripts_is_sent_them_again() -> None:
    async with opened() as store:
        session_id = await use_everything(store)
        await asked(store, "SCRIPT", "FLUSH")

        appended = await store.append(session_id, Draft(b"{}"), now=NOW)

        assert appended is not None and appended.event.number == 3


async def test_a_process_is_taken_for_dead_when_it_gave_no_sign_of_life() -> None:
    """KEY11: who dies does not leave, and the key that says it lives vanishes by itself."""
    own = namespace()
    async with opened(own) as store:
        async with opened(own) as dying:
            assert dying.exchange is not None and store.exchange is not None
            await dying.exchange.join("process", Deaf())
        assert await store.exchange.is_alive("process")
        [key] = [key for key in await keys_of(store) if ":alive:" in key]
        assert 0 < await asked(store, "PTTL", key) <= LIVENESS * 1000
        # As time does.
        await asked(store, "DEL", key)
        assert not await store.exchange.is_alive("process")


def test_the_program_is_there() -> None:
    """What is missing fails by name; it is not skipped."""
    assert Path(binary()).exists()


# --- what is left of a log -----------------------------------------------------------------


async def test_a_log_whose_events_are_gone_begins_anew() -> None:
    """CUP8: a server that evicts takes one key and leaves the other."""
    async with opened() as store:
        session_id = await use_everything(store)
        head = await store.head(session_id)
        assert head is not None
        [events] = [key for key in await keys_of(store) if key.endswith(":e:events")]
        await asked(store, "DEL", events)

        _, refusal = await store.read(session_id, Position(head.log_epoch, 1).event_id(), now=NOW)
        appended = await store.append(session_id, Draft(b"{}"), now=NOW)

    assert refusal is not None and refusal.value == "log_replaced"
    assert appended is not None and appended.event.number == 1
    position = parse_position(appended.event.event_id)
    assert position is not None and position.log_epoch > head.log_epoch


async def test_a_log_at_its_end_issues_no_other_id() -> None:
    """EVT7. A change of the server, which others get too, begins it anew."""
    async with opened() as store:
        session_id = await use_everything(store)
        key = store_key(store, session_id)
        packed: bytes = await asked(store, "HGET", key, "l:events")
        incarnation, epoch, _, *rest = packed.split(b" ")
        at_its_end = b" ".join([incarnation, epoch, b"999999999999", *rest])
        await asked(store, "HSET", key, "l:events", at_its_end)

        with pytest.raises(OverflowError):
            await store.append(session_id, Draft(b"{}"), now=NOW)
        assert await store.append_change([session_id], change_of("note://1"), now=NOW) == []
        head = await store.head(session_id)

    assert head is not None and head.number == 0 and head.log_epoch > epoch.decode()


async def test_a_session_whose_record_is_gone_is_gone() -> None:
    """CUP8, the reverse: no event comes back without its session."""
    async with opened() as store:
        session_id = await use_everything(store)
        keys = await keys_of(store)
        [record] = [key for key in keys if key.endswith("}") and ":uri:" not in key]
        await asked(store, "DEL", record)

        assert await store.append(session_id, Draft(b"{}"), now=NOW) is None
        assert await store.head(session_id) is None
        assert not await subscribers_of(store, "note://2")
        assert await store.end(session_id) is None


async def test_a_principals_other_sessions_do_not_hide_his_conversations() -> None:
    """Behind a gateway one identity has thousands, whose places stand before theirs."""
    gateway = Principal("gateway")
    store = redis_store()
    await store.open(SessionPolicy(forget_after=FORGET_AFTER))
    named = SessionId("n" * 43)
    await store.create(Mode.CONVERSATION, gateway, peer=None, now=NOW, session_id=named)
    makes = (
        store.create(Mode.TRANSPORT, gateway, peer=None, now=NOW, session_id=None)
        for _ in range(2_100)
    )
    await asyncio.gather(*makes)
    gone = await store.evict_own(gateway, now=NOW + 99, unused_for=60, held=(), limit=9)
    assert [record.session_id for record in gone] == [named]
    await store.close()
