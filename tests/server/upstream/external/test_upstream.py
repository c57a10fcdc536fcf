"""A command behind the layer: what passes, who shares a process, what is sent again.

The promises are those of `mcp_sessions.external_server`, and of the port
(`mcp_sessions/server/upstream/port.py`) as every wrapped server keeps it.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from mcp_sessions import ConfigurationError, Conversations, metrics
from mcp_sessions.server.upstream.external import process, starts
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.slot import Slot
from tests.support.children import child, child_world, children_of, is_alive, until
from tests.support.duplex import duplex_world
from tests.support.modern import LOG_LEVEL, ModernClient, session_meta
from tests.support.raw import RawClient, in_session, initialize_params, keyed, text_of, uris
from tests.support.world import Clock

UPDATED = "notifications/resources/updated"


def calls(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def updates(messages: list[dict[str, Any]]) -> list[str]:
    return [m["params"]["uri"] for m in messages if m.get("method") == UPDATED]


def user(subject: str, client: str = "client") -> AuthenticatedUser:
    """What the SDK's authentication leaves in the scope."""
    token = AccessToken(token=f"t-{subject}", client_id=client, scopes=[], subject=subject)
    return AuthenticatedUser(token)


async def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid), "the child is dead")


# --- the wire passes -----------------------------------------------------------------------------


async def test_a_commands_tools_are_hidden_too() -> None:
    """Nothing of the command has to know: it is asked for what it does not have."""
    async with child_world(hidden={"echo", "test://*"}) as w:
        client = await w.connected()
        assert (await client.result("tools/list"))["tools"] == []
        assert (await client.result("resources/list"))["resources"] == []
        said = [await client.call(name).answer() for name in ("echo", "qcho")]
        texts = [json.dumps({**each, "id": 0}) for each in said]
        assert texts[0] == texts[1].replace("qcho", "echo")


async def test_what_the_server_says_of_itself_is_said_and_what_the_layer_adds() -> None:
    async with child_world() as w:
        client = w.client(capabilities={"elicitation": {"form": {}}, "ofAnotherKind": {"a": 1}})
        result = await client.initialize()
        assert result["serverInfo"] == {"name": "child", "version": "1", "ofAnotherKind": True}
        assert result["instructions"] == "ask me"
        assert result["capabilities"]["logging"] == {}
        assert result["capabilities"]["resources"] == {"subscribe": True, "listChanged": True}
        assert "io.github.mcp-sessions/sessions" in result["capabilities"]["extensions"]
        notified = json.loads(await client.text("client"))
        assert notified["clientInfo"] == {"name": "raw", "version": "1"}
        assert notified["capabilities"] == {"elicitation": {"form": {}}, "ofAnotherKind": {"a": 1}}


async def test_unknown_members_and_methods_pass_and_the_credential_of_a_session_does_not() -> None:
    async with child_world() as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        sent = {"name": "params", "ofAnotherKind": [1], "_meta": {**in_session(session), "own": 2}}
        result = await client.result("tools/call", sent)
        assert json.loads(text_of(result)) == {
            "name": "params", "ofAnotherKind": [1], "_meta": {"own": 2},
        }  # fmt: skip
        assert result["ofAnotherKind"] == {"kept": True}
        assert await client.result("own/method", {"a": 1}) == {"mine": {"a": 1}}
        assert (await client.error("no/method"))["data"] == "no/method"


async def test_progress_comes_under_the_clients_own_token_with_what_else_it_says() -> None:
    async with child_world() as w:
        client = await w.connected()
        sent = client.call("progress", meta={"progressToken": "mine"})
        assert text_of(await sent.result()) == "reported"
        reports = [m["params"] for m in sent.reply.messages if "method" in m]
        assert reports == [
            {"progressToken": "mine", "progress": step, "ofAnotherKind": step} for step in (1, 2)
        ]


