"""The rule that keeps clients of one child apart, as a property: `external/child.py`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_sessions.core.nearness import ConnectedClient
from tests.support.puppets import (
    QUESTION,
    Json,
    Puppet,
    PuppetWorld,
    owner_of,
    puppet_world,
    settled,
)
from tests.support.virtual_time import VirtualTimeLoop

ELICITS: Json = {"elicitation": {}}
LOG = "notifications/message"
PEOPLE = ("ann", "bob", "eve")
"""Without authentication they are strangers of one principal, and describe their clients alike."""


@dataclass(frozen=True)
class Kind:
    """How a client asks.

    Args:
        session: In a session of its person; else outside of sessions.
        hides: Through a proxy, so that nothing shows which client it is.
    """

    method: str
    params: Json
    capabilities: Json = field(default_factory=dict[str, Any])
    level: str | None = None
    session: bool = False
    handshake: bool = False
    hides: bool = False

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
    "looks": Kind("tools/list", {}),
    "hidden": Kind("tools/call", TOOL, ELICITS, "debug", hides=True),
    "session": Kind("tools/call", TOOL, ELICITS, "debug", session=True),
    "mute session": Kind("tools/call", TOOL, {}, "debug", session=True),
    "old session": Kind("tools/call", TOOL, ELICITS, session=True, handshake=True),
    "old": Kind("tools/call", TOOL, handshake=True, hides=True),
}
OFTEN = ("question", "log", "late question", "late log", "answer")
ACTIONS = (*OFTEN, *OFTEN, "cancel", "other", "progress", "task", "complete", "wait", "leaves")
Step = tuple[str, Any]


TAKEN_OVER: list[Step] = [
    ("begin", ("looks", "ann", 1)),
    ("answer", 0),
    ("begin", ("mute session", "bob", 1)),
    ("late log", 0),
]
"""A session begins where only a stranger asked before."""


@st.composite
def stories(draw: st.DrawFn) -> list[Step]:
    """What happens, in order: few kinds of clients at a time, so that they meet."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=3))
    who = st.tuples(st.sampled_from(kinds), st.sampled_from(PEOPLE), st.integers(1, 2))
    begin = st.tuples(st.just("begin"), who)
    act = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9))
    return draw(st.lists(st.one_of(begin, act, act), min_size=12, max_size=24))


