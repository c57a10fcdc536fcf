"""Messages that children send by themselves, on their way to clients."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.upstream.external.server_messages import CHANGES, WAITING, Notifier
from tests.support.virtual_time import VIRTUAL, Backend

LOG, CHANGED = "notifications/message", "notifications/resources/updated"
Params = Mapping[str, Any] | None


@pytest.fixture
def anyio_backend() -> Backend:
    """Time passes only when nothing else can happen."""
    return VIRTUAL


class Client:
    """What it received, and whether it takes more."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.methods: list[str] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self.failures: list[Exception] = []
        self.attempts = 0

    async def way(self, method: str, params: Params) -> None:
        self.attempts += 1
        await self.takes.wait()
        if self.failures:
            raise self.failures.pop()
        self.received.append((params or {}).get("n"))
        self.methods.append(method)


async def test_one_that_takes_nothing_keeps_nobody_waiting_and_gets_all_in_order() -> None:
    notifier, slow, other = Notifier(), Client(), Client()
    slow.takes.clear()
    for n in range(3):
        notifier.later("slow", slow.way, LOG, {"n": n}, is_change=False)
        notifier.later("other", other.way, LOG, {"n": n}, is_change=False)
    await notifier.flush("other")
    assert (slow.received, other.received) == ([], [0, 1, 2])
    slow.takes.set()
    await notifier.flush("slow")
    assert slow.received == [0, 1, 2]
    await notifier.flush("slow")


async def test_what_waits_for_one_is_bounded_in_bytes_and_changes_say_it_once() -> None:
    notifier, slow = Notifier(), Client()
    slow.takes.clear()
    for n in range(100):
        notifier.later("slow", slow.way, LOG, {"n": n, "data": "x" * 100_000}, is_change=False)
        notifier.later("slow", slow.way, CHANGED, {"n": "changed"}, is_change=True)
        # Its first turn: that one is on its way.
        await asyncio.sleep(0)
    slow.takes.set()
    await notifier.flush("slow")
    logs = [n for n in slow.received if n != "changed"]
    assert logs == list(range(len(logs)))
    assert 100_000 * (len(logs) - 2) < WAITING < 100_000 * (len(logs) + 1)
    assert slow.received.count("changed") == 1
    notifier.later("slow", slow.way, LOG, {"n": "next"}, is_change=False)
    await notifier.flush("slow")
    assert slow.received[-1] == "next"


async def test_changes_that_nobody_can_have_asked_for_are_bounded_and_said_to_be_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notifier, slow = Notifier(), Client()
    slow.takes.clear()
    for n in range(30):
        about = {"uri": f"test://{n}", "n": n, "data": "x" * 1_000_000}
        notifier.later("slow", slow.way, CHANGED, about, is_change=True)
        # Of the same resource: it is said already.
        notifier.later("slow", slow.way, CHANGED, {**about, "n": "again"}, is_change=True)
    for n in range(100):
        about = {"n": n, "data": "x" * 1_000_000}
        notifier.later("slow", slow.way, "notifications/tools/list_changed", about, is_change=True)
    slow.takes.set()
    await notifier.flush("slow")
    notified = slow.received[:-2]
    assert notified == list(range(len(notified)))
    assert 1_000_000 * len(notified) < CHANGES < 1_000_000 * (len(notified) + 1)
    lists = [f"notifications/{name}/list_changed" for name in ("resources", "tools")]
    assert slow.methods == [CHANGED] * len(notified) + lists
    assert slow.received[-2:] == [None, None]
    assert caplog.text.count("is dropped") == 1


async def test_a_change_that_comes_while_the_same_is_sent_is_sent_again() -> None:
    """Its client may have read in between."""
    notifier, slow = Notifier(), Client()
    slow.takes.clear()
    notifier.later("slow", slow.way, CHANGED, {"n": 1}, is_change=True)
    await asyncio.sleep(0)
    assert slow.attempts == 1
    notifier.later("slow", slow.way, CHANGED, {"n": 1}, is_change=True)
    slow.takes.set()
    await notifier.flush("slow")
    assert slow.received == [1, 1]


