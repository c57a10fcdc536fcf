"""Two users behind the layer's authentication and one command, in any order, by every way in.

Neither gets a word of the other's: not over HTTP of both eras, a GET stream, ``listen`` or a
WebSocket, whoever the processes are shared with. What one has stays there whatever the other tries.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions import SessionLayer
from tests.support.children import child
from tests.support.duplex import DuplexPeer, listening, websocket
from tests.support.identities import Verifier, auth_settings
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import Json, RawClient, Reply, SocketCarrier, in_session, keyed

WITHIN = 30.0
"""Seconds that one step may take."""

Who = Literal[0, 1]
PERS = ("session", "principal", "shared")
KEY = "the same key"
"""Both users send it."""


@dataclass
class Recorder:
    """A carrier that keeps every reply, and every request as it was sent."""

    carrier: BearerCarrier
    replies: list[Reply] = field(default_factory=list[Reply])
    sent: list[str] = field(default_factory=list[str])

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        self.sent.append(f"{headers} {body.decode()}")
        reply = self.carrier.send(method, path, headers, body)
        self.replies.append(reply)
        return reply


@dataclass
class User:
    """One user: three clients, what they said and received, and what they have."""

    name: str
    record: Recorder
    older: RawClient
    modern: ModernClient
    socket: DuplexPeer
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    secrets: list[str] = field(default_factory=list[str])
    modern_sessions: list[str] = field(default_factory=list[str])
    older_sessions: list[str] = field(default_factory=list[str])
    socket_sessions: list[str] = field(default_factory=list[str])

    def secret(self) -> str:
        word = f"{self.name}-says-{next(self.numbers)}"
        self.secrets.append(word)
        return word

    @property
    def sessions(self) -> list[str]:
        own = [*self.modern_sessions, *self.older_sessions, *self.socket_sessions]
        return [*own, *([self.older.session_id] if self.older.session_id else [])]

    @property
    def received(self) -> str:
        bodies = [f"{reply.headers} {bytes(reply.body).decode()}" for reply in self.record.replies]
        return "\n".join([*bodies, json.dumps(self.socket.messages)])

    @property
    def said(self) -> str:
        return "\n".join(self.record.sent)


@dataclass
class Setup:
    """A server that runs for many examples, each with two users of its own."""

    loop: asyncio.AbstractEventLoop
    port: int
    verifier: Verifier
    count: "itertools.count[int]" = field(default_factory=itertools.count)

    @asynccontextmanager
    async def user(self) -> AsyncGenerator[User]:
        name = f"user{next(self.count)}x"
        token = self.verifier.add(f"token-of-{name}", name)
        record = Recorder(BearerCarrier(SocketCarrier("127.0.0.1", self.port), token))
        url, fields = f"ws://127.0.0.1:{self.port}/mcp", {"Authorization": f"Bearer {token}"}
        async with websocket(url, headers=fields) as socket:
            older = RawClient(record)
            await older.initialize()
            await socket.initialize()
            yield User(name, record, older, ModernClient(record), socket)
            for reply in record.replies:
                if not reply.ended:
                    reply.leave()


# --- what a user does ---------------------------------------------------------------------


async def start_modern(user: User) -> None:
    """A session of the newer era, with a stream for its events."""
    session = str((await user.modern.start())["sessionId"])
    user.modern_sessions.append(session)
    await user.modern.listening(session, f"note://{user.secret()}", "test://a")


async def start_older(user: User) -> None:
    """A session on the connection of the older era, with its GET stream."""
    user.older_sessions.append(str((await user.older.start())["sessionId"]))
    await user.older.get().started()


async def start_socket(user: User) -> None:
    user.socket_sessions.append(str((await user.socket.start())["sessionId"]))


async def echo(user: User) -> None:
    """A call by each way, with a key that the other uses as well; the answer is its own."""
    for word, said in (
        (first := user.secret(), user.modern.text("echo", {"text": first})),
        (second := user.secret(), user.older.text("echo", text=second)),
        (third := user.secret(), user.socket.text("echo", text=third)),
    ):
        assert await said == word
    word = user.secrets[0]
    for session in user.modern_sessions[-1:]:
        assert await user.modern.text("echo", {"text": word}, session=session, key=KEY) == word
    for session in user.older_sessions[-1:]:
        assert await user.older.text("echo", text=word, meta=keyed(KEY, session)) == word


async def noise(user: User) -> None:
    """The server logs, reports, asks and tells of changes, each with a word of the user's."""
    for session in (None, *user.modern_sessions[-1:]):
        meta: Json = {"progressToken": 1, "io.modelcontextprotocol/logLevel": "debug"}
        await user.modern.call("log", {"text": user.secret()}, session=session, meta=meta).answer()
    for meta in ({"progressToken": 1}, *map(in_session, user.older_sessions[-1:])):
        await user.older.call("log", text=user.secret(), meta=meta).answer()
        await user.older.call("update", uri=f"note://{user.secret()}", meta=meta).answer()
        await user.older.call("ask", question=user.secret(), meta=meta).answer()
    await user.socket.text("log", text=user.secret(), meta={"progressToken": 1})
    await user.socket.text("update", uri=f"note://{user.secret()}")


async def subscribe(user: User) -> None:
    """To a resource of its own, by each way."""
    for uri in (f"note://{user.secret()}", f"note://{user.secret()}"):
        await user.older.answer("resources/subscribe", {"uri": uri})
        await user.socket.result("resources/subscribe", {"uri": uri})
        await user.socket.text("update", uri=uri)


