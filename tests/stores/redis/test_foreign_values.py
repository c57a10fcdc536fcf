"""Another program deletes a key of a session's, or writes another type or a wrong value.

A call that meets it fails as one to a store that is away (HTP5), and no other session notices. An
operator ends the session, or deletes the key.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcp_sessions.core.log import Draft, Refusal
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import DataConflict, LimitReached, StoreRefused, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    RequestKey,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.record_changes import SetCurrent, SetFilter, SetLogLevel
from mcp_sessions.stores.records import Peer
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.testing.parts import change_of
from tests.support.redis_server import asked, keys_of, redis_store
from tests.support.world import world

pytestmark = pytest.mark.redis

NOW = 1_800_000_000.0
POLICY = SessionPolicy(idle_timeout=1_000, max_lifetime=10_000, request_key_bytes=2_000)
RESPONSE = StreamName("response")
URI = "note://1"

SUFFIXES = (
    *("", ":u", ":s", ":c", ":d", ":q", ":qf", ":qa", ":r"),
    *(":e:events", ":k:events", ":e:get", ":k:get", ":e:response"),
)
LISTS = ("all", "of", "uri")
TYPES: dict[str, Sequence[bytes]] = {
    "string": (b"SET", b"%s", b"x"),
    "list": (b"RPUSH", b"%s", b"x"),
    "hash": (b"HSET", b"%s", b"x", b"y"),
    "set": (b"SADD", b"%s", b"x"),
    "zset": (b"ZADD", b"%s", b"1", b"x"),
}
GARBAGE = (b"\xff{", b"", b"[]", b"nan", b"-1", b"0x1f")


def key_use(name: str, run: str = "run") -> KeyUse:
    return KeyUse(RequestKey(name), b"digest", "here", run=run)


async def used(store: RedisStore, uri: str = URI) -> SessionId:
    peer = Peer("2025-11-25", {"clientInfo": {"name": "client"}})
    of = (await store.create(Mode.PROTOCOL, ANONYMOUS, peer=peer, now=NOW)).session_id
    for stream in (EVENTS, GET_STREAM, RESPONSE):
        for key in (None, "key"):
            await store.append(of, Draft(b"{}", key=key), now=NOW, stream=stream)
    for name in ("answered", "dropped", "running"):
        await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=key_use(name))
    await store.finish_request(of, RequestKey("answered"), b'"result":{}', now=NOW)
    await store.finish_request(of, RequestKey("dropped"), None, now=NOW)
    await store.subscribe(of, uri)
    await store.change_state(of, {"a": 1}, ())
    await store.replace_data(of, {"b": 2}, expected_version=0)
    head = await store.head(of)
    assert head is not None
    await store.carry(of, SessionId("other"), FencingEpoch(1), head)
    await store.change(of, SetCurrent(None))
    await store.change(of, SetLogLevel("info"))
    await store.attach(of, ConnectionId("here"), now=NOW)
    return of


async def damaged(store: RedisStore, key: str, how: str) -> None:
    if how in TYPES or how == "nothing":
        await asked(store, "DEL", key)
    if how in TYPES:
        await asked(store, *(part if part != b"%s" else key for part in TYPES[how]))
    elif how.startswith("garbage"):
        await written(store, key, GARBAGE[int(how[-1])])


async def written(store: RedisStore, key: str, value: bytes) -> None:
    match await asked(store, "TYPE", key):
        case b"string":
            await asked(store, "SET", key, value)
        case b"hash":
            fields = await asked(store, "HKEYS", key)
            await asked(store, "HSET", key, *(each for name in fields for each in (name, value)))
        case b"set":
            await asked(store, "SADD", key, value)
        case b"zset":
            await asked(store, "ZADD", key, "0", value)
        case b"stream":
            await asked(store, "XTRIM", key, "MAXLEN", "1")
            await asked(store, "XADD", key, "*", "x", value)
        case _:
            pass


def calls(store: RedisStore, of: SessionId) -> list[tuple[str, Callable[[], Awaitable[Any]]]]:
    return [
        ("load", lambda: store.load(of, now=NOW)),
        ("admit", lambda: store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW)),
        ("keyed", lambda: admitted(store, of, "answered")),
        ("finish", lambda: store.finish_request(of, RequestKey("running"), b"x" * 99, now=NOW)),
        ("new key", lambda: admitted(store, of, "k" * 99)),
        ("touch", lambda: store.touch([of], now=NOW + 600)),
        ("append", lambda: store.append(of, Draft(b"{}", key="key"), now=NOW)),
        ("append get", lambda: store.append(of, Draft(b"{}"), now=NOW, stream=GET_STREAM)),
        ("append more", lambda: store.append(of, Draft(b"{}"), now=NOW, stream=RESPONSE)),
        (
            "append another",
            lambda: store.append(of, Draft(b"{}"), now=NOW, stream=StreamName("r2")),
        ),
        ("read", lambda: store.read(of, None, now=NOW)),
        ("read on", lambda: read_on(store, of)),
        ("head", lambda: store.head(of)),
        ("heads", lambda: store.heads([(of, EVENTS), (of, GET_STREAM)])),
        ("attach", lambda: store.attach(of, ConnectionId("there"), now=NOW)),
        ("detach", lambda: store.detach(of, FencingEpoch(1))),
        ("drop origin", lambda: store.drop_origin(of, SessionId("other"))),
        ("subscribe", lambda: store.subscribe(of, URI)),
        ("audience", lambda: store.audience(change_of(URI), None)),
        ("unsubscribe", lambda: store.unsubscribe(of, "note://2")),
        ("filter", lambda: store.change(of, SetFilter(frozenset({URI}), frozenset({"tools"})))),
        ("state", lambda: store.change_state(of, {"a": 2}, ())),
        ("data", lambda: store.load_data(of)),
        ("edit", lambda: edited(store, of)),
        ("claim", lambda: store.claim(of, "me", None)),
        ("all", store.all_sessions),
        ("of one", lambda: store.all_sessions(ANONYMOUS)),
        ("new", lambda: store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)),
        ("sleep", lambda: store.sleep(now=NOW)),
        (
            "evict",
            lambda: store.evict(now=NOW, unused_for=900, held=[of], limit=1, opened=False),
        ),
        ("evict heavy", lambda: store.evict_heavy(now=NOW, most=1, held=[of], limit=1)),
        ("expire", lambda: store.expire(now=NOW, held=[], limit=9)),
    ]


async def admitted(store: RedisStore, of: SessionId, name: str) -> Begun | None:
    found = await store.admit(
        of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=key_use(name, "another")
    )
    return found.key if found is not None else None


async def read_on(store: RedisStore, of: SessionId) -> object:
    head = await store.head(of)
    if head is None:
        return None
    return await store.read(of, f"{head.log_epoch}-{0:012d}", now=NOW)


async def edited(store: RedisStore, of: SessionId) -> bool:
    data = await store.load_data(of)
    return data is not None and await store.replace_data(
        of, {"b": 3}, expected_version=data.version
    )


async def failing(store: RedisStore, of: SessionId) -> list[str]:
    """Which calls fail. What they raise is documented, or the test fails."""
    failed: list[str] = []
    for name, call in calls(store, of):
        try:
            await call()
        except StoreUnavailable:
            failed.append(name)
        except (LimitReached, DataConflict):
            pass
    return failed


async def key_of(store: RedisStore, of: SessionId, name: str) -> str:
    if name in LISTS:
        (key,) = [
            key
            for key in await keys_of(store)
            if f"}}:{name}" in key or key.split(":{", 1)[0].endswith(f":{name}")
        ]
        return key
    return store._key(of) + name  # pyright: ignore[reportPrivateUsage]


IN_SHORT = ("nothing", "string", "hash", "garbage 0", "garbage 3")
HOW = [
    pytest.param(how, marks=[] if how in IN_SHORT else [pytest.mark.full])
    for how in ("nothing", *TYPES, *(f"garbage {number}" for number in range(len(GARBAGE))))
]
"""By default two types, and two kinds of garbage: what is no text, and what is no number."""


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SUFFIXES)
async def test_a_foreign_value_in_a_session_is_an_error_of_that_session_alone(
    name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """HTP5: nothing hangs, no other session notices, and nobody's log has a traceback."""
    store = redis_store()
    await store.open(POLICY)
    of, other = await used(store), await used(store, "note://other")
    key = await key_of(store, of, name)
    assert await asked(store, "EXISTS", key) == 1
    await damaged(store, key, how)
    with caplog.at_level(logging.WARNING):
        await failing(store, of)
        assert await failing(store, other) == []
        assert await store.load(other, now=NOW) is not None
        assert await admitted(store, other, "answered") is Begun.ANSWERED
    assert not [record for record in caplog.records if record.exc_info]
    assert of not in caplog.text
    await store.close()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SUFFIXES)
