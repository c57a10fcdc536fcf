"""One user's credentials over time: refreshed, weaker, expired, revoked."""

import asyncio
from typing import Any

import pytest
from mcp.server import MCPServer
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions import SessionPolicy
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.support.identities import FAR, Guarded, Verifier, guarded, who
from tests.support.modern import ModernClient, Received, session_meta
from tests.support.raw import (
    SESSION,
    Json,
    Reply,
    call_params,
    in_process,
    in_session,
    initialize_params,
    keyed,
    text_of,
    uris,
)
from tests.support.virtual_time import cycles
from tests.support.world import Clock, inside

pytestmark = pytest.mark.usefixtures("with_each_authentication")

A, B = "note://a", "note://b"


class LoopClock(Clock):
    """The layer's clock and the loop's are one: a second of waiting is a second of time."""

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return FAR + asyncio.get_running_loop().time()

    @now.setter
    def now(self, value: float) -> None:
        pass


async def passed(seconds: float) -> None:
    """So much time passes, in which nothing else is waited for."""
    await asyncio.sleep(seconds)


# --- SES8: refreshed -------------------------------------------------------------------------


async def test_a_refreshed_token_keeps_the_session() -> None:
    """SES8: the same (issuer, subject, client) with another token, with more scopes or the same;
    in both eras, for every use.
    """
    async with guarded() as server:
        server.verifier.add("refreshed", "alice")
        server.verifier.add("stronger", "alice", "use", "admin")
        older = await server.connected("alice")
        get = await older.get().started()
        started = await older.start()
        session = started["sessionId"]
        state = (await server.modern("alice").create())["state"]
        assert state
        first = server.modern("alice").call("wait", {"gate": "g"}, session=session, key="k")
        await server.tools.gate("g").started.wait()
        first.leave()
        del server.verifier.tokens["alice"]

        for token in ("refreshed", "stronger"):
            same = server.older(token)
            same.session_id = older.session_id
            client = server.modern(token)
            await same.resume(session)
            assert await same.text("session_id") == session
            assert await client.text("session_id", session=session) == session
            assert (await same.get("nonsense").started()).status == 200
            resumed = await client.resume(session, started["sessionEventId"])
            assert resumed["catchup"] is True
            received = await client.listening(session, A)
            await server.layer.notify_resource_updated(A)
            # The one of the round before is replayed, or the newer one has replaced it.
            assert set(uris(await received.has_events(1))) == {A}
            again = client.call("wait", {"gate": "g"}, session=session, key="k")
            await cycles()
            server.tools.gate("g").go.set()
            # The handler ran once, with the token that it was called with.
            assert text_of(await again.result()) == "alice alice"
        assert server.tools.calls == ["wait"]
        assert get.status == 200
        await server.modern("stronger").send("session/end", {"sessionId": session}).result()


async def test_a_refreshed_tokens_state_is_accepted() -> None:
    """The token is bound to the identity, not to the credential."""
    async with guarded() as server:
        server.verifier.add("refreshed", "alice", "use", "more")
        created = await server.modern("alice").create()
        result = await (
            server.modern("refreshed")
            .call("whoami", {}, session=created["sessionId"], state=created["state"])
            .result()
        )
        assert result["_meta"][SESSION]["state"] == created["state"]


# --- SEC3: weaker ----------------------------------------------------------------------------


async def test_a_weaker_credential_cannot_attach_or_replay() -> None:
    """SEC3: "attaching and replay need at least the scopes it was made with". An attached session
    stays attached, and its events arrive.
    """
    async with guarded() as server:
        server.verifier.add("strong", "alice", "use", "secret")
        strong = server.modern("strong")
        started = await strong.start()
        session, position = started["sessionId"], started["sessionEventId"]
        received = await strong.listening(session, A)
        weak, older = server.modern("alice"), await server.connected("alice")
        params: Json = {"sessionId": session, "lastSessionEventId": position}
        expected = {
            "code": -32043,
            "message": "Session not found",
            "data": {"sessionId": session},
        }
        assert await weak.send("session/resume", params).error() == expected
        assert await older.error("session/resume", params) == expected
        assert await server.older("alice").error("session/resume", params) == expected
        assert await weak.listen(session, A, B).error() == expected
        await server.layer.notify_resource_updated(A)
        await server.layer.notify_resource_updated(B)

        assert uris(await received.has_events(1)) == [A]
        await cycles()
        assert len(received.events) == 1