class Story:
    """Some clients, the puppets that serve them, and what must hold.

    Each message of a puppet carries the name of the person whose request caused it.
    """

    def __init__(self, w: PuppetWorld, *, is_url: bool, per: str) -> None:
        self.w = w
        self.is_url = is_url
        self.per = per
        self.kinds: dict[str, Kind] = {}
        """By the number of a request."""

        self.connections: dict[tuple[str, int], ConnectedClient] = {}
        self.questions = 0
        self.begun = 0

    async def begin(self, name: str, person: str, number: int) -> None:
        """A request of a person, on one of its connections."""
        kind = KINDS[name]
        self.begun += 1
        owner = f"{name} {self.begun}" if kind.hides else person
        connection = self.connections.setdefault((person, number), ConnectedClient())
        self.kinds[str(self.begun)] = kind
        self.w.send(
            owner,
            kind.method,
            {**kind.params, "number": str(self.begun)},
            capabilities=kind.capabilities,
            level=kind.level,
            session=f"{name} of {person}" if kind.session else None,
            handshake=kind.handshake,
            connection=None if kind.hides else connection,
        )
        await settled()

    async def act(self, action: str, number: int) -> None:
        """Something happens to one of the requests."""
        match action:
            case "wait":
                await asyncio.sleep((0.6, 4.5, 70, 1_000)[number % 4])
            case "leaves" if self.connections:
                at = list(self.connections)[number % len(self.connections)]
                self.connections.pop(at).has_left = True
            case "cancel":
                tasks = [task for task in self.w.tasks if not task.done()]
                if tasks:
                    tasks[number % len(tasks)].cancel()
            case _:
                await self.speak(action, number)
        await settled()

    async def speak(self, action: str, number: int) -> None:
        """A puppet answers, or says something about a request that it has, or once had."""
        is_late = action.startswith("late")
        found = [
            (puppet, request)
            for puppet in self.w.puppets.living
            for request in puppet.requests
            if is_late != (request["id"] in puppet.unanswered)
        ]
        if not found:
            return
        puppet, request = found[-1 - number % len(found)]
        named = self.is_url and number % 3 == 0 and not is_late
        if action == "answer":
            puppet.answer(request["id"])
        elif action.endswith("question"):
            await self.question(puppet, request, named=named, is_late=is_late)
        else:
            methods = {"progress": "notifications/progress", "task": "notifications/tasks/status"}
            methods |= {
                "log": LOG,
                "late log": LOG,
                "complete": "notifications/elicitation/complete",
            }
            message = said(methods.get(action, "notifications/other"), request)
            if named and action != "progress":
                puppet.say_on(request["id"], message)
            else:
                puppet.say(message)

    async def question(self, puppet: Puppet, request: Json, *, named: bool, is_late: bool) -> None:
        """A lone request that can be asked is asked, and no question is left open."""
        owner, kind = owner_of(request), self.kinds[request["params"]["number"]]
        self.questions += 1
        name = f"q{self.questions}"
        message = {"id": name, **said(QUESTION, request, str(self.questions))}
        is_alone = len(puppet.unanswered) == 1 and len(puppet.slot.calls) == 1
        puppet.say_on(request["id"], message) if named else puppet.say(message)
        await settled()
        asked = self.who_was_asked(str(self.questions))
        assert asked in ([], [owner]), "it was asked of another client"
        if is_alone and not is_late and kind.can_be_asked and self.per == "session":
            assert asked == [owner], "its process is its own"
        assert asked or name in puppet.answers, "it is neither asked nor refused"

    def who_was_asked(self, number: str) -> list[str]:
        """The owners that a question came to."""
        received = [(c, m) for c in self.w.calls for m in c.received if m["method"] == QUESTION]
        return [call.owner for call, m in received if m["params"]["number"] == number]

    def expect_no_crossing(self) -> None:
        """Nobody received anything of anybody else."""
        for call in self.w.calls:
            for message in call.received:
                assert message["params"].get("owner", call.owner) == call.owner, message
        for task, call in self.w.tasks.items():
            if task.done() and not task.cancelled():
                result = task.result()
                assert result.get("owner", call.owner) == call.owner, result


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
            params |= {"taskId": "t", "status": "working"}
        case "notifications/elicitation/complete":
            params |= {"elicitationId": "e"}
        case _:
            params |= {"message": "well?", "requestedSchema": {"type": "object"}}
    return {"method": method, "params": params}


async def expect_nothing_crosses(
    steps: Sequence[Step], most: int, *, is_url: bool, per: str
) -> None:
    """Tell a story, and look after each of its steps."""
    async with puppet_world(per=per, most=most) as w:
        story = Story(w, is_url=is_url, per=per)
        for name, which in steps:
            if name == "begin":
                await story.begin(*which)
            else:
                await story.act(name, which)
            story.expect_no_crossing()


@pytest.mark.parametrize("per", ["session", "principal", "shared"])
@pytest.mark.parametrize("is_url", [False, True], ids=["command", "url"])
def test_no_message_of_one_client_reaches_another_at_any_time_and_a_lone_one_is_asked(
    is_url: bool, per: str
) -> None:
    """Strangers ask, cancel, leave, and begin sessions; their servers say what they like, also
    about requests that they answered long ago.
    """

    @given(stories(), st.sampled_from([1, 2, 20]))
    @example(TAKEN_OVER, 20)
    def run(steps: list[Step], most: int) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(expect_nothing_crosses(steps, most, is_url=is_url, per=per))

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
def test_no_token_that_a_client_wrote_reaches_a_child(per: str, kind: str) -> None:
    """A child gives it back, and a token could be the id of another client's request."""

    async def run() -> None:
        async with puppet_world(per=per) as w:
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