@pytest.mark.parametrize("is_change", [True, False])
async def test_while_the_store_is_away_changes_wait_for_it_and_nothing_else_does(
    is_change: bool,
) -> None:
    notifier, client = Notifier(), Client()
    client.failures = [StoreUnavailable("away") for _ in range(5)]
    await notifier.now("one", client.way, LOG, {"n": 1}, is_change=is_change)
    assert client.attempts == 1
    await notifier.flush("one")
    assert client.received == ([1] if is_change else [])
    assert len(client.failures) == (0 if is_change else 4)
    client.failures = []
    await notifier.now("one", client.way, LOG, {"n": 2}, is_change=False)
    assert client.received[-1] == 2


async def test_a_message_that_waits_for_one_call_keeps_the_others_for_a_moment_only() -> None:
    """Its client may be at a replica that died. Its own answer comes after it."""
    notifier, slow, other = Notifier(), Client(), Client()
    slow.takes.clear()
    for n in range(3):
        await notifier.of_call("slow", slow.way, LOG, {"n": n})
        await notifier.of_call("other", other.way, LOG, {"n": n})
    assert (slow.received, other.received) == ([], [0, 1, 2])
    assert notifier.waits("slow") and not notifier.waits("other")
    answer = asyncio.create_task(notifier.flush("slow"))
    await asyncio.sleep(0)
    assert not answer.done()
    slow.takes.set()
    await answer
    assert slow.received == [0, 1, 2]


async def test_what_waits_for_one_call_is_bounded_and_nothing_is_left_out() -> None:
    """Beyond the bound the child is not read."""
    notifier, slow = Notifier(), Client()
    slow.takes.clear()
    sent = list[int]()

    async def reads() -> None:
        for n in range(30):
            await notifier.of_call("slow", slow.way, LOG, {"n": n, "data": "x" * 100_000})
            sent.append(n)

    reading = asyncio.create_task(reads())
    # Time passes, virtually.
    await asyncio.sleep(60)
    assert 100_000 * (len(sent) - 1) < WAITING < 100_000 * (len(sent) + 2)
    slow.takes.set()
    await reading
    await notifier.flush("slow")
    assert slow.received == list(range(30))


@pytest.mark.fails_in_background("a notification of a child")
async def test_what_is_wrong_with_one_client_is_its_own() -> None:
    notifier, client = Notifier(), Client()
    client.failures = [ValueError("broken")]
    await notifier.now("one", client.way, LOG, {"n": 1}, is_change=True)
    client.failures = [ValueError("broken")]
    notifier.later("one", client.way, LOG, {"n": 2}, is_change=True)
    notifier.later("one", client.way, LOG, {"n": 3}, is_change=True)
    await notifier.flush("one")
    assert client.received == [3]


async def test_who_is_forgotten_and_who_is_left_at_the_end_get_nothing_more() -> None:
    notifier, gone, left = Notifier(), Client(), Client()
    for client in (gone, left):
        client.takes.clear()
        for n in range(2):
            notifier.later(client, client.way, LOG, {"n": n}, is_change=False)
    await asyncio.sleep(0)
    notifier.forget(gone)
    await notifier.flush(gone)
    await notifier.close()
    for client in (gone, left):
        client.takes.set()
    await asyncio.sleep(1)
    assert (gone.received, left.received) == ([], [])


@pytest.mark.fails_in_background("a notification of a child")
async def test_what_json_cannot_say_is_left_out_and_ends_unowned_reading() -> None:
    notifier, client = Notifier(), Client()
    for n in (1, [10**30, float("inf")], 2):
        notifier.later("client", client.way, LOG, {"n": n}, is_change=False)
    await notifier.flush("client")
    assert client.received == [1, 2]
