"""``state`` on the wire, in both eras: minted here, echoed there, never read back."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mcp_sessions import SessionPolicy, SessionSecurity, current_session
from mcp_sessions.ids import digest
from mcp_sessions.principal import Principal
from mcp_sessions.server.requests.handle import SessionState
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.modern.test_sessions import UNKNOWN_ID, not_found
from tests.stores.every_store import STORES
from tests.support.modern import ModernClient, Received, session_meta
from tests.support.raw import KEY, SESSION, Json, RawClient, Sent, in_process
from tests.support.world import Clock, Ctx, Toolbox, World, world

KEYS = ["k" * 32]
INVALID = {
    "code": -32602,
    "message": "Invalid params: the session's state is not valid",
    "data": {"reason": "invalid_state"},
}


class Notebook(Toolbox):
    """A toolbox that keeps notes in ``session.state``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
        self.tools |= {"set": self._set, "look": self._look, "set_and_fail": self._set_and_fail}

    async def _set(self, ctx: Ctx, arguments: Json) -> str:
        """Sets and deletes, and waits at a gate in between, if there is one."""
        state = current_session().state
        state.update(arguments.get("values") or {})
        for name in arguments.get("without") or ():
            del state[name]
        if "gate" in arguments:
            await self.gate(arguments["gate"]).arrive()
        return "set"

    async def _look(self, ctx: Ctx, arguments: Json) -> str:
        self.seen.append(dict(current_session().state))
        return "looked"

    async def _set_and_fail(self, ctx: Ctx, arguments: Json) -> str:
        current_session().state.update(arguments["values"])
        raise RuntimeError("after it was set")


@pytest.fixture
def box() -> Notebook:
    return Notebook()


@pytest.fixture
async def w(box: Notebook) -> AsyncGenerator[World]:
    async with world(box=box) as running:
        yield running


def called(
    client: ModernClient | RawClient, tool: str, meta: Json, **arguments: Any
) -> Received | Sent:
    """Call a tool, in the client's era."""
    if isinstance(client, ModernClient):
        return client.call(tool, arguments, meta=meta)
    return client.call(tool, meta=meta, **arguments)


async def result_of(
    client: ModernClient | RawClient,
    tool: str,
    session: str,
    *,
    state: Any = None,
    **arguments: Any,
) -> Json:
    """Call a tool in a session, in the client's era."""
    return await called(client, tool, session_meta(session, state=state), **arguments).result()


def token_of(result: Json) -> str:
    return str(result["_meta"][SESSION]["state"])


@pytest.fixture(params=["modern", "handshake", "lone"])
def era(request: pytest.FixtureRequest) -> str:
    return request.param


async def client_of(w: World, era: str) -> ModernClient | RawClient:
    if era == "modern":
        return ModernClient(w.carrier)
    return await w.connected() if era == "handshake" else w.client()


@pytest.fixture
async def asking(w: World, era: str) -> ModernClient | RawClient:
    """A client of each era."""
    return await client_of(w, era)


@pytest.fixture
async def created(client: ModernClient) -> Json:
    """A session that a client of the modern era created."""
    return await client.create()


async def test_the_token_is_new_only_when_the_state_is(
    box: Notebook, w: World, asking: ModernClient | RawClient, created: Json
) -> None:
    """Rule: "the token is minted anew only when the state changed"."""
    session, empty = created["sessionId"], created["state"]
    assert token_of(await result_of(asking, "look", session)) == empty
    assert token_of(await result_of(asking, "set", session, values={})) == empty

    first = token_of(await result_of(asking, "set", session, values={"lang": "en"}))
    assert first != empty
    w.clock.advance(10)
    assert token_of(await result_of(asking, "look", session, state=first)) == first
    assert token_of(await result_of(asking, "set", session, values={"lang": "en"})) == first
    second = token_of(await result_of(asking, "set", session, values={"lang": "fr"}))
    assert second != first
    await result_of(asking, "set", session, without=["lang"])

    await result_of(asking, "look", session)
    assert box.seen == [{}, {"lang": "en"}, {}]


async def test_a_request_that_sends_no_state_has_it_too(
    w: World, box: Notebook, asking: ModernClient | RawClient
) -> None:
    """Rule: "With a store the stored state is the state, by rule 1 and rule 2"."""
    older = await w.connected()
    session = (await older.start())["sessionId"]
    result = await older.call("set", values={"n": 1}).result()
    assert "_meta" not in result  # "Results by rule 2 stay as they are."
    result = await result_of(asking, "look", session)
    await older.call("look").result()

    assert box.seen == [{"n": 1}] * 2
    assert token_of(result)


