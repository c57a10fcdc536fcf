"""A handler of a Python server asks clients of the 2026 era: by results that need input.

What holds for a command as well is in `tests/server/upstream/external/test_peer_in_rounds.py`.
"""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError, NoBackChannelError

from mcp_sessions import current_session
from mcp_sessions.server.upstream.held_call import HeldCall, new_outcome
from mcp_sessions.stores.memory.memory_store import MemoryStore
from tests.server.upstream.external.test_peer_in_rounds import UNKNOWN, again
from tests.support.children import until
from tests.support.modern import LOG_LEVEL, ModernClient
from tests.support.raw import Json, at_most, text_of
from tests.support.replicas import user
from tests.support.world import Toolbox, World, world

# The 2026 era deprecates sampling and roots. Servers that use them keep working.
pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")

ELICITS: Json = {"elicitation": {}}
ALL: Json = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
ASK: Json = {"name": "ask", "arguments": {"question": "how many?"}}
TWO: Json = {"action": "accept", "content": {"answer": "two"}}


def client_of(w: World, **capabilities: Any) -> ModernClient:
    return ModernClient(w.carrier, capabilities=capabilities or ELICITS)


async def refused(ask: Any) -> str:
    """What a handler gets: the kind of its error, and the text."""
    try:
        return f"answered {await ask}"
    except MCPError as failed:
        return f"{type(failed).__name__} {failed.error.code}"


def box_of(*tools: Any) -> Toolbox:
    box = Toolbox()
    box.tools.update({tool.__name__: tool for tool in tools})
    return box


SCHEMA: Any = {"type": "object", "properties": {"answer": {"type": "string"}}}


async def test_a_call_has_as_many_rounds_as_its_handler_has_questions() -> None:
    """It runs once, in a session and outside. Progress belongs to the newest request."""

    async def ask_twice(ctx: Any, arguments: Json) -> str:
        answers: list[Any] = []
        for question in "ab":
            result = await ctx.session.elicit_form(question, SCHEMA)
            await ctx.session.report_progress(len(answers) + 1)
            content: Json = result.content or {}
            answers.append(content.get("answer", result.action))
        return " ".join(answers)

    async with world(box=box_of(ask_twice)) as w:
        client = client_of(w)
        for session in (None, (await client.create())["sessionId"]):
            params: Json = {"name": "ask_twice", "arguments": {}}
            asked = await client.send("tools/call", params, session=session).result()
            assert asked["resultType"] == "input_required"
            ((_, question),) = asked["inputRequests"].items()
            assert (question["method"], question["params"]["message"]) == (
                "elicitation/create", "a"
            )  # fmt: skip
            for token, answer in (("2nd", TWO), ("3rd", {"action": "decline"})):
                brought = again(asked, answer, params=params)
                meta = {"progressToken": token}
                sent = client.send("tools/call", brought, session=session, meta=meta)
                asked = await sent.result()
                (report,) = [m["params"] for m in sent.messages if "method" in m]
                assert report["progressToken"] == token
            assert (asked["resultType"], text_of(asked)) == ("complete", "two decline")
        assert w.box.calls == ["ask_twice"] * 2


