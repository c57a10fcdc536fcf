"""A request is cancelled while the store is still asked for its session."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from mcp_sessions.errors import StoreUnavailable
from tests.support.interposed import Interposed
from tests.support.raw import Json, RawClient, keyed
from tests.support.virtual_time import cycles
from tests.support.world import World, world

SOON = 5
T = TypeVar("T")


class Admission:
    """The store, asked to let the next request into its session, until it answers."""

    def __init__(self, interposed: Interposed) -> None:
        self._asked = 0
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.fails = False
        interposed.before["admit"] = self._wait

    async def _wait(self) -> None:
        self._asked += 1
        if self._asked != 2:
            # First its connection is admitted; and what cancels it, at once.
            return
        self.asked.set()
        await self.answers.wait()
        if self.fails:
            raise StoreUnavailable("away")


Names = Callable[[str, int | str], Json]
"""The parameters of a cancellation, of a session's id and a request's."""

BY: dict[str, Names] = {
    "its id": lambda session, request_id: {"requestId": request_id},
    "session and key": lambda session, request_id: {
        "requestId": request_id,
        "_meta": keyed("k", session),
    },
}


async def with_session(w: World) -> tuple[RawClient, str]:
    client = await w.connected()
    return client, (await client.start())["sessionId"]


async def within(seconds: float, awaited: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await awaited


@pytest.mark.parametrize("by", list(BY))
async def test_what_is_cancelled_on_its_way_does_not_run(by: str) -> None:
    """REQ6, REQ7: it is answered ``-32800``. By its id, its handler never begins."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        client, session = await with_session(w)
        admission = Admission(interposed)
        sent = client.call("wait", gate="g", meta=keyed("k"))
        await admission.asked.wait()

        cancelling = asyncio.create_task(
            client.notify("notifications/cancelled", BY[by](session, sent.id))
        )
        await cycles()
        admission.answers.set()

        assert (await within(SOON, sent.error()))["code"] == -32800
        await within(SOON, cancelling)
        assert w.box.calls == [] or w.box.gate("g").cancelled.is_set()
        assert w.box.calls == [] or by == "session and key"
        interposed.mend()
        assert await client.text("echo", text="after") == "after"


async def test_what_is_refused_after_it_was_cancelled_is_refused() -> None:
    """Nothing was begun that could be ended; its id is free again."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        client, _ = await with_session(w)
        admission = Admission(interposed)
        admission.fails = True
        sent = client.call("wait", gate="g", meta=keyed("k"))
        await admission.asked.wait()
        await client.notify("notifications/cancelled", {"requestId": sent.id})
        admission.answers.set()

        reply = await sent.reply.done()
        assert reply.status == 503
        interposed.mend()
        again = client.send("ping", request_id=sent.id)
        assert await within(SOON, again.result()) == {}


@pytest.mark.parametrize("is_refused_before", [False, True])
async def test_what_runs_without_a_listener_is_cancelled_by_the_id_under_which_it_was_sent_again(
    is_refused_before: bool,
) -> None:
    """REQ6: also while the store is asked about the second sending, and once that was refused."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        client, _ = await with_session(w)
        sent = await w.waits(client.call("wait", gate="g", meta=keyed("k")))
        # Its response is a stream by now.
        await asyncio.sleep(1)
        sent.reply.leave()
        await cycles()
        admission = Admission(interposed)
        admission.fails = True
        params = {"name": "wait", "arguments": {"gate": "g"}, "_meta": keyed("k")}
        again = client.send("tools/call", params, request_id=sent.id)
        await within(SOON, admission.asked.wait())

        async def refused() -> None:
            admission.answers.set()
            assert (await again.reply.done()).status == 503

        if is_refused_before:
            await refused()
        await client.notify("notifications/cancelled", {"requestId": sent.id})
        if not is_refused_before:
            await refused()

        await within(SOON, w.box.gate("g").cancelled.wait())
