"""One client's connection: whatever it sends, each request gets one answer, and it goes on."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, cast

import acp
import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.acp import AcpSessionLayer
from mcp_sessions.acp.link import Link, Outgoing
from mcp_sessions.errors import ConfigurationError, StoreInUse
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity, mint_key
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.stores.stateless import Stateless
from tests.support.conversations import (
    WITHIN,
    Json,
    RawClient,
    ScriptedAgent,
    client_of,
    conversation,
    prompt,
)
from tests.support.virtual_time import cycles


async def expect_still_serves(client: RawClient) -> None:
    assert await client.prompt(await client.new(), "well?") == {"stopReason": "end_turn"}


@pytest.mark.parametrize(
    ("line", "code", "answer_id"),
    [
        (b"{", -32700, None),
        (b"\xff\xfe", -32700, None),
        (b'{"jsonrpc":"2.0","id":1e999,"method":"session/list"}', -32700, None),
        (b"[" * 100_000, -32700, None),
        (b"[]", -32600, None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"session/list"}]', -32600, None),
        (b"7", -32600, None),
        (b'"hello"', -32600, None),
        (b"null", -32600, None),
        (b"{}", -32600, None),
        (b'{"id":5,"method":"session/list"}', -32600, 5),
        (b'{"jsonrpc":"1.0","id":5,"method":"session/list"}', -32600, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":7}', -32600, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"session/list","params":[]}', -32600, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"session/list","params":"x"}', -32600, 5),
        (b'{"jsonrpc":"2.0","id":{},"method":"session/list"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":true,"method":"session/list"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":null,"method":"session/list"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":5,"method":"session/list","params":{"cwd":7}}', -32602, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"no/such/method"}', -32601, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"_vendor/method","params":{}}', -32601, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":""}', -32601, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"session/fork","params":{}}', -32602, 5),
    ],
)
async def test_what_is_no_request_is_answered_and_harms_nobody(
    line: bytes, code: int, answer_id: Any
) -> None:
    async with conversation() as client:
        await client.send_line(line)
        await client.until(lambda: client.strays)
        [stray] = client.strays
        assert (stray["error"]["code"], stray["id"]) == (code, answer_id)
        await expect_still_serves(client)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"   ",
        b"\r",
        b'{"jsonrpc":"2.0","method":"no/such/notification"}',
        b'{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":7}}',
        b'{"jsonrpc":"2.0","id":99,"result":{}}',
        b'{"jsonrpc":"2.0","id":"x","result":null}',
        b'{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"?"}}',
        b'{"jsonrpc":"2.0","id":[],"error":"?"}',
    ],
)
async def test_what_needs_no_answer_gets_none(line: bytes) -> None:
    async with conversation() as client:
        before = len(client.received)
        await client.send_line(line)
        await client.ask("session/list", {})
        assert len(client.received) == before + 1
        await expect_still_serves(client)


@given(st.binary(max_size=200).filter(lambda line: b"\n" not in line))
def test_no_bytes_end_a_connection(line: bytes) -> None:
    async def run() -> None:
        async with conversation(store=MemoryStore()) as client:
            await client.send_line(line)
            await expect_still_serves(client)

    asyncio.run(run())


_ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "text", "command", "args", "env", "url", "headers"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)

_METHODS = st.sampled_from(
    [
        "initialize",
        "session/new",
        "session/load",
        "session/resume",
        "session/list",
        "session/close",
        "session/prompt",
        "session/set_mode",
        "session/set_config_option",
        "authenticate",
    ]
)


@given(
    _METHODS,
    st.dictionaries(
        st.sampled_from(
            ["sessionId", "cwd", "mcpServers", "prompt", "cursor", "protocolVersion", "_meta"]
        ),
        _ODD,
        max_size=4,
    ),
)
def test_odd_params_are_refused_with_a_documented_error_or_accepted(
    method: str, params: Json
) -> None:
    """Any bytes are answered, or ignored, and the connection continues."""

    async def run() -> None:
        layer = AcpSessionLayer(ScriptedAgent(), connect_servers=False)
        async with client_of(layer) as client:
            await client.initialize()
            answer = await client.answer_to(method, params)
            if "error" in answer:
                assert answer["error"]["code"] in (-32600, -32601, -32602, -32002), answer
            await expect_still_serves(client)

    asyncio.run(run())


async def test_a_message_that_is_too_long_is_refused_and_the_next_one_is_read() -> None:
    async with conversation(max_message=1_000_000) as client:
        session_id = await client.new()
        fits = "x" * 900_000
        assert await client.prompt(session_id, fits) == {"stopReason": "end_turn"}
        await client.send_line(json.dumps({"jsonrpc": "2.0", "x": "x" * 1_000_000}).encode())
        await client.until(lambda: client.strays)
        assert client.strays[0]["error"]["code"] == -32600
        assert "too long" in client.strays[0]["error"]["message"]
        await expect_still_serves(client)


async def test_two_requests_with_one_id_do_not_cross() -> None:
    release = asyncio.Event()

    async def wait(agent: ScriptedAgent, session_id: str, text: str) -> None:
        await release.wait()

    async with conversation(ScriptedAgent(wait)) as client:
        session_id = await client.new()
        answer = await client.begin("session/prompt", prompt(session_id, "first"))
        again = {"id": client.last_id, "method": "session/prompt"}
        async with client.watching() as watched:
            await client.send({**again, "params": prompt(session_id, "second")})
            await client.until(lambda: watched)
        assert watched[0]["error"]["data"] == {"reason": "duplicate_id"}
        release.set()
        assert (await answer)["result"] == {"stopReason": "end_turn"}


async def test_a_client_cannot_make_more_work_than_a_limit_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has one line about it."""
    release = asyncio.Event()

    async def wait(agent: ScriptedAgent, session_id: str, text: str) -> None:
        await release.wait()

    async with conversation(ScriptedAgent(wait)) as client:
        session_id = await client.new()
        answers = [
            await client.begin("session/prompt", prompt(session_id, "go")) for _ in range(300)
        ]
        refused = [await answer for answer in answers[256:]]
        assert {answer["error"]["code"] for answer in refused} == {-31011}
        release.set()
        done = [await answer for answer in answers[:256]]
        assert all("result" in answer for answer in done)
    said = [line for line in caplog.messages if line.startswith("requests are refused")]
    assert said == ["requests are refused: 256 wait for their answers"]