async def test_the_server_asks_the_client_of_the_request() -> None:
    async with child_world() as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask", question="how many?")
        (question,) = await sent.reply.has(1)
        assert question["method"] == "elicitation/create"
        assert question["params"]["message"] == "how many?"
        await client.respond(question, {"action": "accept", "content": {"answer": "two"}})
        assert json.loads(text_of(await sent.result()))["content"] == {"answer": "two"}


async def test_a_client_that_cannot_be_asked_is_not_and_the_server_learns_why() -> None:
    async with child_world() as w:
        client = await w.connected()
        assert "code" in json.loads(await client.text("ask", question="how many?"))


async def test_a_cancelled_request_is_cancelled_in_the_server_by_its_own_id(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    async with child_world(options={"env": {"CALLS": str(noted)}}) as w:
        client = await w.connected()
        await client.text("count")
        sent = client.call("wait")
        await until(lambda: "wait" in calls(noted), "the call runs")
        await client.notify("notifications/cancelled", {"requestId": sent.id})
        await until(lambda: "cancelled True" in calls(noted), "the server was told")
        assert await client.text("echo", text="still here") == "still here"


async def test_a_log_message_comes_with_the_request_and_the_level_is_the_servers() -> None:
    async with child_world() as w:
        client = await w.connected()
        await client.result("logging/setLevel", {"level": "error"})
        sent = client.call("log", text="hello")
        await sent.result()
        assert sent.reply.messages[0]["params"] == {"level": "info", "data": "hello"}
        assert json.loads(await client.text("state"))["level"] == "error"


async def test_the_modern_era_is_served_by_a_server_of_the_era_before() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        found = await client.send("server/discover").result()
        assert found["resultType"] == "complete" and found["instructions"] == "ask me"
        assert found["capabilities"]["logging"] == {}
        assert "io.github.mcp-sessions/sessions" in found["capabilities"]["extensions"]
        listed = await client.send("tools/list").result()
        assert (listed["ttlMs"], listed["cacheScope"]) == (0, "private")
        assert [tool["name"] for tool in listed["tools"]] == ["echo"]
        session = (await client.start())["sessionId"]
        named = session_meta(session)
        seen = json.loads(await client.text("params", meta={**named, "own": 1}))
        assert seen == {"name": "params", "arguments": {}, "_meta": {"own": 1}}
        for level, received in ((None, 0), ("warning", 0), ("info", 1)):
            wish = {} if level is None else {LOG_LEVEL: level}
            sent = client.call("log", {"text": "hello"}, meta={**named, **wish})
            await sent.result()
            assert len(sent.events) == received, level


# --- sessions ------------------------------------------------------------------------------------


async def test_each_session_has_a_process_of_its_own_which_ends_with_it() -> None:
    async with child_world() as w:
        one, two = await w.connected(), await w.connected()
        pids = [int(await client.text("pid")) for client in (one, two)]
        assert pids[0] != pids[1]
        session = (await one.start())["sessionId"]
        in_it = int(await one.text("pid"))
        assert in_it not in pids
        assert int(await two.text("pid", meta=in_session(session))) == in_it
        await one.end(session)
        await until(lambda: not is_alive(in_it), "the session's process ended")
        assert (await one.delete().done()).status == 200
        await until(lambda: not is_alive(pids[0]), "the connection's process ended")
        assert is_alive(pids[1])


async def test_updates_wait_for_who_comes_back_and_the_newest_stands_for_all() -> None:
    async with child_world() as w:
        first = await w.connected()
        started = await first.start()
        await first.result("resources/subscribe", {"uri": "test://a"})
        await first.text("update", uri="test://a")
        assert (await first.delete().done()).status == 200
        second = await w.connected()
        named = in_session(started["sessionId"])
        stream = second.get()
        await second.resume(started["sessionId"], started["sessionEventId"])
        assert updates(await stream.has(1)) == ["test://a"]
        state = json.loads(await second.text("state", meta=named))
        assert state["subscribed"] == ["test://a"], "the process went on"


async def test_what_is_no_session_is_served_by_a_process_for_its_principal() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        assert await client.text("count") == "1"
        assert await client.text("count") == "2"


async def test_each_conversation_has_a_process_of_its_own() -> None:
    async with child_world(conversations=Conversations()) as w:
        client = await w.connected()
        one, two = ({"openai/session": name} for name in ("one", "two"))
        assert [await client.text("count", meta=each) for each in (one, two, one)] == [
            "1", "1", "2",
        ]  # fmt: skip


# --- who shares a process ------------------------------------------------------------------------


async def test_a_shared_process_serves_all_and_is_notified_of_no_client() -> None:
    async with child_world(options={"per": "shared"}) as w:
        one, two = await w.connected(capabilities={"elicitation": {}}), await w.connected()
        assert await one.text("count") == "1"
        assert await two.text("count") == "2"
        assert json.loads(await one.text("client"))["clientInfo"]["name"] == "mcp-sessions"
        assert json.loads(await one.text("ask", question="who?"))["code"] == -32601


async def test_a_subscription_that_several_share_lasts_as_long_as_one_of_them_has_it() -> None:
    async with child_world(options={"per": "shared"}) as w:
        clients = [await w.connected() for _ in range(2)]
        streams = [client.get() for client in clients]
        about = {"uri": "test://a"}
        for client in clients:
            await client.result("resources/subscribe", about)
        await clients[0].result("resources/unsubscribe", about)
        assert "test://a" in json.loads(await clients[0].text("state"))["subscribed"]
        await clients[0].text("update", uri="test://a")
        await streams[1].until(lambda: bool(updates(streams[1].messages)), "the update")
        assert updates(streams[0].messages) == []
        await clients[1].result("resources/unsubscribe", about)
        assert "test://a" not in json.loads(await clients[1].text("state"))["subscribed"][1:]


async def test_two_principals_share_no_process() -> None:
    async with child_world(options={"per": "principal"}) as w:
        pids: list[str] = []
        for name in ("ann", "ann", "bob"):
            carrier = await w.carrier_of(user(name))
            client = ModernClient(carrier)
            pids.append(await client.text("pid"))
        assert pids[0] == pids[1] != pids[2]


async def test_a_change_reaches_each_session_of_its_principal_once() -> None:
    async with child_world(options={"per": "principal"}) as w:
        clients = [await w.connected() for _ in range(2)]
        streams = [await client.get().started() for client in clients]
        await clients[0].text("changed")
        await clients[0].result("resources/subscribe", {"uri": "test://a"})
        await clients[1].text("update", uri="test://a")
        await clients[1].text("changed")
        for stream, expected in zip(streams, (3, 2), strict=True):
            await stream.has(expected)
        assert [m["method"].split("/")[1] for m in streams[0].messages] == [
            "tools", "resources", "tools",
        ]  # fmt: skip
        assert [m["method"].split("/")[1] for m in streams[1].messages] == ["tools", "tools"]


async def test_sessions_come_and_go_and_some_of_their_processes_are_killed() -> None:
    """Each call has an answer, and there is nothing left: of processes, of descriptors."""
    options = {"max_children": 200}
    others = set(children_of(os.getpid()))
    async with child_world(options=options) as w:
        upstream: Any = w.inside.upstream
        await (await w.connected()).delete().done()

        async def one(number: int) -> list[int]:
            client = await w.connected()
            pid = int(await client.text("pid"))
            codes: list[int] = []
            if number % 3 == 0:
                os.kill(pid, signal.SIGKILL)
            for _ in range(3):
                answer = await client.call("count").answer()
                codes.append(answer.get("error", {}).get("code", 0))
            assert (await client.delete().done()).status == 200
            return codes

        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            answered = await asyncio.gather(*(one(number) for number in range(9)))
            assert {code for codes in answered for code in codes} <= {0, -31012}
            assert all(codes[-1] == 0 for codes in answered)
        await until(lambda: not upstream.children._living, "all of them ended", 30)
        assert not upstream.children._slots
        assert len(set(children_of(os.getpid())) - others) <= 1, "the guard"
        await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 3, "they are closed")