async def test_a_weaker_credential_does_not_attach_in_passing() -> None:
    """Rule 1 "attaches its session if it is attached nowhere": not for a weaker one. It may use
    the session, and its own calls are answered.
    """
    async with guarded() as server:
        server.verifier.add("strong", "alice", "use", "secret")
        session = (await server.modern("strong").start())["sessionId"]
        older = await server.connected("alice")
        get = await older.get().started()
        assert await older.text("session_id", meta=in_session(session)) == session
        await server.modern("strong").call("update", {"uri": A}, session=session).result()
        await cycles()

        assert get.messages == []
        received = await server.modern("strong").listening(session)
        assert uris(await received.has_events(1)) == [A]


async def test_a_weaker_credential_cannot_read_a_stronger_ones_streams() -> None:
    """SEC3, SEC7: neither its GET stream, from any position, nor one of its POST streams; as if the
    transport-mode session were not there.
    """
    async with guarded() as server:
        server.verifier.add("strong", "alice", "use", "secret")
        strong = await server.connected("strong")
        get = await strong.get().started()
        await strong.result("resources/subscribe", {"uri": A})
        await server.layer.notify_resource_updated(A)
        await get.until(lambda: len(get.messages) == 1)
        called = strong.call("steps", meta={"progressToken": 1})
        await called.result()
        weak = server.older("alice")
        weak.session_id = strong.session_id
        unowned = server.older("alice")
        unowned.session_id = "N" * 43
        for event in (None, get.events[0].id, called.reply.events[0].id, "nonsense"):
            refused, unknown = await weak.get(event).done(), await unowned.get(event).done()
            assert refused.status == unknown.status == 404
            assert bytes(refused.body) == bytes(unknown.body)
        await server.layer.notify_resource_updated(A)
        await get.until(lambda: len(get.messages) == 2)


async def test_a_weaker_credential_does_not_get_a_session_started_over_it() -> None:
    """SEC3: a client that steps up starts a session on the transport session that its weaker
    token made. The weaker token's next GET is refused, the stronger one's is served.
    """
    async with guarded() as server:
        server.verifier.add("strong", "alice", "use", "secret")
        weak = await server.connected("alice")
        strong = server.older("strong")
        strong.session_id = weak.session_id
        await strong.result("session/start", {})

        assert (await weak.get().done()).status == 404
        get = await strong.get().started()
        await strong.result("resources/subscribe", {"uri": A})
        await server.layer.notify_resource_updated(A)
        await get.until(lambda: uris(get.messages) == [A])


@pytest.mark.parametrize("extra", [1, 100])
async def test_a_weaker_credential_does_not_read_the_response_to_a_stronger_ones_request(
    extra: int,
) -> None:
    """SEC3: on the connection that the weaker one made, where its own GET stream and its own
    responses are served: neither the answer nor a question on its way, also while it is open.
    """
    scopes = [f"scope-{number}" for number in range(extra)]
    async with guarded() as server:
        server.verifier.add("strong", "alice", "use", *scopes)
        server.verifier.add("refreshed", "alice", "use", *scopes)
        weak = await server.connected("alice", capabilities={"elicitation": {}})
        strong, refreshed = server.older("strong"), server.older("refreshed")
        strong.session_id = refreshed.session_id = weak.session_id
        done = strong.call("steps", meta={"progressToken": 1})
        await done.result()
        await done.reply.done()
        asked = strong.call("ask")
        await asked.reply.has(1)

        for reply in (done.reply, asked.reply):
            refused = await weak.get(reply.events[0].id).done()
            assert refused.status == 404
        assert not asked.reply.ended
        question = asked.reply.messages[0]
        await strong.respond(question, {"action": "accept", "content": {"answer": "this"}})
        assert text_of(await asked.result()) == "accept: this"
        again = refreshed.get(done.reply.events[0].id)
        assert [m.get("method", "answer") for m in await again.has(4)][-1] == "answer"
        own = weak.call("steps", meta={"progressToken": 2})
        await own.result()
        for client in (weak, strong):
            assert len(await client.get(own.reply.events[0].id).has(4)) == 4


