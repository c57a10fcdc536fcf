"""For any server, a client ends up in one of its documented ways, in bounded memory."""

import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import httpx2
import pytest
from anyio.abc import TaskStatus
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions import method_names
from mcp_sessions.client import messages
from mcp_sessions.client.application import Callbacks, Listens
from mcp_sessions.client.dialer import Event, Link, LinkSettings, Received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.resuming import ResumingClient
from mcp_sessions.client.sessions import head_of, session_of_create, session_of_start
from mcp_sessions.client.state import Runtime
from mcp_sessions.core.messages import EXTENSION, SESSION_META, Json, Malformed, parse
from mcp_sessions.core.resume import (
    MAX_SECONDS,
    Attempts,
    SessionView,
    abilities,
    event_id_of,
    is_sendable,
    is_session_id,
    seconds_of,
)
from mcp_sessions.http_client.body import PIECE, ResponseTooLarge, pieces, whole
from mcp_sessions.http_client.sse_reader import MAX_RETRY, EventTooLarge, SseReader
from mcp_sessions_transports.http.client.requester import failure_of

NAMES = (
    "sessionId sessionEventId state expiresAt _meta session catchup resumed replayed reason "
    "retryAfter instance requestKeys lifetime features extensions capabilities sessions "
    "protocolVersion notifications resourceSubscriptions toolsListChanged uri requestId "
    "progressToken code message data started isError content text type "
    "io.modelcontextprotocol/subscriptionId"
).split()

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**420)
    | st.floats()
    | st.text(st.characters(codec=None, categories=None), max_size=20)
    | st.sampled_from(["taken_over", "draining", "evicted", "s-1", "x" * 5_000, "ü", "\ud800"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*NAMES, EXTENSION, SESSION_META]) | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from([*NAMES, EXTENSION, SESSION_META]), values, max_size=6)


# --- small parsers -----------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\n", b"data:", b"retry:", b"id:\xff"])))
def test_an_event_stream_gives_events_or_is_too_large(chunks: list[bytes]) -> None:
    reader = SseReader(max_bytes=200)
    try:
        for chunk in chunks:
            for event in reader.feed(chunk):
                assert len(event.data) <= 200
                assert event.retry is None or 0 <= event.retry <= MAX_RETRY
    except EventTooLarge:
        pass  # That is the other documented way.


@pytest.mark.parametrize("digits", [1, 7, 8, 400, 5_000])
def test_a_retry_of_any_length_is_bounded(digits: int) -> None:
    [event] = SseReader(max_bytes=10_000).feed(b"retry:" + b"9" * digits + b"\n\n")
    assert event.retry == min(int("9" * min(digits, 8)), MAX_RETRY)


def test_zeros_before_a_retry_are_nothing() -> None:
    [event] = SseReader(max_bytes=10_000).feed(b"retry:" + b"0" * 5_000 + b"25\n\n")
    assert event.retry == 25


@given(scalars)
def test_a_number_of_seconds_is_bounded(value: object) -> None:
    assert 0 <= seconds_of(value) <= MAX_SECONDS
    assert 0 <= seconds_of(value, most=3) <= 3


@given(objects)
def test_what_a_server_says_of_itself_is_read_or_is_not_there(said: Json) -> None:
    found = abilities(said)
    assert 0 <= found.key_lifetime <= MAX_SECONDS
    made = session_of_start(said), session_of_create(said, may_resume=True)
    for session in (view for view in made if view is not None):
        assert is_session_id(session.session_id)
        headers = messages.session_headers(session.session_id)
        assert all(is_sendable(value) for value in headers.values())
    SessionView("s-1").merge(said)
    event_id_of(said, "s-1")
    head_of(said)
    messages.says_not_begun(said)
    messages.says_state_refused(said)
    Attempts("me").is_own(said.get("instance"), now=0)


