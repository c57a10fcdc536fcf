"""Attachment and delivery: who receives a session's events, and what a takeover moves."""

import pytest

from mcp_sessions import metrics
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.delivery.attachments import Attachments
from tests.support.apps import DEPRECATED
from tests.support.raw import (
    EXTENSION,
    UPDATED,
    Json,
    RawClient,
    Reply,
    call_params,
    event_ids,
    in_session,
    uris,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

KNOWS_US: Json = {"extensions": {EXTENSION: {}}}
DETACHED = "notifications/sessions/detached"


async def with_stream(w: World, **options: object) -> tuple[RawClient, Reply]:
    """A client after its handshake, whose GET stream is open."""
    client = await w.connected(**options)
    return client, await client.get().started()


async def update(w: World, session: str, *changed: str) -> None:
    """Events of one session, one per URI, from a request that attaches nothing."""
    for uri in changed:
        await w.client().text("update", uri=uri, meta=in_session(session))


async def test_an_attach_is_counted_whatever_becomes_of_its_replay(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store attached the session, and took it from another connection."""

    async def fails(*_: object) -> None:
        raise StoreUnavailable

    client, other = await w.connected(), await w.connected()
    session = (await client.start())["sessionId"]
    counted = list[str]()

    def count(transport: str, *_: object) -> None:
        counted.append(transport)

    monkeypatch.setattr(metrics, "attached", count)
    monkeypatch.setattr(Attachments, "_begin", fails)
    reply = await other.send("session/resume", {"sessionId": session}).reply.done()

    assert (reply.status, len(counted)) == (503, 1)


# --- events -----------------------------------------------------------------------------------


async def test_a_session_event_names_itself_and_its_session(
    client: RawClient, stream: Reply, session: str
) -> None:
    """Rule: "``params.sessionEventId`` and ``params._meta[…] = {"sessionId": …}`` (never
    ``state``)", next to what the sender put there.
    """
    await client.text(
        "tell",
        method="notifications/x",
        params={"a": 1, "sessionEventId": "forged", "_meta": {"b": 2, **in_session("forged")}},
    )

    message = (await stream.has(1))[0]

    assert message == {
        "jsonrpc": "2.0",
        "method": "notifications/x",
        "params": {
            "a": 1,
            "_meta": {"b": 2, **in_session(session)},
            "sessionEventId": message["params"]["sessionEventId"],
        },
    }
    assert message["params"]["sessionEventId"] != "forged"


async def test_what_a_handler_sends_on_the_standalone_channel_is_an_event_of_its_session(
    client: RawClient, stream: Reply
) -> None:
    """Rule: "an event of that one session, subscribed or not"."""
    other = (await client.start())["sessionId"]
    session = (await client.start())["sessionId"]
    await client.result("resources/subscribe", {"uri": "a:1", "_meta": in_session(other)})

    await client.text("update", uri="a:1")
    messages = await stream.has(1)
    await cycles()

    assert [m["params"]["_meta"] for m in messages] == [in_session(session)]


async def test_without_a_session_it_is_a_bare_message(client: RawClient, stream: Reply) -> None:
    """Rule: "messages of a bare transport-mode session carry an SSE ``id`` and nothing of ours"."""
    await client.text("update", uri="a:1")

    event = await stream.event(1)  # 0 is the priming event

    assert event.message == {"jsonrpc": "2.0", "method": UPDATED, "params": {"uri": "a:1"}}
    assert event.id


async def test_a_server_wide_change_is_one_event_in_each_entitled_session(
    w: World, client: RawClient, stream: Reply
) -> None:
    """Rule: "``resources/updated`` where the session subscribed, list changes in all"; on a
    connection with several sessions once per session, and no bare copy of list changes.
    """
    first = (await client.start())["sessionId"]
    second = (await client.start())["sessionId"]
    for session in (first, second):
        await client.result("resources/subscribe", {"uri": "a:1", "_meta": in_session(session)})
    await client.result("resources/subscribe", {"uri": "a:2", "_meta": in_session(second)})

    await w.layer.notify_resource_updated("a:1")
    await w.layer.notify_resource_updated("a:2")
    await w.layer.notify_resource_updated("a:3")
    await w.layer.notify_tools_changed()
    messages = await stream.has(5)
    await cycles()

    named = [(uris([m])[0], m["params"].get("_meta")) for m in messages]
    assert len(stream.messages) == 5
    assert sorted(named, key=str) == sorted(
        [
            ("a:1", in_session(first)),
            ("a:1", in_session(second)),
            ("a:2", in_session(second)),
            ("notifications/tools/list_changed", in_session(first)),
            ("notifications/tools/list_changed", in_session(second)),
        ],
        key=str,
    )


async def test_bare_copies_only_for_the_connections_own_subscriptions(
    w: World, client: RawClient, stream: Reply, session: str
) -> None:
    """Rule: "bare copies only for its own session-less subscriptions"."""
    await client.result("resources/subscribe", {"uri": "a:1"})  # rule 2: the session's
    await client.result("resources/subscribe", {"uri": "a:1", "_meta": in_session(None)})

    await w.layer.notify_resource_updated("a:1")
    messages = await stream.has(2)

    metas = [m["params"].get("_meta") for m in messages]
    assert sorted(metas, key=str) == sorted([None, in_session(session)], key=str)


@pytest.mark.parametrize(
    ("notify", "method"),
    [
        ("notify_tools_changed", "notifications/tools/list_changed"),
        ("notify_prompts_changed", "notifications/prompts/list_changed"),
        ("notify_resources_changed", "notifications/resources/list_changed"),
    ],
)
async def test_list_changes_reach_clients_without_a_session(
    notify: str, method: str, w: World
) -> None:
    """Handshake-era clients that know nothing of us; once."""
    _, stream = await with_stream(w)

    await getattr(w.layer, notify)()
    messages = await stream.has(1)
    await cycles()

    assert messages == [{"jsonrpc": "2.0", "method": method}]


async def test_what_a_handler_emits_on_its_requests_channel_is_no_session_event(
    client: RawClient, stream: Reply
) -> None:
    """Rule: "progress, log messages … goes to the response stream that carries the request,
    unnumbered".
    """
    await client.start()

    progress = client.call("progress", steps=2, meta={"progressToken": "t"})
    logged = client.call("log", text="hello")

    assert [m["params"] for m in (await progress.reply.has(3))[:2]] == [
        {"progressToken": "t", "progress": 1, "total": 2},
        {"progressToken": "t", "progress": 2, "total": 2},
    ]
    assert (await logged.reply.has(2))[0]["params"] == {"level": "info", "data": "hello"}
    assert stream.messages == []


# --- who is attached ------------------------------------------------------------------------


async def test_start_attaches_where_it_is_sent(w: World, stream: Reply, session: str) -> None:
    """Rule: "attach where they are sent, if that connection can be pushed to"."""
    await update(w, session, "a:1")

    assert uris(await stream.has(1)) == ["a:1"]


async def test_a_request_that_names_a_free_session_attaches_it(w: World) -> None:
    """Rule: "a rule-1 request on such a connection attaches its session if it is attached nowhere
    (nothing is replayed)".
    """
    session = (await w.client().start())["sessionId"]
    await update(w, session, "a:1")
    client, stream = await with_stream(w)

    await client.text("session_id", meta=in_session(session))
    await update(w, session, "a:2")

    assert uris(await stream.has(1)) == ["a:2"]


async def test_a_request_that_names_an_attached_session_takes_nothing_over(w: World) -> None:
    """Only ``session/resume`` takes over."""
    holder, stream = await with_stream(w)
    session = (await holder.start())["sessionId"]
    other, other_stream = await with_stream(w)

    await other.text("session_id", meta=in_session(session))
    await update(w, session, "a:1")

    assert uris(await stream.has(1)) == ["a:1"]
    assert other_stream.messages == []
    assert await holder.text("session_id") == session


async def test_a_lone_post_attaches_nothing(w: World) -> None:
    """It "cannot be pushed to"."""
    session = (await w.client().start())["sessionId"]
    await w.client().text("session_id", meta=in_session(session))
    client, stream = await with_stream(w)

    await client.text("session_id", meta=in_session(session))
    await update(w, session, "a:1")

    assert uris(await stream.has(1)) == ["a:1"]


async def test_a_request_by_rule_2_does_not_attach(w: World) -> None:
    """Sessions that a later GET detached "wait for ``session/resume``": a plain request must
    not attach them again, for the client would advance past what it missed and never get it.
    """
    client, first = await with_stream(w)
    started = await client.start()
    first.leave()
    stream = await client.get().started()  # no Last-Event-ID: detaches
    await update(w, started["sessionId"], "a:1")

    assert await client.text("session_id") == started["sessionId"]
    await update(w, started["sessionId"], "a:2")
    await cycles()
    assert stream.messages == []

    resumed = await client.resume(started["sessionId"], started["sessionEventId"])
    assert resumed["replayed"] == 2
    assert uris(await stream.has(2)) == ["a:1", "a:2"]


async def test_delete_detaches(w: World, client: RawClient) -> None:
    """A connection ends "with DELETE or expiry"; its sessions wait, attached nowhere."""
    started = await client.start()
    await client.delete().done()
    await update(w, started["sessionId"], "a:1")

    other, stream = await with_stream(w)
    resumed = await other.resume(started["sessionId"], started["sessionEventId"])

    assert resumed["catchup"]
    assert uris(await stream.has(1)) == ["a:1"]


async def test_an_expired_connection_detaches() -> None:
    """The session was used from another connection and lives on."""
    async with world(idle_timeout=100) as w:
        client = await w.connected()
        started = await client.start()
        for _ in range(3):
            w.clock.advance(60)
            await update(w, started["sessionId"], "a:1")
        assert await w.expire() == 1

        other, stream = await with_stream(w)
        await other.text("session_id", meta=in_session(started["sessionId"]))
        await update(w, started["sessionId"], "a:2")

        assert uris(await stream.has(1)) == ["a:2"]


# --- takeover --------------------------------------------------------------------------------


async def test_a_takeover_moves_events(w: World) -> None:
    """RES3: "the displaced connection gets nothing more of that session"."""
    old, old_stream = await with_stream(w)
    started = await old.start()
    await update(w, started["sessionId"], "a:1")
    position = event_ids(await old_stream.has(1))[0]
    new, new_stream = await with_stream(w)

    await new.resume(started["sessionId"], position)
    await update(w, started["sessionId"], "a:2")

    assert uris(await new_stream.has(1)) == ["a:2"]
    await cycles()
    assert len(old_stream.messages) == 1
    assert await new.text("session_id") == started["sessionId"]


async def test_what_waited_on_the_old_connection_goes_to_the_new_one(w: World) -> None:
    """EVT10: "Events enqueued during takeover are not lost", and not sent by the old stream,
    whether they wait for its GET or in its buffer.
    """
    old, old_stream = await with_stream(w)
    started = await old.start()
    old_stream.stall()
    await update(w, started["sessionId"], "a:1", "a:2", "a:3")
    new, new_stream = await with_stream(w)

    resumed = await new.resume(started["sessionId"], started["sessionEventId"])
    old_stream.unstall()

    assert resumed["replayed"] == 3
    assert uris(await new_stream.has(3)) == ["a:1", "a:2", "a:3"]
    await cycles()
    # The first was in the network already when it stalled.
    assert len(old_stream.messages) <= 1
    again = await old.get(old_stream.events[-1].id).started()
    await cycles()
    assert again.messages == []


@pytest.mark.parametrize(
    "capabilities",
    [KNOWS_US, {"experimental": {"experimental/sessions": {}}}],
    ids=["extension", "experimental"],
)
async def test_the_displaced_connection_is_notified_once(capabilities: Json, w: World) -> None:
    """TKO7: "one ``notifications/sessions/detached {sessionId, reason}`` with reason
    ``taken_over``"; "It is not a session event".
    """
    old, old_stream = await with_stream(w, capabilities=capabilities)
    session = (await old.start())["sessionId"]
    new = await w.connected(capabilities=capabilities)

    await new.resume(session)
    await new.resume(session)
    messages = await old_stream.has(1)
    await cycles()

    assert messages == [
        {
            "jsonrpc": "2.0",
            "method": DETACHED,
            "params": {"sessionId": session, "reason": "taken_over"},
        }
    ]


INSTANCE = "io.github.mcp-sessions/instance"


async def resumed_by(client: RawClient, session: str, instance: object) -> None:
    """``session/resume`` of a client that names itself."""
    await client.result("session/resume", {"sessionId": session, "_meta": {INSTANCE: instance}})


async def test_the_displaced_learns_which_client_has_the_session(w: World) -> None:
    """TKO12: so that it knows a late request of its own from another client's."""
    old, stream = await with_stream(w, capabilities=KNOWS_US)
    session = (await old.start())["sessionId"]

    await resumed_by(await w.connected(), session, "one-of-ours")

    [notified] = await stream.has(1)
    assert notified["params"] == {
        "sessionId": session,
        "reason": "taken_over",
        "instance": "one-of-ours",
    }


@pytest.mark.parametrize("instance", ["", "two words", "ü", "x" * 65, 7, None, {}, "a\n"])
async def test_a_name_that_cannot_be_repeated_is_not(instance: object, w: World) -> None:
    """TKO12: "in no case is the request refused for it"."""
    old, stream = await with_stream(w, capabilities=KNOWS_US)
    session = (await old.start())["sessionId"]

    await resumed_by(await w.connected(), session, instance)

    [notified] = await stream.has(1)
    assert notified["params"] == {"sessionId": session, "reason": "taken_over"}


async def test_a_client_that_knows_nothing_of_us_gets_nothing(w: World) -> None:
    """Rule: "If its client declared our extension it gets one"."""
    old, old_stream = await with_stream(w, capabilities={"extensions": {"other/one": {}}})
    session = (await old.start())["sessionId"]

    await (await w.connected()).resume(session)
    await cycles()

    assert old_stream.messages == []


async def test_the_displaced_connection_is_refused_by_rule_2(w: World) -> None:
    """Rule: "rule-2 requests on it get ``-31010``; ``ping``, ``initialize``, ``session/*`` and
    rule-1 requests are served".
    """
    old = await w.connected()
    session = (await old.start())["sessionId"]
    await (await w.connected()).resume(session)

    for method in ("tools/list", "tools/call", "resources/subscribe", "x/unknown"):
        error = await old.error(method, call_params("echo", {"text": "x"}))
        assert (error["code"], error["message"]) == (-31010, "Session detached")
    assert w.box.calls == []
    assert await old.result("ping") == {}
    assert await old.text("session_id", meta=in_session(session)) == session
    assert (await old.error("session/end", {"sessionId": "x"}))["code"] == -32043
    initialized = w.client()
    initialized.session_id = old.session_id
    await initialized.initialize()


@pytest.mark.parametrize("way", ["null", "start", "resume that session", "resume another"])
async def test_the_displaced_connection_can_continue(way: str, w: World) -> None:
    """Rule: "Until the displaced connection starts or resumes a session there (or sends session
    ``null``)".
    """
    old, old_stream = await with_stream(w)
    started = await old.start()
    session = expected = started["sessionId"]
    new = await w.connected()
    await new.resume(session)

    if way == "null":
        expected = "none"
        assert await old.text("session_id", meta=in_session(None)) == "none"
    elif way == "start":
        expected = (await old.start())["sessionId"]
    elif way == "resume another":
        expected = (await w.client().start())["sessionId"]
        await old.resume(expected)
    else:
        await old.resume(session, started["sessionEventId"])
        await update(w, session, "a:1")
        assert uris(await old_stream.has(1)) == ["a:1"]
        assert (await new.error("tools/list"))["code"] == -31010

    assert await old.text("session_id") == expected


async def test_takeover_moves_events_not_answers(w: World) -> None:
    """Rule: "the displaced connection gets … the responses of requests it sent"; nothing runs twice
    and nothing is cancelled.
    """
    old = await w.connected()
    session = (await old.start())["sessionId"]
    running = await w.waits(old.call("wait", gate="g"))

    await (await w.connected()).resume(session)
    w.box.gate("g").go.set()

    assert (await running.result())["content"][0]["text"] == "through g"
    assert w.box.calls == ["wait"]


async def test_a_request_of_the_displaced_connection_emits_to_the_new_one(w: World) -> None:
    """What its handler sends on the standalone channel is the session's, wherever that is
    attached by now.
    """
    old, old_stream = await with_stream(w)
    session = (await old.start())["sessionId"]

    async def later(ctx: Ctx, arguments: Json) -> str:
        await w.box.gate("g").arrive()
        return await w.box.tools["update"](ctx, arguments)

    w.box.tools["later"] = later
    running = await w.waits(old.call("later", uri="a:1"))
    new, new_stream = await with_stream(w)
    await new.resume(session)
    w.box.gate("g").go.set()

    await running.result()
    assert uris(await new_stream.has(1)) == ["a:1"]
    assert old_stream.messages == []


async def test_a_late_end_of_the_displaced_connection_changes_nothing(w: World) -> None:
    """TKO9: neither its GET's end, nor a new GET, nor its DELETE."""
    old, old_stream = await with_stream(w)
    started = await old.start()
    new, new_stream = await with_stream(w)
    await new.resume(started["sessionId"], started["sessionEventId"])

    await old_stream.gone()
    await old.get().started()
    await update(w, started["sessionId"], "a:1")
    await old.delete().done()
    await update(w, started["sessionId"], "a:2")

    assert uris(await new_stream.has(2)) == ["a:1", "a:2"]
    assert await new.text("session_id") == started["sessionId"]


# --- store first ----------------------------------------------------------------------------


async def test_an_event_is_replayable_though_nobody_took_it(
    w: World, client: RawClient, stream: Reply
) -> None:
    """EVT10: "Store first, then send. A send failure leaves the event replayable"."""
    started = await client.start()
    stream.stall()
    await update(w, started["sessionId"], "a:1")
    await stream.gone()
    other, other_stream = await with_stream(w)

    resumed = await other.resume(started["sessionId"], started["sessionEventId"])

    assert resumed["replayed"] == 1
    assert uris(await other_stream.has(1)) == ["a:1"]


# --- coalescing ------------------------------------------------------------------------------


async def test_a_million_updates_of_ten_resources_are_ten_events() -> None:
    """Rule: "the window is bounded by what there is to know, not by traffic" (here: 5,000)."""
    async with world(max_events=20) as w:
        started = await w.client().start()
        for number in range(10):
            await w.client().result(
                "resources/subscribe",
                {"uri": f"a:{number}", "_meta": in_session(started["sessionId"])},
            )
        for number in range(5_000):
            await w.layer.notify_resource_updated(f"a:{number * 7 % 10}")
        client, stream = await with_stream(w)

        resumed = await client.resume(started["sessionId"], started["sessionEventId"])
        messages = await stream.has(10)

        assert (resumed["catchup"], resumed["replayed"]) == (True, 10)
        assert sorted(uris(messages)) == [f"a:{number}" for number in range(10)]
        assert event_ids(messages)[-1] == resumed["sessionEventId"]


async def test_the_policy_says_what_is_coalesced() -> None:
    """Rule: "configurable"."""
    async with world(coalescing={"notifications/x": "topic", "notifications/y": None}) as w:
        started = await w.client().start()
        for method, params in [
            ("notifications/x", {"topic": "a", "n": 1}),
            ("notifications/x", {"topic": "b", "n": 2}),
            ("notifications/y", {"n": 3}),
            ("notifications/x", {"topic": "a", "n": 4}),
            ("notifications/y", {"n": 5}),
            (UPDATED, {"uri": "a:1", "n": 6}),
            (UPDATED, {"uri": "a:1", "n": 7}),
        ]:
            await w.client().text(
                "tell", method=method, params=params, meta=in_session(started["sessionId"])
            )
        client, stream = await with_stream(w)

        await client.resume(started["sessionId"], started["sessionEventId"])

        assert [m["params"]["n"] for m in await stream.has(5)] == [2, 4, 5, 6, 7]


async def test_live_events_are_not_coalesced(w: World, stream: Reply, session: str) -> None:
    """Rule: "An event stored while its session is attached and the stream is open is handed over in
    the same step: live events are sent one by one".
    """
    for _ in range(5):
        await update(w, session, "a:1")

    assert uris(await stream.has(5)) == ["a:1"] * 5


# --- after the call ---------------------------------------------------------------------------


async def test_a_kept_session_still_reaches_its_client_after_the_call(w: World) -> None:
    """Promised: "a notification sent through a kept ``ctx.session`` after its call has
    returned still reaches the session", on whatever connection it is by then.
    """
    old = await w.connected()
    session = (await old.start())["sessionId"]
    await old.text("keep")
    new, stream = await with_stream(w)
    await new.resume(session)

    await w.box.kept[0].send_resource_updated("a:1")
    message = (await stream.has(1))[0]

    assert message["params"]["_meta"] == in_session(session)


async def test_a_kept_session_of_no_session_reaches_its_connection(
    w: World, client: RawClient, stream: Reply
) -> None:
    """The same without a session: bare, on the GET stream."""
    await client.text("keep")

    await w.box.kept[0].send_resource_updated("a:1")

    assert (await stream.has(1))[0]["params"] == {"uri": "a:1"}


async def test_what_belonged_to_the_request_alone_ends_with_it(
    w: World, client: RawClient, stream: Reply
) -> None:
    """Late progress is no session event; a late log message was meant for the client."""
    await client.call("keep", meta={"progressToken": 1}).result()

    await w.box.kept[0].report_progress(1)
    await w.box.kept[0].send_log_message(  # pyright: ignore[reportDeprecated]
        "info", "late", related_request_id=1
    )

    assert [m["method"] for m in await stream.has(1)] == ["notifications/message"]
