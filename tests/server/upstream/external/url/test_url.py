"""A URL behind the layer: what passes, and what it costs when it does wrong.

The promises are those of `mcp_sessions.external_server`. Nothing is ever sent twice that may have
run.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from mcp_sessions import ConfigurationError, HTTPServer, Principal
from mcp_sessions.server.upstream.external import url_requests
from tests.support.children import until
from tests.support.modern import ModernClient, session_meta
from tests.support.raw import RawClient, Reply, initialize_params, keyed, text_of
from tests.support.url_server import UrlServer
from tests.support.urls import stock_url, url_of
from tests.support.world import World, world

HANDSHAKE: dict[str, Any] = initialize_params()
UPDATED = "notifications/resources/updated"


@asynccontextmanager
async def url_world(
    server: UrlServer, *, options: dict[str, Any] | None = None, **limits: Any
) -> AsyncGenerator[World]:
    """A layer over that server; options as of `HTTPServer`."""
    async with url_of(server) as url:
        async with world(server=HTTPServer(url, **(options or {})), **limits) as w:
            yield w


@asynccontextmanager
async def reached(
    misdeed: str = "", *, capabilities: dict[str, Any] | None = None, **how: Any
) -> AsyncGenerator[tuple[UrlServer, RawClient]]:
    """That server, and a client of the layer over it; what else is given is for `url_world`."""
    server = UrlServer(misdeed)
    async with url_world(server, **how) as w:
        yield server, await w.connected(capabilities=capabilities)


async def subscribed(client: RawClient) -> Reply:
    """The notification stream of a client with a session that is subscribed to ``test://a``."""
    stream = await client.get().started()
    await client.start()
    await client.result("resources/subscribe", {"uri": "test://a"})
    return stream


async def refused(server: UrlServer, **options: Any) -> dict[str, Any]:
    """The error of a client whose server does not start."""
    async with url_world(server, options=options) as w:
        client = w.client()
        return await client.error("initialize", HANDSHAKE)


def updates(messages: list[dict[str, Any]]) -> list[str]:
    return [m["params"]["uri"] for m in messages if m.get("method") == UPDATED]


# --- what passes -----------------------------------------------------------------------------


async def test_what_passes_passes_as_it_is_and_the_session_there_ends_with_the_one_here() -> None:
    capabilities: dict[str, Any] = {"elicitation": {"form": {}}, "ofAnotherKind": {}}
    async with reached(capabilities=capabilities) as (server, client):
        notified = json.loads(await client.text("client"))
        assert notified["capabilities"] == capabilities
        sent = {"name": "params", "ofAnotherKind": [1], "_meta": {"own": 2}}
        result = await client.result("tools/call", sent)
        assert json.loads(text_of(result)) == sent and result["ofAnotherKind"] == {"kept": True}
        call = client.call("log", text="hello")
        await call.result()
        assert call.reply.messages[0]["params"] == {"level": "info", "data": "hello"}
        (session,) = server.sessions
        await client.delete().done()
        await until(lambda: server.ended == [session], "the session there was ended")


async def test_the_credential_of_a_client_stays_here_and_the_layer_has_its_own() -> None:
    server = UrlServer()
    options = {"headers": {"Authorization": "Bearer ours", "X-Own": "1"}}
    async with url_world(server, options=options) as w:
        client = await w.connected()
        theirs = {"Authorization": "Bearer theirs", "X-Theirs": "1", "Cookie": "theirs=1"}
        message = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"name": "count"}}
        (answer,) = await client.post(message, headers=theirs).has(1)
        assert text_of(answer["result"]) == "1"
    assert len(server.headers) >= 4
    for headers in server.headers:
        assert headers["authorization"] == "Bearer ours" and headers["x-own"] == "1"
        assert "x-theirs" not in headers and "cookie" not in headers