# --- expired -------------------------------------------------------------------------------


async def _streams(server: Guarded, token: str) -> dict[str, Any]:
    """A GET stream, a listen stream, and a re-opened POST stream, with that token."""
    older = await server.connected(token)
    get = await older.get().started()
    await older.result("resources/subscribe", {"uri": A})
    client = server.modern(token)
    session = (await client.start())["sessionId"]
    received = await client.listening(session, A)
    call = older.call("wait", gate="g")
    await server.tools.gate("g").started.wait()
    await call.reply.until(lambda: bool(call.reply.events))
    await call.reply.gone()
    post = await older.get(call.reply.events[0].id).started()
    return {"get": get, "listen": received, "post": post}


def _is_open(stream: Reply | Received) -> bool:
    reply = stream.reply if isinstance(stream, Received) else stream
    return not reply.ended


def _changes(stream: Reply | Received) -> list[str]:
    return [u for u in uris(stream.messages) if u == A]


async def test_streams_end_when_their_credential_expires() -> None:
    """Rule: "GET and listen streams are closed when the credential expires …, before another
    event". Stored events wait for the refreshed credential.
    """
    async with guarded(clock=LoopClock()) as server:
        ends = FAR + asyncio.get_running_loop().time() + 100
        server.verifier.add("short", "alice", expires_at=ends)
        server.verifier.add("refreshed", "alice")
        streams = await _streams(server, "short")
        await passed(95)
        await server.layer.notify_resource_updated(A)
        for name in ("get", "listen"):
            await streams[name].until(lambda n=name: _changes(streams[n]) == [A], name)
        assert all(_is_open(stream) for stream in streams.values())

        await passed(6)
        await server.layer.notify_resource_updated(A)
        for stream in streams.values():
            await stream.done()
        assert _changes(streams["get"]) == _changes(streams["listen"]) == [A]
        # Cut, not completed: its client may come back with another credential.
        assert not any("result" in m or "error" in m for m in streams["listen"].messages)

        position = streams["listen"].events[-1]["params"]["sessionEventId"]
        session = streams["listen"].events[-1]["params"]["_meta"][SESSION]["sessionId"]
        again = server.modern("refreshed")
        assert (await again.resume(session, position))["replayed"] == 1
        server.tools.gate("g").go.set()


async def test_streams_end_when_a_re_check_fails() -> None:
    """Rule: "or a re-check fails". A verifier that fails has not said yes."""
    for how in ("revoked", "weaker", "somebody else", "broken"):
        async with guarded(clock=LoopClock(), credential_check=30) as server:
            server.verifier.add("checked", "alice", "use", "more")
            streams = await _streams(server, "checked")
            await passed(65)
            assert all(_is_open(stream) for stream in streams.values())
            asked = server.verifier.asked
            match how:
                case "revoked":
                    del server.verifier.tokens["checked"]
                case "weaker":
                    server.verifier.add("checked", "alice", "use")
                case "somebody else":
                    server.verifier.add("checked", "bob", "use", "more")
                case _:
                    server.verifier.broken = True
            await passed(31)
            for stream in streams.values():
                await stream.done()
            assert server.verifier.asked >= asked + 3
            server.verifier.broken = False
            server.tools.gate("g").go.set()


