from mcp_sessions_conformance.client_scenarios.shared_steps import (
    DONE,
    NOTHING,
    WORK,
    expect,
    finish,
    sits_out,
)
from mcp_sessions_conformance.received import as_result
from mcp_sessions_conformance.scripted import ScriptedServer
from mcp_sessions_conformance.values import SESSION

ODD_STATES = ("", "a+b/c==", 'quote " and \\ slash', "ünï cödé", "  spaces  ", "%7B%7D", "x" * 3000)


async def echoes_state(server: ScriptedServer, _: ScriptedServer) -> None:
    server.state = "the first"
    expected: list[str] = []
    for state in ODD_STATES:
        held = await server.held("next")
        if not expected and sits_out(server, held):
            return
        expected.append(server.state or "")
        expect(
            held.request.named.get("state") == expected[-1],
            f"the state of request {len(expected)} is {held.request.named.get('state')!r:.200}, "
            f"expected {expected[-1]!r:.200}",
        )
        server.state = state
        held.answer.set_result(as_result(NOTHING))
    await finish(server)


async def keeps_state(server: ScriptedServer, _: ScriptedServer) -> None:
    server.state = "kept"
    held = await server.held("next")
    if sits_out(server, held):
        return
    held.answer.set_result(as_result(WORK))
    held = await server.held("work")
    server.state = None
    held.answer.set_result(as_result({}))
    held = await server.held("next")
    found = held.request.named.get("state")
    expect(found == "kept", f"after a result without state the client sends {found!r}")
    server.names_sessions = False
    held.answer.set_result(as_result(NOTHING))
    held = await server.held("next")
    found = held.request.named.get("state")
    expect(found == "kept", f"after a result without metadata the client sends {found!r}")
    held.answer.set_result(as_result(DONE))


async def no_metadata_on_create(server: ScriptedServer, _: ScriptedServer) -> None:
    server.state = "s"
    held = await server.held("next")
    if sits_out(server, held):
        return
    name = str(held.request.named.get("sessionId"))
    server.sessions.pop(name, None)
    held.answer.set_result(
        {"error": {"code": -32043, "message": "Session not found", "data": {"sessionId": name}}}
    )
    await finish(server)
    created = server.requests("sessions/create")
    expect(created, "the client never sent sessions/create")
    for request in created:
        expect(SESSION not in request.meta, f"sessions/create carries {request.meta!r:.200}")


async def ignores_foreign_metadata(server: ScriptedServer, _: ScriptedServer) -> None:
    server.state = "own"
    held = await server.held("next")
    if sits_out(server, held):
        return
    own = held.request.named.get("sessionId")
    foreign = {SESSION: {"sessionId": "another-session", "state": "foreign"}}
    held.answer.set_result({**as_result(WORK), "_meta": foreign})
    for tool in ("work", "next"):
        held = await server.held(tool)
        named = held.request.named
        expect(
            named.get("sessionId") == own and named.get("state") == "own",
            f"after metadata of another session the client sends {named!r:.200}",
        )
        held.answer.set_result(as_result(DONE if tool == "next" else {}))


async def drops_a_lost_session(server: ScriptedServer, _: ScriptedServer) -> None:
    held = await server.held("next")
    name = str(held.request.named.get("sessionId") or next(iter(server.sessions), ""))
    server.sessions.pop(name, None)
    held.answer.set_result(
        {"error": {"code": -32043, "message": "Session not found", "data": {"sessionId": name}}}
    )
    before = len(server.received)
    await finish(server)
    for request in server.received[before:]:
        sent = request.named.get("sessionId") == name or request.params.get("sessionId") == name
        expect(not sent, f"{request.method} still names the session that is gone")
