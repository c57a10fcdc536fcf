"""A keyed request is sent again at another replica, and only then its handler asks.

KEY6: questions follow the newest sending, whichever era its client speaks.
"""

import asyncio
import logging

import pytest

from mcp_sessions import Conversations, SessionSecurity, current_session
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS
from tests.replicas.test_requests import ELICITS, SOON, with_session
from tests.server.upstream.external.test_peer_in_rounds import UNKNOWN, again
from tests.server.upstream.test_rounds import SCHEMA, TWO
from tests.support.audit import Lines
from tests.support.modern import ModernClient, Received
from tests.support.raw import SESSION, Json, RawClient, Sent, at_most, keyed, text_of
from tests.support.replicas import Cluster, cluster
from tests.support.world import Ctx

ERAS = ("handshake", "modern")
LATE: Json = {"name": "late", "arguments": {}}


def tools(c: Cluster) -> None:
    """Adds ``late``, which asks when its gate is open, and then changes its session's state."""

    async def late(ctx: Ctx, arguments: Json) -> str:
        if "stays" not in arguments:
            await c[0].box.gate("g").arrive()
        await ctx.session.report_progress(1)
        result = await ctx.session.elicit_form("?", SCHEMA, related_request_id=ctx.request_id)
        await ctx.session.report_progress(2)
        session = current_session()
        session.state["answers"] = session.state.get("answers", 0) + 1
        return f"{result.action}: {(result.content or {}).get('answer')}"

    for w in c.worlds:
        w.box.tools["late"] = late


class Sender:
    """One client of each era, which has one session, and may send to any replica."""

    def __init__(self, c: Cluster, client: RawClient, session: str) -> None:
        self.c, self.client, self.session = c, client, session

    def send(self, era: str, number: int, token: str) -> Received | Sent:
        if era == "modern":
            meta = {"progressToken": token}
            return self.modern(number).call("late", session=self.session, key="k", meta=meta)
        meta = keyed("k", self.session, progressToken=token)
        return self.c.at(number, self.client).call("late", meta=meta)

    def modern(self, number: int) -> ModernClient:
        return ModernClient(self.c[number].carrier, capabilities=ELICITS)

    async def answered(self, era: str, sent: Received | Sent) -> tuple[Json, list[Json]]:
        """The result after its question was answered at the third replica, and its progress."""
        if era == "handshake":
            question = (await at_most(SOON, sent.reply.has(2)))[1]
            assert question["method"] == "elicitation/create"
            await self.c.at(2, self.client).respond(question, TWO)
            result = await at_most(SOON, sent.result())
            return result, [m for m in sent.reply.messages if m.get("method", "")[-5:] == "gress"]
        asked = await at_most(SOON, sent.result())
        assert asked["resultType"] == "input_required"
        brought = again(asked, TWO, params=LATE)
        last = self.modern(2).send(
            "tools/call", brought, session=self.session, meta={"progressToken": "b"}
        )
        result = await at_most(SOON, last.result())
        assert result["resultType"] == "complete"
        return result, [*sent.reply.messages[:-1], *last.reply.messages[:-1]]


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("newest", ERAS)
@pytest.mark.parametrize("first", ERAS)
async def test_the_newest_sending_is_asked_in_its_era(
    first: str, newest: str, leaves: bool
) -> None:
    """Its progress is its own, and its result has the newest state (ASC14)."""
    async with cluster(3, security=SessionSecurity(["k" * 32])) as c:
        tools(c)
        sender = Sender(c, *await with_session(c, capabilities=ELICITS))
        one = await c[0].waits(sender.send(first, 0, "a"))
        if leaves:
            one.reply.leave()
        other = sender.send(newest, 1, "b")
        await asyncio.sleep(0.5)
        c[0].box.gate("g").go.set()

        result, progress = await sender.answered(newest, other)
        assert text_of(result) == "accept: two"
        reports = [(m["params"]["progressToken"], m["params"]["progress"]) for m in progress]
        assert reports == [("b", 1), ("b", 2)]
        assert [w.box.calls for w in c.worlds] == [["late"], [], []]
        security = c[2].inside.sealed._security  # pyright: ignore[reportPrivateUsage]
        state, _ = security.open_state(
            result["_meta"][SESSION]["state"],
            session_id=SessionId(sender.session),
            principal=ANONYMOUS,
            now=c.clock(),
        )
        assert state == {"answers": 1}
        if not leaves:
            await expect_its_own_answer(first, newest, await at_most(SOON, one.answer()))


async def expect_its_own_answer(era: str, newest: str, answer: Json) -> None:
    """KEY5: the first sender is answered, too; with nothing that its era does not have."""
    if newest == "handshake":
        assert text_of(answer["result"]) == "accept: two"
        assert answer["result"].get("resultType", "") == ("complete" if era == "modern" else "")
    elif era == "modern":
        assert answer["result"]["resultType"] == "input_required"
    else:
        assert answer["error"]["code"] == UNKNOWN


async def test_a_kept_question_is_unknown_to_the_other_era() -> None:
    """KEY3, KEY11: no result of the handshake era asks for input."""
    async with cluster(2) as c:
        tools(c)
        sender = Sender(c, *await with_session(c, capabilities=ELICITS))
        c[0].box.gate("g").go.set()
        asked = await sender.send("modern", 0, "a").result()
        assert asked["resultType"] == "input_required"
        for number in range(2):
            error = await at_most(SOON, sender.send("handshake", number, "b").error())
            assert error["code"] == UNKNOWN


@pytest.mark.parametrize("by_handle", [False, True])
async def test_the_question_of_a_conversation_is_answered_at_another_replica(
    by_handle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By the host's key and by a handle, with an audit that has each request once."""
    caplog.set_level(logging.INFO, "mcp_sessions.audit")
    on = Conversations(handle={"late"} if by_handle else ())
    async with cluster(2, security=SessionSecurity(["k" * 32]), conversations=on) as c:
        tools(c)
        meta: Json = {} if by_handle else {"openai/session": "one"}
        params: Json = {"name": "late", "arguments": {"stays": True}}
        one, other = (ModernClient(w.carrier, capabilities=ELICITS) for w in c.worlds)
        asked = await at_most(SOON, one.send("tools/call", params, meta=meta).result())
        assert asked["resultType"] == "input_required"
        brought = again(asked, TWO, params=params)
        result = await at_most(SOON, other.send("tools/call", brought, meta=meta).result())
        assert text_of(result) == "accept: two"
        calls = Lines(caplog).about("tools/call")
        assert [each["mcp_sessions.outcome"] for each in calls] == ["ok", "ok"]
