"""``subscriptions/listen`` bound to a session: what waits, then what comes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.modern.test_sessions import UNKNOWN_ID, not_found
from tests.support.everything import make_everything
from tests.support.interposed import Interposed
from tests.support.modern import (
    ACKNOWLEDGED,
    SUBSCRIPTION_ID,
    ModernClient,
    Received,
)
from tests.support.raw import EXTENSION, SESSION, UPDATED, Json, event_ids, in_session, uris
from tests.support.virtual_time import cycles
from tests.support.world import Gate, World, world

TOOLS_CHANGED = "notifications/tools/list_changed"
A, B, C = "note://a", "note://b", "note://c"


@asynccontextmanager
async def modern(**options: Any) -> AsyncGenerator[tuple[World, ModernClient]]:
    async with world(**options) as w:
        yield w, ModernClient(w.carrier)


async def update(w: World, *changed: str) -> None:
    """The server's own application changes resources."""
    for uri in changed:
        await w.layer.notify_resource_updated(uri)


async def completed(received: Received) -> Json:
    """The result with which a stream ended: its last message."""
    await received.done()
    last = received.messages[-1]
    assert last["id"] == received.id, received.reply
    return last


# --- what is received -------------------------------------------------------------------------


async def test_a_stream_is_acknowledged_first(w: World, client: ModernClient, session: str) -> None:
    """Its first message names what is received, all of what was asked, and the subscription."""
    await w.layer.notify_tools_changed()
    received = client.listen(
        session, A, B, lists=("tools", "prompts", "resources"), request_id="lïsten"
    )
    first, second = await received.has(2)

    assert first == {
        "jsonrpc": "2.0",
        "method": ACKNOWLEDGED,
        "params": {
            "notifications": {
                "toolsListChanged": True,
                "promptsListChanged": True,
                "resourcesListChanged": True,
                "resourceSubscriptions": [A, B],
            },
            "_meta": {SUBSCRIPTION_ID: "lïsten"},
        },
    }
    assert second["method"] == TOOLS_CHANGED
    assert received.status == 200
    assert [received.reply.header(n) for n in ("content-type", "x-accel-buffering")] == [
        "text/event-stream",
        "no",
    ]


