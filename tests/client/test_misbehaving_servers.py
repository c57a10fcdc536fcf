"""The resuming client against servers that do what no server should, on real sockets."""

import json
import zlib
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError

from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client_transport import resumable
from tests.support.resuming import QUICK, Received, text_of
from tests.support.scripted import (
    SESSION,
    Entry,
    Exchange,
    ScriptedServer,
    named,
    never,
    status,
    tool_result,
)

UPDATED = "notifications/resources/updated"
KEY = "io.github.mcp-sessions/requestKey"
FOREIGN: dict[str, Any] = {"tools": {}, "sessions": {}}
"""The capabilities of a server that has sessions and nothing of this project."""


@asynccontextmanager
async def client_of(
    server: ScriptedServer, *, policy: ReconnectPolicy = QUICK
) -> AsyncGenerator[tuple[Client, Received]]:
    received = Received()
    transport = resumable(server.url(), on_resume=received.on_resume, policy=policy)
    with anyio.fail_after(30):
        async with Client(transport, mode="legacy", message_handler=received.on_message) as client:
            yield client, received


@asynccontextmanager
async def facing(
    script: dict[str, Entry] | None = None,
    capabilities: dict[str, Any] | None = None,
    *,
    policy: ReconnectPolicy = QUICK,
) -> AsyncGenerator[tuple[ScriptedServer, Client, Received]]:
    """A server that follows the script, a client that is connected to it, and what that got."""
    async with ScriptedServer(script or {}) as server:
        if capabilities is not None:
            server.capabilities = capabilities
        async with client_of(server, policy=policy) as (client, received):
            yield server, client, received


async def expect_no_connection(script: dict[str, Entry], why: str = "") -> None:
    """The client does not connect to a server that follows the script."""
    error = pytest.RaisesExc(MCPError, match=why or None)
    with pytest.RaisesGroup(error, flatten_subgroups=True):
        async with facing(script):
            raise AssertionError("it connected")


async def call(client: Client) -> str:
    """The text of a tool that says which session it was called in."""
    return text_of(await client.call_tool("echo", {}))


def positions_of(server: ScriptedServer) -> list[object]:
    """Where its client asked to resume from."""
    return [exchange.params["lastSessionEventId"] for exchange in server.asked("session/resume")]


def not_found(exchange: Exchange) -> None:
    exchange.error(-32043, "Session not found")


def without_start(exchange: Exchange) -> None:
    """The data-layer document only."""
    if exchange.method.startswith("session/"):
        exchange.error(-32601, "Method not found")


def without_an_id(exchange: Exchange) -> None:
    """An event that nobody can continue after."""
    exchange.event({"jsonrpc": "2.0", "method": "notifications/x"})


def cut(exchange: Exchange) -> None:
    """After the response began."""
    exchange.event(None, "1")
    exchange.reset()


def first(times: int, how: Entry) -> Entry:
    """An entry for that many requests. Those that come later are answered as they should be."""
    left = iter(range(times))
    return lambda exchange: how(exchange) if next(left, None) is not None else None


def in_session(session_id: str, how: Entry) -> Entry:
    """An entry for the requests that name this session."""
    return lambda exchange: how(exchange) if named(exchange) == session_id else None


def on_the_first_connection(how: Entry) -> Entry:
    """An entry for the requests that come there."""

    def entry(exchange: Exchange) -> Awaitable[None] | None:
        return how(exchange) if exchange.headers.get("mcp-session-id") == "transport-1" else None

    return entry


async def expect_unknown(client: Client) -> MCPError:
    """A call fails, and its caller learns that nobody knows whether it ran."""
    with pytest.raises(MCPError) as unknown:
        await call(client)
    assert is_outcome_unknown(unknown.value)
    return unknown.value


# --- a credential that is not accepted --------------------------------------------------------


@pytest.mark.parametrize("code", [401, 403])
async def test_a_credential_that_is_refused_fails_the_request_and_the_log_says_why(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    await expect_no_connection({"*": status(code)})
    assert f"the server answered {code}" in caplog.text


async def test_an_address_that_answers_with_a_status_only_is_named_with_it() -> None:
    why = r"http://127\.0\.0\.1:\d+/mcp: the server answered with HTTP status 502"
    await expect_no_connection({"*": status(502)}, why)


# --- a session that is lost (CLI5) ------------------------------------------------------


async def test_not_found_starts_over_once_for_all_who_ask_at_once() -> None:
    async with facing({"tools/call": in_session("s-1", not_found)}) as (server, client, received):
        found: list[str] = []

        async def ask() -> None:
            found.append(await call(client))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)

        assert found == ["s-2"] * 8
        assert server.sessions == 2
        assert [outcome.is_new_session for outcome in received.outcomes] == [True]


