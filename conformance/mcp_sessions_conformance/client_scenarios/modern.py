from dataclasses import dataclass

from mcp_sessions_conformance.client_scenarios.shared_steps import (
    DONE,
    NOTHING,
    expect,
    finish_once_received,
    has_session,
    receive,
)
from mcp_sessions_conformance.peer import MODERN_VERSION, Failure
from mcp_sessions_conformance.received import Received, as_result
from mcp_sessions_conformance.scripted import ScriptedServer
from mcp_sessions_conformance.values import Json

LISTEN = "subscriptions/listen"
ENVELOPE = "io.modelcontextprotocol/"


async def _is_modern(server: ScriptedServer) -> bool:
    """Whether the client speaks the modern era. If not, it gets the message that it is done."""
    held = await server.held("next")
    is_modern = held.request.is_modern
    held.answer.set_result(as_result(NOTHING if is_modern else DONE))
    return is_modern


@dataclass(frozen=True)
class _Visit:
    said: Json
    """The client's messages at the end."""

    before: int
    """How many messages had come when its connections were cut."""


async def _visit(server: ScriptedServer) -> _Visit | None:
    """The client listens, receives a change, loses its connections, and receives what it missed;
    None: it does not speak the modern era.
    """
    if not await _is_modern(server):
        return None
    await has_session(server)
    await server.streaming()
    await server.instruct(receive(1))
    server.push("conformance://e1")
    await server.instruct(receive(2))
    server.cut()
    before = len(server.received)
    server.push("conformance://e2")
    return _Visit(await finish_once_received(server, 2), before)


def _of_session(server: ScriptedServer) -> list[Received]:
    """Return the requests of ``session/*``.

    Raises:
        Failure: There are none.
    """
    found = [request for request in server.received if request.method.startswith("session/")]
    expect(found, "the client never sent session/start")
    return found


async def resumes_before_it_listens(server: ScriptedServer, _: ScriptedServer) -> None:
    visit = await _visit(server)
    if visit is None:
        return
    since = server.received[visit.before :]
    again = next((r for r in since if r.method == LISTEN and r.named), None)
    if again is None:
        raise Failure("the client did not listen again with its session")
    resumed = [r for r in since if r.method == "session/resume" and r.number < again.number]
    expect(resumed, "the client listened again without session/resume")
    position = resumed[0].params.get("lastSessionEventId")
    expect(position == "ev~000001/x", f"session/resume names the position {position!r}")
    received, uris = visit.said.get("heard"), ["conformance://e1", "conformance://e2"]
    expect(received == uris, f"the client received {received!r}, expected {uris!r}")


async def sends_state_with_everything(server: ScriptedServer, _: ScriptedServer) -> None:
    server.state = "of the session"
    visit = await _visit(server)
    if visit is None:
        return
    for request in server.received[visit.before :]:
        state = request.named.get("state")
        expect(
            not request.named or request.method == "session/resume" or state == server.state,
            f"{request.method} names the session with the state {state!r}, not {server.state!r}",
        )


async def mirrors_the_session(server: ScriptedServer, _: ScriptedServer) -> None:
    if await _visit(server) is None:
        return
    for request in server.received:
        if request.named and not request.method.startswith("session/"):
            found = request.headers.get("mcp-session-id")
            named = request.named.get("sessionId")
            expect(
                found == named, f"{request.method} has the header {found!r}, and names {named!r}"
            )


async def mirrors_nothing_with_session_methods(server: ScriptedServer, _: ScriptedServer) -> None:
    if await _visit(server) is None:
        return
    for request in _of_session(server):
        found = request.headers.get("mcp-session-id")
        expect(found is None, f"{request.method} carries Mcp-Session-Id: {found!r}")


async def keeps_the_rules_of_the_era(server: ScriptedServer, _: ScriptedServer) -> None:
    if await _visit(server) is None:
        return
    for request in _of_session(server):
        headers, meta = request.headers, request.meta
        version = headers.get("mcp-protocol-version")
        expect(version == MODERN_VERSION, f"{request.method} has the version {version!r}")
        method = headers.get("mcp-method")
        expect(method == request.method, f"{request.method} has Mcp-Method: {method!r}")
        version = meta.get(f"{ENVELOPE}protocolVersion")
        expect(version == MODERN_VERSION, f"_meta of {request.method} has the version {version!r}")
        capable = meta.get(f"{ENVELOPE}clientCapabilities")
        expect(isinstance(capable, dict), f"{request.method} does not say what its client can")
