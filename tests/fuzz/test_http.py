"""Any bytes of a client over HTTP are answered, or refused with a documented error.

Never a 500, a hang or a dead connection, in each era; and the next request is served as if
nothing had been. The wrapped server's handlers never fail by themselves, so that an internal
error is the layer's.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions import SessionLayer, SessionPolicy, SessionSecurity
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.testing.memory_client import inside
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.fuzz.echo import CODES, STATUSES, echo_server
from tests.support.modern import (
    HOST,
    LOG_LEVEL,
    MODERN,
    ModernClient,
    envelope,
    routing_headers,
)
from tests.support.raw import (
    KEY,
    NEWEST,
    SESSION,
    AsgiCarrier,
    Carrier,
    Json,
    RawClient,
    Reply,
    SocketCarrier,
    in_process,
)
from tests.support.servers import serve
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.world import Clock

KEYS = ["k" * 32]


@dataclass
class Target:
    """The server, and real things that fuzzed messages may name."""

    layer: SessionLayer
    carrier: Carrier
    named: dict[str, str]
    """Placeholder → what is sent in its place."""


@asynccontextmanager
async def target(*, stateless: bool = False) -> AsyncGenerator[Target]:
    """A server with sessions in every situation."""
    layer = ClockedLayer(
        echo_server(),
        store=None if stateless else "memory://",
        security=SessionSecurity(KEYS),
        policy=SessionPolicy(max_events=5, max_sessions=50, detached_timeout=5),
        clock=Clock(),
    )
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        yield Target(layer, carrier, await _situations(carrier, stateless=stateless))


async def _situations(carrier: AsgiCarrier, *, stateless: bool) -> dict[str, str]:
    client = ModernClient(carrier)
    created = await client.create()
    named = {"<session>": created["sessionId"], "<state>": created["state"], "<key>": "known"}
    ended = (await client.create())["sessionId"]
    await client.send("sessions/delete", session=ended).result()
    named["<ended>"] = ended
    if stateless:
        return named | {"<transport>": "none", "<attached>": ended, "<position>": "none"}
    older = RawClient(carrier)
    await older.initialize()
    assert older.session_id is not None
    started = await older.start()
    get = await older.get().started()
    await client.call("emit", {}, session=started["sessionId"]).result()
    await get.until(lambda: bool(get.messages))
    emitted = older.call("emit", meta={"progressToken": 1})
    await emitted.result()
    await client.call("echo", {}, session=created["sessionId"], key="known").result()
    return named | {
        "<transport>": older.session_id,
        "<attached>": started["sessionId"],
        "<position>": started["sessionEventId"],
        "<get event>": get.events[-1].id,
        "<post event>": emitted.reply.events[0].id,
    }


# --- what is sent ----------------------------------------------------------------------------

POSITIONS = [
    "<session>",
    "<ended>",
    "<transport>",
    "<attached>",
    "<state>",
    "<key>",
    "<position>",
    "<get event>",
    "<post event>",
]

ODD_TEXT = st.one_of(
    st.sampled_from(POSITIONS),
    st.sampled_from(["", " ", "\x00", "\u2028", "é" * 300, "x" * 5_000, "-", "0", "A" * 43]),
    st.text(max_size=12),
    st.text(max_size=12),
    st.text(st.characters(exclude_categories=()), max_size=12),
)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**200]),
    st.floats(allow_nan=False, allow_infinity=False),
    ODD_TEXT,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(ODD_TEXT, inner, max_size=3)
    ),
    max_leaves=6,
)


def _mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return valid values, and now and then any value."""
    return st.integers(0, 11).flatmap(lambda n: strategy if n else VALUES)