async def test_a_stream_with_a_good_credential_stays() -> None:
    """And one without an expiry is checked again, too."""
    async with guarded(clock=LoopClock(), credential_check=30) as server:
        asked = server.verifier.asked
        streams = await _streams(server, "alice")
        asked = server.verifier.asked
        await passed(100)
        assert server.verifier.asked == asked + 3 * len(streams)
        assert all(_is_open(stream) for stream in streams.values())
        server.tools.gate("g").go.set()


async def _responses(server: Guarded, token: str) -> dict[str, Any]:
    """Response streams with that token: of each era a call that waits, and a listen without a
    session.
    """
    older, client = await server.connected(token), server.modern(token)
    session = (await client.start())["sessionId"]
    call = older.call("wait", gate="older")
    keyed_call = client.call("wait", {"gate": "keyed"}, session=session, key="k")
    alone = client.call("wait", {"gate": "alone"})
    for gate in ("older", "keyed", "alone"):
        await server.tools.gate(gate).started.wait()
    await call.reply.event(0)
    # A modern response is a stream when there was nothing to say for so long.
    await passed(16)
    for received in (keyed_call, alone):
        assert received.is_sse
    listen = await client.listening(None, A)
    return {
        "older": call.reply,
        "keyed": keyed_call,
        "alone": alone,
        "listen": listen,
        "connection": older.session_id,
        "session": session,
    }


@pytest.mark.parametrize("how", ["expired", "revoked", "no answer"])
async def test_response_streams_end_with_their_credential(how: str) -> None:
    """SEC4: of a POST too, whoever it is from; the request behind it goes on as after any cut,
    and a refreshed credential fetches its answer.
    """
    async with guarded(clock=LoopClock(), credential_check=30) as server:
        ends = FAR + asyncio.get_running_loop().time() + 100
        server.verifier.add("short", "alice", expires_at=ends if how == "expired" else None)
        server.verifier.add("refreshed", "alice")
        streams = await _responses(server, "short")
        names = ("older", "keyed", "alone", "listen")
        await passed(60)
        assert all(_is_open(streams[name]) for name in names)
        await server.layer.notify_resource_updated(A)
        await streams["listen"].until(lambda: _changes(streams["listen"]) == [A])

        if how == "revoked":
            del server.verifier.tokens["short"]
        elif how == "no answer":
            server.verifier.hangs = True
        await passed(45)
        server.verifier.hangs = False
        await server.layer.notify_resource_updated(A)
        server.tools.gate("older").go.set()
        server.tools.gate("keyed").go.set()
        for name in names:
            await streams[name].done()
        assert _changes(streams["listen"]) == [A]
        assert not any("result" in m or "error" in m for n in names for m in streams[n].messages)

        older, client = server.older("refreshed"), server.modern("refreshed")
        older.session_id = streams["connection"]
        rest = await older.get(streams["older"].events[0].id).has(1)
        assert text_of(rest[0]["result"]).startswith("alice")
        again = client.call("wait", {"gate": "keyed"}, session=streams["session"], key="k")
        assert text_of(await again.result()).startswith("alice")
        # Without a key a cut is a cancellation in this era, whoever cuts.
        assert server.tools.gate("alone").cancelled.is_set()
        assert server.tools.calls.count("wait") == 3