async def test_a_late_word_of_the_old_session_does_not_end_the_new_one() -> None:
    """Single flight: it was dealt with already."""
    late: list[Exchange] = []

    def entry(exchange: Exchange) -> None:
        if not late:
            late.append(exchange)
            never(exchange)
        else:
            not_found(exchange)

    script = {"tools/call": in_session("s-1", entry)}
    async with facing(script) as (server, client, received):
        answers: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                answers.append(await call(client))

            tasks.start_soon(ask)
            await server.has(lambda: late, "the first call")
            assert await call(client) == "s-2"
            assert await call(client) == "s-2", "it is of use"
            not_found(late[0])

        assert answers == ["s-2"]
        assert server.sessions == 2
        assert len(received.outcomes) == 1


@pytest.mark.parametrize("code", [404, 410])
async def test_404_on_post_while_the_get_stream_lives(code: int) -> None:
    """The connection is made anew; the session is resumed, and if it is there, kept."""
    script: dict[str, Entry] = dict.fromkeys(
        ("tools/call", "ping"), on_the_first_connection(status(code))
    )
    async with facing(script) as (server, client, received):
        await server.has(lambda: server.asked("GET"), "the notification stream")

        assert await call(client) == "s-1"

        await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
        assert (server.transports, server.sessions) == (2, 1)
        assert (await received.outcome()).recovered


@pytest.mark.parametrize("is_resumable", [True, False])
async def test_400_for_all_requests_is_a_lost_connection_and_no_call_is_sent_again(
    is_resumable: bool,
) -> None:
    """KEY17: a habit of servers that should say 404. The call may have run. What has no effect
    finds out.
    """
    error = {"code": -32000, "message": "Bad Request: No valid session ID provided"}
    body = json.dumps({"jsonrpc": "2.0", "error": error, "id": None}).encode()
    refuse = on_the_first_connection(status(400, body, **{"Content-Type": "application/json"}))
    async with facing({"session/start": without_start}, FOREIGN if is_resumable else None) as (
        server,
        client,
        _,
    ):
        before = await call(client)
        for method in ("tools/call", "session/resume", "ping"):
            server.script[method] = refuse
        with pytest.raises(MCPError):
            await call(client)
        assert await call(client) == before
        assert (server.transports, len(server.asked("tools/call"))) == (2, 3)


async def test_a_400_about_one_call_costs_that_call_alone() -> None:
    async with facing({"tools/call": first(1, status(400, b"no session"))}) as (server, client, _):
        with pytest.raises(MCPError):
            await call(client)
        assert await call(client) == "s-1"
        assert (server.transports, len(server.asked("tools/call"))) == (1, 2)


@pytest.mark.parametrize("code", [400, 404, 410])
async def test_a_resume_that_is_refused_by_status_starts_over(code: int) -> None:
    script = {
        "tools/call": on_the_first_connection(status(404)),
        "ping": on_the_first_connection(status(404)),
        "session/resume": status(code),
    }
    async with facing(script) as (server, client, received):
        assert await call(client) == "s-2"

        assert (server.transports, server.sessions) == (2, 2)
        outcome = await received.outcome()
        assert (outcome.recovered, outcome.is_new_session) == (False, True)
        assert received.methods.count("notifications/tools/list_changed") == 1


@pytest.mark.parametrize("capabilities", [FOREIGN, None], ids=["foreign", "ours"])
async def test_a_resume_that_is_refused_with_503_starts_over_at_a_foreign_server_only(
    capabilities: Any,
) -> None:
    """HTP5: one of this project keeps its sessions while its store is away, or it drains."""
    script = {
        "tools/call": on_the_first_connection(status(404)),
        "ping": on_the_first_connection(status(404)),
        "session/resume": first(4, status(503)),
    }
    async with facing(script, capabilities) as (_, client, received):
        assert await call(client) == ("s-2" if capabilities else "s-1")
        assert (await received.outcome()).is_new_session is bool(capabilities)


async def test_a_server_that_forgets_every_session_is_given_up() -> None:
    """Exactly once: not for ever."""
    async with facing({"tools/call": not_found}) as (server, client, _):
        with pytest.raises(MCPError):
            await call(client)

        assert server.sessions == 2