@pytest.mark.parametrize("request_id", [0, -7, "", 'quote " and \\', 2**70, "\ud800"], ids=repr)
async def test_every_event_names_its_owner(
    request_id: int | str, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "each with ``subscriptionId`` and ``sessionEventId``"; and "a session event has …
    ``params._meta[…session] = {"sessionId": …}`` (never ``state``)".
    """
    received = await client.listening(session, A, lists=("tools",), request_id=request_id)
    await update(w, A)
    await w.layer.notify_tools_changed()
    one, two = await received.has_events(2)

    own = {SESSION: {"sessionId": session}, SUBSCRIPTION_ID: request_id}
    for event in (one, two):
        assert event["params"].pop("sessionEventId").endswith(("01", "02"))
    assert one["params"] == {"uri": A, "_meta": own}
    assert two == {"jsonrpc": "2.0", "method": TOOLS_CHANGED, "params": {"_meta": own}}


async def test_a_handlers_standalone_message_is_an_event_of_its_session(
    client: ModernClient, session: str
) -> None:
    """Rule: "an event of that one session, subscribed or not", with the sender's own ``_meta``."""
    other = (await client.start())["sessionId"]
    received = await client.listening(session)
    deaf = await client.listening(other)
    await client.text("update", {"uri": C}, session=session)
    params = {"text": "x", "_meta": {"example.com/mine": 1, SESSION: "not yours"}}
    notify = {"method": "notifications/example", "params": params}
    await client.text("tell", notify, session=session)
    events = await received.has_events(2)

    assert events[0]["params"]["uri"] == C
    assert events[1]["params"]["text"] == "x"
    assert events[1]["params"]["_meta"] == {
        "example.com/mine": 1,
        SESSION: {"sessionId": session},
        SUBSCRIPTION_ID: received.id,
    }
    assert deaf.events == []


async def test_without_a_session_a_handlers_standalone_message_goes_nowhere(
    client: ModernClient, session: str
) -> None:
    """As the SDK: a modern request without a session has no such channel."""
    received = await client.listening(session, A)
    assert await client.text("update", {"uri": A}) == "updated"
    await cycles()
    assert received.events == []


@pytest.mark.parametrize("listed", [(), ("tools",), ("prompts", "resources")], ids=str)
async def test_a_list_change_is_received_if_it_was_asked_for(
    listed: tuple[str, ...], w: World, client: ModernClient, session: str
) -> None:
    received = await client.listening(session, A, lists=listed)
    await w.layer.notify_tools_changed()
    await w.layer.notify_prompts_changed()
    await w.layer.notify_resources_changed()
    await update(w, A)
    events = await received.has_events(len(listed) + 1)

    notified = [event["method"] for event in events]
    assert notified == [*(f"notifications/{n}/list_changed" for n in sorted(listed)), UPDATED] or (
        sorted(notified) == sorted([*(f"notifications/{n}/list_changed" for n in listed), UPDATED])
    )


async def test_with_nothing_asked_for_nothing_is_received(
    w: World, client: ModernClient, session: str
) -> None:
    received = await client.listening(session)
    await w.layer.notify_tools_changed()
    await update(w, A)
    await cycles()

    assert received.messages == [
        {
            "jsonrpc": "2.0",
            "method": ACKNOWLEDGED,
            "params": {"notifications": {}, "_meta": {SUBSCRIPTION_ID: received.id}},
        }
    ]


async def test_a_session_is_received_with_a_stream_without_one() -> None:
    """The SDK's own stream and ours, on one server: each receives a change once."""
    rich = make_everything("mcpserver")
    async with modern(server=rich.server) as (_, client):
        session = (await client.start())["sessionId"]
        bare = await client.listening(None, A)
        bound = await client.listening(session, A)
        await rich.publish(A)
        await client.text("touch", {"uri": A})
        await bound.has_events(2)
        await bare.has_events(2)
        await cycles()

        assert (len(bare.events), len(bound.events)) == (2, 2)
        assert all("sessionEventId" not in event["params"] for event in bare.events)


async def test_live_events_are_not_coalesced(w: World, client: ModernClient, session: str) -> None:
    """Rule: "live events are sent one by one"."""
    received = await client.listening(session, A)
    for _ in range(5):
        await update(w, A)
    events = await received.has_events(5)

    assert uris(events) == [A] * 5
    assert event_ids(events) == sorted(set(event_ids(events)))


# --- what waits ----------------------------------------------------------------------------


@pytest.mark.parametrize("made_by", ["session/start", "sessions/create"])
async def test_what_follows_a_sessions_start_waits_for_its_first_stream(
    made_by: str, w: World, client: ModernClient
) -> None:
    """Rule: "``session/start`` and ``sessions/create`` leave what follows their head waiting"."""
    if made_by == "session/start":
        session = (await client.start())["sessionId"]
    else:
        session = (await client.create())["sessionId"]
    await client.text("update", {"uri": A}, session=session)
    await w.layer.notify_tools_changed()
    await client.text("update", {"uri": B}, session=session)
    received = await client.listening(session, C, lists=("tools",))
    await update(w, C)
    events = await received.has_events(4)

    assert uris(events) == [A, TOOLS_CHANGED, B, C]


async def test_what_waits_is_coalesced(client: ModernClient, session: str) -> None:
    """A newer event replaces the older one with the same key in the log, "sent or not"."""
    for uri in (A, B, A, A):
        await client.text("update", {"uri": uri}, session=session)
    received = await client.listening(session)
    assert uris(await received.has_events(2)) == [B, A]
    await cycles()
    assert len(received.events) == 2


async def test_a_filter_outlives_its_stream(w: World, client: ModernClient, session: str) -> None:
    """Rule: "The listen's filter becomes the session's subscriptions and outlives the stream"."""
    received = await client.listening(session, A, lists=("tools",))
    await update(w, A)
    position = (await received.has_events(1))[0]["params"]["sessionEventId"]
    await received.gone()
    await update(w, A, B)
    await w.layer.notify_tools_changed()
    await w.layer.notify_prompts_changed()

    resumed = await client.resume(session, position)

    assert (resumed["catchup"], resumed["replayed"]) == (True, 2)
    again = await client.listening(session, A, lists=("tools", "prompts"))
    assert uris(await again.has_events(2)) == [A, TOOLS_CHANGED]


async def test_a_newer_filter_replaces_the_older(
    w: World, client: ModernClient, session: str
) -> None:
    await client.listening(session, A, B)
    received = await client.listening(session, B, C)
    await update(w, A, B, C)

    assert uris(await received.has_events(2)) == [B, C]
    infos = await w.layer.sessions.list()
    assert infos[0].subscriptions == {B, C}


async def test_a_handshake_era_subscription_and_a_filter_are_one_thing(
    w: World, client: ModernClient
) -> None:
    """``resources/subscribe`` there, listen here, and the reverse."""
    older = await w.connected()
    session = (await older.start())["sessionId"]
    await older.result("resources/subscribe", {"uri": A})
    assert (await w.layer.sessions.list())[-1].subscriptions == {A}

    received = await client.listening(session, B)
    await update(w, A, B)

    assert uris(await received.has_events(1)) == [B]


# --- a cut stream --------------------------------------------------------------------------


async def test_a_stream_after_a_cut_one_starts_at_the_head(
    w: World, client: ModernClient, session: str
) -> None:
    """Rule: "A listen after a cut one without a new ``session/resume`` starts at the head"."""
    received = await client.listening(session, A)
    await received.gone()
    await update(w, A)
    again = await client.listening(session, A, B)
    await update(w, B)

    assert uris(await again.has_events(1)) == [B]


async def test_resume_leaves_its_replay_waiting_for_the_next_stream(
    w: World, client: ModernClient, session: str
) -> None:
    """Rule: "``session/resume`` on a modern POST … answers as always, and leaves its replay
    waiting for the next listen", which then goes on live.
    """
    received = await client.listening(session, A, B, C)
    await update(w, A)
    position = (await received.has_events(1))[0]["params"]["sessionEventId"]
    await received.gone()
    await update(w, B)

    resumed = await client.resume(session, position)
    assert resumed == {
        "resumed": True,
        "catchup": True,
        "replayed": 1,
        "sessionEventId": resumed["sessionEventId"],
        "expiresAt": resumed["expiresAt"],
        "resultType": "complete",
    }
    await update(w, C)
    again = await client.listening(session, A, B, C)
    await update(w, A)
    events = await again.has_events(3)

    assert uris(events) == [B, C, A]
    assert event_ids(events)[0] == resumed["sessionEventId"]


async def test_only_the_next_stream_gets_what_waits(w: World, client: ModernClient) -> None:
    """EVT7: nothing is delivered twice by listening twice."""
    started = await client.start()
    session = started["sessionId"]
    await client.text("update", {"uri": A}, session=session)
    first = await client.listening(session, B)
    await first.has_events(1)
    second = await client.listening(session, B)
    await update(w, B)

    assert uris(await second.has_events(1)) == [B]


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        (None, "no_position"),
        ("", "unknown_position"),
        ("nonsense", "unknown_position"),
        ("ahead", "ahead"),
        ("other log", "log_replaced"),
        ("evicted", "evicted"),
    ],
)
async def test_a_bad_position_is_no_error_and_leaves_nothing_waiting(
    position: str | None, reason: str
) -> None:
    """Rule: "nothing up to head is sent, head is the new position"."""
    async with modern(max_events=2) as (w, client):
        started = await client.start()
        session, head = started["sessionId"], started["sessionEventId"]
        for uri in (A, B, C):
            await client.text("update", {"uri": uri}, session=session)
        given = {
            "ahead": head[:-1] + "9",
            "other log": "0" * 19 + head[19:],
            "evicted": head,
        }.get(position or "", position)

        resumed = await client.resume(session, given)
        received = await client.listening(session, A)
        await update(w, A)
        events = await received.has_events(1)

        assert (resumed["catchup"], resumed["reason"]) == (False, reason)
        assert resumed["replayed"] == 0
        assert uris(events) == [A]
        assert resumed["sessionEventId"] < event_ids(events)[0]