@pytest.mark.parametrize("seconds", [3, 10, 14, 40])
@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_no_answer_reaches_a_client_whose_credential_ended_while_it_ran(
    how: str, seconds: int
) -> None:
    """SEC4, in both eras: an answer within 15 s was sent as JSON, and nobody asked again. One of a
    stream was sent until the next check. The answer of a call with a key stays for its owner.
    """
    async with guarded(clock=LoopClock()) as server:
        ends = FAR + asyncio.get_running_loop().time() + seconds - 1
        server.verifier.add("short", "alice", expires_at=ends if how == "expired" else None)
        server.verifier.add("refreshed", "alice")
        older, client = await server.connected("short"), server.modern("short")
        session = (await client.start())["sessionId"]
        calls: list[Any] = [
            client.call("wait", {"gate": "g"}),
            client.call("wait", {"gate": "g"}, session=session, key="k"),
            older.call("wait", gate="g"),
        ]
        get, listen = await older.get().started(), await client.listening(session, A)
        await older.result("resources/subscribe", {"uri": A})
        await server.tools.gate("g").started.wait()
        await passed(seconds)
        if how == "revoked":
            del server.verifier.tokens["short"]
        server.tools.gate("g").go.set()
        await server.layer.notify_resource_updated(A)
        for call in calls:
            await call.reply.done()
            assert call.reply.status == 200, "401 would have the client send it again"
            assert b"alice" not in bytes(call.reply.body)
        for stream in (get, listen):
            await stream.done()
            assert _changes(stream) == []

        again = server.modern("refreshed").call("wait", {"gate": "g"}, session=session, key="k")
        assert text_of(await again.result()).startswith("alice")
        assert server.tools.calls.count("wait") == 3


@pytest.mark.parametrize("at_once", [0, 10])
@pytest.mark.parametrize("how", ["expired", "revoked"])
@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_a_request_whose_credential_ended_before_its_body_was_here_runs_nothing(
    era: str, how: str, at_once: int
) -> None:
    """SEC4: a client could open a request, and send its body when its key was long revoked."""
    async with guarded(clock=LoopClock()) as server:
        ends = FAR + asyncio.get_running_loop().time() + 4
        server.verifier.add("short", "alice", expires_at=ends if how == "expired" else None)
        older, client = await server.connected("short"), server.modern("short")
        rest = asyncio.Event()
        for comes in (False, True):
            server.carrier.holds_next = at_once, rest
            call: Any = older.call("whoami") if era == "handshake" else client.call("whoami", {})
            await passed(2 if comes else 0)
            if comes and how == "revoked":
                del server.verifier.tokens["short"]
            await passed(5 if comes else 0)
            rest.set()
            await call.reply.done()
            rest.clear()
            assert call.reply.status == (401 if comes else 200)
        assert call.reply.header("www-authenticate") == 'Bearer error="invalid_token"'
        assert server.tools.calls.count("whoami") == 1


@pytest.mark.parametrize("names_session", [False, True])
@pytest.mark.parametrize("how", ["expired", "revoked", "good"])
async def test_a_credential_that_ended_while_the_server_initialized_has_no_session(
    how: str, names_session: bool
) -> None:
    """SEC4: a server may take long to start. Its answer came with a new session."""
    async with guarded(clock=LoopClock()) as server:
        ends = FAR + asyncio.get_running_loop().time() + 4
        server.verifier.add("short", "alice", expires_at=ends if how == "expired" else None)
        upstream = inside(server.layer).upstream
        initialize, client = upstream.initialize, await server.connected("short")
        before = len(await server.store.all_sessions())

        async def slow(*args: Any) -> Any:
            await passed(2)
            if how == "revoked":
                del server.verifier.tokens["short"]
            await passed(5)
            return await initialize(*args)

        upstream.initialize = slow  # pyright: ignore[reportAttributeAccessIssue]
        if not names_session:
            client.session_id = None
        call = client.send("initialize", initialize_params())
        await call.reply.done()
        assert call.reply.status == (200 if how == "good" else 401)
        made = len(await server.store.all_sessions()) - before
        assert made == (1 if how == "good" else 0)


@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_a_slow_body_with_a_good_credential_is_served(era: str) -> None:
    """Also if nobody can say now whether it is good."""
    async with guarded(clock=LoopClock()) as server:
        older, client = await server.connected("alice"), server.modern("alice")
        for hangs in (False, True):
            rest = asyncio.Event()
            server.carrier.holds_next = 10, rest
            call: Any = older.call("whoami") if era == "handshake" else client.call("whoami", {})
            await passed(5)
            server.verifier.hangs = hangs
            rest.set()
            assert text_of(await call.result()).startswith("alice")