@pytest.mark.fails_in_background("the first round of a call")
async def test_a_call_whose_questions_cannot_be_sent_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client does not wait for them, and its handler does not wait for answers."""

    def cannot_be_written(*_: object) -> None:
        raise TypeError("not JSON")

    monkeypatch.setattr(HeldCall, "asked", cannot_be_written)
    async with world() as w:
        sent = client_of(w).send("tools/call", ASK)
        assert (await at_most(5, sent.error()))["code"] == UNKNOWN
        await until(lambda: not w.inside.runner.running, "the handler has ended")


async def test_two_questions_at_once_may_be_answered_one_by_one() -> None:
    async def ask_both(ctx: Any, arguments: Json) -> str:
        asks = [ctx.session.elicit_form(question, SCHEMA) for question in "ab"]
        return " ".join(str(each.content["answer"]) for each in await asyncio.gather(*asks))

    async with world(box=box_of(ask_both)) as w:
        client = client_of(w)
        params: Json = {"name": "ask_both", "arguments": {}}
        asked = await client.send("tools/call", params).result()
        first, second = asked["inputRequests"]
        part: Json = {
            **params,
            "inputResponses": {second: {"action": "accept", "content": {"answer": "B"}}},
            "requestState": asked["requestState"],
        }
        rest = await client.send("tools/call", part).result()
        assert [*rest["inputRequests"]] == [first]
        one: Json = {"action": "accept", "content": {"answer": "A"}}
        result = await client.send("tools/call", again(rest, one, params=params)).result()
        assert text_of(result) == "A B"


async def test_what_a_handler_says_between_two_rounds_comes_with_the_next_one() -> None:
    """Its other question ended the response to which it would belong. KEY21's reasons hold here,
    too: no message of a call is missing without an error.
    """
    gate, told = asyncio.Event(), asyncio.Event()

    async def says(ctx: Any, arguments: Json) -> str:
        other = asyncio.create_task(ctx.session.elicit_form("b", SCHEMA))
        await ctx.session.elicit_form("a", SCHEMA)
        await gate.wait()
        await ctx.session.report_progress(1)
        await ctx.session.send_log_message("info", "between", related_request_id=ctx.request_id)
        await ctx.session.report_progress(2)
        told.set()
        await other
        await ctx.session.report_progress(3)
        return "said"

    async with world(box=box_of(says)) as w:
        client = client_of(w)
        params: Json = {"name": "says", "arguments": {}}
        logs = {LOG_LEVEL: "info"}
        asked = await client.send("tools/call", params, meta=logs).result()
        (first,) = (n for n, q in asked["inputRequests"].items() if q["params"]["message"] == "a")
        part = {**params, "inputResponses": {first: TWO}, "requestState": asked["requestState"]}
        rest = await client.send("tools/call", part).result()
        gate.set()
        await at_most(5, told.wait())
        meta = {"progressToken": "3rd", **logs}
        sent = client.send("tools/call", again(rest, TWO, params=params), meta=meta)
        assert text_of(await sent.result()) == "said"
        said = [m["params"] for m in sent.messages if "method" in m]
        assert [each.get("progress", each.get("data")) for each in said] == [1, "between", 2, 3]


async def test_what_waits_for_the_next_round_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The newest stays: progress says how far it is."""
    told = asyncio.Event()

    async def says(ctx: Any, arguments: Json) -> str:
        asks = asyncio.create_task(ctx.session.elicit_form("a", SCHEMA))
        await asyncio.sleep(0.1)
        for n in range(1, 1001):
            await ctx.session.report_progress(n, message="x" * arguments["size"])
        told.set()
        await asks
        return "said"

    async with world(box=box_of(says)) as w:
        for size, most in ((0, 256), (1000, 65)):
            told.clear()
            params: Json = {"name": "says", "arguments": {"size": size}}
            asked = (
                await client_of(w).send("tools/call", params, meta={"progressToken": 1}).result()
            )
            await at_most(5, told.wait())
            brought = again(asked, TWO, params=params)
            sent = client_of(w).send("tools/call", brought, meta={"progressToken": 2})
            await sent.result()
            steps = [m["params"]["progress"] for m in sent.messages if "method" in m]
            assert steps == list(range(1001 - len(steps), 1001))
            assert most - 8 < len(steps) <= most
    assert "the oldest is left out" in caplog.text


async def test_what_is_said_while_the_next_round_is_told_displaces_no_more_than_it_has_to() -> None:
    """The client of the next round reads slowly, and the handler says more than is kept."""
    told: list[Any] = []
    sending, go_on = asyncio.Event(), asyncio.Event()

    async def notify(method: str, params: Any) -> None:
        sending.set()
        await go_on.wait()
        told.append(params["data"])

    call: Any = SimpleNamespace(newest=SimpleNamespace(notify=notify))
    held = HeldCall(call, "owner", "what", lambda: None, new_outcome(), name="waits")
    assert held.keeps("notifications/message", {"data": "first"})
    held.name = None
    telling = asyncio.create_task(held.tells())
    await at_most(10, sending.wait())
    for said in ("x" * 70_000, "second", "third"):
        assert held.keeps("notifications/message", {"data": said})
    go_on.set()
    await at_most(10, telling)
    assert told == ["first", "second", "third"]