async def test_a_stream_cut_before_its_acknowledgement_is_no_stream(
    w: World, client: ModernClient, session: str
) -> None:
    """The client may be gone before a byte was sent."""
    received = client.listen(session, A)
    await received.gone()
    await cycles()
    [info] = await w.layer.sessions.list()

    assert not info.is_attached


async def test_a_peer_that_takes_nothing_is_cut() -> None:
    """Rule: "slow, and detached, only when its peer has taken nothing for 10 s with a full
    buffer"; nothing else waits for it.
    """
    async with modern(send_buffer=1_000, slow_timeout=10) as (_, client):
        session, other = (await client.start())["sessionId"], (await client.start())["sessionId"]
        received = await client.listening(session)
        quick = await client.listening(other)
        received.reply.stall()
        for number in range(40):
            notify = {"method": "notifications/example", "params": {"n": number, "x": "y" * 100}}
            await client.text("tell", notify, session=session)
        await client.text("update", {"uri": A}, session=other)

        assert uris(await quick.has_events(1)) == [A]
        received.reply.unstall()
        await received.done()
        position = received.events[-1]["params"]["sessionEventId"]
        seen = len(received.events)
        assert (await client.resume(session, position))["replayed"] == 40 - seen
        again = await client.listening(session)
        rest = await again.has_events(40 - seen)
        assert [e["params"]["n"] for e in received.events + rest] == list(range(40))


