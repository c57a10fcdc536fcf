"""Many requests of one client without authentication end nothing of another one at a command."""

import json

import pytest

from mcp_sessions.server.upstream import rounds
from tests.server.test_floods import OURS, THEIRS, client_at
from tests.server.upstream.external.test_peer_in_rounds import QUESTION, TWO, UNKNOWN, again
from tests.support.children import child_world
from tests.support.raw import text_of


@pytest.mark.parametrize("away", [60.0, 0.0])
async def test_a_flood_at_a_command_ends_no_call_of_another_client(
    monkeypatch: pytest.MonkeyPatch, away: float
) -> None:
    """Also if who came first has been away for long."""
    monkeypatch.setattr(rounds, "AWAY", away)
    async with child_world(options={"max_children": 8}) as w:
        ours = await client_at(w, OURS)
        asked = await ours.send("tools/call", QUESTION).result()
        for number in range(12):
            theirs = await client_at(w, THEIRS.format(number))
            await theirs.send("tools/call", QUESTION).answer()
        answered = await ours.send("tools/call", again(asked, TWO)).result()
        assert json.loads(text_of(answered)) == TWO


async def test_who_is_away_for_long_makes_room_for_who_has_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The children are for all: the oldest call of who has most goes, and no other."""
    monkeypatch.setattr(rounds, "AWAY", 0.0)
    async with child_world(options={"max_children": 8}) as w:
        theirs, ours = await client_at(w, THEIRS.format(1)), await client_at(w, OURS)
        asked = [await theirs.send("tools/call", QUESTION).result() for _ in range(3)]
        mine = await ours.send("tools/call", QUESTION).result()
        answered = await ours.send("tools/call", again(mine, TWO)).result()
        assert json.loads(text_of(answered)) == TWO
        error = await theirs.send("tools/call", again(asked[0], TWO)).error()
        assert error["code"] == UNKNOWN
