"""What a session may see: ``session.hide``, ``session.reveal`` and ``SessionLayer(hidden=…)``."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest
from fastmcp import FastMCP
from mcp.server import MCPServer

from mcp_sessions import Conversations, SessionLayer, current_session
from mcp_sessions.core.visibility import STATE_KEY
from mcp_sessions.errors import ConfigurationError, LimitReached, SessionNotFound
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.testing import connect
from tests.server.dispatch.test_conversation_sessions import SECURITY
from tests.support.modern import ModernClient
from tests.support.raw import Carrier, Json, RawClient
from tests.support.replicas import cluster
from tests.support.virtual_time import VIRTUAL
from tests.support.world import Ctx, Toolbox, World, world

Era = Literal["handshake", "modern"]
ERAS: tuple[Era, ...] = ("handshake", "modern")
KINDS = ("sdk", "fastmcp")
HIDDEN = {"pay", "secret*", "notes://all/private", "vault://{name}"}
ONE = {"openai/session": "one"}
CHANGED = [f"notifications/{kind}/list_changed" for kind in ("prompts", "resources", "tools")]


@pytest.fixture
def anyio_backend() -> str:
    """The SDK reads what a template makes in a thread, for which no time jumps."""
    return "asyncio"


def server_of(kind: str) -> Any:
    """With something of each kind, and a tool that hides and reveals."""
    mcp: Any = MCPServer("shop") if kind == "sdk" else FastMCP("shop")
    notes = {"open": "an open note", "private": "a private note"}

    @mcp.tool()
    async def sight(
        reveals: bool,
        tools: list[str] | None = None,
        prompts: list[str] | None = None,
        resources: list[str] | None = None,
    ) -> str:
        session = current_session()
        change = session.reveal if reveals else session.hide
        await change(tools=tools or (), prompts=prompts or (), resources=resources or ())
        return session.source

    @mcp.tool()
    async def pay() -> str:
        return "paid"

    @mcp.tool()
    async def browse() -> str:
        return "browsed"

    @mcp.prompt()
    async def greet() -> str:
        return "hello"

    @mcp.prompt()
    async def secret_greeting() -> str:
        return "the password"

    @mcp.resource("info://hours")
    async def hours() -> str:
        return "9 to 5"

    @mcp.resource("secret://key")
    async def key() -> str:
        return "the key"

    @mcp.resource("notes://all/{name}")
    async def note(name: str) -> str:
        return notes[name]

    @mcp.resource("vault://{name}")
    async def vault(name: str) -> str:
        return f"what {name} has"

    return mcp


async def answer(
    carrier: Carrier, era: Era, method: str, params: Json, meta: Json | None = None
) -> Json:
    if era == "modern":
        return await ModernClient(carrier).send(method, params, meta=meta).answer()
    client = RawClient(carrier)
    await client.initialize()
    return await client.send(method, {**params, **({"_meta": meta} if meta else {})}).answer()


async def called(carrier: Carrier, era: Era, tool: str, meta: Json | None, **arguments: Any) -> str:
    params = {"name": tool, "arguments": arguments}
    said = await answer(carrier, era, "tools/call", params, meta)
    return str(said["result"]["content"][0]["text"])


async def names(carrier: Carrier, era: Era, meta: Json | None = None) -> list[str]:
    """Everything that is listed, without what is the same everywhere."""
    lists = {
        "tools/list": ("tools", "name"),
        "prompts/list": ("prompts", "name"),
        "resources/list": ("resources", "uri"),
        "resources/templates/list": ("resourceTemplates", "uriTemplate"),
    }
    found: list[str] = []
    for method, (member, name) in lists.items():
        result = (await answer(carrier, era, method, {}, meta))["result"]
        found += [str(each[name]) for each in result[member]]
    return sorted({*found} - {"sight", "browse", "greet", "info://hours", "notes://all/{name}"})


ALL = ["pay", "secret://key", "secret_greeting", "vault://{name}"]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_hidden_is_in_no_list(kind: str, era: Era) -> None:
    async with world(server=server_of(kind)) as w:
        assert await names(w.carrier, era) == ALL
    async with world(server=server_of(kind), hidden=HIDDEN) as w:
        assert await names(w.carrier, era) == []
    async with world(server=server_of(kind), hidden={"secret*"}) as w:
        assert await names(w.carrier, era) == ["pay", "vault://{name}"]


ASKED: list[tuple[str, Json, str]] = [
    # Something hidden, and the word that makes it something that never was there.
    ("tools/call", {"name": "pay"}, "pay"),
    ("prompts/get", {"name": "secret_greeting"}, "secret"),
    ("resources/read", {"uri": "secret://key"}, "secret"),
    ("resources/read", {"uri": "notes://all/private"}, "private"),
    ("resources/read", {"uri": "vault://ann"}, "vault"),
    ("resources/subscribe", {"uri": "secret://key"}, "secret"),
    ("resources/unsubscribe", {"uri": "secret://key"}, "secret"),
    (
        "completion/complete",
        {"ref": {"type": "ref/prompt", "name": "secret_greeting"}, "argument": {}},
        "secret",
    ),
]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_hidden_answers_as_what_is_not_there_to_the_byte(
    kind: str, era: Era, caplog: pytest.LogCaptureFixture
) -> None:
    """In whichever words its server has for that, of an item of a template as of a whole one."""
    caplog.set_level(logging.CRITICAL)
    async with world(server=server_of(kind), hidden=HIDDEN) as w:
        for method, hidden, word in ASKED:
            unknown = json.loads(json.dumps(hidden).replace(word, "x" + word[1:]))
            said = [await answer(w.carrier, era, method, each) for each in (hidden, unknown)]
            texts = [json.dumps(each) for each in said]
            assert texts[0].replace(word, "x" + word[1:]) == texts[1]
            assert "error" in said[0] or said[0]["result"].get("isError") or "scribe" in method


async def test_the_servers_own_words_quote_the_name_that_was_asked_for() -> None:
    """A name with a quote in it is quoted otherwise; it is all the same here."""
    async with world(hidden={"it*"}) as w:
        w.box.tools["its"] = w.box.tools["echo"]
        for name in ("it's", "its", 'it"s'):
            said = await answer(w.carrier, "handshake", "tools/call", {"name": name})
            other = await answer(w.carrier, "handshake", "tools/call", {"name": "q" + name})
            assert json.dumps(other).replace("qit", "it") == json.dumps(said)
        assert not any(call.startswith("it") for call in w.box.calls)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_sees_what_was_revealed_to_it_and_no_other_does(
    kind: str, era: Era
) -> None:
    """On every connection of a conversation, in lists and by name; what was said last counts."""
    async with world(server=server_of(kind), hidden=HIDDEN, conversations=Conversations()) as w:
        shown = {"tools": ["p*"], "prompts": ["secret_greeting"], "resources": ["vault://{x}"]}
        await called(w.carrier, era, "sight", ONE, reveals=True, **shown)
        assert await names(w.carrier, era, ONE) == ["pay", "secret_greeting", "vault://{name}"]
        assert await called(w.carrier, era, "pay", ONE) == "paid"
        read = await answer(w.carrier, era, "resources/read", {"uri": "vault://ann"}, ONE)
        assert read["result"]["contents"][0]["text"] == "what ann has"
        assert await names(w.carrier, era, {"openai/session": "two"}) == []
        assert await names(w.carrier, era) == []
        assert "paid" not in await called(w.carrier, era, "pay", None)

        await called(w.carrier, era, "sight", ONE, reveals=False, tools=["*"])
        assert await names(w.carrier, era, ONE) == ["secret_greeting", "vault://{name}"]
        assert "browsed" not in await called(w.carrier, era, "browse", ONE)
        assert await called(w.carrier, era, "browse", None) == "browsed"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stock_client_sees_it_too(kind: str, mode: Any) -> None:
    layer = SessionLayer(server_of(kind), hidden=HIDDEN)
    async with connect(layer, session=False, mode=mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["sight", "browse"]
        assert (await client.list_prompts()).prompts[0].name == "greet"


async def test_a_session_alone_learns_that_its_lists_changed_and_once() -> None:
    """As an event of its own, which is replayed to who missed it."""
    async with world(server=server_of("sdk"), hidden=HIDDEN) as w:
        client, other = await w.connected(), await w.connected()
        started, others = await client.start(), await other.start()
        for reveals in (True, True, False):
            await client.text("sight", reveals=reveals, tools=["pay"], prompts=["secret*"])
        events = await _events(w, started["sessionId"])
        # Two of one kind are one: the message says that the list changed.
        assert events == [CHANGED[0], CHANGED[2]]
        assert await _events(w, others["sessionId"]) == []


async def _events(w: World, session_id: str) -> list[str]:
    head = await w.layer.store.head(session_id)  # pyright: ignore[reportArgumentType]
    assert head is not None
    events, refusal = await w.layer.store.read(
        session_id,  # pyright: ignore[reportArgumentType]
        f"{head.log_epoch}-{0:012d}",
        now=w.clock.now,
    )
    assert refusal is None
    return [json.loads(event.payload)["method"] for event in events]


# --- in whatever way it is subscribed to ---------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
async def test_nothing_is_sent_of_a_hidden_resource(named: bool) -> None:
    """By who listens for it it is acknowledged like one that is not there, and so is never
    received; who listened before it was hidden receives no more of it.
    """
    async with world(server=server_of("sdk"), hidden=HIDDEN) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"] if named else None
        asked = ["secret://key", "nothing://there", "info://hours"]
        received = await client.listening(session, *asked)
        [ack] = await received.has(1)
        assert ack["params"]["notifications"]["resourceSubscriptions"] == asked
        await w.layer.notify_resource_updated("secret://key")
        await w.layer.notify_resource_updated("info://hours")
        assert [each["params"]["uri"] for each in await received.has_events(1)] == ["info://hours"]
        if named:
            await client.text(
                "sight", {"reveals": False, "resources": ["info://*"]}, session=session
            )
            await w.layer.notify_resource_updated("info://hours")
            await client.text("browse", session=session)
            assert (await _events(w, str(session)))[1:] == [CHANGED[1]]


# --- where it is kept ----------------------------------------------------------------------------


def tools(w: World) -> World:
    """Adds ``sight`` to a world's tools, and ``pay``."""

    async def sight(ctx: Ctx, arguments: Json) -> str:
        session = current_session()
        change = session.reveal if arguments.pop("reveals") else session.hide
        session.state["before"] = 1
        await change(**arguments)
        session.state["after"] = 2
        return json.dumps(dict(session.state))

    async def pay(ctx: Ctx, arguments: Json) -> str:
        return f"paid {sorted(arguments)}"

    w.box.tools.update(sight=sight, pay=pay)
    return w


