"""What a client has to do, each as a script for a `ScriptedServer`.

A script returns when the client did it, and raises `Failure` when it did not. The words for
people (what is proved, and what a failure costs) are in ``vectors/client-duties.json``.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mcp_sessions_conformance.got import Got
from mcp_sessions_conformance.peer import Failure
from mcp_sessions_conformance.scripted import DATA_LAYER, ELEVATION, ScriptedServer
from mcp_sessions_conformance.values import SESSION, Json

DONE: Json = {"do": "done"}
NOTHING: Json = {"do": "nothing"}
WORK: Json = {"do": "call", "tool": "work", "arguments": {"n": 1}}

Script = Callable[[ScriptedServer, ScriptedServer], Awaitable[None]]
"""Drives the client; the second server is another one, which only one duty uses."""


@dataclass(frozen=True)
class Play:
    """A script and the server that it needs."""

    script: Script
    speaks: tuple[str, ...] = ELEVATION
    has_keys: bool = True
    key_lifetime: float = 600
    may_fail: bool = False
    """The program need not end well: the script takes its server away."""


def hear(count: int) -> Json:
    """Wait until so many updates were heard."""
    return {"do": "hear", "count": count}


def expect(holds: object, sentence: str) -> None:
    """Raise unless it holds.

    Raises:
        Failure: It does not.
    """
    if not holds:
        raise Failure(sentence)


def in_session(server: ScriptedServer) -> list[Got]:
    """The requests that named a session."""
    return [got for got in server.received if got.named]


async def finish(server: ScriptedServer) -> Json:
    """Tell the client that it is done; what it said last."""
    return await server.instruct(DONE)


# --- state and metadata --------------------------------------------------------------------------

ODD_STATES = ("", "a+b/c==", 'quote " and \\ slash', "ünï cödé", "  spaces  ", "%7B%7D", "x" * 3000)


async def echoes_state(server: ScriptedServer, _: ScriptedServer) -> None:
    """Each answer has a newer state, with characters that a careless client would change."""
    server.state = "the first"
    expected: list[str] = []
    for state in ODD_STATES:
        held = await server.held("next")
        expected.append(server.state or "")
        expect(
            held.got.named.get("state") == expected[-1],
            f"the state of request {len(expected)} is {held.got.named.get('state')!r:.200}, "
            f"expected {expected[-1]!r:.200}",
        )
        server.state = state
        held.answer.set_result(_said(NOTHING))
    await finish(server)


def _said(instruction: Json) -> Json:
    return {"content": [{"type": "text", "text": json.dumps(instruction)}]}


async def keeps_state(server: ScriptedServer, _: ScriptedServer) -> None:
    """A result without state keeps the old one."""
    server.state = "kept"
    await server.instruct(WORK)
    held = await server.held("work")
    server.state = None
    held.answer.set_result(_said({}))
    held = await server.held("next")
    found = held.got.named.get("state")
    expect(found == "kept", f"after a result without state the client sends {found!r}")
    held.answer.set_result(_said(DONE))


async def no_metadata_on_create(server: ScriptedServer, _: ScriptedServer) -> None:
    """Also where it had a session before."""
    server.state = "s"
    held = await server.held("next")
    name = str(held.got.named.get("sessionId"))
    server.sessions.pop(name, None)
    held.answer.set_result(
        {"error": {"code": -32043, "message": "Session not found", "data": {"sessionId": name}}}
    )
    await finish(server)
    created = server.got("sessions/create")
    expect(created, "the client never sent sessions/create")
    for got in created:
        expect(SESSION not in got.meta, f"sessions/create carries {got.meta!r:.200}")


async def ignores_foreign_metadata(server: ScriptedServer, _: ScriptedServer) -> None:
    """A result with the metadata of another session changes nothing."""
    server.state = "own"
    held = await server.held("next")
    own = held.got.named.get("sessionId")
    foreign = {SESSION: {"sessionId": "another-session", "state": "foreign"}}
    held.answer.set_result({**_said(WORK), "_meta": foreign})
    for tool in ("work", "next"):
        held = await server.held(tool)
        named = held.got.named
        expect(
            named.get("sessionId") == own and named.get("state") == "own",
            f"after metadata of another session the client sends {named!r:.200}",
        )
        held.answer.set_result(_said(DONE if tool == "next" else {}))


async def drops_a_lost_session(server: ScriptedServer, _: ScriptedServer) -> None:
    """After -32043 the id is not sent again."""
    held = await server.held("next")
    name = str(held.got.named.get("sessionId") or next(iter(server.sessions), ""))
    server.sessions.pop(name, None)
    held.answer.set_result(
        {"error": {"code": -32043, "message": "Session not found", "data": {"sessionId": name}}}
    )
    told = len(server.received)
    await finish(server)
    for got in server.received[told:]:
        sent = got.named.get("sessionId") == name or got.params.get("sessionId") == name
        expect(not sent, f"{got.method} still names the session that is gone")


# --- resuming ------------------------------------------------------------------------------------


async def _has_session(server: ScriptedServer) -> str:
    await server.until(lambda: server.sessions, "session/start")
    return next(iter(server.sessions))


async def _resumes(server: ScriptedServer, count: int = 1) -> Got:
    await server.until(lambda: len(server.got("session/resume")) >= count, "session/resume")
    return server.got("session/resume")[count - 1]


def _positioned(got: Got, expected: str | None) -> None:
    found = got.params.get("lastSessionEventId")
    expect(found == expected, f"session/resume names the position {found!r}, not {expected!r}")


async def resumes_from_the_last_event(server: ScriptedServer, _: ScriptedServer) -> None:
    """The position is the id of the last event that was heard."""
    name = await _has_session(server)
    await server.streaming()
    await server.instruct(hear(3))
    ids = [server.push(f"conformance://e{n}") for n in (1, 2, 3)]
    await server.instruct(hear(5))
    server.lose_connections()
    server.push("conformance://e4")
    server.push("conformance://e5")
    got = await _resumes(server)
    expect(got.params.get("sessionId") == name, "session/resume names another session")
    _positioned(got, ids[2])
    said = await finish(server)
    uris = [f"conformance://e{n}" for n in (1, 2, 3, 4, 5)]
    expect(said.get("heard") == uris, f"the client heard {said.get('heard')!r}, expected {uris!r}")


async def resumes_from_the_head(server: ScriptedServer, _: ScriptedServer) -> None:
    """Before the first event the position is the head that session/start gave."""
    await _has_session(server)
    await server.streaming()
    await server.instruct(hear(1))
    server.lose_connections()
    server.push("conformance://e1")
    _positioned(await _resumes(server), "ev~000000/x")
    said = await finish(server)
    expect(said.get("heard") == ["conformance://e1"], f"the client heard {said.get('heard')!r}")


async def hears_events_once(server: ScriptedServer, _: ScriptedServer) -> None:
    """Events that were seen before, and come again with the replay, go nowhere."""
    name = await _has_session(server)
    await server.streaming()
    await server.instruct(hear(2))
    server.push("conformance://e1")
    server.push("conformance://e2")
    await server.instruct(hear(3))

    def replay_all(got: Got, result: Json) -> Json:
        session = server.sessions[name]
        for _, message in session.log[:-1]:
            server.send_to(session.connection, message)
        return result

    server.resume_result = replay_all
    server.lose_connections()
    server.push("conformance://e3")
    said = await finish(server)
    uris = [f"conformance://e{n}" for n in (1, 2, 3)]
    expect(said.get("heard") == uris, f"the client heard {said.get('heard')!r}, expected {uris!r}")


async def takes_the_head_after_a_refusal(server: ScriptedServer, _: ScriptedServer) -> None:
    """After catchup false the next position is the head of that answer."""
    await _has_session(server)
    await server.streaming()
    await server.instruct(hear(1))
    server.push("conformance://e1")
    await server.held("next")

    def refuse(got: Got, result: Json) -> Json:
        refused = {"resumed": True, "catchup": False, "reason": "evicted", "replayed": 0}
        return {**refused, "sessionEventId": "ev~000500/x"}

    server.resume_result = refuse
    server.lose_connections()
    await _resumes(server)
    server.resume_result = None
    await server.streaming()
    # It asks again once it has come back: it knows the answer of session/resume.
    await server.held("next")
    server.lose_connections()
    _positioned(await _resumes(server, 2), "ev~000500/x")
    await server.streaming()
    await server.instruct(hear(2))
    server.next_event = 501
    server.push("conformance://e2")
    said = await finish(server)
    uris = ["conformance://e1", "conformance://e2"]
    expect(said.get("heard") == uris, f"the client heard {said.get('heard')!r}, expected {uris!r}")


async def accepts_early_events(server: ScriptedServer, _: ScriptedServer) -> None:
    """An event that arrives before the answer to session/resume is heard, once."""
    name = await _has_session(server)
    await server.streaming()
    await server.instruct(hear(1))
    server.push("conformance://e1")
    await server.instruct(hear(2))
    server.lose_connections()
    server.push("conformance://e2")
    # The replay is on its stream before the answer is on its own: `_resume` sends it first.
    await _resumes(server)
    expect(name in server.sessions, "the client ended its session")
    said = await finish(server)
    uris = ["conformance://e1", "conformance://e2"]
    expect(said.get("heard") == uris, f"the client heard {said.get('heard')!r}, expected {uris!r}")


# --- calls ---------------------------------------------------------------------------------------


async def sends_no_call_twice(server: ScriptedServer, _: ScriptedServer) -> None:
    """A call without a key whose response broke is not sent again: its outcome is unknown."""
    await _has_session(server)
    await server.instruct(WORK)
    await server.held("work")
    server.lose_connections()
    said = await finish(server)
    calls = server.got(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        str(said.get("outcome", "")).startswith("error"),
        f"the program was told {said.get('outcome')!r}, expected an error",
    )


async def repeats_with_the_same_key(server: ScriptedServer, _: ScriptedServer) -> None:
    """A call with a key is sent again with that key and content, after session/resume."""
    await _has_session(server)
    await server.instruct(WORK)
    held = await server.held("work")
    key = held.got.key
    expect(isinstance(key, str) and key, f"the call has no request key, but {key!r}")
    server.lose_connections()
    again = await server.held("work")
    resumed = await _resumes(server)
    expect(resumed.number < again.got.number, "the call was sent again before session/resume")
    expect(again.got.key == key, "the call was sent again with another key")
    same = again.got.params.get("arguments") == held.got.params.get("arguments")
    expect(same, "the call was sent again with other arguments")
    again.answer.set_result({"content": [{"type": "text", "text": "worked"}]})
    said = await finish(server)
    expect(said.get("outcome") == "worked", f"the program was told {said.get('outcome')!r}")


async def uses_no_forgotten_key(server: ScriptedServer, _: ScriptedServer) -> None:
    """A call is not sent again when its key may be forgotten."""
    await _has_session(server)
    await server.instruct(WORK)
    await server.held("work")
    server.is_away = True
    server.lose_connections()
    # Nothing is waited for: that the time of the key is over is what is looked at.
    await asyncio.sleep(2 * server.key_lifetime)
    server.is_away = False
    said = await finish(server)
    calls = server.got(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        str(said.get("outcome", "")).startswith("error"),
        f"the program was told {said.get('outcome')!r}, expected an error",
    )


MOST_KNOCKS = 60
"""In three seconds; without any wait a client makes thousands."""


async def backs_off(server: ScriptedServer, _: ScriptedServer) -> None:
    """A server that is away is asked with pauses."""
    await _has_session(server)
    await server.streaming()
    await server.instruct(hear(1))
    server.is_away = True
    server.lose_connections()
    await server.never(
        lambda: server.knocks > MOST_KNOCKS,
        f"the client asked more than {MOST_KNOCKS} times in 3 s",
        within=3,
    )
    server.is_away = False
    expect(server.knocks > 0, "the client did not try to come back")
    server.push("conformance://e1")
    await finish(server)


async def asks_once(server: ScriptedServer, _: ScriptedServer) -> None:
    """A question that comes again is not put to the user again."""
    await _has_session(server)
    await server.streaming()
    held = await server.held("next")
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    params = {"message": "which?", "mode": "form", "requestedSchema": schema}
    question = {"id": "question-1", "method": "elicitation/create", "params": params}

    def answers() -> list[Got]:
        return [g for g in server.received if not g.method and g.message.get("id") == "question-1"]

    server.tell(question)
    await server.until(answers, "the answer to the question")
    server.tell(question)
    await server.has_read()
    held.answer.set_result(_said(NOTHING))
    said = await finish(server)
    expect(said.get("asked") == 1, f"the user was asked {said.get('asked')!r} times")
    given = [g.message.get("result") for g in answers()]
    expect(all(each == given[0] for each in given), "the second answer is another one")


async def keeps_keys_apart(server: ScriptedServer, _: ScriptedServer) -> None:
    """Two calls have two keys, though they are equal."""
    await _has_session(server)
    for _number in range(2):
        await server.instruct(WORK)
        held = await server.held("work")
        held.answer.set_result({"content": [{"type": "text", "text": "worked"}]})
    await finish(server)
    keys = [got.key for got in server.got(tool="work")]
    expect(keys[0] != keys[1] or keys[0] is None, "two calls have one request key")


async def moves_nothing_that_began(server: ScriptedServer, _: ScriptedServer) -> None:
    """A call that had begun when its session ended is not sent in the next session."""
    name = await _has_session(server)
    await server.instruct(WORK)
    held = await server.held("work")
    server.sessions.pop(name, None)
    data = {"sessionId": name, "started": True}
    held.answer.set_result(
        {"error": {"code": -32043, "message": "Session not found", "data": data}}
    )
    said = await finish(server)
    calls = server.got(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        str(said.get("outcome", "")).startswith("error"),
        f"the program was told {said.get('outcome')!r}, expected an error",
    )


async def offers_nothing_elsewhere(server: ScriptedServer, other: ScriptedServer) -> None:
    """Another server never hears of this one's session or state."""
    server.state, other.state = "secret-of-the-first", "of-the-other"
    held = await server.held("next")
    name = str(held.got.named.get("sessionId") or next(iter(server.sessions), ""))
    expect(name, "the client has no session")
    held.answer.set_result(_said({"do": "connect", "url": other.url}))
    await finish(other)
    await finish(server)
    for got in other.received:
        text = repr(got.message) + repr(got.headers)
        expect(name not in text, f"{got.method} offers the session of another server")
        expect("secret-of-the-first" not in text, f"{got.method} offers another server's state")


