"""A conversation whose host starts no session, and whose requests come to any replica."""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions import Conversations, SessionSecurity
from mcp_sessions.core.conversation_keys import KNOWN_HOSTS, PLATFORM, Rule
from mcp_sessions.server.requests.handle import current_session
from tests.support.modern import ModernClient
from tests.support.raw import Carrier, Json, RawClient, call_params
from tests.support.replicas import Cluster, cluster, user
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.world import Ctx, World

META = {"openai/session": "one"}


def keyed(key: str) -> Json:
    return {"openai/session": key}


def tools(w: World) -> None:
    """Adds ``count``, which counts in its session, and ``name``, which says its id."""

    async def count(ctx: Ctx, arguments: Json) -> str:
        async with current_session().data.edit() as data:
            data["n"] = data.get("n", 0) + 1
            return f"{current_session().source} {data['n']}"

    async def name(ctx: Ctx, arguments: Json) -> str:
        return current_session().id

    w.box.tools.update(count=count, name=name)


@pytest.mark.parametrize("seed", range(5))
async def test_two_first_requests_at_once_make_one_session(seed: int) -> None:
    """And every later one finds it, wherever it comes, in each era."""
    security = SessionSecurity(["k" * 32])
    async with cluster(3, seed=seed, security=security, conversations=Conversations()) as c:
        for w in c.worlds:
            tools(w)
        calls = [ModernClient(w.carrier).text("name", meta=META) for w in c.worlds]
        calls += [w.client().text("name", meta=META) for w in c.worlds]
        assert len(set(await asyncio.gather(*calls))) == 1

        said = [await ModernClient(w.carrier).text("count", meta=META) for w in c.worlds]
        said += [await (await w.connected()).text("count", meta=META) for w in c.worlds]
        assert said == [f"conversation {n}" for n in range(1, 7)]
        modes = [each.mode for each in await c[0].layer.sessions.list()]
        assert modes.count("conversation") == 1


@pytest.mark.in_process
@pytest.mark.parametrize("seed", range(5))
async def test_a_flood_at_two_replicas_takes_its_senders_slots_only(seed: int) -> None:
    """However many come at once, and wherever: what goes is his, unused, and running nowhere."""
    security = SessionSecurity(["k" * 32])
    async with cluster(
        2,
        seed=seed,
        security=security,
        conversations=Conversations(),
        max_sessions=6,
        max_sessions_per_principal=4,
    ) as c:
        for w in c.worlds:
            tools(w)
        anns = [await w.carrier_of(user("ann")) for w in c.worlds]
        bobs = [await w.carrier_of(user("bob")) for w in c.worlds]

        async def flood(word: str) -> int:
            """How many of twenty new conversations have a session."""
            calls = [
                ModernClient(anns[n % 2]).call("echo", {"text": word}, meta=keyed(f"{word} {n}"))
                for n in range(20)
            ]
            assert len([await call.result() for call in calls]) == 20
            sessions = await c[0].layer.sessions.list()
            mine = [each for each in sessions if each.principal.subject == "ann"]
            assert len(mine) <= 4 and len(sessions) <= 6
            return len(mine)

        for carrier in bobs:
            await ModernClient(carrier).text("count", meta=keyed("his"))
        running = await c[0].waits(
            ModernClient(anns[0]).call("wait", {"gate": "g"}, meta=keyed("at work"))
        )
        assert await flood("first") == 4
        c.clock.advance(70)
        for w in c.worlds:
            await w.expire()
        before = {each.id for each in await c[0].layer.sessions.list()}
        assert await flood("second") == 4
        after = {each.id for each in await c[0].layer.sessions.list()}
        # His, hers that is running, and one or more that came in place of what nobody used.
        assert len(before & after) < len(before)
        assert await ModernClient(bobs[1]).text("count", meta=keyed("his")) == "conversation 3"
        c[0].box.gate("g").go.set()
        assert (await running.result())["content"][0]["text"] == "through g"
        assert await ModernClient(anns[1]).text("count", meta=keyed("at work")) == "conversation 1"


# --- every host, every way --------------------------------------------------------------------

