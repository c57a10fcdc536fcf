"""SEC2: "The loggable id is not the credential": no whole session id, key or token, anywhere.

One busy scenario that passes by every place that logs; then everything that was logged, by
whatever logger of ours and at whatever level, with tracebacks, is searched.
"""

import asyncio
import copy
import logging
import pickle
import traceback
from collections import Counter

import pytest

from mcp_sessions.errors import SessionNotFound, SessionsError
from mcp_sessions.ids import digest
from tests.support.apps import DEPRECATED
from tests.support.raw import (
    EXTENSION,
    Json,
    RawClient,
    Reply,
    call_params,
    in_session,
    keyed,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

UNKNOWN = "unknown-" + "U" * 40
KEY = "request-key-" + "K" * 20


async def busy(w: World) -> list[str]:
    """Everything that can happen; the secrets that took part."""

    async def fail(ctx: Ctx, arguments: Json) -> str:
        raise SessionNotFound(arguments["text"])

    w.box.tools["fail"] = fail
    client = await w.connected(capabilities={"extensions": {EXTENSION: {}}, "elicitation": {}})
    other = await w.connected()
    stream, other_stream = await client.get().started(), await other.get().started()
    started = await client.start()
    session = started["sessionId"]
    lone = (await w.client().start())["sessionId"]
    secrets = [session, lone, UNKNOWN, KEY]
    secrets += [c.session_id for c in (client, other) if c.session_id is not None]

    await client.result("resources/subscribe", {"uri": "a:1"})
    await client.text("update", uri="a:1")
    await w.layer.notify_resource_updated("a:1")
    await other.resume(session, started["sessionEventId"])
    await client.error("tools/list")
    await w.client().resume(session, "nonsense")
    for target in (UNKNOWN, client.session_id, lone):
        for method in ("session/resume", "session/end"):
            await other.answer(method, {"sessionId": target})
        await other.answer("tools/call", call_params("echo", {}, in_session(target)))
        headers = {"Mcp-Session-Id": target}
        for reply in (
            w.client().get(headers=headers),
            w.client().get("nonsense", headers=headers),
            w.client().post({"jsonrpc": "2.0", "id": 1, "method": "ping"}, headers=headers),
        ):
            await cycles(10)
            await reply.gone()
    await other.error("session/resume", {"sessionId": session}, headers={"Last-Event-ID": "x"})
    await other.error("tools/call", call_params("fail", {"text": session}))
    await other.answer("tools/call", call_params("echo", {"text": "x"}, keyed(KEY, lone)))
    await other.answer("tools/call", call_params("echo", {"text": "y"}, keyed(KEY, lone)))
    await other.notify("notifications/cancelled", {"_meta": keyed(KEY, lone)})
    await other.notify("notifications/x", {"_meta": in_session(UNKNOWN)})
    await other.notify("notifications/x", {"_meta": {"io.modelcontextprotocol/session": 7}})
    gone = await w.waits(other.call("wait", gate="g", meta=keyed(KEY + "2", session)))
    await gone.reply.started()
    gone.reply.leave()
    await asyncio.sleep(2_000)
    stream = await client.get().started()
    asked = client.call("ask_standalone", question="?", meta=in_session(None))
    await client.respond((await stream.has(1))[-1], {"action": "decline"})
    await asked.answer()
    await w.client().end(session)
    await w.layer.sessions.end(lone)
    await other.delete().done()
    # Those whose clients are there as well.
    w.clock.advance(1_000_000)
    await w.expire()
    await w.client().start()
    await w.layer.drain(grace=0)
    _ = (stream, other_stream)
    return secrets


async def test_an_ordinary_session_is_two_lines_for_an_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its start and its end. What a session does in its life is for whoever debugs."""
    for name in ("mcp_sessions", "mcp_sessions_transports"):
        caplog.set_level(logging.DEBUG, name)
    async with world() as w:
        # What the server says at its start is said once.
        caplog.clear()
        client, other = await w.connected(), await w.connected()
        _streams = await client.get().started(), await other.get().started()
        started = await client.start()
        await other.resume(started["sessionId"], started["sessionEventId"])
        await other.text("echo", text="x")
        await other.end(started["sessionId"])
        await client.delete().done()
    said = {each for each in caplog.records if each.name.startswith("mcp_sessions")}
    for_operators = {each for each in said if each.levelname != "DEBUG"}
    assert {each.levelname for each in for_operators} == {"INFO"}
    lines = Counter(" ".join(each.getMessage().split()[2:]) for each in for_operators)
    assert lines == {
        "started (transport)": 2,
        "started (protocol)": 1,
        "ended: its client ended it": 2,
    }


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """Everything that was logged, as text, with arguments and tracebacks."""
    lines: list[str] = []
    for record in caplog.records:
        if not record.name.startswith(("mcp_sessions", "mcp_sessions_transports")):
            continue
        lines.append(f"{record.name} {record.levelname} {record.getMessage()} {record.args!r}")
        if record.exc_info:
            lines += traceback.format_exception(*record.exc_info)
            lines.append(repr(record.exc_info[1]))
    return "\n".join(lines)


async def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """SEC2; at DEBUG, over a scenario with every kind of line."""
    caplog.set_level(logging.DEBUG)
    async with world(detached_timeout=900, idle_timeout=5_000, slow_timeout=5) as w:
        secrets = await busy(w)

    text = logged(caplog)
    for secret in secrets:
        assert secret not in text
        assert secret[:20] not in text
    # The scenario did pass by: each of these is one kind of line.
    for said in ("started", "resumed", "left its connection", "ended", "expired"):
        assert said in text, text
    assert digest(secrets[0]) in text


async def test_answers_repeat_only_what_the_caller_sent(client: RawClient, session: str) -> None:
    """SEC2, ERR2: an error text names no session; its data only what came with the request."""
    assert client.session_id is not None
    replies: list[Reply] = []
    for method, params in [
        ("session/resume", {"sessionId": UNKNOWN}),
        ("session/resume", {"sessionId": client.session_id}),
        ("session/resume", {}),
        ("tools/call", call_params("echo", {}, in_session(UNKNOWN))),
        ("tools/call", call_params("nothing")),
        ("x/unknown", {}),
    ]:
        sent = client.send(method, params)
        replies.append(await sent.reply.done())
        text = bytes(replies[-1].body).decode()
        for secret in (session, client.session_id, UNKNOWN):
            assert secret not in text or secret in str(params), (method, text)
        message = sent.reply.json["error"]["message"]
        assert not {session, client.session_id, UNKNOWN} & set(message.split())


@pytest.mark.parametrize(
    "error",
    [SessionNotFound(UNKNOWN), SessionNotFound(UNKNOWN, status=404)],
    ids=["200", "404"],
)
def test_an_error_does_not_show_what_it_is_about(error: SessionsError) -> None:
    """SEC2: neither as text nor in a debugger's or a logger's ``repr``; the answer has it."""
    for shown in (str(error), repr(error), *traceback.format_exception(error)):
        assert UNKNOWN not in shown
    assert UNKNOWN in str(getattr(error, "data", ""))


def test_an_error_survives_a_copy() -> None:
    """What sends exceptions between processes copies them."""
    error = SessionNotFound(UNKNOWN, status=404)
    for made in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (made.data, made.status, str(made)) == (error.data, error.status, str(error))


async def test_uvicorn_gets_no_secret_either(caplog: pytest.LogCaptureFixture) -> None:
    """SEC2: an id travels in headers and bodies, never in a URL that access logs show."""
    async with world() as w:
        client: RawClient = await w.connected()
        await client.start()
        assert client.path == "/mcp"
