"""The audit: one record for each request that was served, and nothing in it that opens anything."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from mcp import types

from mcp_sessions import Conversations, SessionSecurity
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import digest
from mcp_sessions.server.reporting.audit import Audit
from tests.support.audit import Lines
from tests.support.modern import ModernClient, session_meta
from tests.support.raw import Json, at_most, in_process, in_session, keyed
from tests.support.replicas import cluster, user
from tests.support.world import Ctx, Toolbox, world

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Broken(Toolbox):
    """With ``cannot``, whose result is that it could not."""

    async def _on_call_tool(
        self, ctx: Ctx, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        if params.name == "cannot":
            text = types.TextContent(text="it is broken")
            return types.CallToolResult(content=[text], is_error=True)
        return await super()._on_call_tool(ctx, params)


async def _until(look: Callable[[], bool]) -> None:
    while not look():  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, "mcp_sessions.audit")
    return Lines(caplog)


async def test_it_is_off_until_its_own_logger_is_set(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its parents log. Off it costs a look at that logger's level, and no more."""
    caplog.set_level(logging.DEBUG)
    begun = list[str]()

    def begin(self: Audit, method: str, *_: Any, **__: Any) -> None:
        begun.append(method)

    monkeypatch.setattr(Audit, "begin", begin)
    async with world() as w:
        client = await w.connected()
        await client.start()
        await client.text("echo", text="x")
        await ModernClient(w.carrier).text("echo", {"text": "x"})
    assert begun == [] and Lines(caplog).all == []


async def test_a_record_says_who_did_what_where_and_how_it_ended(lines: Lines) -> None:
    """In OpenTelemetry's names, where it has one."""
    async with world() as w:
        client = await w.connected()
        session_id = (await client.start())["sessionId"]
        await client.text("echo", text="what nobody may read")
        assert client.session_id is not None
        here: Json = {
            "mcp_sessions.era": "handshake",
            "network.transport": "tcp",
            "network.protocol.name": "http",
            "client.address": "127.0.0.1",
            "mcp_sessions.outcome": "ok",
        }
        by_version = {"mcp.protocol.version": "2025-11-25"}
        in_it = {
            "mcp_sessions.session": digest(session_id),
            "mcp_sessions.session.source": "session",
        }
        began, started, called = lines.all
        assert began == {
            "mcp.method.name": "initialize",
            **here,
            **by_version,
            "mcp_sessions.session": digest(client.session_id),
            "mcp_sessions.session.source": "connection",
        }
        assert started == {"mcp.method.name": "session/start", **here, **by_version, **in_it}
        assert called == {
            "mcp.method.name": "tools/call",
            "gen_ai.tool.name": "echo",
            **here,
            **by_version,
            **in_it,
        }


async def test_without_a_session_of_its_own_a_call_is_in_its_connections(lines: Lines) -> None:
    async with world() as w:
        client = await w.connected()
        await client.text("echo", text="x")
        assert client.session_id is not None
        [called] = lines.about("tools/call")
        assert called["mcp_sessions.session"] == digest(client.session_id)
        assert called["mcp_sessions.session.source"] == "connection"
        await ModernClient(w.carrier).text("echo", {"text": "x"})
        lone = lines.about("tools/call")[1]
        assert "mcp_sessions.session" not in lone and lone["mcp_sessions.era"] == "modern"


async def test_how_a_request_ended(lines: Lines) -> None:
    """A result, a result that is a tool's error, an error, a cancellation, nobody left to
    receive.
    """
    async with world(box=Broken()) as w:
        client = await w.connected()
        await client.text("echo", text="x")
        await client.call("cannot").result()
        await client.error("tools/call", {"name": "no such tool"})
        await client.error("session/resume", {"sessionId": "x" * 43})
        sent = await w.waits(client.call("wait", gate="cancelled"), "cancelled")
        await client.notify("notifications/cancelled", {"requestId": sent.id})
        await sent.error()
        lone = ModernClient(w.carrier)
        left = await w.waits(lone.call("wait", {"gate": "left"}), "left")
        left.leave()
        await w.box.gate("left").cancelled.wait()
        cut = await w.waits(client.call("wait", gate="cut"), "cut")
        await cut.reply.started()
        cut.reply.leave()
        runner = w.inside.runner
        await at_most(5, _until(lambda: [each.is_awaited for each in runner.active] == [False]))
        w.box.gate("cut").go.set()
        await at_most(5, _until(lambda: runner.running == 0))
    outcomes = [each for each in lines.outcomes if each[0] not in ("ping", "initialize")]
    assert outcomes == [
        ("tools/call", "ok", None),
        ("tools/call", "tool_error", "tool_error"),
        ("tools/call", "error", "0"),
        ("session/resume", "error", "-32043"),
        ("tools/call", "cancelled", "-32800"),
        ("tools/call", "cut", "-32800"),
        ("tools/call", "cut", None),
    ]
    failed = lines.about("session/resume")[0]
    assert failed["rpc.response.status_code"] == "-32043"
    # Of a session that is not there, or somebody else's: which was tried.
    assert failed["mcp_sessions.session"] == digest("x" * 43)


