"""Request keys that hosts send under names of their own (KEY22)."""

import asyncio
import logging
from typing import Any, Literal

import pytest

from mcp_sessions import Conversations, SessionLayer, StdioServer
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import TaskPolicy
from tests.server.requests.test_tasks import CAPABILITIES, ENDED, named, text_of, until
from tests.support.modern import ModernClient
from tests.support.raw import Carrier, Json, RawClient, Reply, call_params
from tests.support.replicas import user
from tests.support.world import Toolbox, World, world

Era = Literal["handshake", "modern"]
ERAS: tuple[Era, ...] = ("handshake", "modern")
HEADER, MEMBER = "Idempotency-Key", "claudecode/toolUseId"
ON = (f"header:{HEADER}", f"meta:{MEMBER}")
REUSED, UNKNOWN = -32600, -31012


async def sent(
    carrier: Carrier,
    era: Era,
    tool: str = "echo",
    *,
    key: object = None,
    member: object = None,
    meta: Json | None = None,
    **arguments: Any,
) -> Any:
    """A call on a connection of its own, with a key in the header or in ``_meta``."""
    headers = {HEADER: str(key)} if key is not None else {}
    given = {**(meta or {}), **({MEMBER: member} if member is not None else {})}
    if era == "modern":
        return ModernClient(carrier).call(tool, arguments, meta=given, headers=headers)
    client = RawClient(carrier)
    await client.initialize()
    return client.send("tools/call", call_params(tool, arguments, given), headers=headers)


async def text(carrier: Carrier, era: Era, *args: Any, **options: Any) -> str:
    result = await (await sent(carrier, era, *args, **options)).result()
    return str(result["content"][0]["text"])


async def alice_in(w: World, *scopes: str) -> Carrier:
    return await w.carrier_of(user("alice", *scopes))


class TwoHeaders:
    """Sends the header of the key once more, as a proxy of another mind may."""

    def __init__(self, inner: Carrier, second: str) -> None:
        self._inner, self._second = inner, second

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        return self._inner.send(method, path, [*headers, (HEADER, self._second)], body)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("place", ["key", "member"])
async def test_a_key_counts_for_its_principal_on_any_connection(era: Era, place: str) -> None:
    async with world(request_keys=ON) as w:
        for _ in range(3):
            said = await text(await alice_in(w), era, **{place: "k", "text": "hi"})
            assert said == "hi"
        assert w.box.calls == ["echo"]


