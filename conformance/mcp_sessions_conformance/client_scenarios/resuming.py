from mcp_sessions_conformance.client_scenarios.shared_steps import (
    expect,
    finish,
    finish_once_received,
    has_session,
    receive,
    resumes,
)
from mcp_sessions_conformance.received import Received
from mcp_sessions_conformance.scripted import ScriptedServer
from mcp_sessions_conformance.values import Json


def _positioned(request: Received, expected: str | None) -> None:
    found = request.params.get("lastSessionEventId")
    expect(found == expected, f"session/resume names the position {found!r}, not {expected!r}")


async def resumes_from_the_last_event(server: ScriptedServer, _: ScriptedServer) -> None:
    name = await has_session(server)
    await server.streaming()
    await server.instruct(receive(3))
    ids = [server.push(f"conformance://e{n}") for n in (1, 2, 3)]
    await server.instruct(receive(5))
    server.lose_connections()
    server.push("conformance://e4")
    server.push("conformance://e5")
    request = await resumes(server)
    expect(request.params.get("sessionId") == name, "session/resume names another session")
    _positioned(request, ids[2])
    said = await finish_once_received(server, 5)
    uris = [f"conformance://e{n}" for n in (1, 2, 3, 4, 5)]
    expect(
        said.get("heard") == uris, f"the client received {said.get('heard')!r}, expected {uris!r}"
    )


async def resumes_from_the_head(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
    server.lose_connections()
    server.push("conformance://e1")
    _positioned(await resumes(server), "ev~000000/x")
    said = await finish_once_received(server, 1)
    expect(said.get("heard") == ["conformance://e1"], f"the client received {said.get('heard')!r}")


async def gets_events_once(server: ScriptedServer, _: ScriptedServer) -> None:
    name = await has_session(server)
    await server.streaming()
    await server.instruct(receive(2))
    server.push("conformance://e1")
    server.push("conformance://e2")
    await server.instruct(receive(3))

    def replay_all(request: Received, result: Json) -> Json:
        session = server.sessions[name]
        for _, message in session.log[:-1]:
            server.send_to(session.connection, message)
        return result

    server.resume_result = replay_all
    server.lose_connections()
    server.push("conformance://e3")
    said = await finish_once_received(server, 3)
    uris = [f"conformance://e{n}" for n in (1, 2, 3)]
    expect(
        said.get("heard") == uris, f"the client received {said.get('heard')!r}, expected {uris!r}"
    )


async def takes_the_head_after_a_refusal(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
    server.push("conformance://e1")
    await server.held("next")

    def refuse(request: Received, result: Json) -> Json:
        refused = {"resumed": True, "catchup": False, "reason": "evicted", "replayed": 0}
        return {**refused, "sessionEventId": "ev~000500/x"}

    server.resume_result = refuse
    server.lose_connections()
    await resumes(server)
    server.resume_result = None
    await server.streaming()
    # It asks again once it has come back: it knows the answer of session/resume.
    await server.held("next")
    server.lose_connections()
    _positioned(await resumes(server, 2), "ev~000500/x")
    await server.streaming()
    await server.instruct(receive(2))
    server.next_event = 501
    server.push("conformance://e2")
    said = await finish(server)
    uris = ["conformance://e1", "conformance://e2"]
    expect(
        said.get("heard") == uris, f"the client received {said.get('heard')!r}, expected {uris!r}"
    )


async def accepts_early_events(server: ScriptedServer, _: ScriptedServer) -> None:
    name = await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
    server.push("conformance://e1")
    await server.instruct(receive(2))
    server.lose_connections()
    server.push("conformance://e2")
    # The replay is on its stream before the answer is on its own: `_resume` sends it first.
    await resumes(server)
    expect(name in server.sessions, "the client ended its session")
    said = await finish_once_received(server, 2)
    uris = ["conformance://e1", "conformance://e2"]
    expect(
        said.get("heard") == uris, f"the client received {said.get('heard')!r}, expected {uris!r}"
    )


async def keeps_its_position_without_a_stream(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
    own = server.push("conformance://e1")
    await server.held("next")

    def refuse(request: Received, result: Json) -> Json:
        refused = {"resumed": True, "catchup": False, "reason": "no_stream", "replayed": 0}
        return {**refused, "sessionEventId": "ev~000500/x"}

    server.resume_result = refuse
    server.lose_connections()
    await resumes(server)
    server.resume_result = None
    server.lose_connections()
    _positioned(await resumes(server, 2), own)
    server.push("conformance://e2")
    said = await finish_once_received(server, 2)
    uris = ["conformance://e1", "conformance://e2"]
    expect(
        said.get("heard") == uris, f"the client received {said.get('heard')!r}, expected {uris!r}"
    )


async def looks_into_no_event_id(server: ScriptedServer, _: ScriptedServer) -> None:
    await has_session(server)
    await server.streaming()
    await server.instruct(receive(2))
    server.push("conformance://e1", event_id="zz/9999999999999999999-999999999999")
    newest = server.push("conformance://e2", event_id="a")
    await server.held("next")
    server.lose_connections()
    _positioned(await resumes(server), newest)
    said = await finish_once_received(server, 2)
    uris = ["conformance://e1", "conformance://e2"]
    expect(
        said.get("heard") == uris, f"the client received {said.get('heard')!r}, expected {uris!r}"
    )


async def mixes_no_positions(server: ScriptedServer, _: ScriptedServer) -> None:
    name = await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
    server.push("conformance://e1")
    await server.instruct(receive(2))
    server.lose_connections()
    server.push("conformance://e2")
    await finish_once_received(server, 2)
    for request in server.requests("session/resume"):
        position = str(request.params.get("lastSessionEventId"))
        expect(not position.startswith("sse-"), f"session/resume names the SSE id {position!r}")
        expect("last-event-id" not in request.headers, "session/resume carries Last-Event-ID")
    for headers in (*server.gets, *(request.headers for request in server.received)):
        position, connection = headers.get("last-event-id"), headers.get("mcp-session-id")
        expect(position is None or position.startswith("sse-"), f"Last-Event-ID is {position!r}")
        expect(connection != name, "Mcp-Session-Id names the session, not the connection")
