"""Many requests of one client without authentication end nothing of another one.

A client is its address there, as for the limits of each caller (`docs/limits.md`).
"""

import asyncio
from typing import Any

import pytest

from mcp_sessions.errors import LIMIT_REACHED
from tests.server.upstream.external.test_peer_in_rounds import again
from tests.server.upstream.test_rounds import ASK, ELICITS, TWO
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient, text_of
from tests.support.virtual_time import cycles
from tests.support.world import World, world

OURS, THEIRS = "192.0.2.1", "2001:db8::{}"
"""One address; and addresses of one network, which is one client."""


async def client_at(w: World, address: str) -> ModernClient:
    return ModernClient(await w.carrier_from(address), capabilities=ELICITS)


async def flood(w: World, count: int, *, in_sessions: bool = False) -> list[Json]:
    """One client is asked so often, and answers nothing."""
    answers: list[Json] = []
    for number in range(count):
        client = await client_at(w, THEIRS.format(f"{number:x}"))
        session = (await client.create())["sessionId"] if in_sessions else None
        answers.append(await client.send("tools/call", ASK, session=session).answer())
    return answers


@pytest.mark.parametrize("in_sessions", [False, True])
async def test_a_flood_of_questions_ends_no_call_of_another_client(in_sessions: bool) -> None:
    async with world(max_detached_requests=8) as w:
        ours = await client_at(w, OURS)
        asked = await ours.send("tools/call", ASK).result()
        await flood(w, 20, in_sessions=in_sessions)
        more = await ours.send("tools/call", ASK).result()
        for each in (asked, more):
            answered = await ours.send("tools/call", again(each, TWO, params=ASK)).result()
            assert text_of(answered) == "accept: two"


async def test_a_flood_from_many_addresses_is_refused() -> None:
    """Each has one call that waits, and so has who came first."""
    async with world(max_detached_requests=4) as w:
        ours = await client_at(w, OURS)
        asked = await ours.send("tools/call", ASK).result()
        answers = [
            await (await client_at(w, f"198.51.100.{n}")).send("tools/call", ASK).answer()
            for n in range(6)
        ]
        assert [each.get("error", {}).get("code") for each in answers] == [
            *[None] * 3,
            *[LIMIT_REACHED] * 3,
        ]
        assert answers[-1]["error"]["data"] == {"limit": "max_detached_requests", "max": 4}
        answered = await ours.send("tools/call", again(asked, TWO, params=ASK)).result()
        assert text_of(answered) == "accept: two"


async def test_large_requests_of_one_client_end_no_call_of_another_client() -> None:
    async with world(max_unread_bytes=300_000) as w:
        ours, theirs = await client_at(w, OURS), await client_at(w, THEIRS.format(1))
        asked = await ours.send("tools/call", ASK).result()
        for _ in range(9):
            await theirs.send("tools/call", ASK, meta={"x.y/z": "m" * 60_000}).result()
        answered = await ours.send("tools/call", again(asked, TWO, params=ASK)).result()
        assert text_of(answered) == "accept: two"


async def test_kept_answers_of_one_client_end_none_of_another_client() -> None:
    """ASK7: the same request, sent again, gets the same answer."""
    async with world(max_detached_requests=4) as w:
        ours, theirs = await client_at(w, OURS), await client_at(w, THEIRS.format(1))
        brought = again(await ours.send("tools/call", ASK).result(), TWO, params=ASK)
        first = await ours.send("tools/call", brought).result()
        for _ in range(9):
            asked = await theirs.send("tools/call", ASK).result()
            await theirs.send("tools/call", again(asked, TWO, params=ASK)).result()
        assert await ours.send("tools/call", brought).result() == first


async def cut_in_a_session(w: World, address: str, gate: str) -> None:
    client = RawClient(await w.carrier_from(address))
    await client.initialize()
    sent = client.call("wait", gate=gate)
    await w.box.gate(gate).started.wait()
    await sent.reply.started()
    await sent.reply.gone()


async def test_cut_calls_of_one_client_end_none_of_another_client() -> None:
    """REQ8: however many sessions it has."""
    async with world(max_detached_requests=4, max_detached_requests_per_session=3) as w:
        await cut_in_a_session(w, OURS, "ours")
        for number in range(9):
            await cut_in_a_session(w, THEIRS.format(number), f"theirs {number}")
        await cycles()
        assert not w.box.gate("ours").cancelled.is_set()
        ended = [n for n in range(9) if w.box.gate(f"theirs {n}").cancelled.is_set()]
        assert ended == [*range(3, 9)], "each of its sessions has one: the newest goes"
        w.box.gate("ours").go.set()


async def test_a_call_that_is_cancelled_while_it_asks_counts_no_more() -> None:
    """A place that nobody gives back would be one less for everybody."""
    reached = asyncio.Event()

    async with world(max_detached_requests=2) as w:
        ours = await client_at(w, OURS)
        held: Any = w.inside.runner.shared.questions.rounds
        begin = held.begin

        def begins(*args: Any) -> Any:
            reached.set()
            return begin(*args)

        held.begin = begins
        sent = ours.send("tools/call", ASK)
        await reached.wait()
        sent.leave()
        await sent.reply.gone()
        await cycles()
        assert len(held._bound) <= 1
        for asked in [await ours.send("tools/call", ASK).result() for _ in range(2)]:
            await ours.send("tools/call", again(asked, TWO, params=ASK)).answer()
        await cycles()
        for name in list(held._waiting):
            held._give_up(held._waiting[name][0])
        await cycles()
        assert len(held._bound) == len(held._of_anyone) == 0