async def test_a_session_with_a_foreign_value_can_be_ended(name: str, how: str) -> None:
    """Of all its keys none is left, once the key with the foreign value is deleted too."""
    store = redis_store()
    await store.open(POLICY)
    of = await used(store)
    key, of_session = await key_of(store, of, name), await key_of(store, of, "")
    await damaged(store, key, how)
    try:
        await store.end(of)
    except StoreUnavailable:
        await asked(store, "DEL", key)
        await store.end(of)
    left = [each for each in await keys_of(store) if each.startswith(of_session)]
    if name != "":
        assert left == []
    assert await store.load(of, now=NOW) is None
    await store.close()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LISTS)
async def test_a_foreign_value_in_a_list_stops_what_needs_that_list_alone(
    name: str, how: str
) -> None:
    """The rest of a session continues. When the key is deleted, all calls are served again."""
    store = redis_store()
    await store.open(POLICY)
    of = await used(store)
    key = await key_of(store, of, name)
    await damaged(store, key, how)
    assert set(await failing(store, of)) <= {
        *("subscribe", "audience", "unsubscribe", "filter", "all", "of one", "new"),
        *("sleep", "evict", "evict heavy", "expire"),
    }
    await asked(store, "DEL", key)
    assert await failing(store, of) == []
    await store.close()


