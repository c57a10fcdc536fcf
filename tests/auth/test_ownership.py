"""Two users on one server: another user's id answers exactly like an unknown one.

F1: "Every path … checks the owner"; ERR2: "Unknown and foreign ids answer the same". On every
route and verb and with every kind of id, and nothing happens to the session that was named.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from tests.support.identities import ISSUER, Guarded, everything_of, guarded
from tests.support.modern import ModernClient, session_meta
from tests.support.raw import (
    SESSION,
    Json,
    RawClient,
    Reply,
    call_params,
    in_session,
    initialize_params,
    keyed,
    text_of,
)
from tests.support.virtual_time import VirtualTimeLoop, cycles

pytestmark = pytest.mark.usefixtures("with_each_authentication")

ALICE = Principal("client", ISSUER, "alice")
BOB = Principal("client", ISSUER, "bob")
UNKNOWN_ID = "N" * 43

KINDS = ["attached", "listening", "waiting", "transport", "transport, idle"]


@dataclass
class Estate:
    """Sessions of alice's, one in each situation, and what belongs to them."""

    sessions: dict[str, str]
    """Kind → id."""

    positions: dict[str, str]
    """Kind → a position in the session's log."""

    states: dict[str, str]
    """Kind → a state token."""

    get_event: str
    """An SSE id of her GET stream."""

    post_event: str
    """An SSE id of one of her POST streams."""

    streams: dict[str, Any]
    """Kind → what receives the session's events."""


async def estate(server: Guarded) -> Estate:
    """Alice running: two eras, attached and not, keyed calls running and answered."""
    older = await server.connected("alice")
    get = await older.get().started()
    client = server.modern("alice")
    attached = (await older.start())["sessionId"]
    # The modern era's one receives its events on a listen stream; the third waits for somebody.
    listening = (await client.start())["sessionId"]
    received = await client.listening(listening, "note://a", lists=("tools",))
    waiting = (await client.create())["sessionId"]
    idle = await server.connected("alice")
    assert older.session_id is not None and idle.session_id is not None
    sessions = {
        "attached": attached,
        "listening": listening,
        "waiting": waiting,
        "transport": older.session_id,
        "transport, idle": idle.session_id,
    }
    positions: dict[str, str] = {}
    states: dict[str, str] = {}
    for kind in ("attached", "listening", "waiting"):
        session = sessions[kind]
        await client.call("remember", {"text": kind}, session=session).result()
        await client.call("update", {"uri": "note://a"}, session=session).result()
        await client.call("whoami", {}, session=session, key="answered").result()
        client.call("wait", {"gate": kind}, session=session, key="running")
        await server.tools.gate(kind).started.wait()
        looked = await client.call("whoami", {}, session=session).result()
        states[kind] = looked["_meta"][SESSION]["state"]
        head = await server.store.head(SessionId(session))
        assert head is not None
        positions[kind] = head.event_id()
    streamed = older.call("steps", meta={"progressToken": 1})
    await streamed.result()
    await get.until(lambda: len(get.messages) >= 1)
    return Estate(
        sessions,
        positions,
        states,
        get.events[-1].id,
        streamed.reply.events[1].id,
        {"attached": get, "listening": received},
    )


# --- what bob tries ------------------------------------------------------------------------


class Bob:
    """Bob, on three kinds of connection."""

    def __init__(self, older: RawClient, lone: RawClient, modern: ModernClient) -> None:
        self.older = older
        self.lone = lone
        self.modern = modern

    def named(self, session_id: str) -> RawClient:
        """A client that thinks that id is its transport-mode session."""
        client = RawClient(self.lone.carrier)
        client.session_id = session_id
        return client


Attempt = Callable[[Bob, str, Estate, str], Awaitable[list[Reply]]]
"""Bob's requests with an id; run with alice's id and with nobody's. The last argument is what kind
of session he thinks it is.
"""


async def _ended(*replies: Reply) -> list[Reply]:
    """These replies, when they have ended; a stream that opened is left."""
    for reply in replies:
        with anyio.move_on_after(1):
            await reply.until(lambda r=reply: r.ended or (r.is_sse and bool(r.events)))
        if not reply.ended:
            reply.leave()
        await reply.done()
    return list(replies)


def _sent(client: RawClient, method: str, params: Json) -> Reply:
    return client.send(method, params, request_id=1).reply