async def test_a_key_that_was_seen_before_is_reported(lines: Lines) -> None:
    async with world() as w:
        client = await w.connected()
        await client.start()
        for _ in range(2):
            assert await client.text("echo", meta=keyed("k1"), text="x") == "x"
    seen = [each.get("mcp_sessions.request_key.seen") for each in lines.about("tools/call")]
    assert seen == [None, True]


async def test_a_conversation_is_named_by_digests_that_say_nothing_without_the_keys(
    lines: Lines,
) -> None:
    async with world(conversations=Conversations()) as w:
        ann, bob = [await w.carrier_of(user(name)) for name in ("ann", "bob")]
        for carrier, key in ((ann, "one"), (ann, "one"), (ann, "two"), (bob, "one")):
            modern = ModernClient(carrier)
            await modern.text("echo", {"text": "x"}, meta={"openai/session": key})
        conversations = {digest(each.id) for each in await w.layer.sessions.list()}
    notified = lines.about("tools/call")
    assert {each["mcp_sessions.conversation.source"] for each in notified} == {"openai/session"}
    assert {each["mcp_sessions.session.source"] for each in notified} == {"conversation"}
    sessions = [each["mcp_sessions.session"] for each in notified]
    assert set(sessions) == conversations and sessions[0] == sessions[1] and len(conversations) == 3
    keys = [each["mcp_sessions.conversation"] for each in notified]
    assert keys[0] == keys[1] == keys[3] != keys[2]
    who = [each["enduser.pseudo.id"] for each in notified]
    assert who[0] == who[1] == who[2] != who[3]
    assert not {digest(name) for name in ("one", "two", "ann", "bob")} & {*keys, *who}


async def test_a_handle_is_named_by_a_digest(lines: Lines) -> None:
    """And one that opens nothing is an error of its tool, in no session."""
    async with world(conversations=Conversations(handle={"tell"})) as w:
        modern = ModernClient(w.carrier)
        first = await modern.call("tell", {"method": "notifications/x"}).result()
        handle = first["structuredContent"]["session"]
        await modern.text("tell", {"method": "notifications/x", "session": handle})
        await modern.call("tell", {"method": "notifications/x", "session": "guessed"}).result()
        [conversation] = [digest(each.id) for each in await w.layer.sessions.list()]
    started, passed, refused = lines.about("tools/call")
    assert started["mcp_sessions.session"] == passed["mcp_sessions.session"] == conversation
    assert started["mcp_sessions.conversation.source"] == "handle"
    assert started["mcp_sessions.conversation"] == passed["mcp_sessions.conversation"]
    assert "mcp_sessions.session" not in refused and refused["error.type"] == "tool_error"
    assert not [each for each in (handle, "guessed") if each in json.dumps(lines.all)]


async def test_the_same_digests_come_of_the_same_keys_only() -> None:
    one, other = SessionSecurity(["a" * 32]), SessionSecurity(["b" * 32])
    assert one.pseudonym("x", "y") == SessionSecurity(["a" * 32]).pseudonym("x", "y")
    assert one.pseudonym("x", "y") != other.pseudonym("x", "y")
    assert one.pseudonym("xy") != one.pseudonym("x", "y")