@given(objects, objects)
def test_a_listen_stream_takes_any_acknowledgement_and_any_event(said: Json, event: Json) -> None:
    """Each message goes to the one request that listens, or to nobody."""
    listens = Listens()
    asked = {"notifications": {"toolsListChanged": True, "resourceSubscriptions": ["a"]}}
    message = {"jsonrpc": "2.0", "id": 1, "method": method_names.LISTEN, "params": asked}
    listens.add(PendingRequest(1, message, {}, 0.0))
    listens.next_request()
    listens.acknowledged(said)
    for method in (
        method_names.RESOURCE_UPDATED,
        "notifications/tools/list_changed",
        "notifications/x",
    ):
        notified = listens.parts({"jsonrpc": "2.0", "method": method, "params": event})
        assert len(notified) <= 1
    assert len(listens.everything()) == 2


# --- bodies ------------------------------------------------------------------------------------


def response(body: bytes, status: int = 200, **headers: str) -> httpx2.Response:
    async def stream() -> AsyncGenerator[bytes]:
        yield body

    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, headers=given, content=stream())


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 4_000))
async def test_a_compressed_body_is_whole_or_too_large(parts: list[bytes], limit: int) -> None:
    members = b"".join(gzip.compress(part) for part in parts)
    try:
        found = await whole(pieces(response(members, content_encoding="gzip")), limit=limit)
    except ResponseTooLarge:
        assert sum(map(len, parts)) > limit
    else:
        assert found == b"".join(parts)


@given(st.binary(max_size=200), st.sampled_from(["gzip", "br", "deflate, gzip", "x-gzip", ""]))
async def test_a_body_that_is_compressed_in_any_way_is_read_or_refused(
    body: bytes, encoding: str
) -> None:
    """Passes if nothing is raised but what is documented."""
    try:
        await whole(pieces(response(body, content_encoding=encoding)), limit=10_000)
    except (httpx2.DecodingError, ResponseTooLarge):
        pass


async def test_a_bomb_is_read_in_small_pieces_and_left_at_the_limit() -> None:
    """300 KiB on the wire, 300 MiB in memory: what a decoder makes in one step is bounded."""
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1_048_576)) for _ in range(300)) + packer.flush()
    assert len(bomb) < 400_000
    largest = 0
    seen = 0
    async for piece in pieces(response(bomb, content_encoding="gzip")):
        largest, seen = max(largest, len(piece)), seen + len(piece)
        if seen > 4_194_304:
            break
    assert largest <= PIECE
    with pytest.raises(ResponseTooLarge):
        await whole(pieces(response(bomb, content_encoding="gzip")), limit=4_194_304)


@given(
    st.integers(400, 599),
    st.binary(max_size=50) | values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["5", "9" * 400, "-1", "1.5", "Wed, 21 Oct 2026 07:28:00 GMT", ""]),
    st.booleans(),
)
async def test_whatever_a_status_comes_with_is_a_failure(
    status: int, body: bytes, retry_after: str, is_gone: bool
) -> None:
    given = response(body, status, content_type="application/json", retry_after=retry_after)
    given.request = httpx2.Request("POST", "http://host/", headers={"mcp-session-id": "s"})
    failure = await failure_of(given, 1, name="http://host/", is_gone=is_gone)
    assert failure.status == status
    assert failure.retry_after is None or 0 <= failure.retry_after <= MAX_SECONDS
    assert failure.error is not None
    assert isinstance(failure.error["code"], int)


# --- the whole client --------------------------------------------------------------------------

Sink = Callable[[Link, Event], Awaitable[None]]
POLICY = ReconnectPolicy(
    backoff_base=0.001, backoff_cap=0.001, connect_timeout=1, give_up_after=0.05, jar_interval=60
)