async def test_a_silent_stream_says_that_it_lives(client: ModernClient, session: str) -> None:
    """The SDK's own ``: ping``, every 15 seconds."""
    received = await client.listening(session, A)
    await received.until(lambda: received.pings == 1, "a ping")
    assert received.events == []


# --- whose it is ---------------------------------------------------------------------------


async def test_a_newer_stream_ends_the_older_with_its_result(
    w: World, client: ModernClient, session: str
) -> None:
    """Rule: "a newer listen of that session ends the older with its completion result"."""
    older = await client.listening(session, A, request_id="older")
    newer = await client.listening(session, A, request_id="newer")
    last = await completed(older)
    await update(w, A)

    assert uris(await newer.has_events(1)) == [A]
    assert older.events == []
    result = last["result"]
    assert result["resultType"] == "complete"
    assert result["_meta"][SUBSCRIPTION_ID] == "older"
    assert result["_meta"][SESSION]["sessionId"] == session
    assert set(result) == {"resultType", "_meta"}


async def test_a_late_listen_whose_client_has_left_takes_the_session_from_nobody() -> None:
    """The store took its time, and the client listened anew meanwhile."""
    steps, storing = Interposed(), Gate()
    async with modern(store=steps.store) as (w, client):
        session = str((await client.start())["sessionId"])
        steps.before["change"] = storing.arrive
        late = client.listen(session, A)
        await storing.started.wait()
        late.reply.leave()
        del steps.before["change"]
        received = await client.listening(session, A)
        storing.go.set()
        await cycles()
        await update(w, A)

        assert uris(await received.has_events(1)) == [A]
        assert not received.reply.ended


async def test_many_listens_at_once_leave_one(w: World, client: ModernClient, session: str) -> None:
    """RES3: never two owners, never none."""
    streams = [client.listen(session, A) for _ in range(5)]
    for stream in streams:
        await stream.has(1)
    await cycles()
    await update(w, A)
    await cycles()

    open_ones = [s for s in streams if not s.reply.ended]
    assert len(open_ones) == 1
    assert uris(await open_ones[0].has_events(1)) == [A]
    assert sum(len(s.events) for s in streams) == 1


