"""Plays a plan: one process, one loop, virtual time; the history of the run."""

import asyncio
import gc
import json
import logging
import random
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

from mcp_sessions import SessionPolicy, TaskPolicy
from mcp_sessions.ids import EVENTS, SessionId, process_of
from tests.simulation.chance import decided_by
from tests.simulation.clients import KINDS, Chosen, Client
from tests.simulation.faults import Aimed, StoreFaults
from tests.simulation.history import History
from tests.simulation.our_client import OurClient, decided_by_the_loop
from tests.simulation.plan import KEPT
from tests.simulation.programs import Command, SharedCommand, Url
from tests.simulation.replicas import Replica
from tests.simulation.scheduler import SimulationLoop
from tests.simulation.servers import Failed, InPython, Wrapped
from tests.simulation.task_clients import TaskHost
from tests.support.replicas import Backplane

Json = dict[str, Any]

PATIENCE: Final = 150.0
"""Seconds after which a run ends, whatever its clients wait for."""

_AIMS: Final = 8.0
"""Seconds in which a fault waits for the call that it is for."""

_ROOM: Final = 1_000
"""Events of a session of which none is dropped."""

_COMES: Final = 20.0
"""Seconds in which a fault waits for its moment."""

QUIET: Final = 12.0
"""Seconds in which what is late may still come."""

CLIENTS: Final[dict[str, type[Client]]] = {**KINDS, "tasks": TaskHost, "ours": OurClient}

SERVERS: Final[dict[str, type[Wrapped]]] = {
    "python": InPython, "command": Command, "shared command": SharedCommand, "url": Url,
}  # fmt: skip


class Run:
    """All of one run."""

    def __init__(self, plan: Json, history: History) -> None:
        self.plan = plan
        self.history = history
        self.clients: dict[str, Client] = {}
        steps = [step for client in plan["clients"] for step in client["steps"]]
        self.changes_lists = any("list" in step.get("script", ()) for step in steps)
        self.backplane = Backplane(plan["seed"])
        self._notes_what_is_stored()
        policy = SessionPolicy(max_events=plan["window"], request_key_bytes=plan.get("kept", KEPT))
        after: float | None = plan.get("tasks_after")
        tasks = TaskPolicy(after=after) if after is not None else None
        self.wrapped = wrapped = SERVERS[plan["server"]]()
        self.replicas = [
            Replica(number, self.backplane, history, wrapped, policy, tasks)
            for number in range(plan["replicas"])
        ]
        self._names: dict[str, str] = {}

    def _notes_what_is_stored(self) -> None:
        memory, stored = self.backplane.memory, set[str]()
        append = memory.append

        async def noted(session_id: Any, draft: Any, **options: Any) -> Any:
            appended = await append(session_id, draft, **options)
            if appended is not None and b"notifications/x" in appended.event.payload:
                params = json.loads(appended.event.payload)["params"]
                event_id = appended.event.event_id
                if options.get("stream", EVENTS) == EVENTS and event_id not in stored:
                    stored.add(event_id)
                    self.history.add("stored", call=params["mark"], n=params["n"], id=event_id)
            return appended

        setattr(memory, "append", noted)  # noqa: B010

    # --- what clients know ------------------------------------------------------------------------

    def choose(self, wanted: int) -> Chosen | None:
        for number in range(len(self.replicas)):
            chosen = self.replicas[(wanted + number) % len(self.replicas)].chosen
            if chosen is not None:
                return chosen
        return None

    def session_name(self, session_id: str) -> str:
        return self._names.setdefault(session_id, f"s{len(self._names) + 1}")

    # --- the run ----------------------------------------------------------------------------------

    async def play(self) -> None:
        count, kept = len(self.replicas), self.plan.get("kept", KEPT)
        self.history.add(
            "begins", replicas=count, has_room=kept >= KEPT and self.plan["window"] >= _ROOM,
            passes_on=count > 1 and self.plan["server"] != "python",
        )  # fmt: skip
        for replica in self.replicas:
            await replica.start()
        for plan in self.plan["clients"]:
            self.clients[plan["name"]] = CLIENTS[plan["kind"]](self, plan)
        loop = asyncio.get_running_loop()
        faults = [loop.create_task(self._fault(fault)) for fault in self.plan["faults"]]
        playing = [loop.create_task(client.play()) for client in self.clients.values()]
        if faults:
            await asyncio.wait(faults)
        self.history.add("heals")
        _, stuck = await asyncio.wait(playing, timeout=PATIENCE)
        for client in self.clients.values():
            client.note("idle", stuck=bool([t for t in playing if t in stuck]))
        await asyncio.sleep(QUIET)
        await self._look_for_what_stays()
        self.history.add("end")
        for task in [*faults, *playing]:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise cast(BaseException, task.exception())
        for client in self.clients.values():
            if client.failed:
                raise client.failed[0]

    async def _look_for_what_stays(self) -> None:
        """Who has left lost its connections, and their processes noticed."""
        if not all(client.is_over for client in self.clients.values()):
            return
        living = [each.member.process for each in self.replicas if each.chosen is not None]
        for session_id in self._names:
            record = await self.backplane.memory.load(SessionId(session_id), now=0)
            has = record.attachment if record is not None else None
            if has is not None and process_of(has.connection_id) in living:
                self.history.add("stays", session=self._names[session_id])

    async def _fault(self, fault: Json) -> None:
        if "upon" in fault:
            try:
                async with asyncio.timeout(_COMES):
                    await self.history.comes(fault["upon"], fault["nth"])
            except TimeoutError:
                return
        await asyncio.sleep(fault["at"])
        if fault["kind"] != "kill":
            # A replica notes its own death.
            self.history.add("fault", **fault)
        number: int = fault.get("replica", 0)
        chosen = self.replicas if number == -1 else [self.replicas[number]]
        replica, seconds = chosen[0], fault["for"]
        client = self.clients.get(fault.get("client", ""))
        match fault["kind"]:
            case "store":
                for each in chosen:
                    each.store_faults.how = fault["how"]
                await asyncio.sleep(seconds)
                for each in chosen:
                    each.store_faults.how = None
            case "store call":
                faults: StoreFaults = replica.store_faults
                faults.at_calls[faults.calls + fault["call"]] = fault["how"]
                await asyncio.sleep(seconds)
                faults.at_calls.clear()
            case "store method":
                of_methods = replica.store_faults.of_methods
                of_methods[fault["method"]] = fault["how"]
                await asyncio.sleep(seconds)
                of_methods.pop(fault["method"], None)
            case "aimed":
                await self._aimed(replica, fault)
            case "kill" if replica.chosen is not None:
                replica.kill()
                await asyncio.sleep(seconds)
                await replica.start()
            case "stop" if replica.chosen is not None:
                if await replica.stop(fault["grace"]):
                    await asyncio.sleep(seconds)
                    await replica.start()
            case "pause" if replica.chosen is not None:
                replica.pause()
                await asyncio.sleep(seconds)
                replica.resume()
            case "clock":
                replica.skew = fault["skew"]
                await asyncio.sleep(seconds)
                replica.skew = 0.0
            case "deaf" if replica.chosen is not None:
                member = replica.member
                member.cut_off()
                await asyncio.sleep(seconds)
                if fault.get("unnoticed"):
                    member.is_cut_off = False
                else:
                    member.mend()
            case "reconnects" if replica.chosen is not None:
                member = replica.member
                member.is_deaf = True
                await asyncio.sleep(seconds)
                member.is_deaf = False
                member.mend()
            case "slow" if client is not None:
                client.link.delay += 0.4
                await asyncio.sleep(seconds)
                client.link.delay -= 0.4
            case "still" if client is not None:
                client.link.stands_still = True
                await asyncio.sleep(seconds)
                client.link.flows_again()
            case "child":
                self.wrapped.child_dies()
            case _:
                pass

    async def _aimed(self, replica: Replica, fault: Json) -> None:
        aimed = Aimed(fault["method"], fault["how"], fault["skips"], fault.get("of"))
        replica.store_faults.aimed.append(aimed)
        with suppress(TimeoutError):
            async with asyncio.timeout(_AIMS):
                await aimed.has_hit.wait()
        replica.store_faults.aimed.remove(aimed)
        if not aimed.has_hit.is_set():
            return
        if aimed.how.startswith("pause"):
            await asyncio.sleep(fault["for"])
            replica.resume()
        if not aimed.how.startswith("kill"):
            return
        for _ in range(100):
            if replica.chosen is None:
                await asyncio.sleep(fault["for"])
                await replica.start()
                return
            # The call has its effect first.
            await asyncio.sleep(0.05)

    async def clear_up(self) -> None:
        """End everything, also what was killed, in asyncio's own order."""
        loop = cast(SimulationLoop, asyncio.get_running_loop())
        loop.in_order()
        self.history.add = _nothing
        for client in self.clients.values():
            client.leave()
        for replica in self.replicas:
            replica.store_faults.how = None
            replica.store_faults.at_calls.clear()
            replica.store_faults.of_methods.clear()
            replica.store_faults.aimed.clear()
            for host in replica.hosts:
                if host.is_dead or host.is_paused:
                    host.resume()
        own = asyncio.current_task()
        for _ in range(3):
            rest = [task for task in asyncio.all_tasks() if task is not own]
            if not rest:
                return
            for task in rest:
                task.cancel()
            await asyncio.wait(rest, timeout=60)
        for task in asyncio.all_tasks() - {own}:
            cast(Any, task)._log_destroy_pending = False