class Puppet:
    """A link, and its dialer, whose server answers each method with what the test says."""

    kind = "websocket"
    name = target = "puppet"

    def __init__(self, answers: Mapping[str, Json]) -> None:
        self._answers = answers
        self._closing = anyio.Event()
        self._sink: Sink | None = None

    def link(self) -> Link:
        self.newest = Puppet(self._answers)
        return self.newest

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        self._sink = sink
        task_status.started()
        await self._closing.wait()

    async def say(self, message: Json) -> None:
        """Hand over what came, if a binding would."""
        try:
            parse(message)
        except Malformed:
            return
        assert self._sink is not None
        await self._sink(self, Received(message))

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        assert all(value.isascii() for value in headers.values())
        if "method" not in message or "id" not in message:
            return
        members = self._answers.get(message["method"], {"result": {}})
        await self.say({"jsonrpc": "2.0", "id": message["id"], **members})

    def configure(self, settings: LinkSettings) -> None: ...

    def listen(self) -> None: ...

    def abandon(self, request_id: object) -> None: ...

    async def close(self, *, leave: bool) -> None:
        self._closing.set()


AGREED: Json = {"protocolVersion": "2025-11-25", "capabilities": {"sessions": {}, "tools": {}}}


@asynccontextmanager
async def running(answers: Mapping[str, Json]) -> AsyncGenerator[tuple[ResumingClient, Any]]:
    """A client after its ``initialize``, and its server."""
    notified: list[Json] = []

    async def deliver(message: Json) -> None:
        notified.append(message)

    async def hang_up() -> None:
        return None

    puppet = Puppet({"initialize": {"result": AGREED}, **answers})
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            client = ResumingClient([puppet], Runtime(POLICY, tasks), Callbacks(deliver, hang_up))
            await client.start()
            params: Json = {"protocolVersion": "2025-11-25", "capabilities": {}}
            asked = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
            await client.take(asked, {})
            await client.take(messages.notification(method_names.INITIALIZED), {})
            yield client, (puppet, notified)
            await client.close()
            tasks.cancel_scope.cancel()


async def expect_answer(client: ResumingClient, notified: list[Json], request_id: str) -> None:
    """A call is answered, in whichever way."""
    call = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": {"name": "x"}}
    await client.take(call, {})
    with anyio.fail_after(5):
        while not any(message.get("id") == request_id for message in notified):
            await anyio.lowlevel.checkpoint()


errors = st.fixed_dictionaries(
    {"error": st.fixed_dictionaries({"code": st.integers(), "message": st.text(), "data": values})}
)
answers = st.dictionaries(
    st.sampled_from(["session/start", "sessions/create", "session/resume", "tools/call"]),
    st.fixed_dictionaries({"result": objects}) | errors,
    max_size=4,
)
STARTED = {"result": {"sessionId": "s-1", "sessionEventId": "0"}}


@settings(max_examples=round(0.6 * settings().max_examples))
@given(answers, objects)
async def test_a_call_is_answered_whatever_its_server_answers(
    given: dict[str, Json], capabilities: Json
) -> None:
    said: Json = {**AGREED, "capabilities": {**capabilities, "sessions": {}}}
    async with running({"initialize": {"result": said}, **given}) as (client, (_, notified)):
        await expect_answer(client, notified, "one")
        await expect_answer(client, notified, "two")


sent_by_server = st.fixed_dictionaries(
    {
        "jsonrpc": st.just("2.0"),
        "method": st.sampled_from(
            [
                method_names.DETACHED,
                method_names.CANCELLED,
                method_names.ACKNOWLEDGED,
                method_names.RESOURCE_UPDATED,
            ]
            + ["notifications/progress", "notifications/x", "roots/list"]
        ),
        "params": objects,
    },
    optional={"id": scalars},
)


@settings(max_examples=round(0.6 * settings().max_examples))
@given(st.lists(sent_by_server, max_size=6))
async def test_a_call_is_answered_whatever_its_server_says_before(said: list[Json]) -> None:
    async with running({"session/start": STARTED}) as (client, (puppet, notified)):
        await expect_answer(client, notified, "one")
        for message in said:
            if message["method"] == method_names.DETACHED:
                cast("Json", message["params"])["sessionId"] = "s-1"
            await puppet.newest.say(message)
        await expect_answer(client, notified, "two")