async def test_resume_ends_the_stream(w: World, client: ModernClient, session: str) -> None:
    """Rule: "``session/resume`` on a modern POST detaches the old connection"."""
    received = await client.listening(session, A)
    await client.resume(session)
    await completed(received)
    await update(w, A)

    assert received.events == []
    again = await client.listening(session, A)
    assert uris(await again.has_events(1)) == [A]


@pytest.mark.parametrize("declares", ["extensions", "experimental", ""])
async def test_a_displaced_stream_is_notified_if_its_client_knows_us(declares: str) -> None:
    """Rule: "If its client declared our extension it gets one
    ``notifications/sessions/detached {sessionId, reason}``"; it is no session event.
    """
    known: dict[str, Json] = {
        "extensions": {"extensions": {EXTENSION: {}}},
        "experimental": {"experimental": {"experimental/sessions": {}}},
        "": {},
    }
    async with world() as w:
        client = ModernClient(w.carrier, capabilities=known[declares])
        older = await w.connected()
        session = (await client.start())["sessionId"]
        received = await client.listening(session, A)

        await older.resume(session)
        last = await completed(received)

        notified = [
            m for m in received.messages if m.get("method") == "notifications/sessions/detached"
        ]
        if declares:
            [detached] = notified
            assert detached["params"] == {
                "sessionId": session,
                "reason": "taken_over",
                "_meta": {SUBSCRIPTION_ID: received.id},
            }
        else:
            assert notified == []
        assert "result" in last


async def test_a_displaced_stream_learns_which_client_has_the_session(w: World) -> None:
    """TKO12."""
    client = ModernClient(w.carrier, capabilities={"extensions": {EXTENSION: {}}})
    session = (await client.start())["sessionId"]
    received = await client.listening(session, A)

    await client.resume(session, instance="one-of-ours")
    await completed(received)

    notified = [
        m for m in received.messages if m.get("method") == "notifications/sessions/detached"
    ]
    assert [m["params"]["instance"] for m in notified] == ["one-of-ours"]


async def test_a_takeover_loses_nothing(w: World, client: ModernClient) -> None:
    """EVT10, ATT6: from a stream to a handshake-era connection and back, with events in between."""
    older = await w.connected()
    get = await older.get().started()
    session = (await client.start())["sessionId"]
    received = await client.listening(session, *(f"note://{n}" for n in range(30)))
    seen: list[str] = []
    position = ""
    for round_number in range(3):
        for number in range(10):
            if number == 3:
                await received.has_events(3)
                position = received.events[-1]["params"]["sessionEventId"]
                seen += uris(received.events)
                await older.resume(session, position)
            if number == 6:
                await get.until(lambda r=round_number: len(get.messages) >= 3 * (r + 1))
                seen += uris(get.messages[-3:])
                position = get.messages[-1]["params"]["sessionEventId"]
                await client.resume(session, position)
            await update(w, f"note://{round_number * 10 + number}")
        received = await client.listening(session, *(f"note://{n}" for n in range(30)))
        seen += uris(await received.has_events(4))
        received = await client.listening(session, *(f"note://{n}" for n in range(30)))

    assert seen == [f"note://{n}" for n in range(30)]


async def test_one_sessions_stream_never_yields_anothers_events(client: ModernClient) -> None:
    """SEC7: "Replay is scoped to session *and* stream *and* owner"."""
    one, other = (await client.start())["sessionId"], (await client.start())["sessionId"]
    await client.text("update", {"uri": A}, session=one)
    await client.text("update", {"uri": B}, session=other)
    theirs = (await client.resume(one))["sessionEventId"]

    resumed = await client.resume(other, theirs)
    listen_one, listen_other = await client.listening(one), await client.listening(other)
    await client.text("update", {"uri": C}, session=one)
    await listen_one.has_events(1)
    await cycles()

    assert resumed["reason"] in ("log_replaced", "unknown_position")
    assert uris(listen_one.events) == [C]
    assert listen_other.events == []


