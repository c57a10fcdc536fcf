"""Sessions of conversations, for hosts that start none."""

import logging
from pathlib import Path
from typing import Any, Literal

import pytest

from mcp_sessions import Conversations, SessionLayer, SessionSecurity
from mcp_sessions.core.conversation_keys import KNOWN_HOSTS, Rule
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.server.requests.handle import current_session
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.modern import ModernClient
from tests.support.raw import Carrier, Json, RawClient, call_params, in_session, initialize_params
from tests.support.replicas import cluster, user
from tests.support.world import Ctx, Toolbox, World, world

Era = Literal["handshake", "modern"]
ERAS: tuple[Era, ...] = ("handshake", "modern")
OPENAI, HEADER = Rule("meta", "openai/session"), Rule("header", "agent-session-id")
SECURITY = SessionSecurity(["k" * 32])
ON = Conversations()


def tools(w: World) -> World:
    """Adds ``count``, which counts in its session, and ``name``, which says its id."""

    async def count(ctx: Ctx, arguments: Json) -> str:
        session = current_session(default=None)
        if session is None:
            return "none"
        session.state["n"] = session.state.get("n", 0) + 1
        async with session.data.edit() as data:
            data["n"] = data.get("n", 0) + 1
        await session.notify("notifications/x")
        return f"{session.source} {session.state['n']} {data['n']}"

    async def name(ctx: Ctx, arguments: Json) -> str:
        return current_session().id

    w.box.tools.update(count=count, name=name)
    return w


async def result(
    carrier: Carrier, era: Era, rule: Rule, key: object, tool: str = "count", **arguments: Any
) -> Json:
    """A call on a connection of its own, whose host says the key where the rule says it."""
    meta = {rule.name: key} if rule.source == "meta" else {}
    headers = {rule.name: str(key)} if rule.source == "header" else {}
    if era == "modern":
        call = ModernClient(carrier).call(tool, arguments, meta=meta, headers=headers)
        return await call.result()
    client = RawClient(carrier)
    await client.initialize()
    params = call_params(tool, arguments, meta)
    return await client.send("tools/call", params, headers=headers).result()


async def text(carrier: Carrier, era: Era, rule: Rule, key: object, tool: str = "count") -> str:
    return str((await result(carrier, era, rule, key, tool))["content"][0]["text"])


# --- who has one --------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("rule", KNOWN_HOSTS, ids=lambda rule: f"{rule.source}-{rule.name}")
async def test_a_known_hosts_conversation_is_one_session(rule: Rule, era: Era) -> None:
    """Three calls on three connections are one session, another conversation is another; the
    answers say nothing of it.
    """
    async with world(conversations=ON) as w:
        tools(w)
        said = [await result(w.carrier, era, rule, "one") for _ in range(3)]
        plain = [
            await result(w.carrier, era, rule, "one", "echo", text=f"conversation {n} {n}")
            for n in (1, 2, 3)
        ]
        assert said == plain
        assert await text(w.carrier, era, rule, "other") == "conversation 1 1"