async def test_a_call_that_was_running_when_its_session_ended_is_not_run_again() -> None:
    """KEY3: its response had begun, so it was not refused."""

    def entry(exchange: Exchange) -> None:
        exchange.event(None, "1")
        error = {"code": -32043, "message": "Session not found"}
        exchange.event({"jsonrpc": "2.0", "id": exchange.message["id"], "error": error})
        exchange.end()

    async with facing({"tools/call": in_session("s-1", entry)}) as (_, client, _):
        await expect_unknown(client)
        assert await call(client) == "s-2"


async def test_a_call_that_is_refused_late_may_have_been_running() -> None:
    """KEY3: on a connection for all requests nothing else tells the two apart."""

    async def entry(exchange: Exchange) -> None:
        await anyio.sleep(0.15)  # that is how long it ran
        not_found(exchange)

    policy = ReconnectPolicy(refusal_time=0.1)
    script = {"tools/call": in_session("s-1", entry)}
    async with facing(script, policy=policy) as (server, client, _):
        await expect_unknown(client)
        assert len(server.asked("tools/call")) == 1
        assert await call(client) == "s-2"


async def test_a_server_may_say_that_it_had_begun() -> None:
    """KEY3."""

    def entry(exchange: Exchange) -> None:
        exchange.error(-32043, "Session not found", data={"started": True})

    async with facing({"tools/call": in_session("s-1", entry)}) as (_, client, _):
        await expect_unknown(client)


# --- what is cut ------------------------------------------------------------------------------


async def test_a_cut_response_is_asked_for_again_with_its_key() -> None:
    """And with another id: the old one may still be in use there."""
    async with facing({"tools/call": first(2, cut)}) as (server, client, _):
        assert await call(client) == "s-1"

        calls = server.asked("tools/call")
        assert len(calls) == 3
        assert len({exchange.meta[KEY] for exchange in calls}) == 1
        assert len({exchange.message["id"] for exchange in calls}) == 3


async def test_at_a_server_without_keys_a_cut_call_is_not_sent_again() -> None:
    """KEY3: the caller learns that the outcome is unknown."""
    async with facing({"tools/call": Exchange.reset}, FOREIGN) as (server, client, _):
        await expect_unknown(client)
        assert len(server.asked("tools/call")) == 1


async def test_429_is_asked_again_after_as_long_as_it_says() -> None:
    """The server is there: nothing is lost."""
    busy = status(429, b"", **{"Retry-After": "0"})
    async with facing({"tools/call": first(1, busy)}) as (server, client, received):
        assert await call(client) == "s-1"
        assert len(server.asked("tools/call")) == 2
        assert received.outcomes == []


async def test_503_is_a_loss_and_the_call_is_sent_again_in_the_same_session() -> None:
    away = status(503, b"", **{"Retry-After": "0"})
    async with facing({"tools/call": first(1, away)}) as (server, client, received):
        assert await call(client) == "s-1"
        assert len(server.asked("tools/call")) == 2
        assert [outcome.recovered for outcome in received.outcomes] == [True]


async def test_a_server_that_never_answers_a_call() -> None:
    """CLI1: bounded, and the caller knows that nobody knows."""
    policy = ReconnectPolicy(answer_timeout=2, jar_interval=0.05, closing_timeout=0.2)
    async with facing({"tools/call": never}, policy=policy) as (_, client, _):
        await expect_unknown(client)


async def test_a_caller_that_is_cancelled_sees_its_own_cancellation() -> None:
    """As with the SDK's own transport. The HTTP client had ended with the link, and a
    ``RuntimeError`` about that took the place of a ``TimeoutError``.
    """
    async with ScriptedServer({"tools/call": never}) as server:

        async def use() -> None:
            async with Client(resumable(server.url(), policy=QUICK), mode="legacy") as client:
                await call(client)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            await server.has(lambda: server.asked("tools/call"), "the call")
            tasks.cancel_scope.cancel()
        assert tasks.cancel_scope.cancelled_caught


async def test_a_server_that_never_starts_the_session_it_advertises_is_one_without() -> None:
    """CLI1."""
    policy = ReconnectPolicy(connect_timeout=0.3, closing_timeout=0.2)
    async with facing({"session/start": never}, policy=policy) as (_, client, _):
        assert await call(client) == "none"


async def test_a_half_open_response_is_noticed_by_its_silence() -> None:
    """Its server with keys shows a sign of life on each response; this one is gone."""
    policy = ReconnectPolicy(backoff_base=0.02, stream_silence=0.3)
    silent = first(1, lambda exchange: exchange.event(None, "1"))
    async with facing({"tools/call": silent}, policy=policy) as (server, client, _):
        assert await call(client) == "s-1"
        assert len(server.asked("tools/call")) == 2


# --- events -----------------------------------------------------------------------------------