@pytest.mark.parametrize("declared", [{}, {"roots": {}}, {"elicitation": {"url": {}}}])
async def test_a_client_that_does_not_accept_a_question_is_not_asked(declared: Json) -> None:
    async def ask_form(ctx: Any, arguments: Json) -> str:
        related = arguments.get("related") and ctx.request_id
        ask = ctx.session.elicit_form("?", SCHEMA, related_request_id=related)
        return await refused(ask)

    async with world(box=box_of(ask_form)) as w:
        client = ModernClient(w.carrier, capabilities=declared)
        for session in (None, (await client.create())["sessionId"]):
            for related in (True, False):
                said = await client.text("ask_form", {"related": related}, session=session)
                assert said == f"{NoBackChannelError.__name__} -32600"


async def test_the_policy_switches_it_off() -> None:
    async def ask_form(ctx: Any, arguments: Json) -> str:
        return await refused(ctx.session.elicit_form("?", SCHEMA))

    async with world(box=box_of(ask_form), question_timeout=0) as w:
        assert await client_of(w).text("ask_form") == f"{NoBackChannelError.__name__} -32600"


async def test_a_handler_whose_client_does_not_come_back_gets_a_timeout_error() -> None:
    ended: list[str] = []

    async def ask_form(ctx: Any, arguments: Json) -> str:
        ended.append(await refused(ctx.session.elicit_form("?", SCHEMA)))
        ended.append(await refused(ctx.session.elicit_form("?", SCHEMA)))
        return "late"

    async with world(box=box_of(ask_form), question_timeout=0.05) as w:
        client = client_of(w)
        params: Json = {"name": "ask_form", "arguments": {}}
        asked = await client.send("tools/call", params).result()
        await until(lambda: len(ended) == 2, "it ended")
        assert ended == ["MCPError -32001", "NoBackChannelError -32600"]
        error = await client.send("tools/call", again(asked, TWO, params=params)).error()
        assert error["code"] == UNKNOWN


async def test_a_call_ends_with_its_session() -> None:
    cancelled: list[str] = []

    async def ask_form(ctx: Any, arguments: Json) -> str:
        try:
            await ctx.session.elicit_form("?", SCHEMA)
        except asyncio.CancelledError:
            cancelled.append("ask_form")
            raise
        return "answered"

    async with world(box=box_of(ask_form)) as w:
        client = client_of(w)
        session = (await client.create())["sessionId"]
        params: Json = {"name": "ask_form", "arguments": {}}
        asked = await client.send("tools/call", params, session=session).result()
        assert asked["resultType"] == "input_required"
        await client.send("sessions/delete", {}, session=session).result()
        await until(lambda: cancelled == ["ask_form"], "its handler ended")


async def test_a_credential_with_fewer_scopes_neither_continues_a_call_nor_gets_its_answer() -> (
    None
):
    """KEY18, for a call in rounds: its handler answers as the one that began it may read."""
    async with world() as w:
        strong, weak, stronger = [
            ModernClient(await w.carrier_of(user("alice", *scopes)), capabilities=ELICITS)
            for scopes in (("read",), (), ("admin", "read"))
        ]
        asked = await strong.send("tools/call", ASK).result()
        brought = again(asked, TWO, params=ASK)
        for client, is_served in ((weak, False), (stronger, True), (weak, False), (strong, True)):
            sent = client.send("tools/call", brought)
            if is_served:
                assert text_of(await sent.result()) == "accept: two"
            else:
                assert (await sent.error())["code"] == UNKNOWN