def _nothing(what: str, **members: Any) -> None:
    """Note nothing: the run has ended."""


def play(plan: Json) -> History:
    """Play a plan; its history."""
    seed = plan["seed"]
    loop = SimulationLoop(random.Random(f"order {seed}"), plan["disorder"])
    begun = loop.time()
    history = History(lambda: loop.time() - begun)
    was_enabled = gc.isenabled()
    gc.disable()
    asyncio.set_event_loop(loop)
    try:
        with decided_by(f"chance {seed}", loop.time), _defects(history):
            run = Run(plan, history)
            with run.wrapped.installed(history), decided_by_the_loop():
                try:
                    loop.run_until_complete(run.play())
                finally:
                    loop.run_until_complete(run.clear_up())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        if was_enabled:
            gc.enable()
    return history


@contextmanager
def _defects(history: History) -> Generator[None]:
    """Note what the layer logs of work that died, and print nothing."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raised = record.exc_info[1] if record.exc_info else None
            if raised is not None and not isinstance(raised, Failed):
                history.add("defect", text=f"{record.getMessage()}: {raised!r}"[:200])

    handler = Handler(logging.ERROR)
    ours = ("mcp_sessions", "mcp_sessions_transports", "asyncio")
    loggers = [logging.getLogger(name) for name in (*ours, "mcp", "httpx2")]
    before = [(each, each.propagate, each.handlers) for each in loggers]
    for each in loggers:
        each.propagate, each.handlers = (
            False,
            [handler if each.name in ours else logging.NullHandler()],
        )
    try:
        yield
    finally:
        for each, propagates, handlers in before:
            each.propagate, each.handlers = propagates, handlers