async def test_each_principal_has_a_session_there_with_a_credential_of_its_own() -> None:
    server = UrlServer()
    asked: list[str | None] = []

    async def credential(principal: Principal) -> Mapping[str, str]:
        asked.append(principal.subject)
        return {"Authorization": f"Bearer of {principal.subject}"}

    async with url_world(server, options={"auth": credential, "per": "principal"}) as w:
        for subject in ("alice", "bob", "alice"):
            token = AccessToken(token="t", client_id="c", scopes=[], subject=subject)
            client = RawClient(await w.carrier_of(AuthenticatedUser(token)))
            await client.initialize()
            await client.text("count")
    assert asked == ["alice", "bob"]
    sent = {(headers.get("mcp-session-id"), headers["authorization"]) for headers in server.headers}
    assert len({who for session, who in sent if session}) == len({s for s, _ in sent if s}) == 2


async def test_an_auth_of_the_http_client_is_used_and_one_that_fails_is_said() -> None:
    server = UrlServer()
    async with url_world(server, options={"auth": httpx2.BasicAuth("me", "secret")}) as w:
        await w.connected()
    assert {headers["authorization"][:6] for headers in server.headers} == {"Basic "}

    def none(principal: Principal) -> Mapping[str, str]:
        raise KeyError("the secret")

    error = await refused(UrlServer(), auth=none)
    assert "no credential" in error["message"] and "the secret" not in str(error)


async def test_what_changes_is_received_on_the_servers_own_stream() -> None:
    async with reached() as (server, client):
        stream = await subscribed(client)
        server.say(UPDATED, {"uri": "test://a"})
        assert set(updates(await stream.has(1))) == {"test://a"}


async def test_after_a_stream_that_cannot_be_resumed_clients_read_again() -> None:
    async with reached() as (server, client):
        stream = await subscribed(client)
        server.hang_up()
        assert set(updates(await stream.has(1))) == {"test://a"}
        await until(lambda: len(server.streams) == len(server.sessions), "it is heard again")


@pytest.mark.parametrize("misdeed", ["no stream", "no route"])
async def test_a_server_without_such_a_stream_is_served_all_the_same(misdeed: str) -> None:
    """Nor is a session forgotten where there is nothing to be had by GET."""
    async with reached(misdeed) as (server, client):
        assert await client.text("count") == "1"
        if misdeed == "no route":
            assert (await client.call("resumable").error())["code"] == -31012
        assert await client.text("count") == str(len(server.calls))
        assert len(server.sessions) == 1


async def test_a_response_that_breaks_off_is_fetched_on() -> None:
    async with reached() as (server, client):
        assert await client.text("resumable") == "the rest"
    assert server.calls == ["resumable"] and len(server.resumed) == 1


async def test_a_response_is_not_fetched_on_without_a_pause() -> None:
    """Whatever the server says: zero seconds would be a loop."""
    async with reached("no stream") as (server, client):
        assert await client.text("again and again") == "at last"
    steps = [b - a for a, b in zip(server.resumed_at, server.resumed_at[1:], strict=False)]
    assert len(steps) == 3 and min(steps) >= 0.09


async def test_a_response_that_stays_open_after_its_answer_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each call would cost a connection for as long as the server likes."""
    monkeypatch.setattr("mcp_sessions.server.upstream.external.url._AFTER", 0.2)
    async with reached() as (server, client):
        for _ in range(3):
            assert await client.text("left open") == "answered"
        await until(lambda: server.streams, "it is heard")
        for _ in range(3):
            assert await client.text("answered elsewhere") == "answered"
        await until(lambda: not server.open, "they were left")
        assert await client.text("count") == "7"


async def test_who_says_much_ends_unowned_session() -> None:
    """A server that takes no messages for a while has all of them afterwards."""
    server = UrlServer()
    async with url_world(server, max_running_requests=400) as w:
        talker = await w.connected()
        assert await talker.text("count") == "1"
        server.takes.clear()
        changed = "notifications/roots/list_changed"
        for _ in range(300):
            await talker.notify(changed)
        waiting = talker.call("count")
        server.takes.set()
        await waiting.result()

        def are_notified() -> bool:
            return sum(message.get("method") == changed for message in server.received) == 300

        await until(are_notified, "all of them")
        assert len(server.sessions) == 1


async def test_a_server_that_takes_no_messages_is_asked_by_others_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However much one of those who share its session tells it, and cancels."""
    monkeypatch.setattr(url_requests, "CONNECTING", 0.5)
    monkeypatch.setattr(url_requests, "_WAITING", 4)
    server = UrlServer()
    async with url_world(server, options={"per": "shared"}) as w:
        talker, other = await w.connected(), await w.connected()
        sent = [talker.call("silent") for _ in range(9)]
        await until(lambda: len(server.calls) == 9, "the calls run")
        server.takes.clear()
        for each in sent:
            await talker.notify("notifications/cancelled", {"requestId": each.id})
        for _ in range(9):
            await talker.notify("notifications/roots/list_changed")
        assert await other.text("count") == "10"
        assert await talker.text("count") == "11"
        assert len(server.sessions) == 1
        await until(lambda: "5 messages were dropped" in caplog.text, "what waited is over")
        server.takes.set()