async def test_duplicate_events_are_received_once() -> None:
    async with facing() as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        for event_id in ("1", "2", "1", "2", "3"):
            server.push(UPDATED, event_id, uri=f"note://{event_id}")

        await received.has(lambda: len(received.updates) >= 3, "three updates")
        await call(client)
        assert received.updates == ["note://1", "note://2", "note://3"]


async def test_events_may_come_before_the_answer_to_the_resume() -> None:
    """Over two HTTP streams the order is nobody's; and EVT8 allows integers."""

    async def resume(exchange: Exchange) -> None:
        await server.has(lambda: len(server.asked("session/resume")) == 1, "the resume")
        params = {"uri": "note://4", "sessionEventId": 4}
        exchange.event({"jsonrpc": "2.0", "method": UPDATED, "params": params})
        result = {"resumed": True, "catchup": True, "replayed": 1}
        exchange.event({"jsonrpc": "2.0", "id": exchange.message["id"], "result": result})
        exchange.end()

    script: dict[str, Entry] = {"session/resume": resume}
    async with facing(script) as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        for number in (1, 2, 3):
            server.push(UPDATED, number, uri=f"note://{number}")
        await received.has(lambda: len(received.updates) == 3, "three updates")
        server.script["tools/call"] = first(1, status(404))

        await call(client)

        assert positions_of(server) == [3]
        await received.has(lambda: len(received.updates) == 4, "the fourth")
        await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
        server.push(UPDATED, 4, uri="note://4")
        server.push(UPDATED, 5, uri="note://5")
        await received.has(lambda: len(received.updates) >= 5, "the fifth")
        assert received.updates == [f"note://{n}" for n in (1, 2, 3, 4, 5)]


async def test_a_second_resume_asks_from_the_last_event_of_the_first() -> None:
    """CUP2, CLI4: what was replayed counts, and a gap resets position and memory."""
    answers = iter(
        [
            {"resumed": True, "catchup": True, "replayed": 1},
            {"resumed": True, "catchup": False, "sessionEventId": "90", "reason": "evicted"},
            {"resumed": True, "catchup": True, "replayed": 0},
        ]
    )
    script: dict[str, Entry] = {"session/resume": lambda exchange: exchange.result(next(answers))}
    async with facing(script) as (server, client, received):
        for number in (1, 2, 3):
            await server.has(lambda n=number: len(server.asked("GET")) == n, "a stream")
            server.push(UPDATED, str(number), uri=f"note://{number}")
            await received.has(lambda n=number: len(received.updates) >= n, "an update")
            server.script["tools/call"] = first(1, status(404))
            await call(client)

        assert positions_of(server) == ["1", "2", "3"]
        assert [o.recovered for o in received.outcomes] == [True, False, True]
        assert received.outcomes[1].reason == "evicted"


async def test_after_a_gap_the_head_is_the_position_and_its_ids_are_new() -> None:
    """CLI4: a log that was made anew may number its events as the old one did."""
    answer = {"resumed": True, "catchup": False, "sessionEventId": "0"}
    script: dict[str, Entry] = {"session/resume": lambda exchange: exchange.result(answer)}
    async with facing(script) as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        server.push(UPDATED, "1", uri="note://old")
        await received.has(lambda: received.updates, "an update")
        for _ in range(2):
            server.script["tools/call"] = first(1, status(404))
            await call(client)

        assert positions_of(server) == ["1", "0"]
        await server.has(lambda: len(server.asked("GET")) == 3, "the newest stream")
        server.push(UPDATED, "1", uri="note://new")
        await received.has(lambda: received.updates == ["note://old", "note://new"], "both")


# --- the notification stream that nobody saw ----------------------------------------------------


async def test_a_stream_that_dies_before_its_first_byte_may_have_cost_the_session() -> None:
    """HTL7: the server counts it as opened, and detaches the session with the next one."""
    async with facing({"GET": first(1, Exchange.reset)}) as (server, _, _):
        await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
        await server.has(lambda: server.asked("session/resume"), "the resume")
        assert len(server.asked("session/resume")) == 1


async def test_a_stream_that_died_unseen_is_not_followed_by_another_on_its_connection() -> None:
    """HTL7: the server may serve the first one late, and detach the session."""
    async with facing({"GET": first(1, Exchange.reset)}) as (server, _, _):
        await server.has(lambda: server.asked("session/resume"), "the resume")
        await server.has(lambda: len(server.asked("GET")) == 3, "the third stream")
        streams = [get.headers["mcp-session-id"] for get in server.asked("GET")]
        assert streams == ["transport-1", "transport-1", "transport-2"]
        assert server.asked("session/resume")[0].headers["mcp-session-id"] == "transport-2"


