"""A host on the pipes of ``mcp-sessions bridge``, which speaks sessions itself."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.support.modern import ACKNOWLEDGED, SUBSCRIPTION_ID
from tests.support.process_peer import ProcessPeer
from tests.support.raw import SESSION, Json

BRIDGE = [sys.executable, "-m", "mcp_sessions.cli", "bridge"]


def named(session_id: str) -> Json:
    return {SESSION: {"sessionId": session_id}}


def session_of(event: Json) -> str:
    return event["params"]["_meta"][SESSION]["sessionId"]


class Host(ProcessPeer):
    """The host, and what the bridge wrote to standard error."""

    said: str = ""

    def received(self, session_id: str) -> list[str]:
        """The resources whose updates came in a session, in order."""
        return [e["params"]["uri"] for e in self.events if session_of(e) == session_id]

    def ids(self, session_id: str) -> list[str]:
        """The ids of the events that came in a session, in order."""
        return [e["params"]["sessionEventId"] for e in self.events if session_of(e) == session_id]

    @property
    def acknowledged(self) -> list[str | int]:
        """The listen streams that were said to be open, each time that it was said."""
        notified = [n["params"] for n in self.notifications if n["method"] == ACKNOWLEDGED]
        return [params["_meta"][SUBSCRIPTION_ID] for params in notified]

    async def current(self) -> str:
        """The session in which a request without a name is served."""
        return await self.text("session_id")

    async def subscribed(self, *uris: str) -> str:
        """A new session, with subscriptions; its id. In the modern era a listen stream has them."""
        session_id: str = (await self.start())["sessionId"]
        if self.modern:
            wanted = {"notifications": {"resourceSubscriptions": list(uris)}}
            stream = await self.send("subscriptions/listen", wanted, meta=named(session_id))
            await self.until(lambda: stream in self.acknowledged, "the acknowledgement")
            return session_id
        for uri in uris:
            await self.result("resources/subscribe", {"uri": uri}, meta=named(session_id))
        return session_id


@asynccontextmanager
async def host(
    *urls: str, capabilities: Json | None = None, modern: bool = False
) -> AsyncGenerator[Host]:
    """A host whose bridge runs, after its handshake."""
    process = await asyncio.create_subprocess_exec(
        *BRIDGE,
        *urls,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    peer = Host(process, process.stdout, process.stdin, capabilities=capabilities, modern=modern)
    stderr = process.stderr

    async def listen() -> None:
        while line := await stderr.readline():
            peer.said += line.decode()

    listening = asyncio.create_task(listen())
    try:
        await peer.initialize()
        yield peer
        await peer.leave()
        await peer.exit()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await listening
