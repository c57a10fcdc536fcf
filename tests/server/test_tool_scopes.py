"""Scopes that a server and its tools need: one rule for each way in."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import pytest

from mcp_sessions import Conversations, SessionLayer
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.server.upstream.external.children import can_follow
from tests.support.children import child
from tests.support.duplex import listening, pipe, websocket
from tests.support.identities import Verifier, auth_settings
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import Json, RawClient, SocketCarrier, initialize_params

Way = Literal["2025", "2026", "websocket", "websocket 2026"]
Result = Callable[[str, Json], Awaitable[Json]]
"""Sends a request, and returns the result; or what the error says."""

WAYS: tuple[Way, ...] = ("2025", "2026", "websocket", "websocket 2026")
PER = ("session", "principal", "shared")
NEEDED = {"ech?": ["x"], "ec*": ["write"], "count": ["write", "count"]}


@pytest.fixture
def anyio_backend() -> str:
    """Real time, since processes run."""
    return "asyncio"


@asynccontextmanager
async def served(
    conversations: Conversations | None = None, **options: Any
) -> AsyncGenerator[tuple[int, SessionLayer]]:
    known = Verifier()
    known.add("strong", "alice", "use", "write", "count")
    known.add("weak", "alice", "use")
    known.add("bob", "bob", "use")
    known.add("none", "carol", "other")
    layer = SessionLayer(
        child(tool_scopes=NEEDED, **options),
        auth=auth_settings(),
        token_verifier=known,
        conversations=conversations,
    )
    app = layer.asgi_app(host="0.0.0.0")
    async with layer.lifespan(), listening(app) as port:
        yield port, layer


async def opened(stack: AsyncExitStack, port: int, token: str, way: Way) -> Result:
    """Connect, and start a session."""
    client: Any
    if way.startswith("websocket"):
        headers = {"Authorization": f"Bearer {token}"}
        url, modern = f"ws://127.0.0.1:{port}/mcp", way.endswith("2026")
        client = await stack.enter_async_context(websocket(url, headers=headers, modern=modern))
    else:
        plain = SocketCarrier("127.0.0.1", port)
        stack.push_async_callback(plain.aclose)
        carrier = BearerCarrier(plain, token)
        client = RawClient(carrier) if way == "2025" else ModernClient(carrier)
    if not way.endswith("2026"):
        await client.initialize()
        await client.start()

    async def result(method: str, params: Json) -> Json:
        if way.startswith("websocket"):
            answer = await client.answer(await client.send(method, params))
        else:
            answer = await client.send(method, params).answer()
        return answer.get("result") or answer["error"]

    return result


async def tools(result: Result) -> list[str]:
    return [each["name"] for each in (await result("tools/list", {}))["tools"]]


def call(name: str) -> Json:
    return {"name": name, "arguments": {"text": "hello"}}


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("way", WAYS)
async def test_a_token_without_the_scopes_does_not_see_the_tool(way: Way, per: str) -> None:
    """O: lists leave it out, and a call is answered as if there were no such tool. Others who
    share the process see it.
    """
    async with served(per=per) as (port, _), AsyncExitStack() as stack:
        strong = await opened(stack, port, "strong", way)
        weak = await opened(stack, port, "weak", way)
        bob = await opened(stack, port, "bob", way)
        for _ in range(2):
            assert await tools(strong) == ["echo"]
            assert await tools(weak) == await tools(bob) == []
            said = await strong("tools/call", call("count"))
            assert "content" in said and not said.get("isError")
            for client in (weak, bob):
                refused = await client("tools/call", call("count"))
                unknown = await client("tools/call", call("nothing"))
                assert str(refused).replace("count", "nothing") == str(unknown)
                shouted = await client("tools/call", call("COUNT"))
                assert str(shouted).replace("COUNT", "nothing") == str(unknown)
        listed = await strong("tools/list", {})
        assert listed.get("cacheScope", "private") == "private"


async def test_that_a_tool_needs_a_session_is_said_to_those_who_see_it() -> None:
    """The error would else say that the tool exists."""
    async with served() as (port, layer), AsyncExitStack() as stack:
        layer.require_session(tools={"count"})
        strong = await opened(stack, port, "strong", "2026")
        weak = await opened(stack, port, "weak", "2026")
        assert (await strong("tools/call", call("count")))["code"] == -31044
        refused = await weak("tools/call", call("count"))
        unknown = await weak("tools/call", call("nothing"))
        assert str(refused).replace("count", "nothing") == str(unknown)


async def test_a_tool_that_takes_a_handle_starts_no_session_for_those_who_do_not_see_it() -> None:
    async with (
        served(Conversations(handle=["echo"])) as (port, layer),
        AsyncExitStack() as stack,
    ):
        strong = await opened(stack, port, "strong", "2026")
        weak = await opened(stack, port, "weak", "2026")
        refused = await weak("tools/call", call("echo"))
        unknown = await weak("tools/call", call("nothing"))
        assert str(refused).replace("echo", "nothing") == str(unknown)
        assert await layer.sessions.list() == []
        assert not (await strong("tools/call", call("echo"))).get("isError")
        assert len(await layer.sessions.list()) == 1


async def test_scopes_of_the_server_are_needed_at_each_way_in() -> None:
    """RFC 6750, 3.1: 403, with the scopes that are needed."""
    async with served(scopes=["write", "use"]) as (port, _):
        for token, status in (("none", 403), ("weak", 403), ("strong", 200)):
            carrier = SocketCarrier("127.0.0.1", port)
            client = RawClient(BearerCarrier(carrier, token))
            sent = client.send("ping", {}) if status == 403 else client.send("initialize", INIT)
            reply = await sent.reply.started()
            assert reply.status == status
            if status == 403:
                said = reply.header("www-authenticate") or ""
                assert 'error="insufficient_scope"' in said
            await carrier.aclose()


INIT = initialize_params()


async def test_a_program_on_stdio_needs_no_scope() -> None:
    """It started the server itself."""
    layer = SessionLayer(child(tool_scopes=NEEDED), auth=auth_settings(), token_verifier=Verifier())
    async with layer.lifespan(), pipe(layer) as peer:
        await peer.initialize()
        assert [each["name"] for each in (await peer.result("tools/list"))["tools"]] == ["echo"]


async def test_scopes_without_authentication_are_refused() -> None:
    """They would be no lock."""
    for options in ({"scopes": ["use"]}, {"tool_scopes": {"*": ["use"]}}):
        with pytest.raises(ConfigurationError, match="scopes need authentication"):
            SessionLayer(child(**options))
    with pytest.raises(ConfigurationError, match="each of scopes must be a text, not an int"):
        child(scopes=[1])
    for scope in ("a b", "", 'a"'):
        with pytest.raises(ConfigurationError, match="must be a list of scopes"):
            child(scopes=[scope])
    with pytest.raises(
        ConfigurationError, match="each value of tool_scopes must be a list of texts"
    ):
        child(tool_scopes={"*": "use"})


@pytest.mark.parametrize("options", [{"scopes": ["use"]}, {"tool_scopes": {"*": ["use"]}}])
async def test_other_scopes_of_a_reload_are_not_those_of_a_layer_that_runs(options: Any) -> None:
    """Its clients are asked for what it began with: the server is served anew."""
    assert can_follow(child(**options), child(**options))
    assert not can_follow(child(), child(**options))
    assert not can_follow(child(**options), child())