async def listed(carrier: Carrier, era: Era, meta: Json | None = None) -> bool:
    result = (await answer(carrier, era, "tools/list", {}, meta))["result"]
    return "pay" in [tool["name"] for tool in result["tools"]]


async def test_every_replica_knows_it_and_so_does_a_restart(tmp_path: Path) -> None:
    on = Conversations()
    async with cluster(3, security=SECURITY, conversations=on, hidden={"pay"}) as c:
        for w in c.worlds:
            tools(w)
        assert not await listed(c[0].carrier, "modern", ONE)
        await called(c[0].carrier, "modern", "sight", ONE, reveals=True, tools=["pay"])
        assert all([await listed(w.carrier, era, ONE) for w in c.worlds for era in ERAS])

    path = str(tmp_path / "sessions.db")
    async with world(store=SQLiteStore(path), conversations=on, hidden={"pay"}) as w:
        await called(tools(w).carrier, "modern", "sight", ONE, reveals=True, tools=["pay"])
    async with world(store=SQLiteStore(path), conversations=on, hidden={"pay"}) as w:
        assert await listed(tools(w).carrier, "modern", ONE)
        assert not await listed(w.carrier, "modern")


@pytest.mark.parametrize("anyio_backend", [VIRTUAL], ids=["virtual"])
@pytest.mark.parametrize("fails", ["before", "after"])
async def test_who_was_not_notified_is_notified_when_it_is_asked_again(fails: str) -> None:
    """The store failed before the rules were stored: whoever calls again does what was not done,
    and after that nothing is done twice. Or before the event was: it is stored later.
    """
    async with cluster(1, security=SECURITY) as c:
        w = tools(c[0])
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        store = w.layer.store
        failing = "change_state" if fails == "before" else "append"
        notified = getattr(store, failing)

        async def fail(*args: Any, **options: Any) -> Any:
            c.backplane.is_away = True
            try:
                return await notified(*args, **options)
            finally:
                c.backplane.is_away = False

        arguments: Json = {"reveals": False, "tools": ["pay"]}
        setattr(store, failing, fail)
        sent = client.call("sight", arguments, session=session)
        assert ("error" in await sent.answer()) is (fails == "before")
        assert await _events(w, session) == []
        setattr(store, failing, notified)
        await asyncio.sleep(30)
        for _ in range(2):
            await client.text("sight", dict(arguments), session=session)
            assert await _events(w, session) == [CHANGED[2]]


