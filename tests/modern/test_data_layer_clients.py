"""An existing client of the data-layer draft, over handshake-era HTTP, as it was seen to behave.

what real clients were seen to do is honoured, all of it (ASC1, HTP3).
"""

from collections.abc import AsyncGenerator
from typing import Any

import mcp_types as types
import pytest

from tests.modern.test_sessions import UNKNOWN_ID, not_found
from tests.support.modern import EVENT_ID
from tests.support.raw import SESSION, Json, RawClient, call_params, in_session
from tests.support.world import Ctx, Toolbox, World, started_session, world


class DraftClient:
    """What that client does, no more and no less."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.session: dict[str, str] | None = None
        """What it keeps: the members of ``result.session``, as strings."""
        self.supports_sessions = False

    async def connect(self) -> None:
        """Shake hands, and create a session if the server can."""
        result = await self.client.initialize()
        sessions = result["capabilities"].get("sessions")
        self.supports_sessions = isinstance(sessions, dict)

    async def create(self) -> Json:
        """``sessions/create`` with **no** ``params``."""
        message = {"jsonrpc": "2.0", "id": 1, "method": "sessions/create"}
        reply = self.client.post(message)
        result: Json = (await reply.answer(1))["result"]
        assert reply.status == 200
        given = result["session"]
        self.session = {
            name: given[name]
            for name in ("sessionId", "state", "expiresAt")
            if isinstance(given.get(name), str)
        }
        return result

    async def call(self, tool: str, **arguments: Any) -> Json:
        """``tools/call`` with ``sessionId`` and ``state``, and what comes back merged in."""
        meta: Json = {}
        if self.session is not None:
            named = {n: v for n, v in self.session.items() if n != "expiresAt"}
            meta = {SESSION: named}
        result = await self.client.result("tools/call", call_params(tool, arguments, meta or None))
        returned_meta: Json = result.get("_meta") or {}
        if self.session is not None and SESSION in returned_meta:
            returned: Json | None = returned_meta[SESSION]
            if returned is None:
                self.session = None
            else:
                assert returned["sessionId"] == self.session["sessionId"]
                self.session |= {n: v for n, v in returned.items() if isinstance(v, str)}
        return result

    async def misplaced(self, method: str, params: Json) -> Json:
        """Its bug: on ``resources/read`` and ``prompts/get`` it is ``params.meta``."""
        return await self.client.result(method, {**params, "meta": {SESSION: self.session}})


@pytest.fixture
async def w() -> AsyncGenerator[World]:
    """A world whose toolbox counts in ``session.state``."""
    box = Toolbox()

    async def count(ctx: Ctx, arguments: Json) -> str:
        session = started_session()
        if session is None:
            return "no session"
        session.state["count"] = session.state.get("count", 0) + 1
        return str(session.state["count"])

    box.tools["count"] = count
    async with world(box=box) as running:
        yield running


@pytest.fixture
async def client(w: World) -> DraftClient:
    client = DraftClient(w.client(capabilities={"experimental": {"experimental/sessions": {}}}))
    await client.connect()
    return client


@pytest.fixture
async def session(client: DraftClient) -> str:
    """The id of the session that ``client`` created."""
    await client.create()
    assert client.session is not None
    return client.session["sessionId"]


def text(result: Json) -> str:
    return str(result["content"][0]["text"])


async def test_it_finds_the_capability_and_creates_without_params(
    w: World, client: DraftClient
) -> None:
    """It looks for an object at ``result.capabilities.sessions``; right after
    ``notifications/initialized`` it creates, with id 1 and no ``params``.
    """
    assert client.supports_sessions
    result = await client.create()

    assert set(result["session"]) == {"sessionId", "state", "expiresAt"}
    assert all(isinstance(value, str) for value in result["session"].values())
    assert set(result["_meta"]) == {EVENT_ID}
    assert len(await w.layer.sessions.list()) == 2


@pytest.mark.parametrize("params", [{}, None, {"_meta": {}}, {"_meta": {SESSION: None}}], ids=repr)
async def test_create_takes_every_spelling_of_no_params(
    params: Json | None, client: DraftClient
) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "sessions/create", "params": params}
    reply = client.client.post(message)
    assert (await reply.answer(1))["result"]["session"]["sessionId"]


async def test_its_calls_name_the_session_in_addition_to_another_header(
    client: DraftClient,
) -> None:
    """Rule: "Over HTTP its ``Mcp-Session-Id`` is the id from ``initialize``, next to another
    ``_meta`` sessionId": no conflict in this era.
    """
    await client.create()
    assert client.session is not None
    assert client.client.session_id not in (None, client.session["sessionId"])
    states = {client.session["state"]}
    for number in (1, 2, 3):
        assert text(await client.call("count")) == str(number)
        states.add(client.session["state"])
    assert len(states) == 4


async def test_create_makes_nothing_current(client: DraftClient) -> None:
    """Rule: "``sessions/create`` makes nothing current": its lists and its calls without a
    session are served without one.
    """
    await client.create()
    assert "_meta" not in await client.client.result("tools/list")
    assert "_meta" not in await client.client.result("resources/list")
    assert await client.client.text("session_id") == "none"


@pytest.mark.parametrize("method", ["resources/read", "prompts/get", "tools/call"])
async def test_metadata_in_the_wrong_position_is_ignored(
    method: str, w: World, client: DraftClient
) -> None:
    """Rule: "under ``params.meta`` (its bug): ignore that, serve without a session"; not even a
    session that is not there is refused.
    """

    async def read(ctx: Ctx, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        assert started_session() is None
        return types.ReadResourceResult(contents=[])

    async def get(ctx: Ctx, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        assert started_session() is None
        return types.GetPromptResult(messages=[])

    server = w.box.server
    server.add_request_handler("resources/read", types.ReadResourceRequestParams, read)
    server.add_request_handler("prompts/get", types.GetPromptRequestParams, get)
    await client.create()
    params: dict[str, Json] = {
        "resources/read": {"uri": "note://a"},
        "prompts/get": {"name": "greet"},
        "tools/call": {"name": "session_id", "arguments": {}},
    }
    for session in (client.session, {"sessionId": UNKNOWN_ID}):
        client.session = session
        result = await client.misplaced(method, params[method])
        assert method != "tools/call" or text(result) == "none"
        assert SESSION not in (result.get("_meta") or {})


async def test_a_missing_state_is_no_error(w: World, client: DraftClient) -> None:
    """Rule: "it uses a stored session on a new connection with no create, perhaps without
    ``state``"; what is stored is there.
    """
    await client.create()
    await client.call("count")
    assert client.session is not None
    for kept in (["sessionId"], ["sessionId", "state"]):
        again = DraftClient(w.client())
        await again.connect()
        again.session = {name: client.session[name] for name in kept}
        result = await again.call("count")
        assert int(text(result)) > 1
        assert set(again.session) == {"sessionId", "state", "expiresAt"}


async def test_null_means_no_session(client: DraftClient) -> None:
    """Rule: "``null`` drops the session": in a request it is served without one."""
    await client.create()
    result = await client.client.result("tools/call", call_params("count", {}, {SESSION: None}))
    assert text(result) == "no session"
    assert "_meta" not in result


async def test_a_session_that_is_gone_is_reported_with_status_200(
    w: World, client: DraftClient, session: str
) -> None:
    """Quirk 2: "on 404 the 1.x Python client throws the body away and reports "Session
    terminated"; on some other 4xx its whole transport dies".
    """
    await client.client.result("sessions/delete", {"_meta": in_session(session)})
    for method, params in (
        ("tools/call", call_params("count", {}, in_session(session))),
        ("sessions/delete", {"_meta": in_session(session)}),
        ("session/end", {"sessionId": session}),
        ("session/resume", {"sessionId": session}),
    ):
        sent = client.client.send(method, params)
        assert await sent.error() == not_found(session)
        assert sent.reply.status == 200
    assert text(await client.client.result("tools/call", call_params("count"))) == "no session"
    assert w.box.calls == ["count"]


async def test_the_header_may_mirror_the_session(
    w: World, client: DraftClient, session: str
) -> None:
    """Rule: "equal to the ``_meta`` sessionId it is a mirror (the data-layer document wants it …),
    accepted, no transport session meant".
    """
    lone = w.client()
    lone.session_id = session
    sent = lone.call("session_id", meta=in_session(session))
    assert text(await sent.result()) == session
    assert sent.reply.header("mcp-session-id") is None
    deleted = await lone.result("sessions/delete", {"_meta": in_session(session)})
    assert deleted == {}


async def test_it_may_use_several_sessions_at_once(client: DraftClient) -> None:
    """The elevation document: "Connection multiplexing"."""
    ids: list[str] = []
    for _ in range(3):
        await client.create()
        assert client.session is not None
        ids.append(client.session["sessionId"])
        await client.call("count")
    counts: list[str] = []
    for session in ids * 2:
        client.session = {"sessionId": session}
        counts.append(text(await client.call("count")))
    assert counts == ["2"] * 3 + ["3"] * 3