def _members(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object that mostly has these members, each mostly as it is meant."""
    given = {name: _mostly(strategy) for name, strategy in strategies.items()}
    whole = st.fixed_dictionaries(given, optional={"example": VALUES})
    partial = st.fixed_dictionaries({}, optional=given)
    return st.integers(0, 7).flatmap(lambda n: whole if n else partial)


SESSION_IDS = st.sampled_from(
    ["<session>", "<session>", "<attached>", "<attached>", "<ended>", "<transport>", "A" * 43]
)
SESSION_METAS = st.one_of(
    _members(sessionId=SESSION_IDS),
    _members(sessionId=st.just("<session>"), state=st.just("<state>")),
    st.none(),
)
METAS = st.fixed_dictionaries(
    {},
    optional={
        SESSION: _mostly(SESSION_METAS),
        KEY: _mostly(st.sampled_from(["<key>", "k", "x" * 300])),
        "progressToken": _mostly(st.sampled_from(["token", 1])),
        LOG_LEVEL: _mostly(st.sampled_from(["info", "debug"])),
        "example.com/x": VALUES,
    },
)
FILTERS = _members(
    toolsListChanged=st.booleans(), resourceSubscriptions=st.lists(ODD_TEXT, max_size=3)
)
NOTHING: st.SearchStrategy[Any] = st.just({})
REQUEST_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "session/start": NOTHING,
    "session/resume": _members(
        sessionId=SESSION_IDS,
        lastSessionEventId=st.sampled_from(["<position>", "<get event>", "x"]),
    ),
    "session/end": _members(sessionId=SESSION_IDS),
    "sessions/create": NOTHING,
    "sessions/delete": NOTHING,
    "tools/call": _members(
        name=st.sampled_from(["echo", "emit", "state"]),
        arguments=st.dictionaries(ODD_TEXT, VALUES, max_size=2),
    ),
    "tools/list": NOTHING,
    "resources/read": _members(uri=ODD_TEXT),
    "resources/subscribe": _members(uri=ODD_TEXT),
    "resources/unsubscribe": _members(uri=ODD_TEXT),
    "subscriptions/listen": _members(notifications=FILTERS),
    "server/discover": NOTHING,
    "example/echo": _members(echo=VALUES),
    "initialize": _members(
        protocolVersion=st.sampled_from([NEWEST, MODERN, "2024-11-05"]),
        capabilities=st.just({}),
        clientInfo=st.just({"name": "fuzz", "version": "1"}),
    ),
    "ping": NOTHING,
    "x/unknown": VALUES,
}
NOTIFICATION_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "notifications/cancelled": _members(requestId=st.integers(0, 3)),
    "notifications/initialized": NOTHING,
    "notifications/progress": _members(progressToken=st.just("token"), progress=st.just(1)),
    "notifications/roots/list_changed": NOTHING,
    "x/unknown": VALUES,
}


_WEIGHTS = {"tools/call": 6, "subscriptions/listen": 3, "session/resume": 3, "example/echo": 2}
"""How much more often than the others these are sent."""


def _of(methods: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    often = [method for method in methods for _ in range(_WEIGHTS.get(method, 1))]
    return st.sampled_from(often).flatmap(
        lambda method: st.fixed_dictionaries(
            {"method": st.just(method), "params": _mostly(methods[method])}
        )
    )


REQUEST_MESSAGES = st.tuples(_of(REQUEST_PARAMS), _mostly(st.integers(0, 3))).map(
    lambda pair: {**pair[0], "id": pair[1]}
)
MESSAGES = st.integers(0, 11).flatmap(
    lambda n: {
        0: VALUES,
        1: st.fixed_dictionaries({"id": ODD_TEXT}, optional={"result": VALUES, "error": VALUES}),
        2: _of(NOTIFICATION_PARAMS),
        3: _of(NOTIFICATION_PARAMS),
    }.get(n, REQUEST_MESSAGES)
)
HEADER_VALUES = st.one_of(
    st.sampled_from(POSITIONS),
    st.sampled_from(["", " ", "*/*", "null", "application/json", "x" * 5_000, "=?base64?!?=", ","]),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=12),
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Accept",
            "Content-Type",
            "Content-Length",
            "Host",
            "Origin",
            "Mcp-Session-Id",
            "Last-Event-ID",
            "Mcp-Protocol-Version",
            "Mcp-Method",
            "Mcp-Name",
            "Mcp-Param-X",
            "Authorization",
            "Cookie",
            "X-Other",
        ]
    ),
    st.one_of(st.none(), HEADER_VALUES),
    max_size=3,
)
ERAS = st.sampled_from(["modern", "handshake", "lone"])


@dataclass(frozen=True)
class Sent:
    verb: str
    era: str
    message: Any
    meta: Any
    headers: dict[str, str | None]
    body: bytes | None = None
    """Instead of the message."""


REQUESTS = st.builds(
    Sent,
    verb=st.sampled_from(["POST"] * 16 + ["GET", "GET", "DELETE", "PUT"]),
    era=ERAS,
    message=MESSAGES,
    meta=_mostly(METAS),
    headers=st.integers(0, 5).flatmap(lambda n: HEADERS if n == 0 else st.just({})),
    body=st.integers(0, 19).flatmap(lambda n: st.binary(max_size=40) if n == 0 else st.none()),
)


def filled(value: Any, named: dict[str, str]) -> Any:
    """``value`` with real ids in the place of their names."""
    if isinstance(value, str):
        return named.get(value, value)
    if isinstance(value, list):
        return [filled(item, named) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {filled(n, named): filled(v, named) for n, v in members.items()}
    return value


def deliver(target: Target, sent: Sent) -> tuple[Reply, Any]:
    """Send it; the reply, and the message that was sent, if one was."""
    message: Any = filled(sent.message, target.named)
    if isinstance(message, dict):
        members = cast("Json", message)
        if "method" in members or "id" in members:
            members["jsonrpc"] = "2.0"
        params = members.get("params")
        meta = filled(sent.meta, target.named)
        if isinstance(params, dict) or ("params" not in members and meta):
            given = cast("Json", params) if isinstance(params, dict) else {}
            if sent.era == "modern" and isinstance(meta, dict):
                meta = envelope(cast("Json", meta))
            members["params"] = {**given, "_meta": meta}
    body = sent.body if sent.body is not None else json.dumps(message).encode()
    whole = cast("Any", message)
    stock = {
        "Host": HOST,
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
    }
    match sent.era:
        case "modern":
            stock["Mcp-Protocol-Version"] = MODERN
            if isinstance(message, dict):
                stock |= routing_headers(cast("Json", message))
        case "handshake":
            stock |= {"Mcp-Protocol-Version": NEWEST, "Mcp-Session-Id": target.named["<transport>"]}
        case _:
            stock["Mcp-Protocol-Version"] = NEWEST
    replaced = {name.lower() for name in sent.headers}
    lines = [(n, v) for n, v in stock.items() if n.lower() not in replaced]
    lines += [(n, str(filled(v, target.named))) for n, v in sent.headers.items() if v is not None]
    # What HTTP itself cannot carry is not the layer's to see.
    lines = [(n, v.encode("latin-1", "replace").decode("latin-1")) for n, v in lines]
    lines = [(n, "".join(c for c in v if c.isprintable() or c == " ")) for n, v in lines]
    return target.carrier.send(sent.verb, "/mcp", lines, body), whole


async def settled(reply: Reply) -> None:
    """The reply has ended, or is a stream that began; its client then leaves."""
    await reply.until(
        lambda: reply.ended or (reply.is_sse and reply.status is not None), "any answer"
    )
    if not reply.ended:
        await asyncio.sleep(0.2)
        await reply.gone()


def expect_answered(reply: Reply, message: Any) -> None:
    """A documented status, and a documented answer in it."""
    assert reply.error is None, reply
    assert reply.status in STATUSES, reply
    asked_id: Any = cast("Json", message).get("id") if isinstance(message, dict) else None
    for answer in reply.messages if reply.is_sse else _json_of(reply):
        assert answer.get("jsonrpc") == "2.0", reply
        if "method" in answer:
            continue
        assert ("result" in answer) != ("error" in answer), reply
        assert answer["id"] is None or reply.is_sse or answer["id"] == asked_id, reply
        if "error" in answer:
            assert answer["error"]["code"] in CODES, reply
            assert isinstance(answer["error"]["message"], str)


def _json_of(reply: Reply) -> list[Json]:
    if reply.header("content-type") != "application/json" or not reply.body:
        return []
    return [reply.json]


async def expect_well(target: Target) -> None:
    """Another client is served, and nothing is left running."""
    client = ModernClient(target.carrier)
    result = await client.call("echo", {"text": "after"}).result()
    assert result["structuredContent"] == {"text": "after"}
    runner: RequestRunner = inside(target.layer).runner
    # What is without a listener is given up after five seconds.
    await asyncio.sleep(10)
    assert runner.running == 0


def examples(share: float) -> settings:
    """So many times as many examples as the profile says."""
    return settings(max_examples=round(settings().max_examples * share))


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run one example in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work())


async def expect_all_answered(
    requests: list[Sent], check: Callable[[Reply, Any], None] = expect_answered, **how: bool
) -> None:
    """Sent one after the other, to a target that is made so."""
    async with target(**how) as server:
        for sent in requests:
            reply, message = deliver(server, sent)
            await settled(reply)
            check(reply, message)
        await expect_well(server)


@examples(1.5)
@given(st.lists(REQUESTS, min_size=3, max_size=8))
def test_whatever_is_sent_is_answered(requests: list[Sent]) -> None:
    """One after the other."""
    in_virtual_time(lambda: expect_all_answered(requests))


@examples(0.5)
@given(st.lists(REQUESTS, min_size=2, max_size=8))
def test_whatever_is_sent_at_once_is_answered(requests: list[Sent]) -> None:
    """All at the same time, on the same connections and sessions."""

    async def run() -> None:
        async with target() as server:
            delivered = [deliver(server, sent) for sent in requests]
            for reply, message in delivered:
                await settled(reply)
                expect_answered(reply, message)
            await expect_well(server)

    in_virtual_time(run)


@examples(0.5)
@given(st.lists(REQUESTS, min_size=1, max_size=4))
def test_whatever_is_sent_without_a_store_is_answered(requests: list[Sent]) -> None:
    """Stateless mode."""
    in_virtual_time(lambda: expect_all_answered(requests, check_stateless, stateless=True))


def check_stateless(reply: Reply, message: Any) -> None:
    """As above; nothing can be subscribed where nothing is remembered."""
    method: Any = cast("Json", message).get("method") if isinstance(message, dict) else None
    if method in ("resources/subscribe", "resources/unsubscribe"):
        assert reply.error is None and reply.status in STATUSES, reply
        return
    expect_answered(reply, message)


# --- tokens and ids --------------------------------------------------------------------------

SPOILS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 400), st.integers(1, 127)),
        st.tuples(st.just("cut"), st.integers(0, 400), st.integers(1, 50)),
        st.tuples(st.just("insert"), st.integers(0, 400), st.integers(0, 0xFFFF)),
        st.tuples(st.just("double"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=3,
)


def spoiled(text: str, spoils: list[tuple[str, int, int]]) -> str:
    for what, at, value in spoils:
        at = min(at, max(len(text) - 1, 0))
        match what:
            case "flip" if text:
                text = text[:at] + chr(ord(text[at]) ^ value) + text[at + 1 :]
            case "cut":
                text = text[:at] + text[at + value :]
            case "insert":
                text = text[:at] + chr(value) + text[at:]
            case _:
                text += text
    return text


@given(spoils=SPOILS, stateless=st.booleans())
def test_a_spoiled_token_is_refused(spoils: list[tuple[str, int, int]], stateless: bool) -> None:
    """STT8: never opened, never an internal error; in both modes, and as an id without a store."""

    async def run() -> None:
        async with target(stateless=stateless) as server:
            session, state = server.named["<session>"], server.named["<state>"]
            client = ModernClient(server.carrier)
            token = spoiled(state, spoils)
            received = await client.call("state", session=session, state=token).done()
            if token == state:
                assert received.status == 200
            else:
                error = await received.error()
                assert error["data"] == {"reason": "invalid_state"}
            other = spoiled(session, spoils)
            received = await client.call("state", session=other, state=state).done()
            if other != session:
                error = await received.error()
                assert (error["code"], error["data"]) == (-32043, {"sessionId": other})

    in_virtual_time(run)


@given(
    spoils=SPOILS,
    which=st.sampled_from(["<get event>", "<post event>", "<position>"]),
)
def test_a_spoiled_position_yields_nothing_of_others(
    spoils: list[tuple[str, int, int]], which: str
) -> None:
    """``Last-Event-ID`` and ``lastSessionEventId``: refused or from a place of its own."""

    async def run() -> None:
        async with target() as server:
            position = spoiled(server.named[which], spoils)
            client = ModernClient(server.carrier)
            params = {"sessionId": server.named["<session>"], "lastSessionEventId": position}
            resumed = await client.send("session/resume", params).result()
            assert resumed["catchup"] is False or resumed["replayed"] == 0
            header = position.encode("ascii", "replace").decode()
            header = "".join(c for c in header if c.isprintable())
            older = RawClient(server.carrier)
            older.session_id = server.named["<transport>"]
            reply = older.get(header)
            await settled(reply)
            expect_answered(reply, None)

    in_virtual_time(run)


# --- the corpus ------------------------------------------------------------------------------

CORPUS: list[bytes] = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"[{}]",
    b"0",
    b'"',
    b"nul",
    b"-",
    b"1e999",
    b"[" * 5_000,
    b'{"jsonrpc":"2.0","id":1,"method":"session/resume","params":{"sessionId":"\\ud800"}}',
    b'{"jsonrpc":"2.0","id":1,"method":"session/end","params":{"sessionId":"'
    + b"A" * 10_000
    + b'"}}',
    b'{"jsonrpc":"2.0","id":1,"method":"session/start","params":[]}',
    b'{"jsonrpc":"2.0","id":1,"method":"session/start","params":{"_meta":[]}}',
    b'{"jsonrpc":"2.0","id":1,"method":"sessions/create","params":null}',
    b'{"jsonrpc":"2.0","id":1e400,"method":"session/start"}',
    b'{"jsonrpc":"2.0","id":9007199254740993,"method":"session/start"}',
    b'{"jsonrpc":"2.0","id":123456789012345678901234567890,"method":"session/start"}',
    b'{"jsonrpc":"2.0","id":"\\u0000","method":"session/start"}',
    b'{"jsonrpc":"2.0","id":{"a":1},"method":"session/start"}',
    b'{"jsonrpc":"2.0","id":1,"method":"session/start"}{"jsonrpc":"2.0"}',
    b'{"jsonrpc":"2.0","id":1,"id":2,"method":"session/start","method":"ping"}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":{}}}',
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":[],"progress":{}}}',
    b'{"jsonrpc":"2.0","id":"x","error":{"code":1,"message":"m","data":[[[]]]}}',
    b'{"jsonrpc":"2.0","id":null,"error":{"code":"1","message":5}}',
    b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * 100_000 + b'"}',
    b'{"jsonrpc":"2.0","id":1,"method":"example/echo","params":{"echo":' + b"9" * 4_000 + b"}}",
    b'{"jsonrpc":"2.0","id":1,"method":"example/echo","params":{"echo":'
    + b'{"a":' * 200
    + b"1"
    + b"}" * 200
    + b"}}",
]


def _corpus() -> list[Sent]:
    return [
        Sent("POST", era, None, {}, dict(headers), body)
        for body in CORPUS
        for era in ("modern", "handshake", "lone")
        for headers in ({}, {"Content-Length": "5"}, {"Mcp-Session-Id": "\x7f"})
    ]


def test_the_corpus_is_answered() -> None:
    async def run() -> None:
        async with target() as server:
            for sent in _corpus():
                reply, _ = deliver(server, sent)
                await settled(reply)
                assert reply.error is None, (sent, reply)
                assert reply.status in STATUSES, (sent, reply)
                for answer in _json_of(reply):
                    assert "result" in answer or answer["error"]["code"] in CODES, (sent, reply)
            await expect_well(server)

    in_virtual_time(run)


async def test_the_corpus_is_answered_over_a_socket() -> None:
    """No dead connection: behind a real HTTP server each gets its response."""
    layer = SessionLayer(echo_server(), security=SessionSecurity(KEYS))
    with serve(layer.asgi_app()) as server:
        carrier = SocketCarrier(server.host, server.port)
        named = {"<transport>": "none"}
        for body in CORPUS:
            for era in ("modern", "handshake", "lone"):
                sent = Sent("POST", era, None, {}, {}, body)
                reply, _ = deliver(Target(layer, carrier, named), sent)
                await reply.done()
                assert reply.status in STATUSES, (sent, reply)
        await carrier.aclose()
