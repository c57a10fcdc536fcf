"""What the tests of the page share: a client of one dashboard, and sessions to look at."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2

from mcp_sessions.core.ends import SessionEnd, StoreMade
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.dashboard.access_control import guarded, loopback_guard
from mcp_sessions.dashboard.application import Dashboard
from mcp_sessions.dashboard.snapshots import Fleet, NoFleet, Snapshots
from mcp_sessions.ids import ConnectionId, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.operator import SharedStore
from mcp_sessions.stores.probe import StoreSize
from mcp_sessions.stores.records import Peer, SessionPage, SessionRecord
from mcp_sessions.testing import MakeStore

ALICE = Principal("app", "https://issuer.example", "alice", frozenset({"read"}))
ROOMY = SessionPolicy(max_sessions=20_000, max_sessions_per_principal=20_000)
PROCESS = "process-v1-abcdefgh1234"
"""The replica of that name is called abcdefgh."""


class CountingStore(SharedStore):
    """Counts what the page asks of the store. It can be made to wait."""

    def __init__(self, store: SessionStore) -> None:
        super().__init__(store, _nobody)
        self.pages: list[int] = []
        self.others = 0
        """Calls that ask for something else."""

        self.ends_read = 0
        self.may_answer = anyio.Event()
        self.may_answer.set()

    async def size(self) -> StoreSize | None:
        self.others += 1
        return await super().size()

    async def ends(self) -> Sequence[SessionEnd]:
        self.others += 1
        self.ends_read += 1
        return await super().ends()

    async def made(self) -> StoreMade | None:
        self.others += 1
        return await super().made()

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        await self.may_answer.wait()
        page = await super().some_sessions(after, limit)
        self.pages.append(len(page.records))
        return page


async def _nobody(store: SessionStore, record: SessionRecord) -> None:
    """No replica has to know."""


@dataclass
class Pages:
    """A browser without JavaScript."""

    client: httpx2.AsyncClient
    snapshots: Snapshots
    store: CountingStore
    leaving: list[bool]
    """Not empty: the process is about to stop."""

    bodies: list[str] = field(default_factory=list[str])
    """Each answer so far, with its headers."""

    async def get(self, path: str = "/", *, status: int = 200) -> str:
        return self._seen(await self.client.get(path), status)

    async def post(self, path: str, status: int, **form: str) -> httpx2.Response:
        answer = await self.client.post(path, data=form)
        self._seen(answer, status)
        return answer

    def _seen(self, answer: httpx2.Response, status: int) -> str:
        self.bodies.append(f"{answer.headers}\n{answer.text}")
        assert answer.status_code == status, answer.text
        return answer.text


@asynccontextmanager
async def pages_of(store: SessionStore, fleet: Fleet | None = None) -> AsyncGenerator[Pages]:
    counting = CountingStore(store)
    leaving: list[bool] = []
    snapshots = Snapshots(
        counting, fleet or NoFleet(), policy=ROOMY, clock=time.time,
        is_leaving=lambda: bool(leaving),
    )  # fmt: skip
    app = guarded(Dashboard(snapshots, title="the store").app(), loopback_guard)
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8090") as client:
        yield Pages(client, snapshots, counting, leaving)


@asynccontextmanager
async def opened(make: MakeStore) -> AsyncGenerator[SessionStore]:
    store = make()
    await store.open(ROOMY)
    try:
        yield store
    finally:
        await store.close()


async def made(
    store: SessionStore,
    *,
    client: str = "claude-code 2.1.0",
    principal: Principal = ALICE,
    mode: Mode = Mode.PROTOCOL,
    **more: Any,
) -> SessionId:
    name, _, version = client.partition(" ")
    peer = Peer("2025-11-25", {"clientInfo": {"name": name, "version": version}})
    record = await store.create(mode, principal, peer=peer, now=time.time(), **more)
    return record.session_id


async def attached(store: SessionStore, session_id: SessionId, process: str = PROCESS) -> None:
    """Attach it by a WebSocket at a replica."""
    now = time.time()
    connection_id = ConnectionId(f"websocket-{session_id[:6]}@{process}")
    entry = Entry(now, "attached websocket abcdefgh started")
    assert await store.attach(session_id, connection_id, now=now, entry=entry) is not None
