"""The rule that keeps clients of one child apart, as a property: `external/cause.py`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.ids import SessionId
from mcp_sessions.server.upstream.external import cause
from mcp_sessions.server.upstream.external.cause import BEHIND, LATE, UnansweredRequests
from mcp_sessions.server.upstream.port import UpstreamCall
from tests.support.puppets import (
    QUESTION,
    Json,
    Puppet,
    PuppetCall,
    PuppetWorld,
    owner_of,
    puppet_world,
    settled,
)

ELICITS: Json = {"elicitation": {}}
LOG = "notifications/message"


@dataclass(frozen=True)
class Kind:
    """How a client asks."""

    method: str
    params: Json
    capabilities: Json = field(default_factory=dict[str, Any])
    level: str | None = None
    session: str | None = None
    handshake: bool = False

    @property
    def can_be_asked(self) -> bool:
        """Whether its request may have a question for an answer, or its client can be asked."""
        named = self.method in ("tools/call", "prompts/get", "resources/read")
        return bool(self.capabilities) and (named or self.handshake)


TOOL: Json = {"name": "it"}
COMPLETES: Json = {"ref": {"type": "ref/prompt", "name": "it"}, "argument": {"name": "a"}}
KINDS = {
    "asks": Kind("tools/call", TOOL, ELICITS),
    "asks and hears": Kind("tools/call", TOOL, ELICITS, "debug"),
    "gets": Kind("prompts/get", TOOL, ELICITS),
    "reads": Kind("resources/read", {"uri": "test://a"}, ELICITS, "debug"),
    "completes": Kind("completion/complete", COMPLETES, ELICITS, "debug"),
    "lists": Kind("tools/list", {}, ELICITS),
    "hears": Kind("tools/call", TOOL, {}, "debug"),
    "mute": Kind("tools/call", TOOL),
    "one": Kind("tools/call", TOOL, ELICITS, "debug", "one"),
    "two": Kind("completion/complete", COMPLETES, ELICITS, "debug", "two"),
    "old one": Kind("tools/call", TOOL, ELICITS, None, "old", True),
    "old": Kind("tools/call", TOOL, {}, None, None, True),
}
OFTEN = ("question", "log", "cancel", "answer")
ACTIONS = (*OFTEN, *OFTEN, "other", "progress", "task", "reply", "late")
Step = tuple[str, Any]


@st.composite
def stories(draw: st.DrawFn) -> list[Step]:
    """What happens, in order: few kinds of clients at a time, so that they meet."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=3))
    begin = st.tuples(st.just("begin"), st.sampled_from(kinds))
    act = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5))
    return draw(st.lists(st.one_of(begin, act, act), min_size=12, max_size=24))