async def test_a_sessions_state_shows_nothing_of_it_and_its_token_neither(w: World) -> None:
    tools(w)
    client = await w.connected()
    before = await client.start()
    after = await client.result(
        "tools/call", {"name": "sight", "arguments": {"reveals": False, "tools": ["pay"] * 99}}
    )
    assert json.loads(after["content"][0]["text"]) == {"before": 1, "after": 2}
    [record] = [
        each
        for each in await w.layer.store.all_sessions()
        if each.session_id == before["sessionId"]
    ]
    assert set(record.state.values) == {"before", "after", STATE_KEY}

    async def meddle(ctx: Ctx, arguments: Json) -> str:
        session = current_session()
        assert STATE_KEY not in session.state
        with pytest.raises(ValueError, match="the layer itself"):
            session.state[STATE_KEY] = {}
        session.state.clear()
        return "cleared"

    w.box.tools["meddle"] = meddle
    assert await client.text("meddle") == "cleared"
    assert "pay" not in [tool["name"] for tool in (await client.result("tools/list"))["tools"]]


async def test_requests_that_change_it_at_once_change_it_both() -> None:
    async with cluster(2, security=SECURITY, conversations=Conversations()) as c:
        for w in c.worlds:
            tools(w)
        hidden = ("pay", "echo", "log", "tell", "keep", "wait")
        calls = [
            called(c[n % 2].carrier, "modern", "sight", ONE, reveals=False, tools=[name])
            for n, name in enumerate(hidden)
        ]
        await asyncio.gather(*calls)
        result = (await answer(c[0].carrier, "modern", "tools/list", {}, ONE))["result"]
        assert {tool["name"] for tool in result["tools"]}.isdisjoint(hidden)


