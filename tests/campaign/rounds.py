"""A round of a campaign: clients of several plans of the simulation, and faults of real processes.

A seed decides what clients do and which faults begin when. It does not decide the order in which
things then happen: a machine does. The history is that of the clients and of the servers' files,
ordered by the machine's monotonic clock. The simulation's rules judge it.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, cast

from tests.campaign.network import HttpCarrier, ProxiedLink, WebSocket
from tests.campaign.servers import CLOCKS_JUMP, SHARED, Fleet, Replica
from tests.simulation.clients import KINDS, Client, HandshakeHttp, ModernHttp, Socket
from tests.simulation.history import History, Record
from tests.simulation.plan import plan_of
from tests.support.proxy import TcpProxy

Json = dict[str, Any]

PLANS: Final = 8
"""Plans of the simulation whose clients meet in one round."""

LAST: Final = 4.0
"""Seconds in which faults begin."""

PATIENCE: Final = 150.0
"""Seconds after the faults in which each client comes to its end."""

QUIET: Final = 6.0
"""Seconds in which what is late may still come."""

_CLIENT_FAULTS: Final = ("cut", "half-open", "still")
_REPLICA_FAULTS: Final = ("kill", "stop", "pause", *(("clock",) if CLOCKS_JUMP else ()))

_RECONNECTED: Final = 5.0
"""Seconds in which replicas hear each other again after their store is back."""


def plan_of_round(seed: int, replicas: int, store_faults: tuple[str, ...]) -> Json:
    """Plain data: ``seed``, ``clients`` as in `tests.simulation.plan`, and ``faults``."""
    chance = random.Random(f"campaign {seed}")
    clients: list[Json] = []
    for _ in range(PLANS):
        plan = plan_of(chance.randrange(1_000_000))
        while not _is_played_here(plan):
            plan = plan_of(chance.randrange(1_000_000))
        first = len(clients)
        for client in plan["clients"]:
            number = len(clients) + 1
            client |= {"name": f"r{seed}c{number}", "number": number, "user": None}
            client["at"] = number % replicas
            client["roams"] = client["roams"] and replicas > 1
            for step in client["steps"]:
                if step["do"] == "take":
                    step["from"] = f"r{seed}c{first + int(step['from'][1:])}"
            clients.append(client)
    kinds = (*store_faults, *_REPLICA_FAULTS, *_CLIENT_FAULTS)
    faults = [
        {
            "kind": chance.choice(kinds),
            "at": round(chance.uniform(0, LAST), 3),
            "for": chance.choice((0.3, 1.0, 3.0, 8.0)),
            "replica": chance.randrange(replicas),
            "client": chance.choice(clients)["name"],
            "skew": chance.choice((-40, -3, 3, 40)),
        }
        for _ in range(chance.choice((2, 3, 4, 5)))
    ]
    return {"seed": seed, "clients": clients, "faults": sorted(faults, key=lambda f: f["at"])}


def _is_played_here(plan: Json) -> bool:
    """A command and a URL would be another fleet, and so would calls that become tasks. And
    `resumable` sends its requests over the network of the simulation.
    """
    is_known = all(client["kind"] in KINDS for client in plan["clients"])
    return plan["server"] == "python" and "tasks_after" not in plan and is_known


class Resuming(Client):
    """Has its session again after ``evicted``, as a client does (TKO7)."""

    def detached(self, params: Json) -> None:
        super().detached(params)
        if params.get("reason") == "evicted" and self.session is not None:
            self.run(self._come_back(self.session))

    async def _come_back(self, session: str) -> None:
        await self.resume(session, self.position)
        await self.resumed()


class RealHttp(Resuming, HandshakeHttp):
    def __init__(self, world: Any, plan: Json) -> None:
        super().__init__(world, plan)
        _goes_through_proxies(self, world)


class RealModern(Resuming, ModernHttp):
    def __init__(self, world: Any, plan: Json) -> None:
        super().__init__(world, plan)
        _goes_through_proxies(self, world)


class RealSocket(Resuming, Socket):
    def __init__(self, world: Any, plan: Json) -> None:
        super().__init__(world, plan)
        self.link: Any = world.link

    def detached(self, params: Json) -> None:
        if params.get("reason") == "evicted":
            self._has = None
        super().detached(params)

    def new_socket(self) -> Any:
        return WebSocket(cast(Any, self.chosen()))


def _goes_through_proxies(client: RealHttp | RealModern, world: "ClientWorld") -> None:
    client.link = world.link
    client.raw.carrier = HttpCarrier(cast(Callable[[], TcpProxy], client.chosen))


PLAYED: Final[dict[str, Any]] = {"http": RealHttp, "modern": RealModern, "websocket": RealSocket}
assert PLAYED.keys() == KINDS.keys()


class ClientWorld:
    """What one client knows of the rest."""

    def __init__(self, played: "Round", link: ProxiedLink) -> None:
        self.history = played.history
        self.clients = played.clients
        self.session_name = played.session_name
        self.link = link
        self.changes_lists = False
        self._fleet = played.fleet

    def choose(self, wanted: int) -> TcpProxy:
        """That of the replica of that number, or of the next one that is there."""
        replicas = self._fleet.replicas
        for number in range(len(replicas)):
            at = (wanted + number) % len(replicas)
            if replicas[at].is_up:
                return self.link.proxies[at]
        return self.link.proxies[wanted % len(replicas)]


class Round:
    def __init__(self, fleet: Fleet, plan: Json) -> None:
        self.fleet = fleet
        self.plan = plan
        self.began = time.monotonic()
        self.history = History(time.monotonic)
        self.clients: dict[str, Client] = {}
        self._names: dict[str, str] = {}
        self._turns: dict[object, asyncio.Lock] = {}

    def session_name(self, session_id: str) -> str:
        return self._names.setdefault(session_id, f"s{len(self._names) + 1}")

    async def play(self) -> History:
        """Play it; its history, with what the servers wrote."""
        async with AsyncExitStack() as stack:
            for plan in self.plan["clients"]:
                proxies = [
                    await stack.enter_async_context(TcpProxy("127.0.0.1", replica.port))
                    for replica in self.fleet.replicas
                ]
                world = ClientWorld(self, ProxiedLink(proxies))
                self.clients[plan["name"]] = PLAYED[plan["kind"]](world, plan)
            await self._play()
        return self._whole()

    async def _play(self) -> None:
        faults = [asyncio.create_task(self._fault(fault)) for fault in self.plan["faults"]]
        playing = {
            name: asyncio.create_task(client.play()) for name, client in self.clients.items()
        }
        try:
            if faults:
                await asyncio.gather(*faults)
            for number, replica in enumerate(self.fleet.replicas):
                if await replica.revive():
                    self.history.add("fault", kind="kill", replica=number)
            self.history.add("heals")
            await asyncio.wait(playing.values(), timeout=PATIENCE)
            for name, client in self.clients.items():
                client.note("idle", stuck=not playing[name].done())
            await asyncio.sleep(QUIET)
            self.history.add("end")
        finally:
            for client in self.clients.values():
                client.leave()
            for task in [*faults, *playing.values()]:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*faults, *playing.values(), return_exceptions=True)
        for name, client in self.clients.items():
            playing[name].exception() if not playing[name].cancelled() else None
            if client.failed:
                raise client.failed[0]

    # --- faults -----------------------------------------------------------------------------------

    async def _fault(self, fault: Json) -> None:
        await asyncio.sleep(fault["at"])
        kind, seconds = fault["kind"], fault["for"]
        replica: Replica = self.fleet.replicas[int(fault["replica"])]
        link = cast(ProxiedLink, self.clients[fault["client"]].link)
        if kind in self.fleet.store.kinds:
            async with self._turn(self.fleet.store):
                self.history.add("fault", **fault)
                if kind.startswith(tuple(SHARED)):
                    # What replicas say to each other is lost meanwhile.
                    self.history.add("fault", **fault | {"kind": "deaf", "for": seconds})
                await self.fleet.store.fault(kind, seconds)
                if kind.startswith(tuple(SHARED)):
                    self.history.add("fault", **fault | {"kind": "deaf", "for": _RECONNECTED})
            return
        doing: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": lambda: self._killed(replica, seconds),
            "stop": lambda: self._stopped(replica),
            "pause": lambda: self._paused(replica, seconds),
            "clock": lambda: self._clock(replica, fault["skew"], seconds),
            "still": lambda: self._still(link, seconds),
            "half-open": lambda: self._half_open(link),
            "cut": lambda: self._cut(link),
        }
        subject: object = replica if kind in _REPLICA_FAULTS else link
        async with self._turn(subject):
            self.history.add("fault", **fault)
            await doing[kind]()

    def _turn(self, subject: object) -> asyncio.Lock:
        """One thing has one fault at a time."""
        return self._turns.setdefault(subject, asyncio.Lock())

    async def _killed(self, replica: Replica, seconds: float) -> None:
        replica.kill()
        await asyncio.sleep(seconds)
        await replica.start()

    async def _stopped(self, replica: Replica) -> None:
        await replica.stop()
        # What it still ran when its grace was over died with it.
        self.history.add("fault", kind="kill", replica=self.fleet.replicas.index(replica))
        await replica.start()

    async def _paused(self, replica: Replica, seconds: float) -> None:
        replica.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            replica.resume()

    async def _clock(self, replica: Replica, skew: int, seconds: float) -> None:
        replica.skew(skew)
        try:
            await asyncio.sleep(seconds + 1)
        finally:
            replica.skew(0)

    async def _still(self, link: ProxiedLink, seconds: float) -> None:
        for proxy in link.proxies:
            proxy.stall_all()
        await asyncio.sleep(seconds)
        for proxy in link.proxies:
            proxy.unstall_all()

    async def _half_open(self, link: ProxiedLink) -> None:
        for proxy in link.proxies:
            for connection in proxy.connections:
                connection.lose_client()

    async def _cut(self, link: ProxiedLink) -> None:
        link.cut()

    # --- the history ------------------------------------------------------------------------------

    def _whole(self) -> History:
        whole = History()
        # A line that was cut by a kill was written by nobody: each is one write.
        written = (json.loads(line) for line in self.fleet.records())
        theirs = [record for record in written if self._is_ours(record)]
        whole.records = sorted([*self.history.records, *theirs], key=lambda record: record["t"])
        return whole

    def _is_ours(self, record: Record) -> bool:
        if record["what"] == "defect":
            return bool(self.began <= record["t"])
        mark: str = record.get("call") or record["question"]
        return mark.startswith(f"r{self.plan['seed']}c")