async def _resume(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    params: Json = {"sessionId": target, "lastSessionEventId": hers.positions["waiting"]}
    with_header = {"Mcp-Session-Id": target}
    return await _ended(
        _sent(bob.older, "session/resume", params),
        _sent(bob.lone, "session/resume", {"sessionId": target}),
        bob.modern.send("session/resume", params, request_id=1).reply,
        bob.modern.send("session/resume", params, request_id=1, headers=with_header).reply,
        bob.modern.send(
            "session/resume", params, request_id=1, headers={"Last-Event-ID": hers.get_event}
        ).reply,
    )


async def _end(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    params: Json = {"sessionId": target}
    return await _ended(
        _sent(bob.older, "session/end", params),
        _sent(bob.lone, "session/end", params),
        bob.modern.send("session/end", params, request_id=1).reply,
    )


async def _delete(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    meta = session_meta(target, state=hers.states.get(kind))
    return await _ended(
        _sent(bob.older, "sessions/delete", {"_meta": meta}),
        _sent(bob.lone, "sessions/delete", {"_meta": in_session(target)}),
        bob.modern.send("sessions/delete", meta=meta, request_id=1).reply,
    )


async def _call(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    replies: list[Reply] = []
    for tool in ("whoami", "remember", "unknown"):
        arguments: Json = {"text": "bob was here"} if tool == "remember" else {}
        for meta in (
            session_meta(target),
            session_meta(target, state=hers.states.get(kind, "x")),
            session_meta(target, state="nonsense"),
            session_meta(target, key="new"),
        ):
            params = call_params(tool, arguments, meta)
            replies += [
                _sent(bob.older, "tools/call", params),
                _sent(bob.lone, "tools/call", params),
                bob.modern.call(tool, arguments, meta=meta, request_id=1).reply,
            ]
    return await _ended(*replies)


async def _other_methods(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    replies: list[Reply] = []
    for method in ("tools/list", "resources/subscribe", "server/discover", "ping", "x/unknown"):
        params: Json = {"uri": "note://bobs", "_meta": in_session(target)}
        replies += [
            _sent(bob.older, method, params),
            _sent(bob.lone, method, params),
            bob.modern.send(method, {"uri": "x"}, session=target, request_id=1).reply,
        ]
    return await _ended(*replies)


async def _keys(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    """Her calls again, with her keys: neither answered nor joined."""
    replies: list[Reply] = []
    calls: list[tuple[str, str, Json]] = [
        ("answered", "whoami", {}),
        ("running", "wait", {"gate": kind}),
        ("running", "whoami", {}),
    ]
    for key, tool, arguments in calls:
        params = call_params(tool, arguments, keyed(key, target))
        replies += [
            _sent(bob.older, "tools/call", params),
            _sent(bob.lone, "tools/call", params),
            bob.modern.call(tool, arguments, session=target, key=key, request_id=1).reply,
        ]
    return await _ended(*replies)


async def _cancel(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    message: Json = {
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": {"requestId": 1, "_meta": session_meta(target, key="running")},
    }
    return await _ended(bob.older.post(message), bob.lone.post(message), bob.modern.post(message))


async def _notify(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    message: Json = {
        "jsonrpc": "2.0",
        "method": "notifications/roots/list_changed",
        "params": {"_meta": in_session(target)},
    }
    return await _ended(bob.older.post(message), bob.lone.post(message), bob.modern.post(message))


async def _listen(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    listen = bob.modern.listen
    return await _ended(
        listen(target, "note://a", lists=("tools",), request_id=1).reply,
        listen(target, request_id=1, key="k").reply,
        listen(target, request_id=1, headers={"Mcp-Session-Id": target}).reply,
        listen(target, request_id=1, state="nonsense").reply,
    )


async def _header(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    """Her id as ``Mcp-Session-Id``, on every verb."""
    thief = bob.named(target)
    initialize: Json = initialize_params("thief")
    answer: Json = {"jsonrpc": "2.0", "id": "question", "result": {}}
    return await _ended(
        _sent(thief, "initialize", initialize),
        _sent(thief, "ping", {}),
        _sent(thief, "tools/list", {}),
        _sent(thief, "tools/call", call_params("whoami")),
        _sent(thief, "session/start", {}),
        _sent(thief, "session/resume", {"sessionId": target}),
        thief.post({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        thief.post(answer),
        thief.get(),
        thief.get(hers.get_event),
        thief.get(hers.post_event),
        thief.get(hers.positions["waiting"]),
        thief.get("nonsense"),
        thief.delete(),
        thief.http("PUT", thief.headers()),
    )


async def _modern_header(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    """Without metadata it is ignored; with other metadata it is a mismatch."""
    call, mirror = bob.modern.call, {"Mcp-Session-Id": target}
    other = {"Mcp-Session-Id": "other"}
    return await _ended(
        call("session_id", headers=mirror, request_id=1).reply,
        call("session_id", session=target, headers=other, request_id=1).reply,
        call("session_id", session=target, headers=mirror, request_id=1).reply,
    )


async def _last_event(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    """Her SSE ids on his own connection: they name no stream of his."""
    events = (hers.get_event, hers.post_event, hers.positions["attached"])
    return await _ended(*(bob.older.get(event) for event in events))


async def _create(bob: Bob, target: str, hers: Estate, kind: str) -> list[Reply]:
    return await _ended(
        _sent(bob.lone, "sessions/create", {"_meta": in_session(target)}),
        bob.modern.send("sessions/create", session=target, request_id=1).reply,
    )


ATTEMPTS: list[Attempt] = [
    _resume,
    _end,
    _delete,
    _call,
    _other_methods,
    _keys,
    _cancel,
    _notify,
    _listen,
    _header,
    _modern_header,
    _last_event,
    _create,
]


def written(reply: Reply, target: str) -> tuple[Any, ...]:
    """The text of a reply, without the id that was sent and the ids of its stream's events."""
    headers = sorted((n, v) for n, v in reply.headers if n != "date")
    body = bytes(reply.body).decode()
    if reply.is_sse:
        body = str([(e.message, "data" in e.fields) for e in reply.events])
    return reply.status, headers, body.replace(target, "<target>"), repr(reply.error)


async def expect_alike(
    server: Guarded, hers: Estate, attempt: Attempt, kind: str, unowned: str, bob: Bob
) -> None:
    """Run an attempt with nobody's id and with alice's; both must answer the same."""
    target = hers.sessions[kind]
    before = {k: everything_of(server.store, s) for k, s in hers.sessions.items()}
    calls = len(server.tools.calls)
    at_unknown = await attempt(bob, unowned, hers, kind)
    ran = server.tools.calls[calls:]
    calls = len(server.tools.calls)
    at_hers = await attempt(bob, target, hers, kind)

    for one, other in zip(at_unknown, at_hers, strict=True):
        assert written(other, target) == written(one, unowned), (attempt, kind)
    assert server.tools.calls[calls:] == ran, attempt
    for name, known in before.items():
        assert everything_of(server.store, hers.sessions[name]) == known, (attempt, kind, name)


async def expect_untouched(server: Guarded, hers: Estate) -> None:
    """Her streams are open and receive what comes; her calls run and are answered."""
    client = server.modern("alice")
    for kind, stream in hers.streams.items():
        seen = len(stream.messages)
        await client.call("update", {"uri": "note://last"}, session=hers.sessions[kind]).result()
        await stream.until(lambda s=stream, n=seen: len(s.messages) > n, kind)
        assert stream.messages[-1]["params"]["uri"] == "note://last"
    for kind in ("attached", "listening", "waiting"):
        session = hers.sessions[kind]
        again = client.call("wait", {"gate": kind}, session=session, key="running")
        await cycles()
        assert not server.tools.gate(kind).cancelled.is_set()
        server.tools.gate(kind).go.set()
        assert text_of(await again.result()) == "alice alice"
        data = await server.store.load_data(SessionId(session))
        assert data is not None and data.value == {"text": kind}
    for kind in ("transport", "transport, idle"):
        older = server.older("alice")
        older.session_id = hers.sessions[kind]
        assert (await older.send("tools/list").reply.done()).status == 200


async def bob_at(server: Guarded) -> Bob:
    """Bob, with a transport-mode session of his own."""
    return Bob(await server.connected("bob"), server.older("bob"), server.modern("bob"))


@pytest.mark.parametrize("kind", KINDS)
async def test_every_route_answers_a_foreign_id_like_an_unknown_one(kind: str) -> None:
    """SES8, ERR2: every attempt once, in order, then everything of hers works as before."""
    async with guarded() as server:
        hers = await estate(server)
        bob = await bob_at(server)
        for attempt in ATTEMPTS:
            await expect_alike(server, hers, attempt, kind, UNKNOWN_ID, bob)
        await expect_untouched(server, hers)


_ATTEMPTS = st.lists(
    st.tuples(st.sampled_from(ATTEMPTS), st.sampled_from(KINDS)), min_size=1, max_size=4
)
_VISIBLE = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters='"\\'),
    min_size=43,
    max_size=43,
)


@settings(max_examples=settings().max_examples // 4)
@given(attempts=_ATTEMPTS, unowned=_VISIBLE, other_subject=st.booleans())
def test_no_sequence_of_attempts_finds_or_touches_anything(
    attempts: list[tuple[Attempt, str]], unowned: str, other_subject: bool
) -> None:
    """SES8: a property over routes, kinds of id and their order."""

    async def run() -> None:
        async with guarded() as server:
            if not other_subject:
                # The same subject of another issuer is another user.
                server.verifier.add("bob", "alice", issuer="https://other.example")
            hers = await estate(server)
            bob = await bob_at(server)
            for attempt, kind in attempts:
                await expect_alike(server, hers, attempt, kind, unowned, bob)
            await expect_untouched(server, hers)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    "other",
    [
        {"subject": "bob"},
        {"subject": None},
        {"subject": "alice", "client_id": "other"},
        {"subject": "alice", "issuer": "https://other.example"},
        {"subject": "alice", "issuer": None},
        {"subject": "ALICE"},
    ],
    ids=str,
)
async def test_an_owner_is_an_issuer_a_subject_and_a_client(other: Json) -> None:
    """Rule: "A session belongs to (issuer, subject, client id) of the credential that made it"."""
    async with guarded() as server:
        server.verifier.add("other", **other)
        hers = (await server.modern("alice").start())["sessionId"]
        error = await server.modern("other").call("whoami", session=hers).error()
        assert error["code"] == -32043
        mine = (await server.modern("other").start())["sessionId"]
        error = await server.modern("alice").call("whoami", session=mine).error()
        assert error["code"] == -32043


async def test_ended_and_expired_ids_answer_like_unknown_ones() -> None:
    """To their owner too: "unknown, expired, ended … all get the same answer"."""
    async with guarded(idle_timeout=100) as server:
        client, older = server.modern("alice"), await server.connected("alice")
        expired = (await client.start())["sessionId"]
        ended = (await client.start())["sessionId"]
        await client.send("session/end", {"sessionId": ended}).result()
        deleted = await server.connected("alice")
        await deleted.delete().done()
        server.clock.advance(101)
        alice = Bob(await server.connected("alice"), server.older("alice"), client)
        nothing = Estate({}, {"waiting": "x", "attached": "y"}, {}, "get", "post", {})
        attempts: list[Attempt] = [_resume, _end, _delete, _call, _listen, _header, _keys]
        for attempt in attempts:
            expected = await attempt(alice, UNKNOWN_ID, nothing, "gone")
            for gone in (ended, expired, deleted.session_id, older.session_id):
                assert gone is not None
                replies = await attempt(alice, gone, nothing, "gone")
                for one, other in zip(expected, replies, strict=True):
                    assert written(other, gone) == written(one, UNKNOWN_ID), attempt


async def test_an_operator_sees_each_users_sessions() -> None:
    """``layer.sessions.list(principal=…)``; a refreshed token is the same principal."""
    async with guarded() as server:
        server.verifier.add("alice again", "alice", "use", "more")
        hers = {
            (await server.modern("alice").start())["sessionId"],
            (await server.modern("alice again").create())["sessionId"],
            (await server.connected("alice")).session_id,
        }
        theirs = (await server.modern("bob").start())["sessionId"]

        listed = await server.layer.sessions.list(principal=ALICE)
        assert {info.id for info in listed} == hers
        assert all(info.principal == ALICE for info in listed)
        assert [i.id for i in await server.layer.sessions.list(principal=BOB)] == [theirs]
        assert len(await server.layer.sessions.list()) == 4
        assert await server.layer.sessions.list(principal=Principal()) == []


async def test_anothers_answer_to_a_question_does_not_count() -> None:
    """Rule: "the first answer from any of the **owner's** connections counts"."""
    async with guarded() as server:
        older = await server.connected("alice", capabilities={"elicitation": {}})
        asking = older.call("ask")
        await asking.reply.until(lambda: asking.reply.ended or bool(asking.reply.messages))
        [question] = asking.reply.messages
        other = await server.connected("bob")
        answer: Json = {
            "jsonrpc": "2.0",
            "id": question["id"],
            "result": {"action": "accept", "content": {"answer": "bob's"}},
        }
        assert (await other.post(answer).done()).status == 202
        lone = await server.older("bob").post(answer).done()
        unknown = await server.older("bob").post({**answer, "id": "unknown"}).done()
        assert written(lone, question["id"]) == written(unknown, "unknown")
        await cycles()
        await older.respond(question, {"action": "accept", "content": {"answer": "mine"}})

        assert text_of(await asking.result()) == "accept: mine"