async def test_changes_are_applied_key_by_key_to_the_newest(
    box: Notebook, client: ModernClient, session: str
) -> None:
    """Rule: "what a request changed is applied to the newest state key by key"."""
    await result_of(client, "set", session, values={"a": 1, "b": 1, "c": 1})
    slow = client.call("set", {"values": {"a": 2}, "without": ["c"], "gate": "g"}, session=session)
    await box.gate("g").started.wait()
    await result_of(client, "set", session, values={"b": 3, "c": 3, "d": 3})
    box.gate("g").go.set()
    newest = token_of(await slow.result())
    looked = await result_of(client, "look", session)

    assert box.seen == [{"a": 2, "b": 3, "d": 3}]
    assert token_of(looked) == newest


async def test_a_handler_that_fails_changes_nothing(box: Notebook, client: ModernClient) -> None:
    created = await client.create()
    session = created["sessionId"]
    received = client.call("set_and_fail", {"values": {"a": 1}}, session=session)
    assert (await received.error())["code"] == -32603
    assert token_of(await result_of(client, "look", session)) == created["state"]
    assert box.seen == [{}]


async def test_a_state_too_large_for_its_token_is_the_handlers_error(
    box: Notebook, client: ModernClient, session: str
) -> None:
    """The client is not asked to keep it; what was there stays."""
    await result_of(client, "set", session, values={"a": 1})
    for too_large in ("x" * 5_000, ["y" * 4_000]):
        received = client.call("set", {"values": {"b": too_large}}, session=session)
        assert (await received.error())["code"] == -32603
    for odd in (2**70, "\ud800"):
        received = client.call("set", {"values": {"b": odd}}, session=session)
        assert (await received.error())["code"] == -32603
    await result_of(client, "look", session)
    assert box.seen == [{"a": 1}]


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_requests_at_once_do_not_make_a_state_together_that_cannot_be_sent(
    store: str, box: Notebook
) -> None:
    """STT12: each is applied to the newest. The one that would make it too large fails, changes
    nothing, and leaves a session whose answers can be sent.
    """
    async with world(store=STORES[store](), box=box) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        await result_of(client, "set", session, values={"kept": 1})
        at_once = [
            client.call("set", {"values": {name: "x" * 2_000}, "gate": name}, session=session)
            for name in "ab"
        ]
        for name in "ab":
            await box.gate(name).started.wait()
        for name in "ab":
            box.gate(name).go.set()
        [(stored, refused)] = [
            (name, answer["error"])
            for name, answer in zip(
                "ba", [await received.answer() for received in at_once], strict=True
            )
            if "error" in answer
        ]

        assert refused["code"] == -32603
        await result_of(client, "look", session)
        assert box.seen == [{"kept": 1, stored: "x" * 2_000}]
        assert token_of(await result_of(client, "set", session, without=[stored]))


async def test_an_older_token_is_accepted_and_rolls_nothing_back(
    box: Notebook, asking: ModernClient | RawClient, created: Json
) -> None:
    """Rule: "an older genuine token is accepted (last write wins, as 004 says) but never read
    back, so replaying it rolls nothing back".
    """
    session = created["sessionId"]
    newest = token_of(await result_of(asking, "set", session, values={"n": 1}))
    result = await result_of(asking, "look", session, state=created["state"])

    assert box.seen == [{"n": 1}]
    assert token_of(result) == newest


async def _bad_tokens(w: World, client: ModernClient, created: Json) -> dict[str, Any]:
    """Tokens that are not this session's, each for a cause of its own."""
    good, session = created["state"], created["sessionId"]
    security = w.layer.security
    now = w.clock.now
    seal: dict[str, Any] = {
        "session_id": session,
        "principal": Principal(),
        "version": 1,
        "expires_at": now + 1_000,
    }

    def sealed(by: SessionSecurity, **other: Any) -> str:
        return by.seal_state({}, **dict[str, Any]({**seal, **other}))

    flipped = good[:-2] + ("A" if good[-2] != "A" else "B") + good[-1]
    return {
        "flipped": flipped,
        "truncated": good[:-4],
        "longer": good + "AAAA",
        "empty": "",
        "nonsense": "nonsense",
        "not ascii": "ü" * 40,
        "surrogate": "\ud800" * 40,
        "large": "A" * 1_000_000,
        "another session": (await client.create())["state"],
        "another principal": sealed(security, principal=Principal("other")),
        "another service": sealed(SessionSecurity(KEYS, audience="other")),
        "another key": sealed(SessionSecurity(["z" * 32], audience="tools")),
        "another purpose": security.seal_session_id(
            principal=Principal(), created_at=now, expires_at=now + 1_000
        ),
        "signed": sealed(SessionSecurity(KEYS, audience="tools", sign_only=True)),
        "expired": sealed(security, expires_at=now - 1),
        "number": 5,
        "object": {},
        "list": [good],
        "true": True,
    }