async def test_what_comes_while_initialize_is_answered_waits_for_it() -> None:
    """A script that sends everything at once is served."""
    release = asyncio.Event()

    class Slow(ScriptedAgent):
        async def initialize(self, protocol_version: int, **arguments: Any) -> Any:
            await release.wait()
            return await super().initialize(protocol_version, **arguments)

    layer = AcpSessionLayer(Slow())
    async with client_of(layer) as client:
        first = await client.begin("initialize", {"protocolVersion": 1})
        second = await client.begin("session/new", {"cwd": "/", "mcpServers": []})
        release.set()
        assert (await first)["result"]["protocolVersion"] == 1
        assert "sessionId" in (await second)["result"]


async def test_an_agent_that_refuses_initialize_is_not_served() -> None:
    class Refuses(ScriptedAgent):
        async def initialize(self, protocol_version: int, **arguments: Any) -> Any:
            raise acp.RequestError(-32001, "closed on Sundays")

    layer = AcpSessionLayer(Refuses())
    async with client_of(layer) as client:
        refused = await client.refusal("initialize", {"protocolVersion": 1})
        assert (refused.code, refused.message) == (-32001, "closed on Sundays")
        refused = await client.refusal("session/new", {"cwd": "/", "mcpServers": []})
        assert refused.code == -32600


async def test_what_the_layer_does_not_know_is_the_agents() -> None:
    """Extensions, modes and authentication go through, with the agent's own session ids."""

    class Knows(ScriptedAgent):
        async def ext_method(self, method: str, params: Json) -> Json:
            self.calls.append((method, params))
            return {"asked": await self.client.ext_method("vendor/back", params)}

        async def set_session_mode(self, **arguments: Any) -> Any:
            self.calls.append(("set_session_mode", arguments))

        async def authenticate(self, **arguments: Any) -> Any:
            self.calls.append(("authenticate", arguments))

    agent = Knows()
    async with conversation(agent) as client:
        session_id = await client.new()
        assert await client.ask("authenticate", {"methodId": "m"}) == {}
        mode = {"sessionId": session_id, "modeId": "m"}
        assert await client.ask("session/set_mode", mode) == {}
        assert agent.calls[-1] == ("set_session_mode", {"session_id": "own-0", "mode_id": "m"})

        params = {"sessionId": session_id, "deep": [1]}
        answer = await client.begin("_vendor/method", params)
        await client.until(lambda: client.questions)
        [question] = client.questions
        assert (question["method"], question["params"]) == ("_vendor/back", params)
        await client.send({"id": question["id"], "result": {"n": 2**70}})
        assert (await answer)["result"] == {"asked": {"n": 2**70}}
        assert agent.calls[-1] == ("vendor/method", {"sessionId": "own-0", "deep": [1]})