async def test_a_verifier_that_does_not_answer_withholds_no_answer() -> None:
    """It has not said no. The next check ends a stream, if there is no answer by then."""
    async with guarded(clock=LoopClock()) as server:
        call = server.modern("alice").call("wait", {"gate": "g"})
        await server.tools.gate("g").started.wait()
        await passed(5)
        server.verifier.hangs = True
        server.tools.gate("g").go.set()
        assert text_of(await call.result()).startswith("alice")


async def test_a_response_that_becomes_a_stream_after_its_credential_expired_says_nothing() -> None:
    """SEC4: before another event."""
    async with guarded(clock=LoopClock()) as server:
        ends = FAR + asyncio.get_running_loop().time() + 5
        server.verifier.add("short", "alice", expires_at=ends)
        received = server.modern("short").call("wait", {"gate": "g"})
        await passed(20)
        await received.done()
        assert received.messages == [] and received.pings == 0


async def test_an_expired_credential_opens_nothing() -> None:
    """401, as the server's own application says it, before anything of ours is asked."""
    async with guarded() as server:
        session = (await server.modern("alice").start())["sessionId"]
        server.verifier.add("alice", "alice", expires_at=1_000)
        for received in (
            server.modern("alice").call("whoami", session=session),
            server.modern("alice").listen(session, A),
        ):
            await received.done()
            assert received.status == 401
            assert received.reply.header("www-authenticate")


async def test_the_credential_of_an_applications_own_middleware_expires_too() -> None:
    """A server whose routes are mounted in an application that authenticates by itself."""
    verifier = Verifier()
    clock = LoopClock()

    class Guard:
        """Knows one user, until the token ends."""

        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser

            if scope["type"] == "http":
                scope["user"] = AuthenticatedUser(verifier.tokens["own"])
            await self._app(scope, receive, send)

    server = MCPServer[Any]("mounted")
    layer = ClockedLayer(server, policy=SessionPolicy(), clock=clock)
    app = Starlette(routes=layer.routes(), middleware=[Middleware(Guard)])
    async with layer.lifespan(), in_process(app) as carrier:
        verifier.add("own", "alice", expires_at=clock.now + 50)
        client = ModernClient(carrier)
        session = (await client.start())["sessionId"]
        received = await client.listening(session, A)
        await passed(51)
        await layer.notify_resource_updated(A)
        await received.done()
        assert received.events == []


# --- SEC7 and keys ---------------------------------------------------------------------------


async def test_two_users_keys_do_not_cross() -> None:
    """SEC7: the same key and content in two users' sessions are two requests."""
    async with guarded() as server:
        hers = (await server.modern("alice").start())["sessionId"]
        his = (await server.modern("bob").start())["sessionId"]
        for token, session in (("alice", hers), ("bob", his)):
            for _ in range(2):
                client = server.modern(token)
                assert await client.text("whoami", session=session, key="k") == f"{token} {token}"
        assert server.tools.calls == ["whoami"] * 2


async def test_a_weaker_credential_is_not_notified_a_stronger_ones_answer() -> None:
    """SEC3: an answer under a request key is a replay too. It stays for who may have it."""
    async with guarded() as server:
        server.verifier.add("strong", "alice", "use", "secret")
        weak, strong = server.modern("alice"), server.modern("strong")
        session = (await weak.start())["sessionId"]
        assert await strong.text("whoami", session=session, key="hers") == "alice strong"
        error = await weak.call("whoami", {}, session=session, key="hers").error()
        assert error == {"code": -31012, "message": "Outcome unknown"}
        again = strong.call("whoami", {}, session=session, key="hers")
        assert text_of(await again.result()) == "alice strong"

        assert await weak.text("whoami", session=session, key="its own") == "alice alice"
        assert await strong.text("whoami", session=session, key="its own") == "alice alice"
        assert server.tools.calls == ["whoami"] * 2


