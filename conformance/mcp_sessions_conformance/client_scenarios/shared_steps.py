from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mcp_sessions_conformance.peer import Failure
from mcp_sessions_conformance.received import Held, Received, as_result
from mcp_sessions_conformance.scripted import ELEVATION, ScriptedServer
from mcp_sessions_conformance.values import Json

DONE: Json = {"do": "done"}
NOTHING: Json = {"do": "nothing"}
WORK: Json = {"do": "call", "tool": "work", "arguments": {"n": 1}}

Script = Callable[[ScriptedServer, ScriptedServer], Awaitable[None]]
"""Drives the client; the second server is another one, which only one scenario uses."""


@dataclass(frozen=True)
class Scenario:
    script: Script
    speaks: tuple[str, ...] = ELEVATION
    has_keys: bool = True
    key_lifetime: float = 600
    """Seconds."""

    is_modern: bool = False
    """The server speaks the modern era as well, and the program is asked for that."""

    may_fail: bool = False
    """The program need not end well: the script takes its server away."""


def receive(count: int) -> Json:
    return {"do": "hear", "count": count}


def expect(holds: object, sentence: str) -> None:
    if not holds:
        raise Failure(sentence)


async def finish(server: ScriptedServer) -> Json:
    return await server.instruct(DONE)


async def finish_once_received(server: ScriptedServer, count: int) -> Json:
    """Ask the client to wait for so many updates, then end it, and return its last message.

    Updates may be lost with its connections. Then it asks again, before it has received everything.
    """
    for _ in range(3):
        said = await server.instruct(receive(count))
        if len(said.get("heard") or []) >= count:
            break
    return await finish(server)


def sits_out(server: ScriptedServer, held: Held) -> bool:
    """Whether the client made no session with ``sessions/create``, which is allowed. It then gets
    the message that it is done: the scenario is not about it.
    """
    if server.sessions:
        return False
    held.answer.set_result(as_result(DONE))
    return True


async def has_session(server: ScriptedServer) -> str:
    """Return the id of the client's session, once it has one.

    Raises:
        Failure: It has none in time.
    """
    await server.until(lambda: server.sessions, "session/start")
    return next(iter(server.sessions))


async def resumes(server: ScriptedServer, count: int = 1) -> Received:
    """Return the ``count``-th request to resume, once it came.

    Raises:
        Failure: It did not in time.
    """
    await server.until(lambda: len(server.requests("session/resume")) >= count, "session/resume")
    return server.requests("session/resume")[count - 1]