async def test_a_key_counts_in_both_eras_at_once() -> None:
    async with world(request_keys=ON) as w:
        for era in ERAS:
            assert await text(await alice_in(w), era, key="k", text="hi") == "hi"
        assert w.box.calls == ["echo"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_with_another_body_is_a_conflict(era: Era) -> None:
    async with world(request_keys=ON) as w:
        alice = await alice_in(w)
        assert await text(alice, era, key="k", text="hi") == "hi"
        error = await (await sent(alice, era, key="k", text="another")).error()
        assert (error["code"], error["data"]["reason"]) == (REUSED, "key_reused")
        assert w.box.calls == ["echo"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_of_another_principal_is_another_key(era: Era) -> None:
    async with world(request_keys=ON) as w:
        for name in ("alice", "bob"):
            said = await text(await w.carrier_of(user(name)), era, key="k", text=name)
            assert said == name
        assert w.box.calls == ["echo", "echo"]


@pytest.mark.parametrize("places", [ON, (ON[1], ON[0])])
async def test_the_same_text_in_two_places_is_two_keys_and_the_first_place_counts(
    places: tuple[str, ...],
) -> None:
    async with world(request_keys=places) as w:
        alice = await alice_in(w)
        assert await text(alice, "modern", key="k", text="hi") == "hi"
        assert await text(alice, "modern", member="k", text="there") == "there"
        of_header = places is ON
        said = await text(alice, "modern", key="k", member="k", text="hi" if of_header else "there")
        assert said == ("hi" if of_header else "there")
        assert w.box.calls == ["echo", "echo"]


async def test_fewer_scopes_do_not_get_the_answer() -> None:
    """KEY18."""
    async with world(request_keys=ON) as w:
        assert await text(await alice_in(w, "admin"), "modern", key="k", text="hi") == "hi"
        weak = await sent(await alice_in(w), "modern", key="k", text="hi")
        assert (await weak.error())["code"] == UNKNOWN
        assert w.box.calls == ["echo"]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("wrong", ["", "x" * 257])
async def test_a_malformed_key_is_refused(era: Era, wrong: str) -> None:
    """KEY15."""
    async with world(request_keys=ON) as w:
        given: list[Any] = [{"key": wrong}, {"member": wrong}, {"member": 7}]
        for options in given:
            error = await (await sent(await alice_in(w), era, text="hi", **options)).error()
            assert error["code"] == -32602
        assert w.box.calls == []


@pytest.mark.parametrize(("second", "is_refused"), [("j", True), ("", True), ("k", False)])
async def test_a_header_with_two_values_is_no_key(second: str, is_refused: bool) -> None:
    """KEY15: nobody can say which of them its sender means."""
    async with world(request_keys=ON) as w:
        carrier = TwoHeaders(await alice_in(w), second)
        sending = ModernClient(carrier).call("echo", {"text": "hi"}, headers={HEADER: "k"})
        if is_refused:
            assert (await sending.error())["code"] == -32602
        else:
            assert (await sending.result())["content"][0]["text"] == "hi"
        assert w.box.calls == ([] if is_refused else ["echo"])


async def test_a_key_means_nothing_unless_its_place_is_named() -> None:
    for places in ((), ("header:X-Other",)):
        async with world(request_keys=places) as w:
            alice = await alice_in(w)
            for _ in range(2):
                assert await text(alice, "modern", key="k", member="k", text="hi") == "hi"
            assert w.box.calls == ["echo", "echo"]


async def test_the_key_of_a_stranger_has_nobodys_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Without authentication everybody is one principal."""
    async with world(request_keys=ON) as w:
        for era in ERAS:
            for said in ("mine", "yours", "yours"):
                assert await text(w.carrier, era, key="k", text=said) == said
        assert w.box.calls == ["echo"] * 6
    ignored = [each for each in caplog.records if "request key is ignored" in each.message]
    assert [each.levelno for each in ignored] == [logging.WARNING]


async def test_an_mcp_session_id_is_enough_without_authentication() -> None:
    async with world(request_keys=ON) as w:
        one, other = await w.connected(), await w.connected()
        for client in (one, one, other):
            reply = client.send(
                "tools/call", call_params("echo", {"text": "hi"}), headers={HEADER: "k"}
            )
            assert (await reply.result())["content"][0]["text"] == "hi"
        assert w.box.calls == ["echo", "echo"]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("who", [None, "alice"])
async def test_a_key_counts_in_its_conversation(era: Era, who: str | None) -> None:
    async with world(request_keys=ON, conversations=Conversations()) as w:
        carrier = w.carrier if who is None else await w.carrier_of(user(who))
        for chat in ("one", "two", "one", "two"):
            meta = {"openai/session": chat}
            assert await text(carrier, era, key="k", meta=meta, text=chat) == chat
        assert w.box.calls == ["echo", "echo"]


async def test_a_key_counts_though_its_call_starts_a_session_by_a_handle() -> None:
    async with world(request_keys=ON, conversations=Conversations(handle={"echo"})) as w:
        alice = await alice_in(w)
        one, two = [
            await (await sent(alice, "modern", key="k", text="hi")).result() for _ in range(2)
        ]
        assert one == two
        assert w.box.calls == ["echo"]


async def test_in_a_session_it_is_a_request_key_of_the_session() -> None:
    async with world(request_keys=ON) as w:
        client = ModernClient(w.carrier)
        sessions = [(await client.start())["sessionId"] for _ in range(2)]
        for session in (sessions[0], sessions[0], sessions[1]):
            reply = client.call("echo", {"text": "hi"}, session=session, headers={HEADER: "k"})
            assert (await reply.result())["content"][0]["text"] == "hi"
        assert w.box.calls == ["echo", "echo"]
        stored = await w.layer.store.all_sessions()
        assert {each.mode for each in stored} == {Mode.PROTOCOL}


async def test_a_request_key_of_its_own_comes_first() -> None:
    async with world(request_keys=ON) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        for key in ("a", "b"):
            options: Json = {"session": session, "key": key, "headers": {HEADER: "k"}}
            await client.call("echo", {"text": "hi"}, **options).result()
        assert w.box.calls == ["echo", "echo"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_whose_response_broke_runs_on_and_its_answer_is_kept(era: Era) -> None:
    async with world(request_keys=ON) as w:
        alice = await alice_in(w)
        cut = await w.waits(await sent(alice, era, "wait", key="k", gate="g"))
        reply: Reply = cut if isinstance(cut, Reply) else cut.reply
        reply.leave()
        await reply.gone()
        again = await sent(await alice_in(w), era, "wait", key="k", gate="g")
        w.box.gate("g").go.set()
        assert (await again.result())["content"][0]["text"] == "through g"
        assert await text(await alice_in(w), era, "wait", key="k", gate="g") == "through g"
        assert w.box.calls == ["wait"]


async def test_the_same_key_twice_at_once_runs_once() -> None:
    async with world(request_keys=ON) as w:
        calls = [await sent(await alice_in(w), "modern", "wait", key="k", gate="g") for _ in "ab"]
        await w.waits(calls[0])
        w.box.gate("g").go.set()
        for call in calls:
            assert (await call.result())["content"][0]["text"] == "through g"
        assert w.box.calls == ["wait"]


async def test_each_round_of_a_call_is_a_request_of_its_own() -> None:
    """A host sends the same text with each round."""
    async with world(request_keys=ON) as w:
        client = ModernClient(await alice_in(w), capabilities={"elicitation": {}})
        options: Json = {"headers": {HEADER: "k"}}
        first, asked = [
            await client.call("ask", {"question": "who?"}, **options).result() for _ in range(2)
        ]
        assert asked == first
        assert asked["resultType"] == "input_required"
        [key] = asked["inputRequests"]
        for answer in ("me", "me"):
            params: Json = {
                **call_params("ask", {"question": "who?"}),
                "inputResponses": {key: {"action": "accept", "content": {"answer": answer}}},
                "requestState": asked["requestState"],
            }
            result = await client.send("tools/call", params, **options).result()
            assert result["content"][0]["text"] == "accept: me"
        assert w.box.calls == ["ask"]


async def test_a_call_that_became_a_task_is_answered_with_it_again() -> None:
    """TSK2."""
    async with world(request_keys=ON, tasks=TaskPolicy(always={"wait"})) as w:
        client = ModernClient(await alice_in(w), capabilities=CAPABILITIES)
        one, two = [
            await client.call("wait", {"gate": "g"}, meta={MEMBER: "k"}).result() for _ in "ab"
        ]
        assert one["taskId"] == two["taskId"]
        w.box.gate("g").go.set()
        polled = await until(client, one, *ENDED)
        assert text_of(polled) == "through g"
        # The host names the same use of a tool in its polls.
        again = await client.send("tasks/get", named(one), meta={MEMBER: "k"}).result()
        assert again == polled
        assert w.box.calls == ["wait"]


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("era", ERAS)
async def test_who_does_not_declare_tasks_gets_none_by_a_key(era: Era, is_over: bool) -> None:
    """KEY11: such a client has no way to poll it, and the call does not run again."""
    async with world(request_keys=ON, tasks=TaskPolicy(after=0.05)) as w:
        alice = await alice_in(w)
        client = ModernClient(alice, capabilities=CAPABILITIES)
        first = client.call("wait", {"gate": "g"}, meta={MEMBER: "k"})
        if is_over:
            assert (await first.result())["resultType"] == "task"
        else:
            async with asyncio.timeout(30):
                await w.box.gate("g").started.wait()
        error = await (await sent(alice, era, "wait", member="k", gate="g")).error()
        assert error["code"] == UNKNOWN
        assert (await first.result())["resultType"] == "task"
        assert w.box.calls == ["wait"]


# --- how long -------------------------------------------------------------------------------


async def test_a_key_is_known_for_its_lifetime_and_no_longer() -> None:
    """Also if that is longer than a session lives without a request (KEY12)."""
    limits: Json = {"idle_timeout": 60, "forget_after": 60, "request_key_lifetime": 3_600}
    async with world(request_keys=ON, max_lifetime=120, **limits) as w:
        alice = await alice_in(w)
        assert await text(alice, "modern", key="k", text="hi") == "hi"
        for passed in (1_800, 1_799):
            w.clock.advance(passed)
            await w.expire()
            assert await text(await alice_in(w), "modern", key="k", text="hi") == "hi"
        assert w.box.calls == ["echo"]
        w.clock.advance(3_602 + 60)
        await w.expire()
        assert await w.layer.store.all_sessions() == []


async def test_other_sessions_of_the_principal_do_not_push_its_keys_out() -> None:
    async with world(
        request_keys=ON, conversations=Conversations(), max_sessions=100, max_sleeping_bytes=1
    ) as w:
        alice = await alice_in(w)
        assert await text(alice, "modern", key="k", text="hi") == "hi"
        w.clock.advance(61)
        for number in range(20):
            meta = {"openai/session": str(number)}
            await text(alice, "modern", meta=meta, text="x")
            w.clock.advance(61)
        await w.inside.lifecycle.sleep()
        assert await text(alice, "modern", key="k", text="hi") == "hi"
        assert w.box.calls.count("echo") == 21


async def test_principals_beyond_the_room_are_refused_until_keys_are_forgotten() -> None:
    async with world(request_keys=ON, max_sessions=20, request_key_lifetime=100) as w:
        for name in ("a", "b"):
            await text(await w.carrier_of(user(name)), "modern", key="k", text=name)
        late = await w.carrier_of(user("c"))
        error = await (await sent(late, "modern", key="k", text="c")).error()
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_sessions")
        assert await text(late, "modern", text="c") == "c"
        assert w.box.calls == ["echo"] * 3
        w.clock.advance(161)
        assert await text(late, "modern", key="k", text="c") == "c"


async def test_such_a_session_is_not_listed_and_its_principal_has_it_not() -> None:
    async with world(request_keys=ON, max_sessions_per_principal=1) as w:
        alice = ModernClient(await alice_in(w))
        await alice.call("echo", {"text": "hi"}, headers={HEADER: "k"}).result()
        assert await w.layer.sessions.list() == []
        await alice.start()
        [stored] = [each for each in await w.layer.store.all_sessions() if each.mode is Mode.KEYS]
        error = await alice.call("echo", {"text": "hi"}, session=stored.session_id).error()
        assert error["code"] == -32043


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["Idempotency-Key", "env:X", "header:", "meta:", ""])
def test_a_place_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="request_keys must be header:NAME or meta:NAME"):
        SessionLayer(Toolbox().server, request_keys=[wrong])


def test_request_keys_need_a_store() -> None:
    with pytest.raises(ConfigurationError, match="need a store"):
        SessionLayer(Toolbox().server, store=None, request_keys=ON)


async def test_nothing_waits_for_a_key_of_another_principal() -> None:
    async with world(request_keys=ON) as w:
        held = await w.waits(await sent(await alice_in(w), "modern", "wait", key="k", gate="g"))
        async with asyncio.timeout(5):
            said = await text(await w.carrier_of(user("bob")), "modern", key="k", text="hi")
        assert said == "hi"
        w.box.gate("g").go.set()
        await held.result()


def test_a_command_is_served_with_them_as_well() -> None:
    assert SessionLayer(StdioServer("true"), request_keys=ON)
