"""Clients that do what a client may do, and note what they saw.

Three kinds: over HTTP in the era of handshakes, over a WebSocket, and over HTTP in the modern era.
They come back to streams that broke, send keyed calls again, resume their session, and answer what
they are asked. What they see is judged by `tests.simulation.rules`, not here.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from starlette.types import ASGIApp

from mcp_sessions.core.messages import members_of
from tests.simulation.history import History
from tests.simulation.network import HttpLink, Link, SocketLink
from tests.simulation.programs import TOLD
from tests.simulation.scheduler import Host
from tests.simulation.servers import LIST
from tests.support.board import Board
from tests.support.modern import EVENT_ID, LOG_LEVEL, ModernClient
from tests.support.raw import (
    EXTENSION,
    KEY,
    Json,
    RawClient,
    Reply,
    call_params,
    in_session,
    initialize_params,
)
from tests.support.replicas import user

SILENCE: Final = 30.0
"""Seconds without an answer after which a client breaks its connection and tries again."""

WITHIN: Final = 60.0
"""Seconds in which a call must be answered, beside those that its script takes."""

AGAIN: Final = 0.5
"""Seconds before another attempt."""

AWAY: Final = 503
_UNKNOWN: Final = -31012
_DETACHED: Final = -31010
_NOT_FOUND: Final = -32043

Chosen = tuple[ASGIApp, Host]


class World(Protocol):
    """What clients know of the rest."""

    history: History
    clients: "dict[str, Client]"
    changes_lists: bool
    """A script changes the list of tools."""

    def choose(self, wanted: int) -> Chosen | None:
        """The replica of that number, or the next one that is there."""
        ...

    def session_name(self, session_id: str) -> str: ...


class Client(ABC):
    """One client.

    Args:
        plan: An entry of ``clients`` of a plan (`tests.simulation.plan`).
    """

    has_handshake = True
    """Log messages come unasked."""

    mixes = False
    """It does not tell what came on the response of a call from what came on a stream."""

    gives_up = False
    """It may say by itself that an outcome is unknown."""

    @property
    def outlives_connections(self) -> bool:
        """Its calls go on without a key when their connection breaks."""
        return True

    def __init__(self, world: World, plan: Json) -> None:
        self.world = world
        self.history = world.history
        self.plan = plan
        self.name: str = plan["name"]
        self.link = Link(f"10.0.0.{plan['number']}")
        self.session: str | None = None
        """Its protocol-mode session."""

        self.own: str | None = None
        """The history's name of the session that its connection has by itself."""

        self.position: str | None = None
        self._resumes = False
        self._came_before: set[str] = set()
        """Events that came while it asked for its session. They may come again, once (ATT6)."""

        self.uris: list[str] = []
        """What its session is subscribed to."""

        self.is_displaced = False
        self.is_over = False
        self.board = Board()
        self._at: int = plan["at"]
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._left: set[str] = set()
        """Second responses of calls, to which it does not come back, or not yet."""

        self._count = 0
        self.failed: list[BaseException] = []

    # --- each kind has its own --------------------------------------------------------------------

    @abstractmethod
    async def connect(self) -> None: ...

    @abstractmethod
    async def ask(self, method: str, params: Json) -> Json | None:
        """The answer to a request that may be sent as often as needed; None: not this time."""

    @abstractmethod
    async def call(self, mark: str, step: Json) -> None:
        """Call ``work``, and note what becomes of it."""

    @abstractmethod
    async def post_reply(self, message: Json) -> bool | None:
        """Send the answer to a question; whether it was accepted. None: nobody will say."""

    # --- the plan ---------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether it could hear now what concerns its session."""
        return False

    @property
    def user(self) -> object:
        return user(self.plan["user"]) if self.plan.get("user") else None

    @property
    def capabilities(self) -> Json:
        can_be_asked: Json = {"elicitation": {}} if self.plan["asks"] else {}
        knows_us: Json = {"extensions": {EXTENSION: {}}} if self.plan["session"] else {}
        return {**can_be_asked, **knows_us}

    def chosen(self) -> Chosen | None:
        if self.plan["roams"]:
            self._at += 1
        return self.world.choose(self._at)

    def note(self, what: str, **members: Any) -> None:
        self.history.add(what, client=self.name, **members)

    async def play(self) -> None:
        """Take each step of the plan."""
        self.note(
            "connects", can_be_asked=self.plan["asks"], is_told=self.plan["session"],
            answers=self.has_handshake and self.plan["asks"] and not self.plan["silent"],
            gives_up=self.gives_up, mixes=self.mixes,
            stays=not self.plan["roams"] and not any(s.get("moves") for s in self.plan["steps"]),
        )  # fmt: skip
        await asyncio.sleep(self.plan["starts"])
        await self.connect()
        if self.plan["session"]:
            await self.start()
        for step in self.plan["steps"]:
            await self._take(step)
        while self._calls:
            await asyncio.wait(set(self._calls))

    async def _take(self, step: Json) -> None:
        match step["do"]:
            case "pause":
                await asyncio.sleep(step["seconds"])
            case "cut":
                self.link.cut()
                self._at += step.get("moves", 0)
            case "call" if not self.is_displaced:
                self._count += 1
                mark = f"{self.name}.{self._count}"
                calling = self._run(self._call(mark, step), self._calls)
                if not step.get("background"):
                    await asyncio.wait({calling})
            case "subscribe" if self.session is not None and not self.is_displaced:
                await self._subscribe(step["uri"])
            case "unsubscribe" if self.session is not None and not self.is_displaced:
                await self._unsubscribe(step["uri"])
            case "tell" if not self.is_displaced:
                await self._tell(f"{self.name}.{self._count}", step["n"])
            case "leave":
                if self.session is not None:
                    self.note("gone", session=self.world.session_name(self.session))
                self.leave()
            case "take":
                await self._take_over(self.world.clients.get(step["from"]))
            case _:
                pass

    async def _call(self, mark: str, step: Json) -> None:
        if step.get("gives_up") is not None:
            self.run(self._gives_up(mark, step["gives_up"]))
        if not step.get("abandons"):
            await self.call(mark, step)
            return
        try:
            async with asyncio.timeout(step["abandons"]):
                await self.call(mark, step)
        except TimeoutError:
            self.note("lost", call=mark)

    async def _gives_up(self, mark: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.note("cancels", call=mark)
        params = {"requestId": mark, "reason": "it is not wanted any more"}
        message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        if await self.post_reply(message):
            self.note("cancelled", call=mark)

    async def _tell(self, mark: str, n: int) -> None:
        """Tell the server something, about the call that was begun last."""
        self.note("tells", call=mark, n=n)
        params: Json = {"mark": mark, "n": n, "_meta": in_session(self.session)}
        if await self.post_reply({"jsonrpc": "2.0", "method": TOLD, "params": params}):
            self.note("is_told", call=mark, n=n)

    def leave(self) -> None:
        """Do nothing more."""
        self.is_over = True
        for task in [*self._tasks, *self._calls]:
            task.cancel()
        self.link.cut()

    def _run(self, work: Coroutine[Any, Any, None], kept: set[asyncio.Task[None]]) -> Any:
        task = asyncio.create_task(work, name=self.name)
        kept.add(task)

        def done(task: asyncio.Task[None]) -> None:
            kept.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self.failed.append(task.exception() or AssertionError())

        task.add_done_callback(done)
        return task

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside the steps, until the client leaves."""
        self._run(work, self._tasks)

    async def until_asked(self, method: str, params: Json) -> Json:
        while True:
            answer = await self.ask(method, params)
            if answer is not None:
                return answer
            await asyncio.sleep(AGAIN)

    # --- its session ------------------------------------------------------------------------------

    def meta(self, mark: str, *, keyed: bool) -> Json:
        members: Json = {"progressToken": mark}
        if self.session is not None:
            members |= in_session(self.session)
        if keyed:
            members[KEY] = mark
        return members

    async def start(self) -> None:
        answer = await self.until_asked("session/start", {})
        started = answer["result"]
        self.session, self.position = started["sessionId"], started["sessionEventId"]
        self.note("owns", session=self.world.session_name(self.session or ""))

    async def resume(self, session: str, position: str | None) -> bool:
        """Have a session; whether there is one."""
        self.position, self._came_before, self._resumes = position, set(), True
        while True:
            params: Json = {"sessionId": session}
            if self.position is not None:
                # The newest: an attempt that failed may have replayed what follows the old one.
                params["lastSessionEventId"] = self.position
            answer = await self.ask("session/resume", params)
            if answer is not None and not says_away(answer):
                self._resumes = False
                return self.was_resumed(session, answer)
            await asyncio.sleep(AGAIN)

    def was_resumed(self, session: str, answer: Json) -> bool:
        """Take the answer to a resume; whether there is that session."""
        name = self.world.session_name(session)
        if "result" not in answer:
            self.note("forgotten", session=name)
            return False
        resumed = answer["result"]
        if not resumed["catchup"] and resumed.get("reason") != "no_stream":
            self.note("gap")
            self.position = resumed["sessionEventId"]
        self.session = session
        self.note("owns", session=name)
        return True

    async def _take_over(self, other: "Client | None") -> None:
        if other is None or other.session is None or other.is_displaced or self.is_displaced:
            return
        if self.session is not None:
            # Nobody reads on there.
            self.note("gone", session=self.world.session_name(self.session))
        self.uris = list(other.uris)
        self.session, self.position = other.session, other.position
        name = self.world.session_name(other.session)
        self.note("takes", session=name, of=other.name, was_connected=other.is_connected)
        other.is_displaced = True
        await self.resume(other.session, other.position)
        await self.resumed()

    async def resumed(self) -> None:  # noqa: B027
        """Do what follows a resume. Most have nothing to do."""

    async def _subscribe(self, uri: str) -> None:
        params: Json = {"uri": uri, "_meta": in_session(self.session)}
        answer = await self.until_asked("resources/subscribe", params)
        if "result" in answer and self.session is not None:
            self.uris.append(uri)
            name = self.world.session_name(self.session)
            self.note("subscribed", session=name, uri=uri)

    async def _unsubscribe(self, uri: str) -> None:
        if self.session is not None:
            name = self.world.session_name(self.session)
            self.note("unsubscribed", session=name, uri=uri)
        self.uris = [each for each in self.uris if each != uri]
        params: Json = {"uri": uri, "_meta": in_session(self.session)}
        await self.until_asked("resources/unsubscribe", params)

    # --- hearing ----------------------------------------------------------------------------------

    def hear(self, message: Json, on: str, copy_of: str | None = None) -> None:
        """Note a message, and answer it if it is a question.

        Args:
            on: The call on whose response it came, or ``events``, or ``again``.
            copy_of: The call whose second response that is.
        """
        method: str = message.get("method", "")
        params: Json = message.get("params") or {}
        meta: Json = params.get("_meta") or {}
        event_id: str | None = params.get("sessionEventId") or meta.get(EVENT_ID)
        if event_id is not None:
            if event_id in self._came_before:
                self._came_before.remove(event_id)
                return
            if self._resumes:
                self._came_before.add(event_id)
            self.position = event_id
        if "id" in message:
            self._asked(message, on, on if copy_of is None else f"{copy_of}'")
        elif method == "notifications/progress":
            # The layer itself reports that a silent call still runs: without a number of ours.
            n, mark = params.get("progress"), params.get("progressToken")
            self.note("hears", call=mark, kind="progress", n=n, on=on)
        elif method == "notifications/message":
            data = params["data"]
            self.note("hears", call=data["mark"], kind="log", n=data["n"], on=on)
        elif method == "notifications/x":
            self.note("hears", call=params["mark"], kind="event", n=params["n"], on=on, id=event_id)
        elif method == "notifications/resources/updated":
            self.note("updated", uri=params["uri"], id=event_id)
        elif method == "notifications/tools/list_changed" and self.world.changes_lists:
            self.note("updated", uri=LIST, id=event_id)
        elif method.endswith("list_changed"):
            self.note("gap")
        elif method == "notifications/sessions/detached":
            self.detached(params)

    def _hear_beside(self, message: Json) -> None:
        """Hear what comes on the response of a request that is no call."""
        self.hear(message, "beside")

    def detached(self, params: Json) -> None:
        self.note("displaced", reason=params.get("reason"))

    def _asked(self, message: Json, on: str, response: str) -> None:
        if message["method"] != "elicitation/create":
            self.run(self._reply(message, {}, None, response))
            return
        question = message["params"]["message"]
        self.note("asked", question=question, on=on, id=str(message["id"]))
        if not self.plan["silent"]:
            value = f"{question}@{self.name}"
            result = {"action": "accept", "content": {"answer": value}}
            self.run(self._reply(message, result, question, response))

    async def _reply(
        self, message: Json, result: Json, question: str | None, response: str
    ) -> None:
        await asyncio.sleep(self.plan["thinks"])
        if response in self._left:
            # What was on it is forgotten with it.
            return
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        for _ in range(20):
            accepted = await self.post_reply(reply)
            if accepted is not False:
                if question is not None:
                    value = f"{question}@{self.name}"
                    self.note("replies", question=question, value=value, accepted=bool(accepted))
                return
            await asyncio.sleep(AGAIN)

    # --- the outcome of a call --------------------------------------------------------------------

    def sends(self, mark: str, step: Json, *, again: bool = False) -> None:
        session = self.own if self.session is None else self.world.session_name(self.session)
        is_bystander = step.get("bystander")
        more: Json = {"bystander": True, "seconds": step["seconds"]} if is_bystander else {}
        more |= {"again": True} if again else {}
        self.note(
            "sends", call=mark, keyed=bool(step.get("keyed")), session=session,
            survives=self.outlives_connections or bool(step.get("keyed")),
            logs=self.has_handshake or self.plan["logs"],
            within=step["seconds"] + WITHIN, **more,
        )  # fmt: skip

    def answered(self, mark: str, answer: Json, *, whole: bool, again: bool = False) -> None:
        if "result" in answer:
            more = {"again": True} if again else {}
            self.note("answered", call=mark, result=True, whole=whole, **more)
            return
        error = answer["error"]
        data: Json = error.get("data") or {}
        said = {"started": data["started"]} if "started" in data else {}
        self.note("answered", call=mark, result=False, code=error["code"], whole=whole, **said)

    def refused(self, mark: str, answer: Json) -> None:
        """Note what was said of a call that could not be served just then."""
        said: Json = members_of(members_of(answer.get("error")).get("data"))
        if "started" in said:
            self.note("refused", call=mark, started=said["started"])

    def params_of(self, mark: str, step: Json) -> Json:
        arguments = {"mark": mark, "script": step["script"]}
        return call_params("work", arguments, self.meta(mark, keyed=bool(step.get("keyed"))))

    def cut_at(self, step: Json) -> float | None:
        return now() + step["cut"] if step.get("cut") is not None else None


class HandshakeHttp(Client):
    """2025-11-25 over HTTP: POSTs, and a GET stream that it comes back to."""

    def __init__(self, world: World, plan: Json) -> None:
        super().__init__(world, plan)
        carrier = HttpLink(self.link, self.chosen, self.user)
        self.raw = RawClient(carrier, capabilities=self.capabilities)
        self._last: str | None = None

    async def connect(self) -> None:
        self.raw.session_id = None
        params = initialize_params(self.name, capabilities=self.capabilities)
        answer = None
        while answer is None:
            sent = self.raw.send("initialize", params)
            answer = await self._answer(sent.reply, sent.id)
            if answer is not None and "result" in answer:
                self.raw.session_id = sent.reply.header("mcp-session-id")
            else:
                await asyncio.sleep(AGAIN)
        # Nothing says when a replica listens again.
        while not await self._accepted({"method": "notifications/initialized"}):  # noqa: ASYNC110
            await asyncio.sleep(AGAIN)
        if not self.plan["session"]:
            self.own = self.world.session_name(self.raw.session_id or "")
            self.note("owns", session=self.own)
        self.run(self._listen())

    async def _answer(self, reply: Reply, number: str | int) -> Json | None:
        # A server that names no call may put its question on any response that is open.
        await read_from(reply, self._hear_beside, lambda: reply.answer_to(number) is not None)
        return None if reply.status == AWAY else reply.answer_to(number)

    async def _accepted(self, message: Json) -> bool:
        reply = self.raw.post({"jsonrpc": "2.0", **message})
        await read_from(reply, lambda _: None, lambda: False)
        return reply.status == 202

    async def ask(self, method: str, params: Json) -> Json | None:
        number = f"{self.name}/{next(self.raw.numbers)}"
        reply = self.raw.send(method, params, request_id=number).reply
        return await self._answer(reply, number)

    async def post_reply(self, message: Json) -> bool:
        return await self._accepted(message)

    async def _listen(self) -> None:
        is_first = True
        while not self.is_over:
            reply = self.raw.get(self._last)
            if not is_first and self._last is None:
                self.run(self._have_again(reply))

            def take(message: Json) -> None:
                self.hear(message, "events")

            def seen(event_id: str) -> None:
                self._last = event_id

            await read_from(reply, take, lambda: False, seen=seen, silence=None)
            # Who is answered with 503 has its first stream to come (HTL3).
            is_first = is_first and reply.status == AWAY
            self.note("breaks", served=reply.status != AWAY)
            if reply.status == 404:
                self.note("forgotten")
                return
            await asyncio.sleep(AGAIN)

    async def _have_again(self, reply: Reply) -> None:
        """Resume the session: a later GET without a position detaches it (HTL7)."""
        is_there = await _until(
            reply.board, lambda: reply.ended or reply.status is not None, now() + SILENCE
        )
        if is_there and reply.status == 200 and self.session is not None:
            if not self.is_displaced:
                await self.resume(self.session, self.position)

    async def call(self, mark: str, step: Json) -> None:
        cut_at, keyed, whole = self.cut_at(step), bool(step.get("keyed")), True
        last: str | None = None

        def seen(event_id: str) -> None:
            nonlocal last
            last = event_id

        self.sends(mark, step)
        params = self.params_of(mark, step)
        reply = self.raw.send("tools/call", params, request_id=mark).reply
        if step.get("twice"):
            self.run(self._once_more(mark, step, params))
        while True:
            at = self._at
            is_silent = await read_from(
                reply,
                lambda message: self.hear(message, mark),
                lambda r=reply: r.answer_to(mark) is not None,
                seen=seen,
                cut_at=cut_at,
                silence=SILENCE + step["seconds"],
            )
            if is_silent:
                self.note("silent", call=mark, at=at)
            cut_at = None
            answer = reply.answer_to(mark)
            if answer is not None and reply.status == 200:
                self.answered(mark, answer, whole=whole)
                return
            if step.get("leaves"):
                self.note("lost", call=mark)
                return
            if reply.status == AWAY and keyed:
                self.refused(mark, reply.json)
            if reply.status is not None and reply.status not in (200, AWAY):
                self.note("answered", call=mark, result=False, code=reply.status, whole=whole)
                return
            if last is None and not keyed:
                # 503 says that nothing ran. A connection that broke says nothing.
                if reply.status == AWAY:
                    self.note("answered", call=mark, result=False, code=AWAY, started=False)
                else:
                    self.note("lost", call=mark)
                return
            await asyncio.sleep(AGAIN)
            if last is not None and not (keyed and step.get("resends")):
                reply = self.raw.get(last)
            else:
                last, whole = None, False
                self.sends(mark, step)
                reply = self.raw.send("tools/call", params, request_id=mark).reply

    async def _once_more(self, mark: str, step: Json, params: Json) -> None:
        """A proxy, or a user, sends it a second time."""
        await asyncio.sleep(step["twice"])
        self.sends(mark, step, again=True)
        reply = self.raw.send("tools/call", params, request_id=f"{mark}'").reply
        cut, last, whole = step.get("copy_cut"), "", True

        def seen(event_id: str) -> None:
            nonlocal last
            last = event_id

        def take(message: Json) -> None:
            self.hear(message, "again", mark)

        def enough() -> bool:
            return reply.answer_to(f"{mark}'") is not None

        cut_at = now() + cut if cut is not None else None
        await read_from(reply, take, enough, seen=seen, cut_at=cut_at)
        if cut is not None and not enough():
            self._left.add(f"{mark}'")
            if not last or step.get("copy_back") is None:
                return
            await asyncio.sleep(step["copy_back"])
            self._left.discard(f"{mark}'")
            whole = False
            reply = self.raw.get(last)
            await read_from(reply, take, enough)
        answer = reply.answer_to(f"{mark}'")
        if answer is not None and reply.status == 200:
            self.answered(mark, answer, whole=whole, again=True)


class ModernHttp(Client):
    """2026-07-28 over HTTP: POSTs, and a listen that it asks for anew."""

    has_handshake = False

    @property
    def outlives_connections(self) -> bool:
        """A response that breaks is a call that is cancelled."""
        return False

    def __init__(self, world: World, plan: Json) -> None:
        super().__init__(world, plan)
        carrier = HttpLink(self.link, self.chosen, self.user)
        self.raw = ModernClient(carrier, capabilities=self.capabilities)
        self._stream: Reply | None = None
        self._is_listening = False

    async def connect(self) -> None:
        """See `Client`: there is no handshake."""

    async def start(self) -> None:
        await super().start()
        self._listens()

    async def resumed(self) -> None:
        if self._stream is not None:
            self._stream.leave()
        elif not self._is_listening:
            self._listens()

    def _listens(self) -> None:
        self._is_listening = True
        self.run(self._listen(self.session))

    async def ask(self, method: str, params: Json) -> Json | None:
        number = f"{self.name}/{next(self.raw.numbers)}"
        reply = self.raw.send(method, params, request_id=number).reply
        await read_from(reply, self._hear_beside, lambda: reply.answer_to(number) is not None)
        return None if reply.status == AWAY else reply.answer_to(number)

    async def post_reply(self, message: Json) -> bool:
        return True

    async def _subscribe(self, uri: str) -> None:
        if uri not in self.uris:
            self.uris.append(uri)
            if self._stream is not None:
                self._stream.leave()

    async def _listen(self, begun: str | None) -> None:
        """Listen to a session that is begun or resumed, and to those that come after it."""
        while not self.is_over and not self.is_displaced and self.session is not None:
            if self.session != begun and not await self.resume(self.session, self.position):
                return
            begun = None
            uris = list(self.uris)
            sent = self.raw.listen(self.session, *uris, lists=("tools",))
            reply = self._stream = sent.reply

            def take(message: Json, uris: list[str] = uris) -> None:
                if message.get("method") == "notifications/subscriptions/acknowledged":
                    name = self.world.session_name(self.session or "")
                    self.note("listens", session=name, uris=uris)
                    for uri in uris:
                        self.note("subscribed", session=name, uri=uri)
                elif "method" in message:
                    self.hear(message, "events")

            await read_from(reply, take, lambda: False, silence=None)
            self.note("breaks", served=reply.status != AWAY)
            await asyncio.sleep(AGAIN)

    async def call(self, mark: str, step: Json) -> None:
        cut_at, keyed, whole = self.cut_at(step), bool(step.get("keyed")), True
        params = self.params_of(mark, step)
        if self.plan["logs"]:
            params["_meta"][LOG_LEVEL] = "info"
        self.sends(mark, step)
        rounds = 0
        while True:
            reply = self.raw.send("tools/call", params, request_id=mark).reply
            copy: asyncio.Task[Json | None] | None = None
            if rounds and step.get("copies") is not None:
                copy = asyncio.create_task(self._copy(mark, step, params, rounds), name=self.name)
                if step.get("round_cut") is not None:
                    cut_at = now() + step["round_cut"]
            at = self._at
            is_silent = await read_from(
                reply,
                lambda message: self.hear(message, mark) if "method" in message else None,
                lambda r=reply: r.answer_to(mark) is not None,
                cut_at=cut_at,
                silence=SILENCE + step["seconds"],
            )
            if is_silent:
                self.note("silent", call=mark, at=at)
            cut_at = None
            answer = reply.answer_to(mark)
            if rounds:
                whole = whole and answer is not None
                self._ends_round(mark, rounds, answer)
            if copy is not None:
                # What is lost with one sending comes with the other.
                answer = await copy if answer is None else answer
                await asyncio.wait({copy})
            if answer is not None and (reply.status != AWAY or copy is not None):
                result = answer.get("result", {})
                if result.get("resultType") == "input_required":
                    replies = await self._replies_to(mark, result)
                    if replies is None or step.get("leaves"):
                        self.note("lost", call=mark)
                        return
                    params, rounds = {**params, **replies}, rounds + 1
                    continue
                if result.get("resultType") == "task":
                    await self.follow(mark, step, result)
                    return
                self.answered(mark, answer, whole=whole)
                return
            if not keyed:
                if reply.status == AWAY and "requestState" not in params:
                    self.note("answered", call=mark, result=False, code=AWAY, started=False)
                elif reply.status == AWAY:
                    await asyncio.sleep(AGAIN)
                    continue
                else:
                    self.note("lost", call=mark)
                return
            if step.get("leaves"):
                self.note("lost", call=mark)
                return
            if reply.status == AWAY:
                self.refused(mark, reply.json)
            whole = False
            await asyncio.sleep(AGAIN)
            self.sends(mark, step)

    async def _copy(self, mark: str, step: Json, params: Json, number: int) -> Json | None:
        """Send a round once more, as a proxy may; its answer."""
        await asyncio.sleep(step["copies"])
        name = f"{mark}'{number}"
        reply = self.raw.send("tools/call", params, request_id=name).reply
        await read_from(
            reply,
            lambda message: self.hear(message, "again") if "method" in message else None,
            lambda: reply.answer_to(name) is not None,
            silence=SILENCE + step["seconds"],
        )
        answer = reply.answer_to(name)
        self._ends_round(mark, number, answer)
        return answer

    def _ends_round(self, mark: str, number: int, answer: Json | None) -> None:
        if answer is not None:
            kind = members_of(answer.get("result")).get("resultType", "result")
            code = members_of(answer.get("error")).get("code")
            self.note("round", call=mark, n=number, answer=kind if code is None else code)

    async def follow(self, mark: str, step: Json, created: Json) -> None:
        """Wait for the end of a task. This client knows none."""
        raise AssertionError(f"{mark} became a task: {created}")

    async def _replies_to(self, mark: str, result: Json) -> Json | None:
        """What the next request brings; None: it does not come back."""
        replies: Json = {}
        for name, asked in result["inputRequests"].items():
            question = asked["params"]["message"]
            self.note("asked", question=question, on=mark, id=f"{name} {result['requestState']}")
            replies[name] = {
                "action": "accept",
                "content": {"answer": f"{question}@{self.name}"},
            }
        if self.plan["silent"]:
            return None
        await asyncio.sleep(self.plan["thinks"])
        return {"inputResponses": replies, "requestState": result["requestState"]}


class Socket(Client):
    """2025-11-25 over a WebSocket, which is made anew when it ends."""

    @property
    def outlives_connections(self) -> bool:
        """What its connection has by itself ends with that."""
        return bool(self.plan["session"])

    def __init__(self, world: World, plan: Json) -> None:
        super().__init__(world, plan)
        self._peer: SocketLink | None = None
        self._ready = asyncio.Event()
        self._has: tuple[SocketLink, str] | None = None
        """The connection on which it resumed that session."""

        self._numbers = self._connections = 0

    async def connect(self) -> None:
        self.run(self._stay_connected())
        await self._ready.wait()

    def new_socket(self) -> SocketLink:
        return SocketLink(self.link, self.chosen(), self.user)

    async def _stay_connected(self) -> None:
        while not self.is_over:
            peer = self.new_socket()
            await peer.open()
            seen = 0

            def look(peer: SocketLink = peer) -> bool:
                nonlocal seen
                for message in peer.messages[seen:]:
                    seen += 1
                    if "method" in message:
                        self.hear(message, "events")
                return peer.ended

            self._peer = peer
            self.run(self._begin(peer))
            await peer.board.until(look, what="the end", within=10_000)
            self.note("breaks")
            self._ready.clear()
            await asyncio.sleep(AGAIN)

    @property
    def is_connected(self) -> bool:
        return self._ready.is_set() and self._peer is not None and not self._peer.ended

    async def _begin(self, peer: SocketLink) -> None:
        params = initialize_params(self.name, capabilities=self.capabilities)
        answer = await self._sent(peer, "initialize", params)
        if answer is None or "error" in answer:
            peer.cut_by_client()
            return
        await peer.notify("notifications/initialized")
        if not self.plan["session"]:
            # What its last connection had is gone with that.
            if self.own is not None:
                self.note("gone", session=self.own)
            self._connections += 1
            self.own = f"{self.name}:{self._connections}"
            self.note("owns", session=self.own)
        self._has = None
        if self.session is not None and not self.is_displaced:
            resumed = await self._resumes_on(peer, self.session)
            if resumed is None:
                peer.cut_by_client()
            if not resumed:
                return
        self._ready.set()

    async def _resumes_on(self, peer: SocketLink, session: str) -> bool | None:
        """Whether there is that session; None: not known."""
        members: Json = {"sessionId": session}
        if self.position is not None:
            members["lastSessionEventId"] = self.position
        answer = await self._sent(peer, "session/resume", members)
        if answer is None or says_away(answer):
            return None
        self._has = (peer, session)
        return self.was_resumed(session, answer)

    async def resume(self, session: str, position: str | None) -> bool:
        while True:
            await self._ready.wait()
            peer = self._peer
            assert peer is not None
            if self._has == (peer, session):
                return True
            resumed = await self._resumes_on(peer, session)
            if resumed is not None:
                return resumed
            await asyncio.sleep(AGAIN)

    def detached(self, params: Json) -> None:
        """See `Client`. A session that nobody else has is resumed (TKO7)."""
        super().detached(params)
        if params.get("reason") == "evicted" and self.session and not self.is_displaced:
            self._has = None
            self.run(self._have_it_again(self.session))

    async def _have_it_again(self, session: str) -> None:
        await self.resume(session, self.position)

    async def _sent(
        self, peer: SocketLink, method: str, params: Json, number: str | None = None,
        cut_at: float | None = None, silence: float = SILENCE,
    ) -> Json | None:  # fmt: skip
        if number is None:
            self._numbers += 1
            number = f"{self.name}/{self._numbers}"
        if peer.ended:
            return None
        await peer.send(method, params, request_id=number)

        def look() -> bool:
            return peer.ended or _answer_in(peer.messages, number) is not None

        until = now() + silence if cut_at is None else min(cut_at, now() + silence)
        if not await _until(peer.board, look, until):
            peer.cut_by_client()
        return _answer_in(peer.messages, number)

    async def ask(self, method: str, params: Json) -> Json | None:
        await self._ready.wait()
        assert self._peer is not None
        answer = await self._sent(self._peer, method, params)
        # HTP5: over such a connection a store that is away is this error.
        return None if answer is not None and says_away(answer) else answer

    async def post_reply(self, message: Json) -> bool | None:
        if self._peer is not None and not self._peer.ended:
            await self._peer.post(message)

    async def call(self, mark: str, step: Json) -> None:
        cut_at, keyed, whole = self.cut_at(step), bool(step.get("keyed")), True
        params, attempt = self.params_of(mark, step), 0
        while True:
            await self._ready.wait()
            assert self._peer is not None
            self.sends(mark, step)
            number = mark if not attempt else f"{mark}'{attempt}"
            attempt += 1
            answer = await self._sent(
                self._peer, "tools/call", params, number,
                cut_at=cut_at, silence=SILENCE + step["seconds"],
            )  # fmt: skip
            cut_at = None
            # HTP5: what a store that is away is answered with. This call may be, by its script.
            is_refused = answer is not None and says_away(answer)
            if answer is not None and not (is_refused and keyed):
                self.answered(mark, answer, whole=whole)
                return
            if not keyed:
                self.note("lost", call=mark)
                return
            if answer is not None:
                self.refused(mark, answer)
            whole = False
            await asyncio.sleep(AGAIN)


def says_away(answer: Json) -> bool:
    """The store failed the request (ERR17), or its replica stops (ERR15). It did not begin, or may
    be asked again.
    """
    data: Json = members_of(members_of(answer.get("error")).get("data"))
    return data.get("reason") in ("store_unavailable", "draining")


KINDS: Final[dict[str, type[Client]]] = {
    "http": HandshakeHttp,
    "modern": ModernHttp,
    "websocket": Socket,
}


async def read_from(
    reply: Reply,
    take: Callable[[Json], None],
    enough: Callable[[], bool],
    *,
    seen: Callable[[str], None] | None = None,
    cut_at: float | None = None,
    silence: float | None = SILENCE,
) -> bool:
    """Take the messages of a response as they come, until it ends or there is enough; whether it
    was silent for too long.

    Args:
        seen: Gets the id of each event.
        cut_at: When the client breaks the connection.
        silence: Seconds after which it breaks the connection as well.
    """
    count = 0

    def look() -> bool:
        nonlocal count
        if reply.is_sse:
            events = reply.events
            while count < len(events):
                event = events[count]
                count += 1
                if event.message is not None and "method" in event.message:
                    take(event.message)
                if seen is not None and "id" in event.fields:
                    seen(event.fields["id"])
        return reply.ended or enough()

    until = now() + (silence if silence is not None else 10_000)
    if not await _until(reply.board, look, until if cut_at is None else min(until, cut_at)):
        reply.leave()
        look()
        return cut_at is None or cut_at > until
    return False


async def _until(board: Board, look: Callable[[], bool], until: float) -> bool:
    """Whether ``look()`` holds by then."""
    try:
        await board.until(look, what="it", within=max(0.0, until - now()))
    except AssertionError:
        return False
    return True


def _answer_in(messages: list[Json], number: str) -> Json | None:
    for message in messages:
        if "method" not in message and message.get("id") == number:
            return message
    return None


def now() -> float:
    return asyncio.get_running_loop().time()