def replaying(*updates: str) -> Any:
    """An entry for ``session/resume``, with the events that the next GET begins with."""

    def resume(exchange: Exchange) -> None:
        replays.append(exchange.params["lastSessionEventId"])
        exchange.result({"resumed": True, "catchup": True, "replayed": len(updates)})

    def get(exchange: Exchange) -> None:
        if replays:
            for number in updates:
                exchange.event(update(number), f"get-{number}")

    replays: list[str] = []
    return resume, get


def update(number: str) -> dict[str, Any]:
    params = {"uri": f"note://{number}", "sessionEventId": number}
    return {"jsonrpc": "2.0", "method": UPDATED, "params": params}


async def test_an_event_of_a_stream_that_cannot_continue_waits_for_those_before_it() -> None:
    """HTL7, ATT3: a request attached the session again, behind an event that nobody got."""
    resume, replay = replaying("1", "2")

    def get(exchange: Exchange) -> None:
        if exchange.headers["mcp-session-id"] != "transport-1":
            replay(exchange)
        elif len(server.asked("GET")) == 1:
            without_an_id(exchange)
            exchange.end()
        else:
            exchange.event(update("2"), "get-2")

    server = ScriptedServer({"GET": get, "session/resume": resume})
    async with server, client_of(server) as (_, received):
        await received.has(lambda: len(received.updates) == 2, "both events")
        assert received.updates == ["note://1", "note://2"]
        assert (await received.outcome()).recovered
        assert positions_of(server) == ["0"]


async def test_a_client_that_gets_no_other_connection_stays_on_the_one_it_has() -> None:
    """It tries again. Its calls are answered meanwhile, and then it gets every event."""
    resume, replay = replaying("1", "2")
    is_full = True

    def get(exchange: Exchange) -> None:
        if exchange.headers["mcp-session-id"] != "transport-1":
            replay(exchange)
        else:
            without_an_id(exchange)
            exchange.end()

    def initialize(exchange: Exchange) -> None:
        if is_full and server.transports == 1:
            exchange.respond(503)

    server = ScriptedServer({"GET": get, "session/resume": resume, "initialize": initialize})
    async with server, client_of(server) as (client, received):
        await server.has(lambda: len(server.asked("initialize")) >= 3, "two that were refused")
        assert await call(client) == "s-1"
        is_full = False
        await received.has(lambda: len(received.updates) == 2, "both events")
        assert received.updates == ["note://1", "note://2"]


async def test_a_session_that_cannot_be_resumed_keeps_its_connection() -> None:
    """Another connection would lose its subscriptions for nothing."""

    def get(exchange: Exchange) -> None:
        server.stream = exchange
        without_an_id(exchange)

    server = ScriptedServer({"*": without_start, "GET": get}, FOREIGN)
    async with server, client_of(server) as (client, received):
        await call(client)
        await server.has(lambda: server.stream, "the notification stream")
        assert server.stream is not None
        server.stream.end()
        assert (await received.outcome()).recovered
        assert len(server.asked("GET")) == 2
        assert server.transports == 1


async def test_a_stream_that_is_opened_anew_during_a_start_is_not_overlooked() -> None:
    """HTL7: the server may have served that start before the stream."""
    held: list[Exchange] = []

    def get(exchange: Exchange) -> None:
        server.stream = exchange
        without_an_id(exchange)

    def start(exchange: Exchange) -> None:
        if len(server.asked("session/start")) == 2:
            held.append(exchange)
            never(exchange)

    refuse = in_session("s-1", not_found)
    script: dict[str, Entry] = {"GET": get, "session/start": start, "tools/call": refuse}
    server = ScriptedServer(script)
    async with server, client_of(server) as (client, _), anyio.create_task_group() as tasks:
        await server.has(lambda: server.stream, "the notification stream")
        tasks.start_soon(call, client)
        await server.has(lambda: held, "the second start")
        assert server.stream is not None
        server.stream.end()
        await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
        held[0].result({"sessionId": "s-2", "sessionEventId": "0"})
        await server.has(lambda: server.asked("session/resume"), "the resume")
        assert server.transports == 2


async def test_a_connection_that_is_gone_when_its_session_is_taken_up_there_is_opened_anew() -> (
    None
):
    """CLI10: the 404 is the connection's, and the session is still there."""
    script = {"session/resume": on_the_first_connection(status(404))}
    async with facing(script) as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        server.push("notifications/sessions/detached", sessionId="s-1", reason="evicted")

        assert (await received.outcome()).recovered
        assert await call(client) == "s-1"
        assert (server.transports, server.sessions) == (2, 1)