# --- a process that dies -------------------------------------------------------------------------


async def test_a_process_that_dies_costs_what_ran_and_the_next_one_is_notified_what_it_knew(
    tmp_path: Path,
) -> None:
    """What ran is answered -31012, also to who asks again with its key, and never runs again."""
    noted = tmp_path / "calls"
    async with child_world(options={"env": {"CALLS": str(noted)}}) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        stream = client.get()
        await stream.started()
        await client.result("resources/subscribe", {"uri": "test://a"})
        await client.result("logging/setLevel", {"level": "error"})
        pid = int(await client.text("pid"))
        running = client.call("wait", meta=keyed("k", session))
        await until(lambda: "wait" in calls(noted), "the call runs")
        await killed(pid)
        assert (await running.error())["code"] == -31012
        assert (await client.call("wait", meta=keyed("k", session)).error())["code"] == -31012
        state = json.loads(await client.text("state"))
        assert state == {"level": "error", "subscribed": ["test://a"]}
        notified = await stream.has(3)
        assert {m["method"] for m in notified} == {
            "notifications/tools/list_changed",
            "notifications/resources/list_changed",
            UPDATED,
        }
        assert calls(noted).count("wait") == 1


async def test_an_idle_process_ends_and_the_next_request_has_another() -> None:
    async with child_world(options={"child_idle": 0.2}) as w:
        client = await w.connected()
        pid = int(await client.text("pid"))
        await until(lambda: not is_alive(pid), "it ended")
        assert int(await client.text("pid")) != pid