async def test_nothing_that_a_client_sends_in_addition_to_names_is_in_a_record(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """SEC2."""
    secrets = ["an-argument", "the-key-of-a-request", "the-key-of-a-conversation", "ann"]
    async with world(conversations=Conversations()) as w:
        carrier = await w.carrier_of(user("ann"))
        client = ModernClient(carrier)
        session_id = (await client.create())["sessionId"]
        meta = {**session_meta(session_id), **keyed(secrets[1]), "openai/session": secrets[2]}
        await client.call("echo", {"text": secrets[0]}, meta=meta).result()
        meta = {"openai/session": secrets[2]}
        await client.call("echo", {"text": secrets[0]}, meta=meta).result()
        await client.call("n" * 10_000).error()
    written = json.dumps(lines.all) + "".join(caplog.messages)
    assert not [each for each in (*secrets, session_id) if each in written]
    assert {
        each["gen_ai.tool.name"] for each in lines.about("tools/call") if "gen_ai.tool.name" in each
    } == {"echo"}


@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_what_is_no_name_of_the_servers_is_a_digest(
    era: str, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """A client may send a session id as the name of a tool, a prompt or a method, or as the
    version of the protocol: whoever reads the audit could resume it.
    """
    caplog.set_level(logging.DEBUG)
    async with world() as w:
        modern, plain = ModernClient(w.carrier), await w.connected()
        session_id = (await plain.start())["sessionId"]
        client: Any = modern if era == "modern" else plain
        for method in ("tools/call", "prompts/get"):
            await client.send(method, {"name": session_id}).answer()
        await client.send(session_id, {}).answer()
        await plain.notify(session_id, {"_meta": in_session("x" * 43)})
        headers = {"MCP-Protocol-Version": session_id}
        await plain.send("tools/list", {}, headers=headers).reply.until(lambda: True)
        await client.send("tools/call", {"name": "not listed"}).answer()
        await client.send("tools/list", {}).answer()
        await client.send("tools/call", {"name": "echo", "arguments": {}}).answer()
    written = json.dumps(lines.all) + "".join(caplog.messages)
    assert session_id not in written and "not listed" not in json.dumps(lines.all)
    unknown = [each for each in lines.all if "mcp_sessions.unknown" in each]
    assert len(unknown) == 4 and len({each["mcp_sessions.unknown"] for each in unknown}) == 2
    # A tool that a list had is written down, also where its call failed.
    assert lines.about("tools/call")[-1]["gen_ai.tool.name"] == "echo"
    assert lines.about("tools/call")[-1]["mcp_sessions.outcome"] != "ok"


@pytest.mark.parametrize("parent", [f"00-{TRACE}-00f067aa0ba902b7-01", "no trace", 7, None])
async def test_a_request_says_of_which_trace_it_is(lines: Lines, parent: object) -> None:
    """As the SDK reads it; what is no trace context is nothing."""
    async with world() as w:
        await ModernClient(w.carrier).text("echo", {"text": "x"}, meta={"traceparent": parent})
    [called] = lines.about("tools/call")
    assert called.get("trace_id") == (TRACE if str(parent).startswith("00-") else None)


async def test_a_listen_is_reported_when_it_begins(lines: Lines) -> None:
    async with world() as w:
        client = ModernClient(w.carrier)
        session_id = (await client.create())["sessionId"]
        listening = await client.listening(session_id, "a:1")
        await client.listen("x" * 43, "a:1").error()
        notified = lines.about("subscriptions/listen")
        assert [each["mcp_sessions.outcome"] for each in notified] == ["ok", "error"]
        assert notified[0]["mcp_sessions.session"] == digest(session_id)
        listening.leave()
    assert len(lines.about("subscriptions/listen")) == 2


async def test_a_store_that_is_away_is_an_outcome(lines: Lines) -> None:
    async with world() as w:
        client = ModernClient(w.carrier)
        session_id = (await client.create())["sessionId"]

        async def away(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("away")

        w.layer.store.admit = away  # pyright: ignore[reportAttributeAccessIssue]
        reply = client.call("echo", {"text": "x"}, meta=in_session(session_id)).reply
        assert (await reply.done()).status == 503
    assert lines.outcomes[-1] == ("tools/call", "error", "StoreUnavailable")


async def test_of_a_request_that_runs_at_another_replica_each_replica_records_its_part(
    lines: Lines,
) -> None:
    """It is asked for twice, and runs once."""
    async with cluster() as replicas:
        first, second = replicas.worlds
        client = ModernClient(first.carrier)
        session_id = (await client.create())["sessionId"]
        meta = {**session_meta(session_id), **keyed("k1")}
        begun = client.call("wait", {"gate": "g"}, meta=meta)
        gate = first.box.gate("g")
        await gate.started.wait()
        again = ModernClient(second.carrier).call("wait", {"gate": "g"}, meta=meta)
        await again.reply.started()
        gate.go.set()
        assert await begun.result() and await again.result()
        assert gate.arrivals == 1
    notified = lines.about("tools/call")
    assert [each["mcp_sessions.outcome"] for each in notified] == ["ok", "ok"]
    seen = sorted(bool(each.get("mcp_sessions.request_key.seen")) for each in notified)
    assert seen == [False, True]


async def test_what_is_recorded_changes_no_answer(lines: Lines) -> None:
    """Every byte of a conversation's way back is the same, audit or none."""

    async def story() -> list[str]:
        async with world(security=SessionSecurity(["k" * 32])) as w, in_process(w.layer_app) as c:
            client = ModernClient(c)
            answers = [await client.call("echo", {"text": "x"}).answer()]
            answers.append(await client.call("no such tool").answer())
            answers.append(await client.send("tools/list").answer())
            answers.append(await client.send("no/such").answer())
            return [json.dumps(each) for each in answers]

    on = await story()
    logging.getLogger("mcp_sessions.audit").setLevel(logging.NOTSET)
    assert await story() == on
    assert len(lines.all) == 4