# --- bad input -----------------------------------------------------------------------------------


async def test_what_cannot_be_kept_is_an_error_of_the_handler() -> None:
    """Nothing is hidden then. Without a store a client could go back to where it saw more."""
    raised: list[BaseException] = []

    def meddling(w: World) -> World:
        async def meddle(ctx: Ctx, arguments: Json) -> str:
            for wrong in ("pay", [3], [""]):
                with pytest.raises(TypeError, match="names and patterns"):
                    await current_session().hide(tools=wrong)  # pyright: ignore[reportArgumentType]
            try:
                await current_session().hide(tools=[f"{n} {'x' * 90}" for n in range(99)])
            except (LimitReached, ConfigurationError, SessionNotFound) as refused:
                raised.append(refused)
            return "meddled"

        w.box.tools["meddle"] = meddle
        return w

    async with world(max_state_bytes=1_000) as w:
        client = await meddling(w).connected()
        await client.start()
        assert await client.text("meddle") == "meddled"
        assert len((await client.result("tools/list"))["tools"]) == len(w.box.tools)
    async with world(store=None) as w:
        layer = SessionLayer(meddling(w).box.server, store=None)
        async with connect(layer, mode="auto") as client:
            await client.call_tool("meddle", {})
    assert [type(each) for each in raised] == [LimitReached, ConfigurationError]


@pytest.mark.parametrize("wrong", ["pay", [3], [""], [None]])
def test_patterns_are_patterns(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="hidden"):
        SessionLayer(Toolbox().server, hidden=wrong)


# --- next to other rules --------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
async def test_a_hidden_tool_that_needs_a_session_does_not_say_so(era: Era) -> None:
    """Who sees it is asked for a session all the same: to see it opens no gate."""
    async with world(hidden={"pay"}) as w:
        tools(w)
        w.layer.require_session(tools={"pay", "pax"})
        said = await answer(w.carrier, era, "tools/call", {"name": "pay"})
        other = await answer(w.carrier, era, "tools/call", {"name": "pay2"})
        assert json.dumps(said) == json.dumps(other).replace("pay2", "pay")
        gated = await answer(w.carrier, era, "tools/call", {"name": "pax"})
        assert gated["error"]["code"] == -31044
        client = await w.connected()
        await client.text("sight", reveals=True, tools=["pay"])
        assert (await client.call("pay").answer())["error"]["code"] == -31044
        assert "pay" not in w.box.calls
        await client.start()
        await client.text("sight", reveals=True, tools=["pay"])
        assert await client.text("pay") == "paid []"


@pytest.mark.parametrize("era", ERAS)
async def test_a_hidden_tool_takes_a_handle_of_who_may_see_it_alone(era: Era) -> None:
    """Else it starts nothing, and knows no wrong handles either."""
    on = Conversations(handle={"pay", "sight"})
    async with world(hidden={"pay"}, conversations=on) as w:
        tools(w)
        for arguments in ({}, {"session": "guessed"}):
            said = await answer(
                w.carrier, era, "tools/call", {"name": "pay", "arguments": arguments}
            )
            params = {"name": "pay2", "arguments": arguments}
            other = await answer(w.carrier, era, "tools/call", params)
            assert json.dumps(said) == json.dumps(other).replace("pay2", "pay")
        assert "conversation" not in [each.mode for each in await w.layer.sessions.list()]
        params = {"name": "sight", "arguments": {"reveals": True, "tools": ["pay"]}}
        first = await answer(w.carrier, era, "tools/call", params)
        handle = first["result"]["structuredContent"]["session"]
        assert await called(w.carrier, era, "pay", None, session=handle) == "paid []"
