"""Processes that die between any two commands, and two that work on one session at once (EVT10)."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import LimitReached, StoreUnavailable
from mcp_sessions.ids import LogEpoch, Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.record_changes import SetFilter
from mcp_sessions.stores.redis import lists
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.testing.parts import audience_of, change_of
from tests.support.redis_server import dies_after, keys_of, namespace, redis_store, shared_redis

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.redis

NOW = 1_800_000_000.0
POLICY = SessionPolicy(idle_timeout=100, max_lifetime=1_000, max_sessions=2, max_subscriptions=3)
URIS = [f"note://{number}" for number in range(6)]

Step = Callable[[RedisStore, SessionId], Awaitable[object]]


async def create(store: RedisStore, _: SessionId) -> None:
    await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)


async def subscribe(store: RedisStore, session_id: SessionId) -> None:
    await store.subscribe(session_id, URIS[2])


async def subscribe_too_much(store: RedisStore, session_id: SessionId) -> None:
    await store.subscribe(session_id, URIS[2])
    await store.subscribe(session_id, URIS[3])


async def unsubscribe(store: RedisStore, session_id: SessionId) -> None:
    await store.unsubscribe(session_id, URIS[0])


async def set_filter(store: RedisStore, session_id: SessionId) -> None:
    await store.change(session_id, SetFilter(frozenset({URIS[1], URIS[4], URIS[5]}), frozenset()))


async def end(store: RedisStore, session_id: SessionId) -> None:
    await store.end(session_id)


async def expire(store: RedisStore, _: SessionId) -> None:
    await store.expire(now=NOW + 1_000, held=(), limit=9)


STEPS: list[Step] = [
    create, subscribe, subscribe_too_much, unsubscribe, set_filter, end, expire,
]  # fmt: skip


async def of_those_who_live(own: str) -> RedisStore:
    store = redis_store(own=own)
    await store.open(POLICY)
    return store


async def updated(store: RedisStore, uri: str) -> set[SessionId]:
    """The sessions that get an update of a resource. Who is found and does not get it is
    forgotten.
    """
    change = change_of(uri)
    found = sorted(await audience_of(store, change))
    return {each.session_id for each in await store.append_change(found, change, now=NOW)}


async def check_whole(store: RedisStore) -> None:
    """What belongs to no single session says what the sessions say."""
    records = await store.all_sessions()
    for uri in URIS:
        expected = {each.session_id for each in records if uri in each.client.subscriptions}
        assert await updated(store, uri) == expected
    assert {each.session_id for each in await store.all_sessions(ANONYMOUS)} == {
        each.session_id for each in records
    }


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_a_process_that_dies_between_two_commands_leaves_nothing_wrong(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had begun: no list lies, no place is lost, and nothing stays."""
    is_done, cut = False, 0
    while not is_done:
        own = namespace()
        store, dying = await of_those_who_live(own), await of_those_who_live(own)
        made = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
        for uri in URIS[:2]:
            await store.subscribe(made.session_id, uri)
        died = dies_after(dying, cut)
        try:
            await step(dying, made.session_id)
        except LimitReached:
            pass  # it has its answer
        except StoreUnavailable:
            assert died()
        is_done = not died()
        cut += not is_done
        await dying.close()

        await check_whole(store)
        # Later, when whoever is running still would have finished.
        with monkeypatch.context() as later:
            later.setattr(lists, "IN_FLIGHT", -10)
            await check_whole(store)
            for _ in range(POLICY.max_sessions - len(await store.all_sessions())):
                await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
            with pytest.raises(LimitReached):
                await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
            await check_whole(store)
            ended = await store.expire(now=NOW + 1_000, held=(), limit=9)
            assert len(ended) == POLICY.max_sessions
            for uri in URIS:
                assert not await updated(store, uri)
        # How sessions ended is remembered, and nothing else.
        assert [key for key in await keys_of(store) if ":ends" not in key] == []
        await store.close()
    assert cut > 0