async def test_a_refusal_whose_text_does_not_end_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_requests, "CONNECTING", 0.5)
    async with reached() as (_, client):
        error = await client.call("dribbles").error()
        assert "HTTP status 400" in error["message"]
        assert await client.text("count") == "2"


async def test_a_cancelled_request_is_cancelled_there_by_its_own_id() -> None:
    async with reached() as (server, client):
        sent = client.call("silent")
        await until(lambda: server.calls == ["silent"], "the call runs")
        await client.notify("notifications/cancelled", {"requestId": sent.id})
        await until(lambda: server.received[-1].get("method") == "notifications/cancelled", "told")
        asked = next(m for m in server.received if m.get("method") == "tools/call")
        assert server.received[-1]["params"]["requestId"] == asked["id"]
        assert await client.text("count") == "2"


async def test_the_modern_era_is_served_by_a_url_of_the_era_before() -> None:
    async with url_world(UrlServer()) as w:
        client = ModernClient(w.carrier)
        assert (await client.send("tools/list").result())["resultType"] == "complete"
        created = await client.create()
        assert await client.text("count", meta=session_meta(created["sessionId"])) == "1"


async def test_a_stock_server_asks_the_client_of_the_request_and_reports_progress() -> None:
    async with stock_url(resumable=True) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected(capabilities={"elicitation": {}})
        sent = client.call("ask", question="how many?")
        (question,) = await sent.reply.has(1)
        assert question["params"]["message"] == "how many?"
        await client.respond(question, {"action": "accept", "content": {"answer": "two"}})
        assert text_of(await sent.result()) == "accept: two"
        reported = client.call("progress", steps=2, meta={"progressToken": "mine"})
        await reported.result()
        reports = [m["params"] for m in reported.reply.messages if "method" in m]
        assert [(r["progressToken"], r["progress"]) for r in reports] == [("mine", 1), ("mine", 2)]


async def test_clients_of_a_shared_session_get_the_log_of_their_own_calls() -> None:
    async with url_world(UrlServer(), options={"per": "shared"}) as w:
        first, second = await w.connected(), await w.connected()
        for client, words in ((first, "one"), (second, "two")):
            call = client.call("log", text=words)
            await call.result()
            assert call.reply.messages[0]["params"]["data"] == words


# --- a server that forgot us ---------------------------------------------------------------------


async def test_a_server_that_forgot_the_session_is_begun_with_again_and_clients_read_again() -> (
    None
):
    async with reached() as (server, client):
        stream = await client.get().started()
        await client.start()
        await client.result("logging/setLevel", {"level": "error"})
        await client.result("resources/subscribe", {"uri": "test://a"})
        running = client.call("silent", meta=keyed("k", None))
        await until(lambda: server.calls == ["silent"], "the call runs")
        server.forget()
        before = len(server.received)
        results = await asyncio.gather(*(client.call("count").result() for _ in range(5)))
        assert sorted(text_of(result) for result in results) == ["2", "3", "4", "5", "6"]
        assert (await running.error())["code"] == -31012
        notified = [m["method"] for m in server.received[before:] if m["method"] != "tools/call"]
        assert notified == [
            "initialize", "notifications/initialized", "logging/setLevel", "resources/subscribe",
        ]  # fmt: skip
        assert "test://a" in updates(await stream.has(3))
        server.say(UPDATED, {"uri": "test://a"})
        await until(lambda: len(updates(stream.messages)) >= 1, "it is told of what comes")
        assert server.calls.count("silent") == 1


