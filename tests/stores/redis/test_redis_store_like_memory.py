"""What Lua decides is what ``core`` decides: the two stores, side by side, call by call.

The state machine (``tests/property``) knows what a store has to do; here every answer is compared
whole, also where the contract leaves a choice: streams with several sessions on them, and relayed
events.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from tests.support.redis_server import redis_store

pytestmark = pytest.mark.redis

NOW = 1_800_000_000.0
ALICE = Principal("client", "issuer", "alice", frozenset({"read"}))
POLICY = SessionPolicy(
    idle_timeout=10_000,
    max_lifetime=100_000,
    max_events=4,
    max_bytes=60,
    max_age=50,
)
ORIGINS = st.sampled_from([None, SessionId("one"), SessionId("two")])
STREAMS = st.sampled_from([EVENTS, GET_STREAM])
LATER = st.sampled_from([0, 0, 0.1, 20, 60])

APPEND = st.tuples(
    st.just("append"),
    LATER,
    STREAMS,
    st.sampled_from([None, "a", "b", "", "ü 1"]),
    ORIGINS,
    st.sampled_from([0, 1, 1, 20, 70]),
)
READ = st.tuples(st.just("read"), LATER, STREAMS, st.integers(-1, 9), st.none() | st.integers(1, 3))
DROP = st.tuples(st.just("drop"), STREAMS, ORIGINS, st.none() | st.integers(0, 2))
CARRY = st.tuples(st.just("carry"), ORIGINS, st.integers(1, 2), st.integers(0, 3))
RELAY = st.tuples(
    st.just("relay"),
    LATER,
    ORIGINS,
    st.integers(1, 2),
    st.tuples(st.sampled_from([0, 0, 0, 1]), st.integers(1, 6)),
    st.booleans(),
)
LOG_STEPS = st.lists(APPEND | READ | DROP | CARRY | RELAY, min_size=15, max_size=40)


@dataclass
class Side:
    """One of the two stores, with its session and what it stored."""

    store: SessionStore
    session_id: SessionId
    origin_epoch: LogEpoch
    answers: list[object] = field(default_factory=list[object])

    async def step(self, now: float, step: Sequence[Any]) -> None:
        match step:
            case ("append", _, stream, key, origin, size):
                draft = Draft(b"x" * size, b"" if size else None, key, origin)
                appended = await self.store.append(self.session_id, draft, now=now, stream=stream)
                assert appended is not None
                self.answers.append((seen(appended.event), appended.attachment))
            case ("read", _, stream, behind, limit):
                await self.read(stream, behind, limit, now)
            case ("drop", stream, origin, epoch):
                await self.store.drop_origin(
                    self.session_id,
                    origin or SessionId("none"),
                    stream=stream,
                    fencing_epoch=FencingEpoch(epoch) if epoch is not None else None,
                )
            case ("carry", origin, epoch, number):
                after = Position(self.origin_epoch, number)
                self.answers.append(
                    await self.store.carry(
                        self.session_id, origin or SessionId("none"), FencingEpoch(epoch), after
                    )
                )
            case ("relay", _, origin, epoch, (anew, number), skips):
                log_epoch = LogEpoch(f"{int(self.origin_epoch) + anew:019d}")
                event_id = Position(log_epoch, number).event_id()
                event = LoggedEvent(event_id, number, b"yy", now, (None, f"{number % 2}"), None)
                relayed = await self.store.relay(
                    self.session_id,
                    origin or SessionId("none"),
                    FencingEpoch(epoch),
                    event,
                    now=now,
                    skips=skips,
                )
                known = seen(relayed.event) if relayed.event is not None else None
                self.answers.append((known, relayed.missing_after))
            case _:
                raise AssertionError(step)

    async def read(self, stream: StreamName, behind: int, limit: int | None, now: float) -> None:
        head = await self.store.head(self.session_id, stream=stream)
        after = None
        if head is not None:
            after = Position(head.log_epoch, max(head.number - behind, 0)).event_id()
        events, refusal = await self.store.read(
            self.session_id, after, now=now, stream=stream, limit=limit
        )
        number = head.number if head is not None else None
        self.answers.append((number, [seen(event) for event in events], refusal))


def seen(event: LoggedEvent) -> object:
    """An event without its log's epoch, which is another one in each store."""
    payload = event.payload.replace(event.event_id.encode(), b"its id")
    return event.number, payload, event.at, event.key, event.origin


async def expect_same(steps: Sequence[Sequence[Any]]) -> None:
    sides: list[Side] = []
    for store in (MemoryStore(), redis_store()):
        await store.open(POLICY)
        made = await store.create(Mode.PROTOCOL, ALICE, peer=None, now=NOW)
        sides.append(Side(store, made.session_id, LogEpoch("1" * 19)))
        now = NOW
        for step in steps:
            if not isinstance(step[1], str) and isinstance(step[1], float | int):
                now += step[1]
            await sides[-1].step(now, step)
        for stream in (EVENTS, GET_STREAM):
            for behind in range(-1, 9):
                await sides[-1].read(stream, behind, None, now)
        await store.end(made.session_id)
        await store.close()
    assert sides[0].answers == sides[1].answers


@given(LOG_STEPS)
def test_logs_are_the_same(steps: list[tuple[Any, ...]]) -> None:
    """CUP8, CUP5, COA4, ATT7."""
    asyncio.run(expect_same(steps))