class Silent:
    """A `Wire` whose client sends lines that are no message, and takes nothing until it may."""

    def __init__(self, lines: int) -> None:
        self.left, self.written, self.may_write = lines, b"", asyncio.Event()

    async def read(self) -> bytes | None:
        if not self.left:
            await self.may_write.wait()
            return None
        self.left -= 1
        return b"{\n"

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.written += data


async def test_refusals_for_a_client_that_reads_nothing_are_bounded_in_bytes() -> None:
    """Each line of its input got one, however many waited: memory had no bound."""
    wire, service = Silent(10_000), cast(Any, object())
    link = Link(wire, service, send_buffer=1_000)
    running = asyncio.create_task(link.run())
    await cycles()
    assert wire.left > 9_900
    wire.may_write.set()
    await running
    await link.finish(within=WITHIN)
    assert wire.written.count(b"-32700") == 10_000


async def test_notifications_of_the_agent_are_bounded_for_a_client_that_reads_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest, push = 0, Outgoing.push

    def counted(outgoing: Any, data: bytes) -> None:
        nonlocal largest
        push(outgoing, data)
        largest = max(largest, outgoing._size)

    class Tells(ScriptedAgent):
        async def ext_method(self, method: str, params: Json) -> Json:
            for _ in range(200):
                await self.client.ext_notification("vendor/news", {"text": "x" * 50_000})
            return {}

    monkeypatch.setattr(Outgoing, "push", counted)
    async with conversation(Tells(), send_buffer=100_000) as client:
        params = {"sessionId": await client.new()}
        client.pause()
        answer = await client.begin("_vendor/method", params)
        with anyio.fail_after(WITHIN):
            while largest < 100_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client.go_on()
        assert (await answer)["result"] == {}
    assert largest < 200_000


@pytest.mark.parametrize(
    "options",
    [
        {"agent": object()},
        {"store": "carrier-pigeon://"},
        {"store": Stateless(SessionSecurity(keys=[mint_key()]))},
        {"connect_timeout": 0},
        {"grace": float("nan")},
        {"max_message": -1},
        {"send_buffer": float("inf")},
    ],
)
def test_what_cannot_be_served_is_refused_at_once(options: Any) -> None:
    arguments: dict[str, Any] = {"agent": ScriptedAgent(), **options}
    with pytest.raises(ConfigurationError):
        AcpSessionLayer(**arguments)


async def test_a_store_that_the_process_before_still_holds_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor that is reloaded starts the next agent while the one before still ends."""
    path = tmp_path / "conversations.db"
    before = SQLiteStore(path)
    await before.open(SessionPolicy())
    async with client_of(AcpSessionLayer(ScriptedAgent(), store=SQLiteStore(path))) as client:
        answer = await client.begin("initialize", {"protocolVersion": 1})
        with anyio.fail_after(WITHIN):
            while "waiting for it to exit" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not answer.done()
        await before.close()
        assert (await answer)["result"]["protocolVersion"] == 1
        await expect_still_serves(client)
    assert caplog.text.count("waiting for it to exit") == 1


async def test_a_store_that_stays_in_use_is_an_error_that_says_by_whom(
    tmp_path: Path,
) -> None:
    path = tmp_path / "conversations.db"
    other = SQLiteStore(path)
    await other.open(SessionPolicy())
    try:
        layer = AcpSessionLayer(ScriptedAgent(), store=SQLiteStore(path), grace=0.01)
        with pytest.raises(StoreInUse, match=f"in use by process {os.getpid()}"):
            async with layer:
                raise AssertionError("two processes serve from one file")
    finally:
        await other.close()


async def test_a_reader_without_a_writer_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError):
        await AcpSessionLayer(ScriptedAgent()).serve(asyncio.StreamReader())


async def test_a_layer_that_was_closed_stays_closed() -> None:
    layer = AcpSessionLayer(ScriptedAgent())
    async with layer:
        pass
    with pytest.raises(RuntimeError):
        async with layer:
            pass