class Story:
    """Some clients, the puppets that serve them, and what must hold."""

    def __init__(self, w: PuppetWorld, most: int, *, is_url: bool, per: str) -> None:
        self.w = w
        self.most = most
        self.is_url = is_url
        self.per = per
        self.kinds: dict[str, Kind] = {}
        """By owner."""

        self.gone: set[str] = set()
        """Owners without a session that cancelled."""

        self.answered: list[tuple[Puppet, Json, set[int]]] = []
        """What was answered, and what was open next to it."""

        self.questions = 0
        self.begun = 0

    async def begin(self, name: str) -> None:
        """Another request: of a new client, or in its client's session."""
        kind = KINDS[name]
        self.begun += 1
        owner = kind.session or f"{name} {self.begun}"
        self.kinds[owner] = kind
        await self.send(owner, {})
        running = [(p, r) for p, r in self.running() if owner_of(r) == owner]
        is_alone = kind.capabilities and kind.can_be_asked and kind.session is None
        if is_alone and self.per == "session" and not kind.handshake and running:
            ((puppet, _),) = running
            is_full = len(self.w.puppets.all) >= max(1, self.most // 2)
            assert len(puppet.unanswered) == 1 or is_full, "it shares, and there is room"

    async def send(self, owner: str, more: Json) -> None:
        """A request of a client that is known."""
        kind = self.kinds[owner]
        self.w.send(
            owner,
            kind.method,
            {**kind.params, **more},
            capabilities=kind.capabilities,
            level=kind.level,
            session=kind.session,
            handshake=kind.handshake,
        )
        await settled()

    def running(self) -> list[tuple[Puppet, Json]]:
        """What the puppets have not answered, also what nobody waits for."""
        return [(p, r) for p in self.w.puppets.all for r in p.unanswered.values()]

    async def act(self, action: str, number: int) -> None:
        """Something happens to one of the requests."""
        if action in ("cancel", "reply"):
            tasks = [t for t in self.w.tasks if t.done() == (action == "reply")]
            if tasks:
                await self.client_acts(action, tasks[number % len(tasks)])
            return
        if action == "late":
            if self.answered:
                await self.late(*self.answered[number % len(self.answered)], number)
            return
        running = self.running()
        if not running:
            return
        puppet, request = running[number % len(running)]
        if action == "answer":
            puppet.answer(request["id"])
            self.answered.append((puppet, request, set(puppet.unanswered)))
        elif action == "question":
            await self.question(puppet, request, on=self.is_url and number % 3 == 0)
        else:
            methods = {"log": LOG, "progress": "notifications/progress"}
            methods["task"] = "notifications/tasks/status"
            message = said(methods.get(action, "notifications/other"), request)
            if self.is_url and number % 3 == 0 and action != "progress":
                puppet.say_on(request["id"], message)
            else:
                puppet.say(message)
        await settled()

    async def late(self, puppet: Puppet, request: Json, others: set[int], number: int) -> None:
        """Something is said about a request that was answered, while others were open."""
        if not others.issuperset(puppet.unanswered):
            return
        if self.is_url or number % 2:
            puppet.say(said(LOG, request))
        else:
            self.questions += 1
            name = f"q{self.questions}"
            puppet.say({"id": name, **said(QUESTION, request, str(self.questions))})
            await settled()
            owners = {owner_of(each) for each in puppet.unanswered.values()}
            is_one = owners <= {owner_of(request)} or puppet.slot.clients.is_one_client
            assert is_one or self.who_was_asked(str(self.questions)) == []
        await settled()

    async def client_acts(self, action: str, task: asyncio.Task[Json]) -> None:
        """Its client gives it up, or brings the answers."""
        owner = self.w.tasks[task].owner
        if action == "cancel":
            task.cancel()
            if self.kinds[owner].session is None:
                self.gone.add(owner)
        elif not task.cancelled() and "inputRequests" in task.result():
            answers = {name: {"action": "decline"} for name in task.result()["inputRequests"]}
            state = task.result()["requestState"]
            await self.send(owner, {"inputResponses": answers, "requestState": state})
        await settled()

    async def question(self, puppet: Puppet, request: Json, *, on: bool) -> None:
        """A request has its puppet ask; a lone one is asked, and no question is left open."""
        owner, kind = owner_of(request), self.kinds[owner_of(request)]
        self.questions += 1
        name = f"q{self.questions}"
        message = {"id": name, **said(QUESTION, request, str(self.questions))}
        others = [each for p, _, each in self.answered if p is puppet]
        is_lone = on or (
            len(puppet.unanswered) == 1 and not any(request["id"] in each for each in others)
        )
        is_there = puppet in self.w.puppets.living and not self.is_away(owner)
        puppet.say_on(request["id"], message) if on else puppet.say(message)
        await settled()
        asked = self.who_was_asked(str(self.questions))
        assert asked in ([], [owner]), "it was asked of another client"
        can_be_asked = kind.can_be_asked and self.per == "session" and owner not in self.gone
        if is_lone and can_be_asked and is_there:
            assert asked == [owner], "nobody else can have asked"
        if is_there:
            assert asked or name in puppet.answers, "it is neither asked nor refused"

    def is_away(self, owner: str) -> bool:
        """Whether something of it waits for answers that its client did not bring."""
        done = [t for t, c in self.w.tasks.items() if c.owner == owner and t.done()]
        return bool(done)

    def who_was_asked(self, number: str) -> list[str]:
        """The owners that a question came to."""
        received = [(c, m) for c in self.w.calls for m in c.received if m["method"] == QUESTION]
        found = [c.owner for c, m in received if m["params"]["number"] == number]
        for task, call in self.w.tasks.items():
            if task.done() and not task.cancelled():
                inputs = task.result().get("inputRequests", {})
                found += [call.owner for i in inputs.values() if i["params"]["number"] == number]
        return found

    def expect_no_crossing(self) -> None:
        """Nobody received anything of anybody else."""
        for call in self.w.calls:
            for message in call.received:
                assert message["params"].get("owner", call.owner) == call.owner, message
        for task, call in self.w.tasks.items():
            if task.done() and not task.cancelled():
                result = task.result()
                assert result.get("owner", call.owner) == call.owner, result
                for asked in result.get("inputRequests", {}).values():
                    assert asked["params"]["owner"] == call.owner, result


def said(method: str, request: Json, number: str = "") -> Json:
    """What a puppet says about a request, with whose that is."""
    params: Json = {"owner": owner_of(request), "number": number}
    match method:
        case "notifications/progress":
            meta: Json = request["params"].get("_meta") or {}
            token = meta.get("progressToken")
            params |= {"progressToken": token, "progress": 1}
        case "notifications/message":
            params |= {"level": "error", "data": "x"}
        case "notifications/tasks/status":
            params |= {"taskId": f"of {owner_of(request)}", "status": "working"}
        case _:
            params |= {"message": "well?", "requestedSchema": {"type": "object"}}
    return {"method": method, "params": params}


async def expect_nothing_crosses(
    steps: Sequence[Step], most: int, *, is_url: bool, per: str
) -> None:
    """Tell a story, and look after each of its steps."""
    async with puppet_world(is_url=is_url, per=per, most=most) as w:
        story = Story(w, most, is_url=is_url, per=per)
        for name, which in steps:
            if name == "begin":
                await story.begin(which)
            else:
                await story.act(name, which)
            story.expect_no_crossing()


@pytest.mark.parametrize("per", ["session", "principal", "shared"])
@pytest.mark.parametrize("is_url", [False, True], ids=["command", "url"])
def test_nothing_of_one_client_reaches_another_and_a_lone_one_can_be_asked(
    is_url: bool, per: str
) -> None:
    """Clients of each kind ask, cancel, answer and leave; their servers say what they like."""

    @given(stories(), st.sampled_from([1, 2, 20]))
    def run(steps: list[Step], most: int) -> None:
        asyncio.run(expect_nothing_crosses(steps, most, is_url=is_url, per=per))

    run()


def tokens(own: int) -> dict[str, Any]:
    """What a client may write as its token, so that a child gives another request's id back."""
    return {
        "integer": own,
        "text": str(own),
        "float": float(own),
        "bool": True,
        "list": [own],
        "object": {"progressToken": own},
        "huge": 10**40 + own,
        "negative": -own,
        "zero": 0,
        "fraction": own + 0.5,
        "empty": "",
    }


@pytest.mark.parametrize("kind", tokens(1))
@pytest.mark.parametrize("per", ["principal", "shared"])
@pytest.mark.parametrize("is_url", [False, True], ids=["command", "url"])
def test_no_token_that_a_client_wrote_reaches_a_child(is_url: bool, per: str, kind: str) -> None:
    """A child gives it back, and a token could be the id of another client's request."""

    async def run() -> None:
        async with puppet_world(is_url=is_url, per=per) as w:
            w.send("A", "tools/call", TOOL, handshake=True)
            await settled()
            (puppet,) = w.puppets.all
            (own,) = puppet.unanswered
            token = tokens(own)[kind]
            w.send("B", "tools/call", TOOL, handshake=True, token=token)
            await settled()
            sent = puppet.unanswered[max(puppet.unanswered)]
            assert owner_of(sent) == "B"
            is_valid = isinstance(token, (str, int)) and not isinstance(token, bool)
            expected = {"progressToken": sent["id"]} if is_valid else {}
            assert sent["params"]["_meta"] == expected
            puppet.say(said("notifications/progress", sent))
            await settled()
            received = {call.owner: len(call.received) for call in w.calls}
            assert received == {"A": 0, "B": 1 if is_valid else 0}

    asyncio.run(run())


@pytest.mark.parametrize("per", ["session", "principal", "shared"])
def test_only_a_child_of_one_client_is_sent_its_notifications(per: str) -> None:
    """What a shared one says because of a notification would be another client's."""

    async def run() -> None:
        async with puppet_world(per=per) as w:
            w.send("A", "tools/call", TOOL, session="a", handshake=True)
            await settled()
            (puppet,) = w.puppets.all
            await w.notify("a" if per == "session" else "b", "notifications/roots/list_changed")
            await settled()
            notified = [
                m["method"] for m in puppet.notified if m["method"] != "notifications/initialized"
            ]
            assert notified == (["notifications/roots/list_changed"] if per == "session" else [])

    asyncio.run(run())


# --- what is known of one child ------------------------------------------------------------------

A, B = (cast(UpstreamCall, PuppetCall(name)) for name in "AB")


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio's own loop."""
    return "asyncio"


@pytest.mark.anyio
async def test_with_too_many_that_are_given_up_none_is_the_only_one_again() -> None:
    unanswered = UnansweredRequests()
    for number in range(2_000):
        unanswered.sent(number, A, {})
        unanswered.given_up(number)
    for number in range(2_000):
        unanswered.answered(number)
    unanswered.sent(5_000, B, {})
    assert unanswered.cause(LOG, {}).known is None


@pytest.mark.anyio
async def test_a_task_is_about_the_request_that_names_it_and_no_other() -> None:
    """It goes on after the answer of the request that began it."""
    unanswered = UnansweredRequests()
    about: Json = {"_meta": {"io.modelcontextprotocol/related-task": {"taskId": "t"}}}
    unanswered.sent(1, A, {"name": "it"})
    assert unanswered.cause(QUESTION, about).known is None
    unanswered.sent(2, B, {"taskId": "t"})
    assert unanswered.cause(QUESTION, about).known is B
    assert unanswered.cause("notifications/tasks/status", {"taskId": "t"}).known is B
    assert unanswered.cause("notifications/tasks/status", {"taskId": "u"}).known is None
    unanswered.sent(3, B, {"taskId": "None"})
    assert unanswered.cause("notifications/tasks/status", {}).known is None
    unanswered.sent(4, B, {"taskId": ""})
    assert unanswered.cause("notifications/tasks/status", {"taskId": [1]}).known is None


@pytest.mark.anyio
async def test_an_elicitation_is_complete_for_who_was_asked_and_no_other() -> None:
    unanswered = UnansweredRequests()
    complete = "notifications/elicitation/complete"
    unanswered.sent(1, A, {})
    assert unanswered.cause(QUESTION, {"mode": "url", "elicitationId": "e"}).known is A
    unanswered.sent(2, B, {})
    assert unanswered.cause(complete, {"elicitationId": "e"}).known is A
    unanswered.answered(1)
    assert unanswered.cause(complete, {"elicitationId": "e"}).known is None, "not B's"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [1_000.0]
    loop = SimpleNamespace(time=lambda: time[0])
    monkeypatch.setattr(cause.asyncio, "get_running_loop", lambda: loop)
    return time


def test_a_request_counts_until_it_is_answered_whatever_became_of_it(now: list[float]) -> None:
    unanswered = UnansweredRequests()
    assert unanswered.cause(LOG, {}).known is None
    unanswered.sent(1, A, {})
    assert unanswered.cause(LOG, {}).known is A
    unanswered.sent(2, None, {})
    assert unanswered.cause(LOG, {}).known is None, "the layer's own counts, too"
    unanswered.answered(2)
    unanswered.sent(3, B, {})
    unanswered.given_up(3)
    assert unanswered.cause(LOG, {}).known is None, "the child may work on it"
    unanswered.answered(3)
    now[0] += LATE
    assert unanswered.cause(LOG, {}).known is A
    unanswered.given_up(1)
    assert unanswered.cause(LOG, {}).known is None, "nobody waits for it"


def test_what_may_come_late_is_unowned_shortly_after_an_answer(now: list[float]) -> None:
    """A URL's own stream may be behind its answers; of whichever request."""
    unanswered = UnansweredRequests()
    unanswered.sent(1, A, {})
    assert unanswered.cause(LOG, {}, is_late=True).known is A
    unanswered.answered(1)
    unanswered.sent(2, B, {})
    assert unanswered.cause(LOG, {}, is_late=True).known is None
    assert unanswered.cause(QUESTION, {}).known is B
    now[0] += BEHIND
    assert unanswered.cause(QUESTION, {}, is_late=True).known is B


def logging_late(now: list[float]) -> UnansweredRequests:
    """Those of a child that logged something a while ago, after it had answered."""
    unanswered = UnansweredRequests()
    unanswered.sent(0, A, {})
    unanswered.answered(0)
    assert unanswered.cause(LOG, {}).known is None
    now[0] += LATE
    return unanswered


def test_a_client_that_calls_twice_on_a_connection_gets_the_log_of_both(
    now: list[float],
) -> None:
    """Outside of sessions, too. Another connection may be another client's."""

    def call(port: int) -> UpstreamCall:
        scope = {"client": ("127.0.0.1", port), "headers": [(b"host", b"127.0.0.1")]}
        return cast(UpstreamCall, PuppetCall("A", context=SimpleNamespace(scope=scope)))

    unanswered = logging_late(now)
    first, second, others = call(50_000), call(50_000), call(50_001)
    for number, each in enumerate((first, second, others), 1):
        unanswered.sent(number, each, {})
        assert unanswered.cause(LOG, {}).known is (each if each is not others else None)
        unanswered.answered(number)
        now[0] += 0.1


def test_what_another_session_was_answered_counts_also_against_a_later_request(
    now: list[float],
) -> None:
    """The last answer may be one of the same session."""
    unanswered = logging_late(now)
    one, two = (
        cast(UpstreamCall, PuppetCall("B", conversation_session=SessionId("s"))) for _ in range(2)
    )
    unanswered.sent(1, A, {})
    unanswered.answered(1)
    unanswered.sent(2, one, {})
    unanswered.answered(2)
    unanswered.sent(3, two, {})
    assert unanswered.cause(LOG, {}).known is None, "it may be about A's"
    now[0] += LATE
    assert unanswered.cause(LOG, {}).known is two
    unanswered.answered(3)
    unanswered.sent(4, one, {})
    assert unanswered.cause(LOG, {}).known is one, "of the same session"


@pytest.mark.parametrize("what", [LOG, QUESTION])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_was_answered_counts_for_a_while_against_what_was_open_with_it(
    now: list[float], what: str, is_given_up: bool
) -> None:
    """A server may ask, or log, after the answer of the request that caused it."""
    unanswered = UnansweredRequests()
    unanswered.sent(1, A, {})
    unanswered.sent(2, B, {})
    if is_given_up:
        unanswered.given_up(2)
    unanswered.answered(2)
    assert unanswered.cause(what, {}).known is None
    now[0] += LATE - 0.1
    assert unanswered.cause(what, {}).known is None
    now[0] += 0.1
    assert unanswered.cause(what, {}).known is A


@pytest.mark.parametrize("port", [0, 50_000])
def test_requests_of_one_address_count_against_each_other_behind_a_proxy(
    now: list[float], port: int
) -> None:
    """A trusted proxy's clients may share an address, and have no port. Any proxy's clients may
    share its connection.
    """
    scope = {"client": ("192.0.2.1", port), "headers": [(b"x-forwarded-for", b"192.0.2.1")]}
    a, b = (
        cast(UpstreamCall, PuppetCall(who, context=SimpleNamespace(scope=scope))) for who in "AB"
    )
    unanswered = UnansweredRequests()
    unanswered.sent(1, a, {})
    unanswered.sent(2, b, {})
    unanswered.answered(1)
    assert unanswered.cause(LOG, {}).known is None, "it may be about A's"
    now[0] += LATE
    assert unanswered.cause(LOG, {}).known is b


def test_requests_of_one_session_do_not_count_against_each_other(now: list[float]) -> None:
    unanswered = logging_late(now)
    one, two = (
        cast(UpstreamCall, PuppetCall("A", conversation_session=SessionId("s"))) for _ in range(2)
    )
    unanswered.sent(1, one, {})
    unanswered.sent(2, two, {})
    unanswered.answered(2)
    assert unanswered.cause(LOG, {}).known is one


@pytest.mark.parametrize(("what", "other"), [(LOG, QUESTION), (QUESTION, LOG)])
def test_a_server_that_sends_something_late_is_known_to_do_so(
    now: list[float], what: str, other: str
) -> None:
    """Otherwise calls that follow each other closely would lose their questions and log messages:
    a client that opens a connection for each request would receive no log.
    """
    unanswered = UnansweredRequests()
    unanswered.cause(what, {})
    unanswered.sent(1, A, {})
    unanswered.answered(1)
    unanswered.sent(2, B, {})
    assert unanswered.cause(what, {}).known is B, "what it says before is about nothing"
    unanswered.answered(2)
    unanswered.cause("notifications/tools/list_changed", {})
    assert unanswered.cause(what, {}).known is None
    unanswered.sent(3, A, {})
    assert unanswered.cause(what, {}).known is None, "it may be about B's"
    assert unanswered.cause(other, {}).known is A
    now[0] += LATE
    assert unanswered.cause(what, {}).known is A