async def test_the_process_of_a_connection_that_sleeps_ends_and_it_wakes_with_another() -> None:
    """A process for each session, and a month of sessions."""
    limits: dict[str, Any] = {"conversations": Conversations(), "forget_after": 86_400 * 30}
    async with child_world(options={"child_idle": 86_400}, **limits) as w:
        sleeps, other = await w.connected(), await w.connected()
        pid, others = int(await sleeps.text("pid")), int(await other.text("pid"))
        w.clock.advance(1_799)
        assert int(await other.text("pid")) == others
        w.clock.advance(1)
        assert await w.expire() == 0
        await w.inside.lifecycle.sleep()
        await until(lambda: not is_alive(pid), "the process of who sleeps ended")
        assert is_alive(others)
        assert int(await sleeps.text("pid")) not in (pid, others)


async def test_starts_and_those_that_fail_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(metrics, "child_begun", counted.append)
    async with child_world() as w:
        client = await w.connected()
        await client.text("pid")
        await client.text("pid", meta=in_session((await client.start())["sessionId"]))
    async with child_world("dies", "key") as w:
        with pytest.raises(AssertionError, match="the key is missing"):
            await w.connected()
    assert counted == ["started", "started", "failed"]


async def test_more_processes_than_may_be_are_refused_and_nobody_loses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose end has begun has its room until it is gone: who comes meanwhile waits for it."""
    monkeypatch.setattr(process, "_CLOSING", 0.3)
    monkeypatch.setattr(process, "_TERMINATING", 0.3)
    options = {"max_children": 1, "env": {"CALLS": str(tmp_path / "calls")}}
    async with child_world("stubborn", options=options) as w:
        first = await w.connected()
        second = w.client()
        params = initialize_params("another")
        refused = await second.error("initialize", params)
        assert (refused["code"], refused["data"]["limit"]) == (-31011, "max_children")
        assert await first.text("count") == "1"
        assert (await first.delete().done()).status == 200
        assert "result" in await second.answer("initialize", params)


async def test_who_was_cut_comes_back_for_its_session_though_there_is_room_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its new connection shakes hands like the one before, and takes nobody's process, its own
    session's least of all. What needs a process of its own there is refused.
    """
    monkeypatch.setattr(starts, "EVICTABLE", 0.0)
    async with duplex_world(server=child(max_children=1)) as w:
        peer = await w.connected("websocket")
        session = await peer.start()
        pid = await peer.text("pid")
        for _ in range(3):
            await peer.leave()
            peer = await w.connected("websocket")
            await peer.resume(session["sessionId"], session["sessionEventId"])
            assert await peer.text("pid") == pid
        monkeypatch.setattr(starts, "EVICTABLE", 60.0)
        refused = await peer.answer(await peer.call("pid", meta=in_session(None)))
        assert refused["error"]["data"]["limit"] == "max_children"