# --- lines that no server should send -----------------------------------------------------------


def raw_event(exchange: Exchange, block: bytes) -> None:
    """Send a server-sent event as it is, on a stream that has begun."""
    exchange.writer.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")


@pytest.mark.parametrize(
    "line",
    [b"retry: " + b"9" * 400, b"retry: " + b"9" * 5_000, "id: grün\ndata:".encode(), b"id: \x07"],
    ids=["retry-400", "retry-5000", "id-beyond-ascii", "id-control"],
)
async def test_a_malformed_line_on_a_stream_costs_the_application_nothing(line: bytes) -> None:
    async with facing() as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        assert server.stream is not None
        raw_event(server.stream, line + b"\n\n")
        server.stream.end()
        if line.startswith(b"id"):
            await server.has(lambda: len(server.asked("GET")) == 2, "the next stream")
            assert (await received.outcome()).recovered, "it had no position to go on from"
        assert await call(client) == "s-1"


REFUSED: dict[str, Any] = {"code": -32600, "message": "refused"}


@pytest.mark.parametrize(
    "body",
    [
        {"jsonrpc": "2.0", "id": None, "error": REFUSED},
        {"jsonrpc": "2.0", "id": "server-error", "error": REFUSED},
        {"jsonrpc": "2.0", "id": 4711, "error": REFUSED},
    ],
    ids=["null", "text", "number"],
)
@pytest.mark.parametrize("code", [200, 301], ids=str)
async def test_an_error_in_the_response_of_a_call_is_its_own_whatever_id_it_has(
    code: int, body: dict[str, Any]
) -> None:
    script: dict[str, Entry] = {"tools/call": lambda exchange: exchange.json(body, code)}
    async with facing(script) as (_, client, __):
        with pytest.raises(MCPError, match="refused"):
            await call(client)


@pytest.mark.parametrize(
    "body",
    [
        {"jsonrpc": "2.0", "method": "notifications/x"},
        {"jsonrpc": "2.0", "id": 1, "method": "ping"},
    ],
    ids=["notification", "question"],
)
async def test_a_response_that_is_a_message_and_no_answer_fails_its_call(
    body: dict[str, Any],
) -> None:
    script: dict[str, Entry] = {"tools/call": lambda exchange: exchange.json(body)}
    async with facing(script) as (_, client, __):
        with pytest.raises(MCPError, match="no answer"):
            await call(client)


async def test_a_connection_whose_id_cannot_be_sent_is_refused_with_a_reason() -> None:
    def initialize(exchange: Exchange) -> None:
        agreed = {
            "protocolVersion": exchange.params["protocolVersion"],
            "capabilities": {},
            "serverInfo": {"name": "scripted", "version": "1"},
        }
        exchange.result(agreed, {"Mcp-Session-Id": "grün"})

    await expect_no_connection({"initialize": initialize}, "an id that cannot be sent")


@pytest.mark.parametrize("seconds", [10**400, 1e308, -5, True, "9", [9]], ids=repr)
async def test_a_time_to_come_back_that_is_none_costs_the_application_nothing(
    seconds: object,
) -> None:
    policy = ReconnectPolicy(backoff_base=0.01, give_up_after=0.3)
    async with facing(policy=policy) as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        server.push(
            "notifications/sessions/detached",
            sessionId="s-1",
            reason="draining",
            retryAfter=seconds,
        )
        assert (await received.outcome()).recovered
        assert await call(client) == "s-1"


@pytest.mark.parametrize("method", ["tools/call", "session/resume", "initialize"])
async def test_no_server_makes_anybody_wait_longer_than_it_waits_for_a_connection(
    method: str,
) -> None:
    """``give_up_after``, whatever ``Retry-After`` says."""
    is_away = False

    def entry(exchange: Exchange) -> None:
        if is_away and exchange.method == method:
            exchange.respond(503, headers={"Retry-After": "1" + "0" * 400})
        elif is_away and exchange.method == "tools/call":
            exchange.respond(404)

    policy = ReconnectPolicy(backoff_base=0.01, backoff_cap=0.05, give_up_after=0.5)
    async with facing({"*": entry}, policy=policy) as (server, client, _):
        await server.has(lambda: server.stream, "the notification stream")
        is_away = True
        with anyio.fail_after(10), pytest.raises(MCPError):
            await client.call_tool("echo", {})


SMALL = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.2, give_up_after=5, max_message=20_000)