# --- its end -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["session/end", "sessions/delete", "operator", "expiry", "older"])
async def test_a_sessions_end_ends_its_stream(how: str) -> None:
    """Rule: "close the log first, drop subscriptions, detach"; the listen request is one of
    "the running requests of the session (they answer ``-32043``)".
    """
    async with modern(idle_timeout=50, max_lifetime=100) as (w, client):
        session = (await client.start())["sessionId"]
        received = await client.listening(session, A)
        match how:
            case "session/end":
                await client.send(how, {"sessionId": session}).result()
            case "sessions/delete":
                await client.send(how, session=session).result()
            case "operator":
                assert await w.layer.sessions.end(session)
            case "older":
                await (await w.connected()).end(session)
            case _:
                w.clock.advance(101)
                assert await w.expire() == 1
        last = await completed(received)
        await update(w, A)

        assert last == {"jsonrpc": "2.0", "id": received.id, "error": not_found(session)}
        assert received.events == []


async def test_at_the_servers_end_a_stream_ends_with_its_result(w: World) -> None:
    """Not an error: the client may listen again, at another server. It is notified first, if it
    knows us.
    """
    client = ModernClient(w.carrier, capabilities={"extensions": {EXTENSION: {}}})
    session = (await client.start())["sessionId"]
    received = await client.listening(session, A)
    await w.layer.drain(grace=0)
    last = await completed(received)

    [detached] = received.events
    assert detached["params"]["reason"] == "draining"
    assert detached["params"]["retryAfter"] == 10
    assert last["result"]["resultType"] == "complete"


# --- what is refused -----------------------------------------------------------------------


async def test_an_unknown_session_opens_no_stream(client: ModernClient) -> None:
    received = client.listen(UNKNOWN_ID, A)
    assert await received.error() == not_found(UNKNOWN_ID)
    assert received.status == 200 and not received.is_sse


@pytest.mark.parametrize("filters", [None, "all", {"resourceSubscriptions": "x"}], ids=str)
async def test_a_malformed_filter_changes_nothing(
    filters: Any, w: World, client: ModernClient, session: str
) -> None:
    """It is judged as the SDK judges it, before the older stream is touched."""
    received = await client.listening(session, A)
    params: Json = {} if filters is None else {"notifications": filters}
    refused = client.send("subscriptions/listen", params, session=session)

    assert (await refused.error())["code"] == -32602
    assert refused.status == 400
    await update(w, A)
    assert uris(await received.has_events(1)) == [A]


async def test_too_many_subscriptions_change_nothing() -> None:
    """Rule: "``-31011`` Limit reached"."""
    async with modern(max_subscriptions=2) as (w, client):
        session = (await client.start())["sessionId"]
        received = await client.listening(session, A)
        error = await client.listen(session, A, B, C).error()

        assert (error["code"], error["data"]["limit"]) == (-31011, "max_subscriptions")
        await update(w, A)
        assert uris(await received.has_events(1)) == [A]


async def test_a_key_on_a_listen_request_is_not_recorded() -> None:
    """A listen stream cannot outlive its connection; a key of it would never be finished, and
    hold the session's others for ever.
    """
    async with modern(request_key_lifetime=10, request_key_bytes=500) as (w, client):
        session = (await client.start())["sessionId"]
        await client.listening(session, A, key="k")
        again = await client.listening(session, A, B, key="k")
        for number in range(10):
            w.clock.advance(11)
            text = await client.text("echo", {"text": "x"}, session=session, key=f"key {number}")
            assert text == "x"
        await update(w, B)
        assert uris(await again.has_events(1)) == [B]


async def test_listening_attaches_a_session_that_was_at_another_replica(
    w: World, client: ModernClient
) -> None:
    """The older connection is displaced, and its rule-2 requests know it."""
    older = await w.connected()
    session = (await older.start())["sessionId"]
    await client.listening(session, A)

    assert (await older.error("tools/list"))["code"] == -31010
    assert await older.text("session_id", meta=in_session(session)) == session