# --- what a user tries with what the other has --------------------------------------------


async def _finished(*replies: Reply) -> None:
    """Each was refused; a stream that opened would not be."""
    for reply in replies:
        await reply.until(lambda r=reply: r.ended or bool(r.events), "an answer")
        assert "result" not in (reply.messages[0] if reply.messages else {}), reply


async def name_them(user: User, session: str) -> None:
    """Resume, list on, call in and end a session, in each era and over the WebSocket."""
    named: Json = {"sessionId": session}
    for method in ("session/resume", "session/end"):
        await _finished(user.modern.send(method, named).reply, user.older.send(method, named).reply)
        await user.socket.error(method, named)
    await _finished(user.modern.send("sessions/delete", named).reply)
    await _finished(
        user.modern.call("echo", {"text": user.secret()}, session=session).reply,
        user.modern.call("echo", {"text": user.secret()}, session=session, key=KEY).reply,
        user.modern.listen(session, "test://a", lists=("tools",)).reply,
        user.older.call("echo", text=user.secret(), meta=in_session(session)).reply,
        user.older.call("echo", text=user.secret(), meta=keyed(KEY, session)).reply,
    )
    arguments = {"name": "echo", "arguments": {"text": user.secret()}}
    await user.socket.error("tools/call", arguments, meta=in_session(session))


async def pose_as(user: User, session: str) -> None:
    """Send its id as that of a connection: POST, GET with and without an event, DELETE."""
    posing = RawClient(user.record)
    posing.session_id = session
    await _finished(
        posing.send("tools/list").reply, posing.get(), posing.get("1-1"), posing.delete()
    )


async def cancel(user: User) -> None:
    """Requests that have the numbers of the other's."""
    for number in range(4):
        params: Json = {"requestId": number, "reason": user.secret()}
        await user.older.notify("notifications/cancelled", params)
        await user.socket.notify("notifications/cancelled", params)


WORK = {f.__name__: f for f in (start_modern, start_older, start_socket, echo, noise, subscribe)}
TRIES = {f.__name__: f for f in (name_them, pose_as)}
STEPS = st.tuples(st.sampled_from([0, 1]), st.sampled_from([*WORK, *TRIES, "cancel"]))


async def step(users: tuple[User, User], who: int, what: str) -> None:
    user, other = users[who], users[1 - who]
    if what in WORK:
        await WORK[what](user)
    elif what == "cancel":
        await cancel(user)
    else:
        for session in other.sessions:
            await TRIES[what](user, session)


def expect_apart(user: User, other: User) -> None:
    """Nothing of the other came to this user, but for ids that the user sent itself."""
    received, said = user.received, user.said
    for word in (*other.secrets, other.name):
        assert word not in received, word
    for session in other.sessions:
        assert session not in received or session in said


async def expect_there(user: User) -> None:
    """All that the user has is still there, and ends now."""
    assert await user.older.text("echo", text="still") == "still"
    assert await user.socket.text("echo", text="still") == "still"
    for session in user.modern_sessions:
        assert await user.modern.text("echo", {"text": "x"}, session=session) == "x"
        await user.modern.send("session/end", {"sessionId": session}).result()
    for session in user.older_sessions:
        await user.older.end(session)
    for session in user.socket_sessions:
        await user.socket.result("session/end", {"sessionId": session})
    assert (await user.older.delete().done()).status in (200, 204)


async def expect_users_apart(setup: Setup, steps: list[tuple[int, str]]) -> None:
    """Two new users do these things."""
    async with asyncio.timeout(WITHIN * 4), setup.user() as one, setup.user() as two:
        # Each has something from the beginning.
        for user in (one, two):
            for begin in (start_modern, start_older, start_socket):
                await begin(user)
        for who, what in steps:
            async with asyncio.timeout(WITHIN):
                await step((one, two), who, what)
        expect_apart(one, two)
        expect_apart(two, one)
        for user in (one, two):
            await expect_there(user)


@pytest.fixture(scope="module", params=PERS)
def setup(request: pytest.FixtureRequest) -> Generator[Setup]:
    loop = asyncio.new_event_loop()
    stack, verifier = AsyncExitStack(), Verifier()

    async def opened() -> int:
        server: Any = child(per=request.param)
        layer = SessionLayer(server, auth=auth_settings(), token_verifier=verifier)
        app = layer.asgi_app()
        await stack.enter_async_context(layer.lifespan())
        return await stack.enter_async_context(listening(app))

    try:
        yield Setup(loop, loop.run_until_complete(opened()), verifier)
        loop.run_until_complete(stack.aclose())
    finally:
        loop.close()


@given(st.lists(STEPS, min_size=2, max_size=6))
@settings(max_examples=6, deadline=None)
@pytest.mark.timeout(300)
def test_nothing_of_one_user_is_found_at_the_other(
    setup: Setup, steps: list[tuple[int, str]]
) -> None:
    setup.loop.run_until_complete(expect_users_apart(setup, steps))


def test_every_step_is_taken_once_by_each_user(setup: Setup) -> None:
    """What the property may leave out in some run."""
    steps = [(who, what) for what in (*WORK, *TRIES, "cancel", *TRIES) for who in (0, 1)]
    setup.loop.run_until_complete(expect_users_apart(setup, steps))
