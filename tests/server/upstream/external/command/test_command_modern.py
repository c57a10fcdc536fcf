"""A command that speaks the era of 2026-07-28 only: its messages, and its possible faults.

What every modern server gives is in ``tests/server/upstream/external/test_child_eras.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.upstream.external.test_upstream import calls, updates
from tests.support.children import modern_child, until
from tests.support.modern import LOG_LEVEL, ModernClient
from tests.support.raw import Json, initialize_params, text_of
from tests.support.world import world

UPDATED = "notifications/resources/updated"


async def listens(client: Any) -> list[Any]:
    return json.loads(await client.text("listens"))


@pytest.mark.parametrize("misdeed", ["", "answers initialize"])
async def test_one_that_refuses_a_handshake_or_answers_another_version_is_asked_what_it_speaks(
    misdeed: str, tmp_path: Path
) -> None:
    noted = tmp_path / "calls"
    async with world(server=modern_child(misdeed, env={"CALLS": str(noted)})) as w:
        client = w.client(capabilities={"elicitation": {}})
        result = await client.initialize()
        assert result["serverInfo"] == {"name": "child", "version": "1", "ofAnotherKind": True}
        notified = json.loads(await client.text("client"))
        assert notified["io.modelcontextprotocol/clientInfo"] == {"name": "raw", "version": "1"}
        assert notified["io.modelcontextprotocol/clientCapabilities"] == {"elicitation": {}}
        await client.notify("notifications/roots/list_changed")
        assert await client.text("echo", text="hello") == "hello"
    assert calls(noted) == ["started", "listen", "client", "echo"], "no notification is of that era"


async def test_one_that_speaks_neither_era_does_not_start() -> None:
    async with world(server=modern_child("newer")) as w:
        error = await w.client().error(
            "initialize",
            initialize_params(),
        )
        assert error == {"code": -32022, "message": "Unsupported protocol version"}


async def test_a_client_of_its_own_era_has_its_results_and_its_questions() -> None:
    async with world(server=modern_child()) as w:
        client = ModernClient(w.carrier)
        assert await client.text("echo", {"text": "hello"}) == "hello"
        asked = await client.call("ask", {"question": "how many?"}).result()
        assert (asked["resultType"], asked["requestState"]) == ("input_required", "kept")


@pytest.mark.parametrize("per", ["session", "principal", "shared"])
async def test_who_asks_in_its_era_says_so_with_each_request_whoever_shares_the_process(
    per: Any,
) -> None:
    prefix = "io.modelcontextprotocol"
    async with world(server=modern_child(per=per)) as w:
        said: list[tuple[Json, str | None]] = [({"roots": {}}, "debug"), ({"x": {}}, None)]
        for declared, level in said:
            client = ModernClient(w.carrier, capabilities=declared)
            meta = {LOG_LEVEL: level} if level is not None else {}
            for session in (None, (await client.create())["sessionId"]):
                notified = json.loads(await client.text("client", session=session, meta=meta))
                assert notified[f"{prefix}/clientCapabilities"] == declared
                assert notified[f"{prefix}/clientInfo"] == {"name": "raw", "version": "1"}
                assert notified.get(LOG_LEVEL) == level


async def test_a_process_that_ends_between_two_rounds_of_a_call_leaves_its_outcome_unknown(
    tmp_path: Path,
) -> None:
    """KEY3: the call ran there up to its question. Another process would run that part again."""
    noted = tmp_path / "calls"
    async with world(server=modern_child(env={"CALLS": str(noted)})) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask", question="how many?")
        (question,) = await sent.reply.has(1)
        assert (await client.call("die").error())["code"] == -31012
        await client.respond(question, {"action": "accept", "content": {"answer": "two"}})
        assert (await sent.error())["code"] == -31012
        assert calls(noted).count("ask") == 1
        assert await client.text("echo", text="hello") == "hello"


async def test_a_request_of_the_server_is_refused_in_an_era_that_has_none() -> None:
    async with world(server=modern_child()) as w:
        client = await w.connected(capabilities={"roots": {}})
        answer = json.loads(await client.text("question"))
        assert answer["error"]["code"] == -32601


async def test_a_call_that_its_client_gives_up_is_cancelled_on_the_pipe(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    async with world(server=modern_child(env={"CALLS": str(noted)})) as w:
        client = await w.connected()
        sent = client.call("wait")
        await until(lambda: "wait" in calls(noted), "it runs")
        await client.notify("notifications/cancelled", {"requestId": sent.id})
        await until(lambda: len(calls(noted)) > 3, "it was told")
        assert calls(noted) == ["started", "listen", "wait", "cancelled True"]


async def test_it_is_listened_to_for_all_that_is_subscribed_and_once() -> None:
    async with world(server=modern_child()) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()
        for uri in ("test://a", "test://b"):
            await client.result("resources/subscribe", {"uri": uri})
        (wanted,) = await listens(client)
        assert wanted["resourceSubscriptions"] == ["test://a", "test://b"]
        assert wanted["toolsListChanged"] is True
        await client.text("update", uri="test://b")
        assert updates(await stream.has(1)) == ["test://b"]
        await client.result("resources/unsubscribe", {"uri": "test://a"})
        (wanted,) = await listens(client)
        assert wanted["resourceSubscriptions"] == ["test://b"]


async def test_where_one_listen_is_allowed_the_older_one_ends_and_what_it_missed_is_reported() -> (
    None
):
    async with world(server=modern_child("one listen")) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()
        await client.result("resources/subscribe", {"uri": "test://a"})
        (wanted,) = await listens(client)
        assert wanted["resourceSubscriptions"] == ["test://a"]
        notified = await stream.has(2)
        assert "notifications/tools/list_changed" in {m["method"] for m in notified}
        assert updates(notified) == ["test://a"]
        await client.text("update", uri="test://a")
        assert updates(await stream.has(3))[1:] == ["test://a"]


@pytest.mark.parametrize("how", ["answer", "cancel"])
async def test_a_listen_that_the_server_ends_is_begun_again_and_what_it_missed_is_reported(
    how: str,
) -> None:
    async with world(server=modern_child()) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()
        await client.result("resources/subscribe", {"uri": "test://a"})
        sent = client.call("hang up", how=how)
        assert text_of(await sent.result()) == "hung up"
        await stream.has(2)
        assert updates(stream.messages) == ["test://a"]
        assert len(await listens(client)) == 1


async def test_the_next_process_listens_once_for_all_that_is_subscribed(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    async with world(server=modern_child(env={"CALLS": str(noted)})) as w:
        client = await w.connected()
        await client.start()
        uris = [f"test://{number}" for number in range(5)]
        for uri in uris:
            await client.result("resources/subscribe", {"uri": uri})
        assert (await client.call("die").error())["code"] == -31012
        (wanted,) = await listens(client)
        assert wanted["resourceSubscriptions"] == uris
    assert calls(noted)[calls(noted).index("die") :] == ["die", "started", "listen"]