async def test_a_stop_has_one_line_for_all_calls_whose_clients_were_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One client could fill the log: there was a line for each of its calls."""
    async with world() as w:
        for _ in range(12):
            asked = await client_of(w).send("tools/call", ASK).result()
            assert asked["resultType"] == "input_required"
    lines = [line for line in caplog.messages if "cancelled" in line]
    assert lines == ["cancelled, since no client came back that was asked: 12"]


async def test_clients_that_nobody_knows_do_not_end_each_others_calls() -> None:
    """They are one principal, and have no share of their own."""
    limits: Any = {"max_detached_requests_per_session": 2, "max_unread_bytes": 1_000_000}
    async with world(**limits) as w:
        first, others = client_of(w), client_of(w)
        asked = await first.send("tools/call", ASK).result()
        for _ in range(5):
            await others.send("tools/call", ASK, meta={"x.y/z": "m" * 60_000}).result()
        result = await first.send("tools/call", again(asked, TWO, params=ASK)).result()
        assert text_of(result) == "accept: two"


async def test_another_handler_asks_the_client_whose_connection_it_uses() -> None:
    kept: list[Any] = []
    asked_of_bob = asyncio.Event()

    async def wait(ctx: Any, arguments: Json) -> str:
        kept.append(ctx.session)
        await asked_of_bob.wait()
        return "waited"

    async def poke(ctx: Any, arguments: Json) -> str:
        result = await kept[0].elicit_form("for bob", SCHEMA)
        return f"bob says {result.content['answer']}"

    async with world(box=box_of(wait, poke)) as w:
        alice, bob = [
            ModernClient(await w.carrier_of(user(name)), capabilities=ELICITS)
            for name in ("alice", "bob")
        ]
        params: Json = {"name": "wait", "arguments": {}}
        waits = bob.send("tools/call", params)
        await until(lambda: bool(kept), "bob's call runs")
        pokes = alice.send("tools/call", {"name": "poke", "arguments": {}})
        asked = await waits.result()
        (question,) = asked["inputRequests"].values()
        assert question["params"]["message"] == "for bob"
        last = bob.send("tools/call", again(asked, TWO, params=params))
        assert text_of(await pokes.result()) == "bob says two"
        asked_of_bob.set()
        assert text_of(await last.result()) == "waited"


async def test_a_handler_that_is_cancelled_while_its_state_is_stored_leaves_no_round_open() -> None:
    async def ask_form(ctx: Any, arguments: Json) -> str:
        result = await ctx.session.elicit_form("?", SCHEMA)
        current_session().state["answer"] = result.content["answer"]
        return "kept"

    async with world(box=box_of(ask_form)) as w:
        client = client_of(w)
        session = (await client.create())["sessionId"]
        params: Json = {"name": "ask_form", "arguments": {}}
        asked = await client.send("tools/call", params, session=session).result()
        store: Any = w.layer.store
        change, reached, cancelled = store.change_state, asyncio.Event(), asyncio.Event()

        async def never(*args: Any, **options: Any) -> Any:
            reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        store.change_state = never
        brought = again(asked, TWO, params=params)
        second = client.send("tools/call", brought, session=session)
        await asyncio.wait_for(reached.wait(), 10)
        second.leave()
        await asyncio.wait_for(cancelled.wait(), 10)
        store.change_state = change
        copy = client.send("tools/call", brought, session=session)
        assert (await copy.error())["code"] == UNKNOWN


async def test_a_call_whose_client_left_while_its_question_was_on_its_way_is_cancelled() -> None:
    """REQ5: its response broke, so its client cannot come back for it."""
    reached, go_on, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class SlowStore(MemoryStore):
        async def touch(self, session_ids: Any, *, now: float) -> None:
            if w.box.gate("g").started.is_set() and not reached.is_set():
                reached.set()
                await go_on.wait()

    async def ask_form(ctx: Any, arguments: Json) -> str:
        await w.box.gate("g").arrive()
        try:
            return str(await ctx.session.elicit_form("?", SCHEMA))
        finally:
            cancelled.set()

    async with world(store=SlowStore(), box=box_of(ask_form)) as w:
        call = await w.waits(client_of(w).send("tools/call", {"name": "ask_form"}))
        # The deadline of its session is moved before it is answered.
        w.clock.advance(100)
        w.box.gate("g").go.set()
        await at_most(10, reached.wait())
        call.leave()
        await call.gone()
        go_on.set()
        await at_most(10, cancelled.wait())


async def test_what_a_handler_changes_is_in_the_last_answer() -> None:
    async def ask_form(ctx: Any, arguments: Json) -> str:
        result = await ctx.session.elicit_form("?", SCHEMA)
        current_session().state["answer"] = result.content["answer"]
        return "kept"

    async def read(ctx: Any, arguments: Json) -> str:
        return str(current_session().state["answer"])

    async with world(box=box_of(ask_form, read)) as w:
        client = client_of(w)
        made = await client.create()
        session = made["sessionId"]
        params: Json = {"name": "ask_form", "arguments": {}}
        asked = await client.send("tools/call", params, session=session).result()
        brought = again(asked, TWO, params=params)
        result = await client.send("tools/call", brought, session=session).result()
        states = [each["_meta"]["io.modelcontextprotocol/session"] for each in (asked, result)]
        assert states[0]["state"] != states[1]["state"]
        assert await client.text("read", session=session) == "two"


async def test_a_tool_that_is_written_for_rounds_passes_through() -> None:
    """Also its own ``requestState``, whatever that looks like."""
    own = "mcp-sessions-call:mine"

    async def rounds(ctx: Any, arguments: Json) -> Any:
        raise AssertionError("called by its handler below")

    box = box_of(rounds)

    async def on_call(ctx: Any, params: types.CallToolRequestParams) -> Any:
        box.calls.append(str(params.request_state))
        if params.request_state is None:
            form = types.ElicitRequestFormParams(message="?", requested_schema=SCHEMA)
            asks: Any = {"mine": types.ElicitRequest(params=form)}
            return types.InputRequiredResult(input_requests=asks, request_state=own)
        return types.CallToolResult(content=[types.TextContent(text="done")])

    box.server.add_request_handler("tools/call", types.CallToolRequestParams, on_call)
    async with world(box=box) as w:
        client = client_of(w)
        params: Json = {"name": "rounds", "arguments": {}}
        asked = await client.send("tools/call", params).result()
        assert [*asked["inputRequests"]] == ["mine"]
        result = await client.send("tools/call", again(asked, TWO, params=params)).result()
        assert text_of(result) == "done"
        assert box.calls == ["None", own]


@pytest.mark.parametrize("seed", range(4))
async def test_nobody_is_asked_for_another(seed: int) -> None:
    """Property: each client gets the questions of its own calls only, whatever the order. Clients
    of both eras share a server, each with several calls at once, in a session or not.
    """

    async def ask_three(ctx: Any, arguments: Json) -> str:
        said: list[str] = []
        for number in range(3):
            await asyncio.sleep(0)
            question = f"{arguments['of']} {number}"
            result = await ctx.session.elicit_form(
                question, SCHEMA, related_request_id=ctx.request_id
            )
            said.append(result.content["answer"])
        return " ".join(said)

    chance = random.Random(seed)
    asked_of: dict[str, list[str]] = {}

    async def modern(w: World, name: str, session: str | None, client: ModernClient) -> None:
        params: Json = {"name": "ask_three", "arguments": {"of": name}}
        result = await client.send("tools/call", params, session=session).result()
        while result["resultType"] == "input_required":
            replies: list[Json] = []
            for question in result["inputRequests"].values():
                message = question["params"]["message"]
                asked_of.setdefault(name, []).append(message)
                replies.append({"action": "accept", "content": {"answer": f"<{message}>"}})
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            brought = again(result, *replies, params=params)
            result = await client.send("tools/call", brought, session=session).result()
        assert text_of(result) == " ".join(f"<{name} {number}>" for number in range(3))

    async def legacy(w: World, name: str) -> None:
        client = await w.connected(capabilities=ELICITS)
        call = client.call("ask_three", of=name)
        for number in range(3):
            question = (await call.reply.has(number + 1))[number]
            asked_of.setdefault(name, []).append(question["params"]["message"])
            content = {"answer": f"<{question['params']['message']}>"}
            await client.respond(question, {"action": "accept", "content": content})
        assert text_of(await call.result()) == " ".join(f"<{name} {n}>" for n in range(3))

    async with world(box=box_of(ask_three)) as w, asyncio.timeout(20):
        client = client_of(w)
        sessions = [None, (await client.create())["sessionId"]]
        work = [modern(w, f"m{n}", sessions[n % 2], client) for n in range(6)]
        work += [legacy(w, f"l{n}") for n in range(3)]
        chance.shuffle(work)
        await asyncio.gather(*work)
        assert asked_of == {
            name: [f"{name} {number}" for number in range(3)]
            for name in (*(f"m{n}" for n in range(6)), *(f"l{n}" for n in range(3)))
        }
        assert w.box.calls.count("ask_three") == 9