async def test_a_400_that_answers_a_request_asks_nothing_more() -> None:
    async with reached() as (server, client):
        error = await client.call("refused").error()
        assert (error["code"], server.calls) == (-32602, ["refused"])
        assert [m["method"] for m in server.received].count("ping") == 0


async def test_a_server_that_forgets_at_once_again_is_an_error_and_no_loop() -> None:
    async with reached() as (server, client):
        server.sessions = _Forgetful()
        error = await client.call("count").error()
        assert error["data"]["started"] is False
        assert server.calls == []
        assert sum(1 for m in server.received if m.get("method") == "initialize") <= 3


class _Forgetful(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        """Forget it at once."""


# --- bad servers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misdeed", "said"),
    [
        ("html", "what it answered is no answer"),
        ("302", "redirects to another address"),
        ("307", "redirects to another address"),
        ("401", "does not accept the layer's credential"),
        ("404", "HTTP status 404"),
        ("502", "HTTP status 502"),
        ("silent", "did not answer initialize"),
        ("version", "1999-01-01"),
    ],
)
async def test_one_that_does_not_start_is_said_and_not_asked_in_a_loop(
    misdeed: str, said: str
) -> None:
    server = UrlServer(misdeed)
    error = await refused(server, start_timeout=0.5)
    assert said in error["message"] and error["data"]["started"] is False
    assert "Outcome unknown" not in error["message"]
    # One that answers, but with no version of that era, is asked for the era after it.
    asked = ["initialize", *(["server/discover"] if misdeed == "version" else [])]
    assert [m["method"] for m in server.received] == asked


async def test_nothing_listens_there() -> None:
    async with url_of(UrlServer()) as url:
        pass
    async with world(server=HTTPServer(url)) as w:
        client = w.client()
        error = await client.error("initialize", HANDSHAKE)
        assert "connection refused" in error["message"]


async def test_the_log_says_once_that_a_server_is_away_and_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = UrlServer()
    async with AsyncExitStack() as up:
        url = await up.enter_async_context(url_of(server))
        async with world(server=HTTPServer(url, title="notes")) as w:
            client = await w.connected()
            await up.aclose()
            for _ in range(3):
                await client.error("tools/list", {})
            async with url_of(server, httpx2.URL(url).port or 0):
                await client.send("tools/list", {}).result()
    said = [each.getMessage() for each in caplog.records if "reached" in each.getMessage()]
    assert said == [
        "notes cannot be reached: connection refused: nothing listens there",
        "notes is reached again",
    ]


