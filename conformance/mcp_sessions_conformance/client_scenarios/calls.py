import asyncio

from mcp_sessions_conformance.client_scenarios.shared_steps import (
    NOTHING,
    WORK,
    expect,
    finish,
    has_session,
    receive,
    resumes,
    sits_out,
)
from mcp_sessions_conformance.received import Received, as_result
from mcp_sessions_conformance.scripted import ScriptedServer


async def sends_no_call_twice(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.instruct(WORK)
    await server.held("work")
    server.lose_connections()
    said = await finish(server)
    calls = server.requests(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        str(said.get("outcome", "")).startswith("error"),
        f"the program got {said.get('outcome')!r}, expected an error",
    )


async def repeats_with_the_same_key(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.instruct(WORK)
    held = await server.held("work")
    key = held.request.key
    expect(isinstance(key, str) and key, f"the call has no request key, but {key!r}")
    server.lose_connections()
    again = await server.held("work")
    resumed = await resumes(server)
    expect(resumed.number < again.request.number, "the call was sent again before session/resume")
    expect(again.request.key == key, "the call was sent again with another key")
    same = again.request.params.get("arguments") == held.request.params.get("arguments")
    expect(same, "the call was sent again with other arguments")
    again.answer.set_result({"content": [{"type": "text", "text": "worked"}]})
    said = await finish(server)
    expect(said.get("outcome") == "worked", f"the program got {said.get('outcome')!r}")


async def uses_no_forgotten_key(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.instruct(WORK)
    await server.held("work")
    server.is_away = True
    server.lose_connections()
    # Nothing is waited for: the check is that the time of the key has passed.
    await asyncio.sleep(2 * server.key_lifetime)
    server.is_away = False
    said = await finish(server)
    calls = server.requests(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        str(said.get("outcome", "")).startswith("error"),
        f"the program got {said.get('outcome')!r}, expected an error",
    )


MOST_KNOCKS = 60
"""In three seconds; without any wait a client makes thousands."""


async def backs_off(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
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
    await has_session(server)
    await server.streaming()
    held = await server.held("next")
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    params = {"message": "which?", "mode": "form", "requestedSchema": schema}
    question = {"id": "question-1", "method": "elicitation/create", "params": params}

    def answers() -> list[Received]:
        return [
            sent
            for sent in server.received
            if not sent.method and sent.message.get("id") == "question-1"
        ]

    server.notify(question)
    await server.until(answers, "the answer to the question")
    server.notify(question)
    await server.has_read()
    held.answer.set_result(as_result(NOTHING))
    said = await finish(server)
    expect(said.get("asked") == 1, f"the user was asked {said.get('asked')!r} times")
    given = [given.message.get("result") for given in answers()]
    expect(all(each == given[0] for each in given), "the second answer is another one")


async def repeats_nothing_of_unknown_outcome(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.instruct(WORK)
    held = await server.held("work")
    held.answer.set_result({"error": {"code": -31012, "message": "Outcome unknown"}})
    said = await finish(server)
    calls = server.requests(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        said.get("outcome") == "error -31012",
        f"the program got {said.get('outcome')!r}, expected 'error -31012'",
    )


async def keeps_keys_apart(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    for _number in range(2):
        await server.instruct(WORK)
        held = await server.held("work")
        held.answer.set_result({"content": [{"type": "text", "text": "worked"}]})
    await finish(server)
    keys = [request.key for request in server.requests(tool="work")]
    expect(keys[0] != keys[1] or keys[0] is None, "two calls have one request key")


async def moves_nothing_that_began(server: ScriptedServer, _: ScriptedServer) -> None:
    name = await has_session(server)
    await server.instruct(WORK)
    held = await server.held("work")
    server.sessions.pop(name, None)
    data = {"sessionId": name, "started": True}
    held.answer.set_result(
        {"error": {"code": -32043, "message": "Session not found", "data": data}}
    )
    said = await finish(server)
    calls = server.requests(tool="work")
    expect(len(calls) == 1, f"the call was sent {len(calls)} times")
    expect(
        str(said.get("outcome", "")).startswith("error"),
        f"the program got {said.get('outcome')!r}, expected an error",
    )


async def offers_nothing_to_others(server: ScriptedServer, other: ScriptedServer) -> None:
    server.state, other.state = "secret-of-the-first", "of-the-other"
    held = await server.held("next")
    if sits_out(server, held):
        return
    name = str(held.request.named.get("sessionId") or next(iter(server.sessions)))
    held.answer.set_result(as_result({"do": "connect", "url": other.url}))
    await finish(other)
    await finish(server)
    for request in other.received:
        text = repr(request.message) + repr(request.headers)
        expect(name not in text, f"{request.method} offers the session of another server")
        expect("secret-of-the-first" not in text, f"{request.method} offers another server's state")


async def stays_away(server: ScriptedServer, _: ScriptedServer) -> None:
    name = await has_session(server)
    await server.streaming()
    held = await server.held("next")
    params = {"sessionId": name, "reason": "taken_over"}
    server.notify({"method": "notifications/sessions/detached", "params": params})
    await server.has_read()
    detached = {"error": {"code": -31010, "message": "Session detached"}}
    server.override = lambda request: detached if request.tool else None
    held.answer.set_result(detached)
    await server.never(
        lambda: server.requests("session/resume"),
        "the client took the session back by itself",
        within=1.5,
    )


async def takes_leave(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await finish(server)
    await server.until(
        lambda: server.requests("session/end") or server.requests("sessions/delete"),
        "session/end or sessions/delete",
        within=3,
    )
