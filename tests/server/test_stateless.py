"""A layer without a store: ``sessions/*`` only (SLS1), and nothing is remembered."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from mcp_sessions import SessionLayer, SessionPolicy, SessionSecurity, current_session
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.principal import Principal
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.modern.test_sessions import UNKNOWN_ID, not_found
from tests.modern.test_state import INVALID, KEYS, Notebook, result_of, token_of
from tests.support.modern import ModernClient
from tests.support.raw import EXTENSION, SESSION, AsgiCarrier, Json, RawClient, in_process, text_of
from tests.support.world import Clock, Ctx

FEATURES = ["create", "delete", "state"]


@asynccontextmanager
async def stateless(
    clock: Clock, box: Notebook
) -> AsyncGenerator[tuple[AsgiCarrier, SessionLayer]]:
    """A layer that remembers nothing."""
    layer = ClockedLayer(
        box.server,
        store=None,
        security=SessionSecurity(KEYS),
        policy=SessionPolicy(stateless_lifetime=100),
        clock=clock,
    )
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        yield carrier, layer


@pytest.fixture(params=[ModernClient, RawClient])
def era(request: pytest.FixtureRequest) -> type[ModernClient | RawClient]:
    """Its clients; those of the older era send lone POSTs."""
    return request.param


def meta_of(session: str) -> Json:
    return {"_meta": {SESSION: {"sessionId": session}}}


async def created_by(client: ModernClient | RawClient) -> Json:
    created: Json = (await client.send("sessions/create").result())["session"]
    return created


async def test_the_token_is_the_state(era: type[ModernClient | RawClient]) -> None:
    """SLS3: "The session id is itself a sealed token with a fixed ``expiresAt``, the token is
    the state and can be replayed until then, ``sessions/delete`` answers ``{}`` and revokes
    nothing". On any replica.
    """
    clock, box, other_box = Clock(), Notebook(), Notebook()
    async with stateless(clock, box) as (carrier, _):
        client = era(carrier)
        created = await created_by(client)
        assert set(created) == {"sessionId", "expiresAt", "state"}
        session = created["sessionId"]
        result = await result_of(client, "set", session, state=created["state"], values={"n": 1})
        token = token_of(result)
        named = result["_meta"][SESSION]
        assert named == {**created, "state": token}

        async with stateless(clock, other_box) as (other_carrier, __):
            other = era(other_carrier)
            await result_of(other, "look", session, state=token)
            # The older token is the older state; no token is an empty state.
            await result_of(other, "look", session, state=created["state"])
            await result_of(other, "look", session)
        assert other_box.seen == [{"n": 1}, {}, {}]

        deleted = await client.send("sessions/delete", meta_of(session)).result()
        assert deleted == ({"resultType": "complete"} if era is ModernClient else {})
        await result_of(client, "look", session, state=token)
        assert box.seen == [{"n": 1}]
        clock.advance(99)
        await result_of(client, "look", session, state=token)
        clock.advance(1)
        params: Json = {"name": "look", "arguments": {}, **meta_of(session)}
        assert await client.send("tools/call", params).error() == not_found(session)


@pytest.mark.parametrize("method", ["session/start", "session/resume", "session/end"])
async def test_the_other_proposal_is_not_spoken(
    method: str, era: type[ModernClient | RawClient]
) -> None:
    """STA6: a server without protocol-level sessions responds with that error."""
    async with stateless(Clock(), Notebook()) as (carrier, _):
        sent = era(carrier).send(method, {"sessionId": UNKNOWN_ID})
        error = await sent.error()
        assert (error["code"], error["data"]) == (-32601, method)
        assert sent.reply.status == (404 if era is ModernClient else 200)


async def test_a_bad_id_or_token_is_refused_as_with_a_store(
    era: type[ModernClient | RawClient],
) -> None:
    """-32043 for the id, ``invalid_state`` for the token."""
    clock = Clock()
    async with stateless(clock, Notebook()) as (carrier, layer):
        client = era(carrier)
        created = await created_by(client)

        async def error(**members: str) -> Json:
            meta = {SESSION: {**created, **members}}
            return await client.send("tools/call", {"name": "look", "_meta": meta}).error()

        session, state = created["sessionId"], created["state"]
        others = layer.security.seal_session_id(
            principal=Principal("other"), created_at=clock.now, expires_at=clock.now + 50
        )
        for foreign in (UNKNOWN_ID, others, session[:-2] + "AA", session.upper(), ""):
            assert await error(sessionId=foreign) == not_found(foreign)
        for token in ("nonsense", "x" + state, state[:-1], (await created_by(client))["state"]):
            assert await error(state=token) == INVALID


async def test_what_needs_a_store_says_so() -> None:
    """``session.data`` cannot be kept anywhere."""
    box = Notebook()

    async def keep(ctx: Ctx, arguments: Json) -> str:
        with pytest.raises(ConfigurationError) as refused:
            await current_session().data.read()
        return str(refused.value)

    box.tools["keep"] = keep
    async with stateless(Clock(), box) as (carrier, _):
        client = ModernClient(carrier)
        session = (await client.create())["sessionId"]
        assert "needs a store" in text_of(await result_of(client, "keep", session))


async def test_a_handshake_leaves_nothing_behind() -> None:
    """No ``Mcp-Session-Id``, and what comes next needs none."""
    box = Notebook()
    async with stateless(Clock(), box) as (carrier, _):
        client = RawClient(carrier)
        info = {"name": "t", "version": "1"}
        hello = {"protocolVersion": client.version, "capabilities": {}, "clientInfo": info}
        sent = client.send("initialize", hello)
        offered = (await sent.result())["capabilities"]["extensions"][EXTENSION]
        assert sent.reply.header("mcp-session-id") is None
        listed = await client.result("tools/list")
        discovered = await ModernClient(carrier).send("server/discover").result()

    assert offered["transports"] == ["streamable-http", "websocket", "stdio"]
    assert offered["features"] == FEATURES
    assert {tool["name"] for tool in listed["tools"]} == set(box.tools)
    [modern] = discovered["capabilities"]["extensions"].values()
    assert modern["features"] == FEATURES