@pytest.mark.parametrize(
    ("tool", "code", "said"),
    [
        ("html", -31012, "no answer"),
        ("accepted", -31012, "no answer"),
        ("no json", -31012, "no answer"),
        ("other id", -31012, "no answer"),
        ("nothing", -31012, "ended without an answer"),
        ("cut", -31012, "closed the connection"),
        ("cut json", -31012, "closed the connection"),
        ("500", -31012, "HTTP status 500"),
        ("502", -31012, "HTTP status 502"),
        ("503", -31012, "HTTP status 503"),
        ("silent", -31012, "no answer in time"),
        ("302", -31012, "redirects"),
        ("307", -31012, "redirects"),
        ("400", -31012, "HTTP status 400"),
        ("401", -31012, "credential"),
        ("403", -31012, "credential"),
        ("429", -31012, "HTTP status 429"),
        ("malformed", -32603, "malformed"),
        ("large", -32603, "more than 4194304 bytes"),
        ("large event", -32603, "more than 4194304 bytes"),
        ("endless", -32603, "more than 4194304 bytes"),
    ],
)
async def test_what_is_no_answer_is_an_error_of_its_request_and_nothing_runs_twice(
    tool: str, code: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reached(options={"silence": 0.5}) as (server, client):
        session = (await client.start())["sessionId"]
        for _ in range(2):
            error = await client.call(tool, meta=keyed("k", session)).error()
            assert error["code"] == code and said in error["message"]
        assert server.calls == [tool], "a key that was used is no second call"
        assert await client.text("count") == "2", "the session goes on"
    assert len([m for m in server.received if m.get("method") == "initialize"]) == 1, "it was kept"
    lines = [line for line in caplog.messages if "The limit max_answer (4194304)" in line]
    assert len(lines) == ("more than" in said), "the operator learns of it from one line"


async def test_a_redirect_within_the_server_is_followed() -> None:
    server = UrlServer()

    async def moved(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/mcp/new":
            await server(scope, receive, send)
            return
        location = (b"location", b"/mcp/new")
        await send({"type": "http.response.start", "status": 307, "headers": [location]})
        await send({"type": "http.response.body", "body": b""})

    async with url_of(moved) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected()
        assert await client.text("count") == "1"


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("ftp://host/mcp", {}, "begins with http:// or https://"),
        ("host/mcp", {}, "did you mean https://host/mcp"),
        ("http://", {}, "not a whole address"),
        ("http://host/mcp#part", {}, "has a fragment"),
        ("http://host:99999/", {}, "not a whole address"),
        ("http://me:secret@host/mcp", {}, "has credentials in it"),
        ("http://host/mcp", {"headers": {"X\n": "1"}}, "cannot be sent"),
        ("http://host/mcp", {"headers": {"X": "1\r\nY: 2"}}, "cannot be sent"),
        ("http://host/mcp", {"per": "tenant"}, "per must be"),
        ("http://host/mcp", {"silence": 0}, "silence"),
        ("http://host/mcp", {"per": "shared", "auth": dict}, "auth as a function"),
    ],
)
def test_what_cannot_be_a_server_is_refused_at_once(
    url: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as refusal:
        HTTPServer(url, **options)
    assert "secret" not in str(refusal.value)


GIVEN = [
    '{"jsonrpc":"2.0","id":ID,"result":{"method":"ols","r2":NaN}}',
    '{"jsonrpc":"2.0","result":{"r2":-Infinity},"id":ID}',
    '{"jsonrpc":"2.0","id":"ID","result":{"n":1e400}}',
    '{"jsonrpc":"2.0","id":ID.0,"result":{"n":"\xff"}}',
    '{"jsonrpc":"2.0","id":ID,"result":{"n":%s}}' % ("1" * 5_000),
    '{"jsonrpc":"2.0","id":ID,"result":{"n":%s}}' % ("[" * 2_000 + "]" * 2_000),
]


@pytest.mark.parametrize("how", ["json", "event", "stream"])
@pytest.mark.parametrize("given", GIVEN, ids=range(len(GIVEN)))
async def test_an_answer_that_is_no_json_is_an_error_of_its_request(how: str, given: str) -> None:
    """Wherever it comes: it is found by its structure."""
    async with reached() as (_, client):
        await client.get().started()
        error = await client.call("given", how=how, given=given).error()
        assert error["code"] == -32603
        # How many levels JSON may have differs between releases of Python.
        assert error["message"] in (
            "the server's answer is no JSON",
            *["the server's answer has too many levels"] * ("[[" in given),
        )
        assert await client.text("count") == "2"


@pytest.mark.parametrize(
    "given",
    [
        '\xef\xbb\xbf{"jsonrpc":"2.0","id":ID,"result":{"content":[]}}\r\n',
        '{"jsonrpc":"2.0","id":"ID","result":{"content":[]}}',
        '[{"jsonrpc":"2.0","id":ID,"result":{"content":[]}}]',
    ],
)
async def test_what_servers_write_of_an_answer_is_read(given: str) -> None:
    async with reached() as (_, client):
        assert (await client.call("given", how="json", given=given).result())["content"] == []


@pytest.mark.parametrize("given", ["1.5", "null", "true", "4711", '"x"', "1" * 5_000])
async def test_an_answer_to_nothing_is_ignored(given: str) -> None:
    async with reached() as (_, client):
        said = '{"jsonrpc":"2.0","error":{"code":-1,"message":"no"},"id":' + given + "}"
        assert await client.text("given", how="event", given=said) == "later"
