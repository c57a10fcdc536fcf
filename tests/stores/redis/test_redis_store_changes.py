"""Server-wide changes in a Redis: an answer that is lost, and what a few sessions cost."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import EVENTS, GET_STREAM, Position, SessionId, StreamName
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import CHANGES_AT_ONCE
from mcp_sessions.stores.records import ServerChange
from mcp_sessions.stores.redis.lists import IN_FLIGHT
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.testing import STORE_CHECKS, Check, change_checks
from mcp_sessions.testing.parts import change_of
from tests.stores import opening
from tests.stores.opening import NOW, new
from tests.support.redis_server import redis_server, redis_store

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    """A Redis that is no cluster: there one script tells many sessions."""
    with redis_server() as server:
        yield server.url


def opened(url: str | None = None) -> AbstractAsyncContextManager[RedisStore]:
    store = RedisStore(url) if url is not None else redis_store()
    return opening.opened(store, SessionPolicy())


async def subscriber(store: RedisStore, mode: Mode) -> SessionId:
    session_id = await new(store, mode)
    await store.subscribe(session_id, "note://1")
    return session_id


async def events(
    store: RedisStore, session_id: SessionId, stream: StreamName
) -> Sequence[LoggedEvent]:
    head = await store.open_stream(session_id, stream)
    assert head is not None
    first = Position(head.log_epoch, 0).event_id()
    found, _ = await store.read(session_id, first, now=NOW, stream=stream)
    return found


def without_key(change: ServerChange) -> ServerChange:
    """Nothing replaces it, so each of it would be there."""
    change.event.key = None
    return change


@pytest.mark.parametrize(
    "check", [each for each in STORE_CHECKS if each.__module__ == change_checks.__name__]
)
async def test_a_server_that_is_no_cluster_keeps_the_contract(plain: str, check: Check) -> None:
    """The shared one of the tests is a cluster, where each session has a script of its own."""
    await check(lambda: RedisStore(plain, namespace=check.__name__))


@pytest.mark.parametrize("others", [0, 100])
@pytest.mark.parametrize("is_cluster", [True, False])
async def test_who_has_a_change_is_not_given_it_again(
    others: int, is_cluster: bool, plain: str
) -> None:
    """Its reply was lost; meanwhile other events were stored, by whichever process."""
    async with opened(None if is_cluster else plain) as store:
        sessions = [await subscriber(store, mode) for mode in (Mode.PROTOCOL, Mode.TRANSPORT)]
        change = without_key(change_of("note://1"))
        first = await store.append_change(sessions[:2], change, now=NOW)
        late = await subscriber(store, Mode.PROTOCOL)
        for session_id, stream in zip(sessions, (EVENTS, GET_STREAM), strict=True):
            for _ in range(others):
                await store.append(session_id, Draft(b"{}"), now=NOW + 1, stream=stream)

        again = await store.append_change([*sessions, late], change, now=NOW + 2, again=True)

        assert [each.event.event_id for each in again[:2]] == [
            each.event.event_id for each in first
        ]
        assert [each.session_id for each in again] == [*sessions, late]
        for session_id, stream in zip(sessions, (EVENTS, GET_STREAM), strict=True):
            assert len(await events(store, session_id, stream)) == 1 + others
        assert len(await events(store, late, EVENTS)) == 1
        # It is of this change only.
        other = without_key(
            ServerChange("other.1", NOW, "note://1", None, change.event, change.bare)
        )
        await store.append_change(sessions, other, now=NOW + 3, again=True)
        assert len(await events(store, sessions[0], EVENTS)) == 2 + others


async def test_sessions_are_notified_by_one_script(plain: str) -> None:
    """None is loaded first."""
    async with opened(plain) as store:
        sessions = [await subscriber(store, Mode.PROTOCOL) for _ in range(CHANGES_AT_ONCE)]
        await store.append_change(sessions, change_of("note://1"), now=NOW)
        before = await scripts_of(store)
        assert (
            len(await store.append_change(sessions, change_of("note://1"), now=NOW))
            == CHANGES_AT_ONCE
        )
        assert await scripts_of(store) == before + 1


async def scripts_of(store: RedisStore) -> int:
    """How many scripts the server ran."""
    answer: bytes = await store._command("INFO", "commandstats")  # pyright: ignore[reportPrivateUsage]
    for line in answer.decode().splitlines():
        if line.startswith("cmdstat_evalsha:"):
            return int(line.split("calls=")[1].split(",")[0])
    return 0


async def test_who_is_no_subscriber_any_more_leaves_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that died between the two steps of subscribing leaves one there; who subscribes
    just now is left alone.
    """
    async with opened() as store:
        session_id = await subscriber(store, Mode.PROTOCOL)
        change = change_of("note://1")
        await store._command("DEL", f"{store._key(session_id)}:u")  # pyright: ignore[reportPrivateUsage]
        assert not await store.append_change([session_id], change, now=NOW)
        assert (await store.audience(change, None)).session_ids == [session_id]
        monkeypatch.setattr("mcp_sessions.stores.redis.lists.IN_FLIGHT", -IN_FLIGHT)
        assert not await store.append_change([session_id], change, now=NOW)
        assert not (await store.audience(change, None)).session_ids