ERAS = ("handshake", "modern")
EVERY = Conversations(anonymous=True, platform_ids=True, per_principal=True)


async def called(carrier: Carrier, era: str, rule: Rule | None, key: str) -> Json:
    """The result of a call of ``count``, on a connection of its own, that says a key."""
    meta: Json = {rule.name: key} if rule is not None and rule.source == "meta" else {}
    headers = {rule.name: key} if rule is not None and rule.source == "header" else {}
    if era == "modern":
        return await ModernClient(carrier).call("count", meta=meta, headers=headers).result()
    client = RawClient(carrier)
    if rule is not PLATFORM:
        # A platform's id is on every request, so there is no connection of the server's.
        await client.initialize()
    params = call_params("count", {}, meta)
    return await client.send("tools/call", params, headers=headers).result()


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("rule", [*KNOWN_HOSTS, PLATFORM, None], ids=str)
async def test_a_hosts_three_calls_at_three_replicas_are_one_session(
    rule: Rule | None, era: str
) -> None:
    """None: the user has one. The answers have nothing that an answer without has not."""
    security = SessionSecurity(["k" * 32])
    async with cluster(3, security=security, conversations=EVERY) as c:
        said: list[Json] = []
        for w in c.worlds:
            tools(w)
            said.append(await called(await w.carrier_of(user("ann")), era, rule, "one"))
        bob = await c[1].carrier_of(user("bob"))
        said += [await called(bob, era, rule, "one"), await called(bob, era, rule, "two")]
        last = 2 if rule is None else 1
        assert [result["content"][0]["text"] for result in said] == [
            f"conversation {n}" for n in (1, 2, 3, 1, last)
        ]
        if era == "modern":
            plain = await ModernClient(c[1].carrier).call("echo", {"text": "a"}).result()
        else:
            plain = await (await c[1].connected()).call("echo", text="a").result()
        assert {frozenset(result) for result in said} == {frozenset(plain)}


class Call(NamedTuple):
    """By somebody, somehow, of some conversation."""

    replica: int
    era: str
    who: int
    rule: Rule
    key: str
    """Of two digits: the id of a session that is there, as others read it in a log."""


PRINCIPALS = [None, user("ann"), user("ann", "write"), user("bob")]
OWNERS = [0, 1, 1, 3]
CALLS = st.builds(
    Call,
    st.integers(0, 1),
    st.sampled_from(ERAS),
    st.integers(0, len(PRINCIPALS) - 1),
    st.sampled_from([*KNOWN_HOSTS, PLATFORM]),
    st.sampled_from(["one", "two", "03", "07"]),
)


@given(st.lists(CALLS, min_size=2, max_size=14))
@settings(max_examples=25)
def test_a_session_is_of_who_sends_what_under_which_name(calls: list[Call]) -> None:
    """CNV4, CNV8: two users with one key have two sessions, on every route; one text under two
    names is two; and whoever says the id of a session, or what handlers are shown of one, has
    one of his own.
    """

    async def play() -> None:
        security = SessionSecurity(["k" * 32])
        async with cluster(2, security=security, conversations=EVERY) as c:
            for w in c.worlds:
                tools(w)
            await expect_each_its_own(c, calls)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(play())


async def expect_each_its_own(c: Cluster, calls: list[Call]) -> None:
    counted: Counter[Any] = Counter()
    # A session of the protocol, that nobody of these started.
    client = RawClient(await c[0].carrier_of(user("eve")))
    await client.initialize()
    await client.start()
    assert await client.text("count") == "session 1"
    for call in calls:
        key = call.key
        if key.isdigit():
            known = sorted(each.id for each in await c[0].layer.sessions.list())
            key = known[int(key) % len(known)]
            if call.rule is PLATFORM:
                # That is how a client names its own connection, and is answered 404 for another.
                continue
        carrier = await c[call.replica].carrier_of(PRINCIPALS[call.who])
        result = await called(carrier, call.era, call.rule, key)
        session = (OWNERS[call.who], call.rule.name, key)
        counted[session] += 1
        assert result["content"][0]["text"] == f"conversation {counted[session]}"
    assert await client.text("count") == "session 2"