async def stays_away(server: ScriptedServer, _: ScriptedServer) -> None:
    """A client that was displaced does not take the session back."""
    name = await _has_session(server)
    await server.streaming()
    held = await server.held("next")
    params = {"sessionId": name, "reason": "taken_over"}
    server.tell({"method": "notifications/sessions/detached", "params": params})
    await server.has_read()
    detached = {"error": {"code": -31010, "message": "Session detached"}}
    server.override = lambda got: detached if got.tool else None
    held.answer.set_result(detached)
    await server.never(
        lambda: server.got("session/resume"),
        "the client took the session back by itself",
        within=1.5,
    )


async def takes_leave(server: ScriptedServer, _: ScriptedServer) -> None:
    """A session that is no longer needed is ended or deleted."""
    await _has_session(server)
    await finish(server)
    await server.until(
        lambda: server.got("session/end") or server.got("sessions/delete"),
        "session/end or sessions/delete",
        within=3,
    )


BOTH = (*ELEVATION, *DATA_LAYER)

PLAYS: dict[str, Play] = {
    "state-is-echoed-exactly": Play(echoes_state, DATA_LAYER),
    "state-is-kept-when-a-result-has-none": Play(keeps_state, DATA_LAYER),
    "create-carries-no-session": Play(no_metadata_on_create, DATA_LAYER),
    "metadata-of-another-session-is-ignored": Play(ignores_foreign_metadata, DATA_LAYER),
    "a-lost-session-is-dropped": Play(drops_a_lost_session),
    "resume-names-the-last-event": Play(resumes_from_the_last_event),
    "resume-names-the-head-before-any-event": Play(resumes_from_the_head),
    "seen-events-go-nowhere": Play(hears_events_once),
    "the-head-of-a-refusal-is-the-position": Play(takes_the_head_after_a_refusal),
    "events-may-overtake-the-result": Play(accepts_early_events),
    "no-call-is-sent-twice": Play(sends_no_call_twice, has_keys=False),
    "a-call-is-repeated-under-its-key": Play(repeats_with_the_same_key),
    "a-forgotten-key-is-not-used": Play(uses_no_forgotten_key, key_lifetime=1),
    "reconnects-back-off": Play(backs_off),
    "a-repeated-question-is-asked-once": Play(asks_once),
    "two-calls-have-two-keys": Play(keeps_keys_apart),
    "what-began-is-not-moved": Play(moves_nothing_that_began),
    "no-session-is-offered-elsewhere": Play(offers_nothing_elsewhere, DATA_LAYER),
    "the-displaced-stays-away": Play(stays_away, may_fail=True),
    "an-unneeded-session-is-ended": Play(takes_leave),
}