async def test_what_another_process_is_doing_still_is_not_put_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list that has too much may belong to a step that is half way through."""
    store, slow = [await of_those_who_live(own) for own in [namespace()] * 2]
    made = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
    half_way, may_go_on = asyncio.Event(), asyncio.Event()
    link = slow._link  # pyright: ignore[reportPrivateUsage]
    call, commands = link.call, list[str]()

    async def stops_after_the_first(*command: bytes | str | float) -> object:
        if commands:
            half_way.set()
            await may_go_on.wait()
        commands.append(str(command[0]))
        return await call(*command)

    monkeypatch.setattr(link, "call", stops_after_the_first)
    for step in (subscribe, create):
        commands.clear()
        half_way.clear()
        may_go_on.clear()
        working = asyncio.create_task(step(slow, made.session_id))
        await half_way.wait()
        assert not await updated(store, URIS[2]) or step is create
        assert len(await store.all_sessions()) == 1
        assert not await store.expire(now=NOW + 99, held=(), limit=9)
        with pytest.raises(LimitReached):
            for _ in range(POLICY.max_sessions):
                other = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
                await store.end(other.session_id)
                assert step is subscribe
            raise LimitReached("", 0)
        may_go_on.set()
        await working
    assert await updated(store, URIS[2]) == {made.session_id}
    assert len(await store.all_sessions()) == 2
    for each in (store, slow):
        await each.close()


WRITER = """
import asyncio, sys
from mcp_sessions.core.log import Draft
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.testing.parts import subscribers_of, audience_of, change_of

async def main(url, namespace, session_id, count):
    store = RedisStore(url, namespace=namespace)
    await store.open(SessionPolicy(max_events=100_000, max_bytes=10_000_000))
    for _ in range(int(count)):
        appended = await store.append(session_id, Draft(b"{}"), now=1_800_000_000.0)
        print(appended.event.number, flush=True)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def writer(own: str, session_id: SessionId, count: int) -> subprocess.Popen[str]:
    """Another process that appends, and prints the number of each event that the store
    confirmed.
    """
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, shared_redis().url, own, session_id, str(count)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


async def everything(store: RedisStore, session_id: SessionId) -> list[int]:
    head = await store.head(session_id)
    assert head is not None
    start = Position(LogEpoch(head.log_epoch), 0).event_id()
    events, refusal = await store.read(session_id, start, now=NOW)
    assert refusal is None
    return [event.number for event in events]


async def test_two_processes_neither_repeat_nor_skip_a_number() -> None:
    """EVT7, with real processes."""
    own = namespace()
    store = redis_store(own=own)
    await store.open(SessionPolicy(max_events=100_000, max_bytes=10_000_000))
    made = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)

    writers = [writer(own, made.session_id, 500) for _ in range(2)]
    said = [await anyio.to_thread.run_sync(each.communicate) for each in writers]

    numbers = [[int(line) for line in out.split()] for out, _ in said]
    assert [len(each) for each in numbers] == [500, 500]
    assert await everything(store, made.session_id) == sorted(numbers[0] + numbers[1])
    await store.close()


async def test_what_a_killed_process_was_assured_is_stored_is_there_without_a_hole() -> None:
    own = namespace()
    store = redis_store(own=own)
    await store.open(SessionPolicy(max_events=100_000, max_bytes=10_000_000))
    made = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)

    dying = writer(own, made.session_id, 1_000_000)
    assert dying.stdout is not None
    acknowledged = 0
    until = time.monotonic() + 20
    while acknowledged < 200 and time.monotonic() < until:
        acknowledged = int(await anyio.to_thread.run_sync(dying.stdout.readline))
    dying.send_signal(signal.SIGKILL)
    rest, _ = await anyio.to_thread.run_sync(dying.communicate)
    acknowledged = max([acknowledged, *(int(line) for line in rest.split())])

    stored = await everything(store, made.session_id)
    assert acknowledged >= 200
    assert stored == list(range(1, len(stored) + 1))
    # One more at the most: it was stored, and not confirmed.
    assert acknowledged <= len(stored) <= acknowledged + 1
    appended = await store.append(made.session_id, Draft(b"{}"), now=NOW)
    assert appended is not None and appended.event.number == len(stored) + 1
    await store.close()