async def test_a_bad_token_changes_nothing_and_has_one_answer(
    era: str, caplog: pytest.LogCaptureFixture
) -> None:
    """STT8, on the wire: "``-32602``, ``data.reason = "invalid_state"``, one text for every
    cause", and one line a minute in the log. Neither the request key nor the deadline was touched.
    """
    box = Notebook()
    clock = Clock()
    layer = ClockedLayer(
        box.server,
        security=SessionSecurity(KEYS),
        policy=SessionPolicy(idle_timeout=1_000),
        clock=clock,
    )
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        w = World(box, layer, clock, carrier, None)  # pyright: ignore[reportArgumentType]
        modern = ModernClient(carrier)
        client = await client_of(w, era)
        created = await modern.create()
        session = created["sessionId"]
        for cause, token in (await _bad_tokens(w, modern, created)).items():
            meta: Json = {SESSION: {"sessionId": session, "state": token}, KEY: "k"}
            if cause == "surrogate" and era != "modern":
                continue  # It is no JSON to this era.
            sent = called(client, "look", meta)
            assert await sent.error() == INVALID, cause
            assert sent.reply.status == (400 if era == "modern" else 200)
        # A client that repeats them does not fill the log.
        [line] = [said for said in caplog.messages if "state" in said and "refused: " in said]
        assert digest(session) in line
        assert box.seen == []

        w.clock.advance(999)
        meta = {**session_meta(session, state=created["state"]), KEY: "k"}
        if era == "handshake":
            client = await w.connected()
        await called(client, "look", meta).result()
        assert box.seen == [{}]


async def test_a_token_in_addition_to_a_session_that_is_not_there_is_not_looked_at(
    asking: ModernClient | RawClient, created: Json
) -> None:
    """A client that does not own the session learns nothing about tokens: ``-32043``."""
    for token in (created["state"], "nonsense", ""):
        meta = session_meta(UNKNOWN_ID, state=token)
        assert await called(asking, "look", meta).error() == not_found(UNKNOWN_ID)


async def test_null_is_no_state(
    box: Notebook, asking: ModernClient | RawClient, created: Json
) -> None:
    """Typed clients send ``"state": null`` where they have none."""
    session = created["sessionId"]
    meta = {SESSION: {"sessionId": session, "state": None, "expiresAt": None}}
    await called(asking, "look", meta).result()
    assert box.seen == [{}]


async def test_delete_looks_at_the_token_too(client: ModernClient) -> None:
    created = await client.create()
    session = created["sessionId"]
    refused = client.send("sessions/delete", session=session, state="nonsense")
    assert await refused.error() == INVALID
    deleted = client.send("sessions/delete", session=session, state=created["state"])
    assert await deleted.result() == {"resultType": "complete"}


async def test_an_event_never_has_a_state(client: ModernClient, session: str) -> None:
    """Rule: "``{"sessionId": …}`` (never ``state``)"."""
    received = await client.listening(session)
    await result_of(client, "set", session, values={"a": 1})
    await client.text("update", {"uri": "note://a"}, session=session)
    [event] = await received.has_events(1)
    assert event["params"]["_meta"][SESSION] == {"sessionId": session}


async def test_after_the_request_the_state_is_closed() -> None:
    """A value that would not be stored is refused, not lost in silence."""
    box = Notebook()
    kept: list[SessionState] = []

    async def keep_state(ctx: Ctx, arguments: Json) -> str:
        kept.append(current_session().state)
        return "kept"

    box.tools["keep_state"] = keep_state
    async with world(box=box) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        await client.text("keep_state", session=session)
        with pytest.raises(RuntimeError):
            kept[0]["late"] = 1