async def test_a_streamed_answer_that_is_too_large_is_an_unknown_outcome() -> None:
    """Asked for again under its key it would be as large, each time."""

    def large(exchange: Exchange) -> None:
        result = tool_result("x" * 50_000)
        exchange.event({"jsonrpc": "2.0", "id": exchange.message["id"], "result": result})
        exchange.end()

    script = {"tools/call": first(1, large)}
    async with facing(script, policy=SMALL) as (server, client, received):
        assert (await expect_unknown(client)).error.data["reason"] == "too_large"
        await call(client)
        assert len(server.asked("tools/call")) == 2
        assert received.outcomes == []


async def test_an_event_that_is_too_large_is_passed_over_and_does_not_come_again() -> None:
    """The application is asked to read again, and the stream goes on after it."""
    async with facing(policy=SMALL) as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        assert server.stream is not None
        params = {"level": "info", "data": "x" * 50_000, "sessionEventId": "1"}
        event = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        server.stream.event(event, "e-1")
        server.push(UPDATED, "2", uri="note://2")

        outcome = await received.outcome()
        assert (outcome.recovered, outcome.reason) == (False, "too_large")
        await received.has(lambda: received.updates == ["note://2"], "the event after it")
        assert len([r for r in server.requests if r.verb == "GET"]) == 1
        await call(client)


async def test_a_response_that_unpacks_to_more_than_the_limit_is_left_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """100 KB on the wire, 100 MB unpacked."""
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(100)) + packer.flush()
    fields = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with facing({"tools/call": first(1, status(200, bomb, **fields))}) as (_, client, _):
        assert "more than 4194304 bytes" in (await expect_unknown(client)).error.message
        assert "more than 4194304 bytes" in caplog.text
        assert await call(client) == "s-1"


# --- metadata ---------------------------------------------------------------------------------


async def test_a_state_of_4_kib_is_echoed_byte_for_byte() -> None:
    state = ('grün \u2028 \N{SNOWMAN} \U0001f600 \\ " \x7f' * 400)[:4096]

    def entry(exchange: Exchange) -> None:
        meta = {SESSION: {"sessionId": named(exchange), "state": state}}
        exchange.result(tool_result(exchange.meta[SESSION].get("state", ""), meta=meta))

    async with facing({"tools/call": entry}) as (_, client, _):
        assert await call(client) == ""
        assert await call(client) == state


async def test_a_result_with_a_foreign_session_changes_nothing() -> None:
    def entry(exchange: Exchange) -> None:
        meta = {SESSION: {"sessionId": "s-666", "state": "theirs"}}
        exchange.result(tool_result(json_of(exchange.meta[SESSION]), meta=meta))

    async with facing({"tools/call": entry}) as (_, client, _):
        assert await call(client) == await call(client) == "{'sessionId': 's-1'}"


def json_of(value: object) -> str:
    return str(value)


async def test_null_metadata_and_none_at_all_keep_the_state() -> None:
    answers: Any = iter([{SESSION: {"sessionId": "s-1", "state": "x"}}, {SESSION: None}, None])

    def entry(exchange: Exchange) -> None:
        text = exchange.meta[SESSION].get("state", "")
        exchange.result(tool_result(text, meta=next(answers)))

    async with facing({"tools/call": entry}) as (_, client, _):
        assert [await call(client) for _ in range(3)] == ["", "x", "x"]


def refuses_state(exchange: Exchange) -> None:
    """As a server does that lost its keys."""
    text = "Invalid params: the session's state is not valid"
    exchange.error(-32602, text, data={"reason": "invalid_state"})


async def test_a_state_that_is_refused_is_left_out_and_the_call_is_sent_again() -> None:
    tokens: list[str | None] = []

    def entry(exchange: Exchange) -> None:
        token = exchange.meta[SESSION].get("state")
        tokens.append(token)
        if token == "old":
            refuses_state(exchange)
        else:
            state = "new" if len(tokens) > 2 else "old"
            meta = {SESSION: {"sessionId": "s-1", "state": state}}
            exchange.result(tool_result("done", meta=meta))

    async with facing({"tools/call": entry}) as (server, client, received):
        assert [await call(client) for _ in range(3)] == ["done"] * 3
        assert tokens == [None, "old", None, "new"]
        assert (server.sessions, received.outcomes) == (1, [])