async def test_what_a_process_of_another_user_said_in_its_handshake_is_notified_nobody() -> None:
    """Though there is room for no other: who has one comes back to it, and the others do not."""
    async with child_world(options={"max_children": 1}) as w:
        params = initialize_params()
        answers = [
            await RawClient(await w.carrier_of(user(name))).answer("initialize", params)
            for name in ("ann", "ann", "bob")
        ]
        assert answers[0]["result"] == answers[1]["result"]
        assert answers[2]["error"]["data"]["limit"] == "max_children"


async def test_a_session_that_continues_at_another_replica_leaves_that_connection_no_process() -> (
    None
):
    """The one with which it shook hands is of no use; what it used, it keeps."""
    async with duplex_world(server=child()) as w:
        upstream: Any = w.inside.upstream
        peer = await w.connected("websocket")
        session = await peer.start()
        pid = await peer.text("pid")
        for uses in (False, True):
            other = await w.connected("websocket")
            own = await other.text("pid") if uses else None
            await other.resume(session["sessionId"], session["sessionEventId"])
            assert await other.text("pid") == pid
            count = 2 if uses else 1
            await until(lambda count=count: len(upstream.children._living) == count, "one is left")
            if uses:
                assert await other.text("pid", meta=in_session(None)) == own


async def test_a_process_is_as_new_as_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first moment on nobody else has its room, though nothing runs yet that it was
    started for.
    """
    idle_for = list[float]()
    occupy = Slot.occupy

    def occupied(slot: Slot, child: Child) -> None:
        occupy(slot, child)
        idle_for.append(asyncio.get_running_loop().time() - slot.used_at)

    monkeypatch.setattr(Slot, "occupy", occupied)
    async with child_world(options={"max_children": 3}) as w:
        came = await asyncio.gather(*(w.connected() for _ in range(12)), return_exceptions=True)
        begun = [client for client in came if isinstance(client, RawClient)]
        assert [await client.text("count") for client in begun] == ["1"] * 3
    assert len(idle_for) == 3 and max(idle_for) < 1


async def test_who_left_before_it_began_leaves_no_session_and_no_process(tmp_path: Path) -> None:
    """A host that is impatient with a slow start, and tries again."""
    others, began = set(children_of(os.getpid())), tmp_path / "began"
    notes = tmp_path / "notes"
    options = {"max_children": 2, "env": {"CALLS": str(notes)}}
    async with child_world("slow", str(began), options=options) as w:
        params = initialize_params()
        for _ in range(2):
            sent = w.client().send("initialize", params)
            await until(lambda: notes.exists(), "one is asked")
            sent.reply.leave()
            notes.unlink()
        began.touch()
        await until(lambda: len(set(children_of(os.getpid())) - others) <= 1, "only the guard")
        assert await w.layer.sessions.list() == []
        assert await (await w.connected()).text("count") == "1"


async def test_a_process_that_only_said_what_there_is_makes_room_for_a_session() -> None:
    """Clients of the modern era ask that before they have one. Not while somebody listens there."""
    async with child_world(options={"max_children": 1}) as w:
        client = ModernClient(w.carrier)
        await client.send("server/discover").result()
        await client.send("tools/list").result()
        session = (await client.create())["sessionId"]
        pid = await client.text("pid", meta=session_meta(session))
        assert await client.text("pid", meta=session_meta(session)) == pid
    async with child_world(options={"max_children": 2}) as w:
        stream, modern = (await w.connected()).get(), await w.carrier_of(user("ann"))
        for carrier in (w.carrier, modern) * 3:
            # Each takes the room of the other's, which nobody has read of.
            assert (await ModernClient(carrier).send("tools/list").result())["tools"]
        assert not stream.messages
    async with child_world(options={"max_children": 1}) as w:
        client = ModernClient(w.carrier)
        received = await client.listening(None, "test://a")
        session = (await client.create())["sessionId"]
        refused = await client.call("pid", meta=session_meta(session)).error()
        assert refused["data"]["limit"] == "max_children"
        await client.text("update", {"uri": "test://a"})
        assert uris(await received.has_events(1)) == ["test://a"]


async def test_a_session_that_begins_has_the_process_of_the_handshake() -> None:
    """If it was asked for nothing but lists: what else may have left something in it."""
    async with child_world() as w:
        others = set(children_of(os.getpid()))
        client, used = await w.connected(), await w.connected()
        shaken = set(children_of(os.getpid())) - others
        stream = client.get()
        await client.result("tools/list")
        session = (await client.start())["sessionId"]
        pid = int(await client.text("pid", meta=in_session(session)))
        assert pid in shaken
        await client.text("changed", meta=in_session(session))
        assert (await stream.has(1))[0]["params"]["_meta"], "an event of the session"
        # The connection itself has a new one, which is nobody else's.
        outside = int(await client.text("pid", meta=in_session(None)))
        assert outside not in shaken
        assert int(await client.text("pid", meta=in_session(session))) == pid
        own = int(await used.text("pid"))
        in_another = in_session((await used.start())["sessionId"])
        assert int(await used.text("pid", meta=in_another)) not in {own, pid, outside}
        assert int(await used.text("pid", meta=in_session(None))) == own


async def test_a_process_that_names_a_session_is_handed_to_no_other() -> None:
    async with child_world(options={"env": {"OF": "{session}"}}) as w:
        client = await w.connected()
        meta = in_session((await client.start())["sessionId"])
        inside = json.loads(await client.text("environ", meta=meta))["env"]["OF"]
        outside = json.loads(await client.text("environ", meta=in_session(None)))["env"]["OF"]
        assert len(inside) == len(outside) == 32 and inside != outside


async def test_after_a_restart_of_the_layer_a_session_has_a_new_process_and_gets_it(
    tmp_path: Path,
) -> None:
    """Its subscriptions and its log level are those of the store; what its client read is read
    again.
    """
    url = f"sqlite:///{tmp_path}/sessions.db"
    async with child_world(store=url) as w:
        client = await w.connected()
        started = await client.start()
        await client.result("resources/subscribe", {"uri": "test://a"})
        await client.result("logging/setLevel", {"level": "error"})
        before = await client.text("pid")
    async with child_world(store=url, clock=Clock(1_800_000_060)) as w:
        client = await w.connected()
        stream = client.get()
        await client.resume(started["sessionId"], started["sessionEventId"])
        state = json.loads(await client.text("state"))
        assert state == {"level": "error", "subscribed": ["test://a"]}
        assert await client.text("pid") != before
        assert updates(await stream.has(3)) == ["test://a"]


# --- what is refused at once ---------------------------------------------------------------------


def test_what_cannot_be_started_is_refused_when_it_is_named(tmp_path: Path) -> None:
    from mcp_sessions import StdioServer

    plain = tmp_path / "plain"
    plain.write_text("no program")
    with pytest.raises(ConfigurationError, match="command not found: no-such-command"):
        StdioServer("no-such-command")
    with pytest.raises(ConfigurationError, match="not an executable file"):
        StdioServer(str(plain))
    with pytest.raises(ConfigurationError, match="no such directory"):
        child(cwd=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="per"):
        child(per="tenant")


async def test_a_process_has_no_secret_of_the_layers_and_runs_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SESSIONS_KEYS", "k" * 32)
    async with child_world(options={"env": {"OWN": "a b;c"}, "cwd": tmp_path}) as w:
        client = await w.connected()
        seen = json.loads(await client.text("environ"))
        assert seen["env"]["OWN"] == "a b;c" and seen["env"]["PATH"] == os.environ["PATH"]
        assert "MCP_SESSIONS_KEYS" not in seen["env"]
        assert Path(seen["cwd"]) == tmp_path