async def test_the_eras_share_a_conversation() -> None:
    async with world(conversations=ON) as w:
        tools(w)
        said = [await text(w.carrier, era, OPENAI, "one") for era in (*ERAS, *ERAS)]
        assert said == [f"conversation {n} {n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("era", ERAS)
async def test_off_a_key_is_nothing(era: Era, w: World) -> None:
    tools(w)
    said = [await text(w.carrier, era, OPENAI, "one") for _ in range(2)]
    assert said == (["none"] * 2 if era == "modern" else ["connection 1 1"] * 2)


async def test_a_session_that_the_client_started_comes_first_then_the_conversations() -> None:
    """Named in ``_meta``, current on the connection, of the conversation, of the connection; and
    who says that a request is of none is taken at its word.
    """
    async with world(conversations=ON) as w:
        tools(w)
        lone = (await w.client().start())["sessionId"]
        client = await w.connected()
        of_one = {OPENAI.name: "one"}

        assert await client.text("count") == "connection 1 1"
        assert await client.text("count", meta=of_one) == "conversation 1 1"
        current = (await client.start())["sessionId"]
        assert await client.text("name", meta=of_one) == current
        assert await client.text("name", meta={**of_one, **in_session(lone)}) == lone
        assert await client.text("count", meta={**of_one, **in_session(None)}) == "none"
        await client.end(current)
        assert await client.text("count", meta=of_one) == "conversation 2 2"


async def test_what_needs_a_session_is_served_in_a_conversations() -> None:
    async with world(conversations=ON) as w:
        tools(w)
        w.layer.require_session(tools={"count"})
        for era in ERAS:
            assert (await text(w.carrier, era, OPENAI, "one")).startswith("conversation")
        assert (await (await w.connected()).call("count").error())["code"] == -31044


async def test_a_host_of_ones_own_is_named() -> None:
    """By a member, by a header, whose case is nothing, or by a function."""

    def key(meta: Any, headers: Any) -> str | None:
        if "fails" in meta:
            raise RuntimeError("of the application")
        return headers.get("x-mine")

    settings = Conversations(meta=("mine",), headers=("X-Own",), key=key)
    async with world(conversations=settings) as w:
        tools(w)
        for rule in (Rule("meta", "mine"), Rule("header", "x-own"), Rule("header", "X-Mine")):
            said = [await text(w.carrier, "modern", rule, "one") for _ in range(2)]
            assert said == ["conversation 1 1", "conversation 2 2"]
        assert await text(w.carrier, "modern", Rule("meta", "fails"), "one") == "none"


async def test_a_member_of_a_member_is_named_with_a_colon() -> None:
    async with world(conversations=Conversations(meta=("my/context:chat",))) as w:
        tools(w)
        rule = Rule("meta", "my/context")
        said = [await text(w.carrier, "modern", rule, {"chat": chat}) for chat in "aab"]
        assert said == [f"conversation {each}" for each in ("1 1", "2 2", "1 1")]
        assert await text(w.carrier, "modern", rule, {"turn": "a"}) == "none"


async def test_who_names_none_may_have_one_for_everything() -> None:
    """Where he is known, and what he sends is not malformed."""
    none = Rule("meta", "nothing")
    async with world(conversations=Conversations(per_principal=True)) as w:
        tools(w)
        ann, bob = [await w.carrier_of(user(name)) for name in ("ann", "bob")]
        said = [await text(each, "modern", none, "") for each in (ann, bob, ann)]
        assert said == ["conversation 1 1", "conversation 1 1", "conversation 2 2"]
        assert await text(ann, "modern", OPENAI, "one") == "conversation 1 1"
        assert await text(ann, "modern", OPENAI, 7) == "none"
        assert await text(w.carrier, "modern", none, "") == "none"


UUID = "2f1a7c1e-6f0e-4b0e-9a44-0d6f3f8f1a77-0001"
"""Of a platform, which wants at least 33 characters."""


@pytest.mark.parametrize("era", ERAS)
async def test_a_platforms_id_is_a_key(era: Era) -> None:
    """It is on every request, the first one included; each user has its own."""
    rule = Rule("header", "Mcp-Session-Id")
    async with world(conversations=Conversations(platform_ids=True)) as w:
        tools(w)
        ann = await w.carrier_of(user("ann"))

        async def said(carrier: Carrier, key: str) -> str:
            if era == "modern":
                return await text(carrier, era, rule, key)
            client = RawClient(carrier)
            client.session_id = key
            params = initialize_params(version=client.version)
            assert (await client.send("initialize", params).reply.done()).status == 200
            await client.notify("notifications/initialized")
            return await client.text("count")

        counted = [await said(w.carrier, UUID), await said(w.carrier, UUID)]
        assert counted == ["conversation 1 1", "conversation 2 2"]
        assert await said(w.carrier, UUID + "2") == "conversation 1 1"
        assert await said(ann, UUID) == "conversation 1 1"


async def test_an_id_that_has_ended_and_one_from_anybody_shut_the_door_as_ever() -> None:
    """404: the client of a session that ended has to receive it; and without the setting,
    whoever.
    """
    settings = Conversations(platform_ids=True, anonymous=False)
    for conversations, ended in ((settings, False), (ON, False), (settings, True), (ON, True)):
        async with world(conversations=conversations) as w:
            client = await w.connected()
            if ended:
                assert (await client.delete().done()).status == 200
            else:
                client.session_id = UUID
            assert (await client.send("tools/list").reply.done()).status == 404
            assert (await client.get().done()).status == 404
            assert (await client.delete().done()).status == 404


async def test_no_header_shuts_no_door() -> None:
    """A request of the 2025 era without one is served; off, it is refused as ever."""
    async with world(conversations=ON) as w:
        tools(w)
        meta = {OPENAI.name: "one"}
        said = [await w.client().text("count", meta=meta) for _ in range(2)]
        assert said == ["conversation 1 1", "conversation 2 2"]
        assert await w.client().text("count") == "none"
        await w.client().notify("notifications/initialized")
    async with world() as w:
        assert (await w.client().send("tools/list").reply.done()).status == 400


# --- whose --------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("rule", KNOWN_HOSTS, ids=lambda rule: f"{rule.source}-{rule.name}")
async def test_two_users_with_one_key_have_two_sessions(rule: Rule, era: Era) -> None:
    """A key is a name, not a credential; a refreshed or weaker token of one identity keeps it."""
    async with world(conversations=ON) as w:
        tools(w)
        carriers = [
            await w.carrier_of(each) for each in (user("ann", "write"), user("bob"), user("ann"))
        ]
        said = [await text(carrier, era, rule, "one") for carrier in (*carriers, w.carrier)]
        first, second = "conversation 1 1", "conversation 2 2"
        assert said == [first, first, second, first]


async def test_the_same_text_under_two_hosts_names_is_two_conversations() -> None:
    async with world(conversations=ON) as w:
        tools(w)
        names = {rule.name: rule for rule in KNOWN_HOSTS}
        said = [await text(w.carrier, "modern", rule, "one") for rule in names.values()]
        assert set(said) == {"conversation 1 1"}


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_that_is_somebodys_session_id_opens_nothing(era: Era) -> None:
    """Of either kind; and a conversation's own id, which only an operator sees, is none that a
    message could name.
    """
    async with world(conversations=ON) as w:
        tools(w)
        victim = await w.connected()
        started = (await victim.start())["sessionId"]
        await victim.text("count")
        for key in (started, victim.session_id):
            assert await text(w.carrier, era, OPENAI, key) == "conversation 1 1"
        conversations = [
            each.id for each in await w.layer.sessions.list() if each.mode == "conversation"
        ]
        assert len(conversations) == 2
        shown = await text(w.carrier, era, OPENAI, started, "name")
        for session_id in (*conversations, shown):
            client = await w.connected()
            refused = await client.call("count", meta=in_session(session_id)).error()
            assert refused["code"] == -32043
            assert (await client.error("session/resume", {"sessionId": session_id}))[
                "code"
            ] == -32043
            assert (await client.error("session/end", {"sessionId": session_id}))["code"] == -32043
            client.session_id = session_id
            assert (await client.send("tools/list").reply.done()).status == 404
        assert await victim.text("count") == "session 2 2"


@pytest.mark.parametrize("key", ["", "x" * 10_000, "a\nb", 7, None, {"id": "x"}, ["x"]])
async def test_a_malformed_key_is_ignored(key: object, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log says so, without it; the request is served."""
    caplog.set_level(logging.INFO, "mcp_sessions")
    async with world(conversations=ON) as w:
        tools(w)
        caplog.clear()
        assert await text(w.carrier, "modern", OPENAI, key) == "none"
        [line] = [each for each in caplog.messages if "not a conversation key" in each]
        assert line == "the value of openai/session is not a conversation key: it is ignored"
        assert await w.layer.sessions.list() == []


async def test_a_key_and_the_id_that_it_becomes_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "the-name-of-a-conversation"
    async with world(conversations=ON) as w:
        tools(w)
        await text(w.carrier, "handshake", OPENAI, key)
        [conversation] = [
            each.id for each in await w.layer.sessions.list() if each.mode == "conversation"
        ]
    ours = [each.getMessage() for each in caplog.records if each.name.startswith("mcp_sessions")]
    assert not any(key in line or conversation[:20] in line for line in ours)
    assert any("openai/session" in line for line in ours)


async def test_a_notification_and_what_needs_no_session_make_none() -> None:
    async with world(conversations=ON) as w:
        client, meta = await w.connected(), {OPENAI.name: "one"}
        await client.notify("notifications/x", {"_meta": meta})
        await client.result("ping", {"_meta": meta})
        modern = ModernClient(w.carrier)
        await modern.send("server/discover", meta=meta).result()
        listening = modern.send(
            "subscriptions/listen", {"notifications": {"toolsListChanged": True}}, meta=meta
        )
        await listening.reply.started()
        listening.reply.leave()
        modes = [each.mode for each in await w.layer.sessions.list()]
        assert modes == ["transport"]


async def test_a_flood_of_keys_meets_its_senders_limit(caplog: pytest.LogCaptureFixture) -> None:
    """He is served without, and nobody else is in his way."""
    async with world(conversations=ON, max_sessions_per_principal=3) as w:
        tools(w)
        ann, bob = [await w.carrier_of(user(name)) for name in ("ann", "bob")]
        said = [await text(ann, "modern", OPENAI, f"key {n}") for n in range(6)]
        assert said == ["conversation 1 1"] * 3 + ["none"] * 3
        assert await text(ann, "modern", OPENAI, "key 0") == "conversation 2 2"
        assert await text(bob, "modern", OPENAI, "key 5") == "conversation 1 1"
    assert [each for each in caplog.messages if "max_sessions_per_principal" in each]


@pytest.mark.parametrize("store", ["memory", "sqlite", "shared"])
async def test_at_a_limit_the_senders_own_oldest_conversation_is_forgotten(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else's, however old, nor one running; a session that was started stays, too."""
    monkeypatch.setenv("MCP_SESSIONS_TEST_STORE", store)
    async with world(conversations=ON, max_sessions=8, max_sessions_per_principal=4) as w:
        tools(w)
        ann, bob, eve = [await w.carrier_of(user(name)) for name in ("ann", "bob", "eve")]
        assert await text(bob, "modern", OPENAI, "his") == "conversation 1 1"
        client = RawClient(ann)
        await client.initialize()
        await client.start()
        running = await w.waits(
            ModernClient(ann).call("wait", {"gate": "g"}, meta={OPENAI.name: "at work"})
        )
        assert await text(ann, "modern", OPENAI, "old") == "conversation 1 1"
        # Four are hers, and all were used lately.
        assert await text(ann, "modern", OPENAI, "new") == "none"
        w.clock.advance(70)
        assert await text(ann, "modern", OPENAI, "new") == "conversation 1 1"
        w.clock.advance(30)
        assert await text(ann, "modern", OPENAI, "newer") == "none"
        assert await text(ann, "modern", OPENAI, "new") == "conversation 2 2"
        w.box.gate("g").go.set()
        assert (await running.result())["content"][0]["text"] == "through g"
        w.clock.advance(70)
        # A session that a client starts needs a place as well.
        second = RawClient(ann)
        await second.initialize()
        assert await text(ann, "modern", OPENAI, "new") == "conversation 3 3"
        assert await client.text("count") == "session 1 1"
        # All have too many: his oldest goes, not hers.
        for key in ("a", "b", "c"):
            assert await text(bob, "modern", OPENAI, key) == "conversation 1 1"
        w.clock.advance(70)
        assert await text(eve, "modern", OPENAI, "none of hers") == "none"
        assert await text(bob, "modern", OPENAI, "d") == "conversation 1 1"
        assert await text(ann, "modern", OPENAI, "new") == "conversation 4 4"


@pytest.mark.parametrize("store", ["memory", "sqlite", "shared"])
async def test_one_who_makes_up_keys_leaves_room_for_others(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit for each, a tenth is his; who is nobody is one of them."""
    monkeypatch.setenv("MCP_SESSIONS_TEST_STORE", store)
    anybody = Conversations(anonymous=True)
    async with world(conversations=anybody, max_sessions=30) as w:
        tools(w)
        flood = [await text(w.carrier, "modern", OPENAI, f"key {n}") for n in range(5)]
        assert flood == ["conversation 1 1"] * 3 + ["none"] * 2
        w.clock.advance(70)
        assert await text(w.carrier, "modern", OPENAI, "one more") == "conversation 1 1"
        assert len(await w.layer.sessions.list()) == 3
        ann = await w.carrier_of(user("ann"))
        assert await text(ann, "modern", OPENAI, "key 0") == "conversation 1 1"


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "Via", "X-Real-IP"])
async def test_who_is_nobody_has_one_on_this_machine_only(header: str) -> None:
    """Unless the operator says otherwise: behind a proxy a name would be everybody's credential."""
    proxied = {header: "192.0.2.1"}
    for anonymous, expected in ((None, "none"), (False, "none"), (True, "conversation 1 1")):
        async with world(conversations=Conversations(anonymous=anonymous)) as w:
            tools(w)
            call = ModernClient(w.carrier).call(
                "count", {}, meta={OPENAI.name: "one"}, headers=proxied
            )
            assert (await call.result())["content"][0]["text"] == expected
    async with world(conversations=Conversations(anonymous=False)) as w:
        tools(w)
        assert await text(w.carrier, "modern", OPENAI, "one") == "none"
        known = await w.carrier_of(user("ann"))
        assert await text(known, "modern", OPENAI, "one") == "conversation 1 1"


# --- where, and how long ------------------------------------------------------------------


async def test_a_conversation_outlives_its_process_and_a_rotation_of_keys(tmp_path: Path) -> None:
    """By the older key it is found until that is given up."""
    old, new = "o" * 32, "n" * 32
    counted: list[str] = []
    for keys in ([old], [old, new], [new, old], [new]):
        store, security = SQLiteStore(tmp_path / "sessions.db"), SessionSecurity(keys)
        async with world(store=store, security=security, conversations=ON) as w:
            tools(w)
            counted.append(await text(w.carrier, "modern", OPENAI, "one"))
    assert counted == [f"conversation {n} {n}" for n in (1, 2, 3, 1)]


async def test_a_running_conversation_does_not_expire_and_one_that_idles_does() -> None:
    async with world(conversations=ON, idle_timeout=100, forget_after=100) as w:
        tools(w)

        async def slow(ctx: Ctx, arguments: Json) -> str:
            await w.box.gate("g").arrive()
            async with current_session().data.edit() as data:
                data["n"] = 7
            return "done"

        w.box.tools["slow"] = slow
        running = await w.waits(ModernClient(w.carrier).call("slow", {}, meta={OPENAI.name: "one"}))
        w.clock.advance(90)
        await w.expire()
        w.clock.advance(90)
        assert await w.expire() == 0
        w.box.gate("g").go.set()
        assert (await running.result())["content"][0]["text"] == "done"
        assert await text(w.carrier, "modern", OPENAI, "one") == "conversation 1 8"
        w.clock.advance(101)
        assert await w.expire() == 1
        assert await text(w.carrier, "modern", OPENAI, "one") == "conversation 1 1"


async def test_a_conversation_that_nobody_used_over_the_weekend_continues(tmp_path: Path) -> None:
    """A store that outlives the process forgets it after 30 days; in memory it is as others are."""
    weekend, month = 3 * 86_400, 30 * 86_400
    async with world(
        store=SQLiteStore(tmp_path / "sessions.db"), security=SECURITY, conversations=ON
    ) as w:
        tools(w)
        for n in (1, 2, 3):
            assert await text(w.carrier, "modern", OPENAI, "one") == f"conversation {n} {n}"
            w.clock.advance(weekend)
            assert await w.expire() == 0
        w.clock.advance(month)
        assert await w.expire() == 1
        assert await text(w.carrier, "modern", OPENAI, "one") == "conversation 1 1"
    for conversations, modes in ((ON, {"conversation", "transport"}), (None, {"transport"})):
        async with world(conversations=conversations, forget_after=weekend) as w:
            tools(w)
            await text(w.carrier, "handshake", OPENAI, "one")
            assert {each.mode for each in await w.layer.sessions.list()} == modes
            w.clock.advance(1800)
            assert await w.expire() == 0
            assert {each.mode for each in await w.layer.sessions.list()} == modes


async def test_an_operator_who_ends_it_takes_no_request_from_its_client() -> None:
    """The client knows of no session that could be over: its answer comes, and nothing names it."""
    async with world(conversations=ON) as w:
        tools(w)
        running = await w.waits(
            ModernClient(w.carrier).call("wait", {"gate": "g"}, meta={OPENAI.name: "one"})
        )
        [conversation] = await w.layer.sessions.list()
        assert await w.layer.sessions.end(conversation.id)
        w.box.gate("g").go.set()
        answer = await running.result()
        assert answer["content"][0]["text"] == "through g"
        assert conversation.id not in str(answer)


@pytest.mark.parametrize("era", ERAS)
async def test_a_store_that_is_away_is_no_other_conversation(era: Era) -> None:
    """The request is not served as if it were of none: its sender is asked to come back."""
    async with cluster(1, security=SECURITY, conversations=ON) as c:
        tools(c[0])
        assert await text(c[0].carrier, era, OPENAI, "one") == "conversation 1 1"
        meta = {OPENAI.name: "one"}
        c.backplane.is_away = True
        if era == "modern":
            reply = ModernClient(c[0].carrier).call("count", {}, meta=meta).reply
        else:
            reply = c[0].client().call("count", meta=meta).reply
        assert (await reply.done()).status == 503
        c.backplane.is_away = False
        assert await text(c[0].carrier, era, OPENAI, "one") == "conversation 2 2"
        assert c[0].box.calls.count("count") == 2


# --- how it is set up ---------------------------------------------------------------------


async def test_what_would_not_be_found_again_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)
    with pytest.raises(ConfigurationError, match="conversations need a store"):
        SessionLayer(Toolbox().server, store=None, conversations=ON)
    lasting = "redis://localhost"
    with pytest.raises(ConfigurationError, match="set MCP_SESSIONS_KEYS"):
        SessionLayer(Toolbox().server, store=lasting, conversations=ON)
    in_file = f"sqlite:///{tmp_path}/sessions.db"
    with pytest.raises(ConfigurationError, match="set MCP_SESSIONS_KEYS"):
        ephemeral = SessionSecurity.ephemeral()
        SessionLayer(Toolbox().server, store=in_file, conversations=ON, security=ephemeral)
    SessionLayer(Toolbox().server, store=in_file, conversations=ON)
    SessionLayer(Toolbox().server, store=lasting, conversations=ON, security=SECURITY)


@pytest.mark.parametrize("names", ["openai/session", ("",), (7,)])
def test_names_are_names(names: Any) -> None:
    for which in ("meta", "headers"):
        with pytest.raises(ConfigurationError, match=which):
            Conversations(**{which: names})