async def test_two_users_subscriptions_do_not_cross() -> None:
    """SEC7: an event of one user's session is on no stream of the other's."""
    async with guarded() as server:
        streams: dict[str, tuple[str, Reply, Received]] = {}
        for token in ("alice", "bob"):
            older = await server.connected(token)
            get = await older.get().started()
            session = (await server.modern(token).start())["sessionId"]
            received = await server.modern(token).listening(session)
            streams[token] = session, get, received
            await older.result("resources/subscribe", {"uri": f"note://{token}"})
        session, get, received = streams["alice"]
        await server.modern("alice").call("update", {"uri": A}, session=session).result()
        await server.layer.notify_resource_updated("note://alice")
        await received.has_events(1)
        await get.until(lambda: len(get.messages) == 1)
        await cycles()

        _, his_get, his_listen = streams["bob"]
        assert his_get.messages == [] and his_listen.events == []


# --- what handlers know --------------------------------------------------------------------


@pytest.mark.parametrize("era", ["modern", "handshake"])
async def test_get_access_token_works_in_handlers(era: str) -> None:
    """Promised: "``get_access_token()`` … work in handlers": plain ones, in sessions, keyed ones
    that outlive their stream, and what a handler leaves behind.
    """
    async with guarded() as server:
        server.verifier.add("refreshed", "alice")
        session = (await server.modern("alice").start())["sessionId"]
        older = await server.connected("alice")

        async def text(tool: str, meta: Json | None, **arguments: Any) -> str:
            if era == "modern":
                return await server.modern("alice").text(tool, arguments, meta=meta)
            return await older.text(tool, meta=meta, **arguments)

        assert await text("whoami", None) == "alice alice"
        assert await text("whoami", in_session(session)) == "alice alice"
        assert await text("later", None, gate="later") == "later"
        call: Any
        if era == "modern":
            call = server.modern("alice").call("wait", {"gate": "g"}, session=session, key="k")
        else:
            call = older.call("wait", meta=keyed("k", session), gate="g")
        await server.tools.gate("g").started.wait()
        await call.reply.gone()
        again = server.modern("refreshed").call("wait", {"gate": "g"}, session=session, key="k")
        await cycles()
        server.tools.gate("g").go.set()
        server.tools.gate("later").go.set()

        assert text_of(await again.result()) == "alice alice"
        await asyncio.gather(*server.tools.background)
        assert server.tools.notified == ["alice alice"]


async def test_two_users_at_once_are_not_mixed_up() -> None:
    """Each handler knows its own caller, however they interleave."""
    async with guarded() as server:
        for number in range(10):
            server.verifier.add(f"user {number}", f"user {number}")
        calls = [
            server.modern(f"user {number}").call("wait", {"gate": "g"}) for number in range(10)
        ]
        await cycles()
        server.tools.gate("g").go.set()
        for number, call in enumerate(calls):
            assert text_of(await call.result()) == f"user {number} user {number}"
        assert who() == "nobody"


async def test_a_refused_caller_reaches_no_handler() -> None:
    """401 and 403 come before the body is looked at, on every verb."""
    async with guarded() as server:
        server.verifier.add("other scope", "alice", "other")
        session = (await server.modern("alice").start())["sessionId"]
        for token, status in (("unknown", 401), ("other scope", 403)):
            client = server.older(token)
            client.session_id = "N" * 43
            meta = session_meta(session, key="k")
            replies = [
                server.modern(token).call("whoami", {}, meta=meta).reply,
                client.send("tools/call", call_params("whoami", {}, meta)).reply,
                client.send("session/start", {}).reply,
                client.get(),
                client.delete(),
            ]
            for reply in replies:
                await reply.done()
                assert reply.status == status
                assert reply.header("www-authenticate") is not None
        assert server.tools.calls == []
        assert len(await server.layer.sessions.list()) == 1