@pytest.mark.parametrize("name", [":q", ":qf", ":qa"])
async def test_no_request_key_is_new_after_a_part_of_the_keys_was_lost(name: str) -> None:
    """KEY3: what is lost may have been this key. So the request is refused, and does not run."""
    store = redis_store()
    await store.open(POLICY)
    of = await used(store)
    await asked(store, "DEL", await key_of(store, of, name))
    for each in ("answered", "dropped", "running", "another"):
        with pytest.raises(StoreRefused):
            await admitted(store, of, each)
    assert await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW) is not None
    await store.close()


@pytest.mark.parametrize("field", ["k:answered", "k:dropped", "a:answered"])
async def test_a_request_key_whose_record_is_lost_is_refused(field: str) -> None:
    """KEY3: that it has ended is known, so it does not run again."""
    store = redis_store()
    await store.open(POLICY)
    of = await used(store)
    await asked(store, "HDEL", await key_of(store, of, ":q"), field)
    with pytest.raises(StoreRefused):
        await admitted(store, of, field.partition(":")[2])
    await store.close()


async def test_keys_are_recorded_again_after_the_last_one_was_forgotten() -> None:
    """KEY12: nothing is left then, and nothing is lost."""
    store = redis_store()
    await store.open(replace(POLICY, request_key_lifetime=100))
    of = (await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)).session_id
    for at in (NOW, NOW + 101):
        begun = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=at, key=key_use("a"))
        assert begun is not None and begun.key is Begun.FIRST
        await store.finish_request(of, RequestKey("a"), b'"result":{}', now=at)
    await store.close()


@pytest.mark.parametrize("suffix", [":e:events", ":k:events"])
async def test_a_change_that_a_log_could_not_take_is_no_gap(suffix: str) -> None:
    """CUP8: the others get it. The session's log begins anew once the foreign value is gone."""
    store = redis_store()
    await store.open(POLICY)
    of, other = await used(store), await used(store)
    head = await store.head(of)
    assert head is not None
    await damaged(store, await key_of(store, of, suffix), "string")
    changed = await store.append_change([of, other], change_of(URI), now=NOW)
    assert [each.session_id for each in changed] == [other]
    await asked(store, "DEL", await key_of(store, of, suffix))
    _, refusal = await store.read(of, head.event_id(), now=NOW)
    assert refusal is Refusal.LOG_REPLACED
    await store.close()


@pytest.mark.parametrize("how", ["string", "garbage 0"])
async def test_a_client_reads_503_and_the_log_has_no_traceback(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """HTP5: never 500. Without its record the session is not found (HTL13)."""
    store = redis_store()
    async with world(store=store) as w:
        client, other = await w.connected(), await w.connected()
        sessions = await store.all_sessions()
        await client.result("ping")
        lost = next(each for each in sessions if client.session_id == each.session_id)
        key = await key_of(store, lost.session_id, "")
        await damaged(store, key, how)
        caplog.clear()
        status = (await client.send("ping").reply.done()).status
        # A record with another owner is somebody else's.
        assert status == (503 if how == "string" else 404)
        assert await other.result("ping") == {}
        errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert len(errors) == (status == 503)
        assert all(key in each.getMessage() for each in errors)
        assert not [each for each in caplog.records if each.exc_info]
        await asked(store, "DEL", key)
        assert (await client.send("ping").reply.done()).status == 404