async def test_a_newer_state_is_kept_when_an_older_one_is_refused() -> None:
    late: list[Exchange] = []
    tokens: list[str | None] = []

    def entry(exchange: Exchange) -> None:
        token = exchange.meta[SESSION].get("state")
        tokens.append(token)
        if token == "old" and not late:
            late.append(exchange)
            never(exchange)
        else:
            state = "old" if token is None else "new"
            meta = {SESSION: {"sessionId": "s-1", "state": state}}
            exchange.result(tool_result("done", meta=meta))

    async with facing({"tools/call": entry}) as (server, client, _):
        await call(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, client)
            await server.has(lambda: late, "the call with the old state")
            await call(client)
            refuses_state(late[0])
        assert tokens == [None, "old", "old", "new"]


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_server_that_refuses_every_state_is_not_asked_for_ever(is_ours: bool) -> None:
    """And a foreign one not once more: its token may be all that there is of the session."""
    calls: list[str | None] = []

    def entry(exchange: Exchange) -> None:
        calls.append(exchange.meta[SESSION].get("state"))
        if len(calls) == 1:
            meta = {SESSION: {"sessionId": "s-1", "state": "x"}}
            exchange.result(tool_result("", meta=meta))
        else:
            refuses_state(exchange)

    async with facing({"tools/call": entry}, None if is_ours else FOREIGN) as (_, client, _):
        await call(client)
        with pytest.raises(MCPError) as refused:
            await call(client)
        assert refused.value.code == -32602
        assert calls == ([None, "x", None] if is_ours else [None, "x"])


# --- servers that only have sessions/create -----------------------------------------------------


async def test_a_server_that_only_creates_sessions_is_used_as_it_is() -> None:
    async with facing({"*": without_start}, FOREIGN) as (server, client, _):
        assert await call(client) == "s-1"

        created = server.asked("sessions/create")[0].message
        assert "params" not in created
        sent = server.asked("tools/call")[0].meta
        assert sent[SESSION] == {"sessionId": "s-1", "state": "one"}
        assert KEY not in sent


async def test_a_tools_result_ends_no_session_whatever_it_says() -> None:
    def entry(exchange: Exchange) -> None:
        exchange.result(tool_result("Session not found. Create one first.", is_error=True))

    async with facing({"tools/call": entry}, FOREIGN) as (server, client, _):
        assert await call(client) == "Session not found. Create one first."
        assert (server.sessions, len(server.asked("tools/call"))) == (1, 1)


async def test_whatever_a_server_says_to_session_methods_the_application_gets_on() -> None:
    """It advertises sessions and knows none of the methods."""

    def entry(exchange: Exchange) -> None:
        if exchange.method.startswith("session"):
            exchange.respond(400)

    async with facing({"*": entry}, FOREIGN) as (_, client, _):
        assert await call(client) == "none"


async def test_a_transport_session_that_is_gone_is_opened_anew() -> None:
    """2025-11-25: on 404 a client starts a new session with a new initialize."""
    script: dict[str, Entry] = dict.fromkeys(
        ("tools/call", "ping"), on_the_first_connection(status(404))
    )
    async with facing(script, {"tools": {}}) as (server, client, received):
        assert await call(client) == "none"
        assert server.transports == 2
        assert (await received.outcome()).is_new_session


async def test_a_status_that_says_nothing_of_sessions_is_the_answer() -> None:
    async with facing({"tools/call": status(500)}) as (server, client, received):
        with pytest.raises(MCPError):
            await call(client)
        assert len(server.asked("tools/call")) == 1
        assert received.outcomes == []


async def test_a_draining_server_is_left_within_the_time_it_gives() -> None:
    """WSS17: what is asked meanwhile is served by whoever comes next."""
    async with facing() as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        server.push(
            "notifications/sessions/detached", sessionId="s-1", reason="draining", retryAfter=0.1
        )

        outcome = await received.outcome()

        assert outcome.recovered
        assert server.transports == 2
        assert await call(client) == "s-1"


async def test_a_drain_that_is_not_waited_for_delays_nothing_that_comes_later() -> None:
    """TKO11: somebody asks, so the client comes back early; the next loss is one like any other."""
    gone = 0

    def get(exchange: Exchange) -> None:
        if exchange.headers["mcp-session-id"] == f"transport-{gone}":
            exchange.respond(404)

    async with facing({"GET": get}) as (server, client, received):
        await server.has(lambda: server.stream, "the notification stream")
        drained = server.stream
        assert drained is not None
        server.push(
            "notifications/sessions/detached", sessionId="s-1", reason="draining", retryAfter=14
        )
        gone = 1
        drained.end()
        while not received.outcomes:
            assert await call(client) == "s-1"
        await server.has(lambda: server.stream is not drained, "the next notification stream")
        gone = 2
        assert server.stream is not None
        server.stream.end()
        with anyio.fail_after(6):
            assert (await received.outcome(2)).recovered
