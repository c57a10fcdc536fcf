"""Values of a handler that are hard to write as JSON: each gets an answer.

The story: an integer beyond 64 bits, a lone surrogate or a ``datetime`` in a result raised in
the middle of answering, and its client waited for ever. A client's own keyed request with such
an argument ended its connection.
"""

import datetime
import decimal
import json
import math
import uuid
from typing import Any

import mcp_types as types
import pytest
from mcp.server import Server
from mcp.shared.exceptions import MCPError
from pydantic import ConfigDict

from mcp_sessions import current_session
from tests.support.everything import Everything
from tests.support.modern import ModernClient, envelope, session_meta
from tests.support.raw import Json, RawClient, keyed
from tests.support.side_by_side import Side, expect_same
from tests.support.world import Ctx, Toolbox, World, world


class Which(types.RequestParams):
    model_config = ConfigDict(extra="allow")

    which: str = ""


PLAIN: dict[str, Any] = {
    "none": {"a": None, "b": [None]},
    "large": {"a": 2**70, "b": -(2**64)},
    "surrogate": {"a": "\ud800"},
    "floats": {"a": [1e22, -0.0, 5e-324, 0.1]},
    "not a number": {"a": math.nan, "b": [math.inf, -math.inf]},
    "deep": {"a": [[[[[[[[[[1]]]]]]]]]]},
}
"""JSON, or what JSON writers make null."""

DUMPED: dict[str, Any] = {
    "date": {"a": datetime.datetime(2026, 7, 28, tzinfo=datetime.UTC)},
    "set": {"a": {1}},
    "bytes": {"a": b"x"},
    "tuple": {"a": (1, 2)},
    "model": {"a": types.Tool(name="x", input_schema={"none": None})},
    "uuid": {"a": uuid.UUID(int=1)},
    "decimal": {"a": decimal.Decimal("1.5")},
    "meta": {"_meta": None},
    "result type": {"resultType": "example/other", "a": None},
}
"""Not JSON, but the SDK's entries make it that."""

HOPELESS: dict[str, Any] = {"object": {"a": object()}, "function": {"a": len}}


def odd_server() -> Server[Any]:
    """Methods of its own that return, raise and send these."""
    values = {**PLAIN, **DUMPED, **HOPELESS}

    async def give(ctx: Ctx, params: Which) -> dict[str, Any]:
        return dict(values[params.which])

    async def fail(ctx: Ctx, params: Which) -> dict[str, Any]:
        raise MCPError(code=-32050, message="\ud800", data=values[params.which])

    server = Server[Any]("odd")
    server.add_request_handler("example/give", Which, give)
    server.add_request_handler("example/fail", Which, fail)
    return server


async def _nowhere(uri: str) -> None:
    raise AssertionError("nothing is published here")


@pytest.mark.parametrize("method", ["example/give", "example/fail"])
async def test_what_the_sdk_can_write_is_written_as_it_does(method: str) -> None:
    """Results and errors of the server's own methods, byte for byte."""

    async def script(side: Side) -> None:
        client = side.client()
        for which in {**PLAIN, **DUMPED}:
            await client.send(method, {"which": which}).done()

    await expect_same(lambda: Everything(odd_server(), _nowhere), script)


@pytest.mark.parametrize("era", ["modern", "handshake", "lone"])
@pytest.mark.parametrize("in_a_session", [False, True])
async def test_whatever_a_handler_returns_is_answered(era: str, in_a_session: bool) -> None:
    """CLI1: nothing waits for ever. A value that JSON cannot represent is an internal error."""
    async with world(server=odd_server()) as w:
        modern = ModernClient(w.carrier)
        session = (await modern.start())["sessionId"] if in_a_session else None
        if session is None and era == "lone":
            return
        older = await w.connected() if era == "handshake" else w.client()
        for method in ("example/give", "example/fail"):
            for which in {**PLAIN, **DUMPED, **HOPELESS}:
                key = f"{method} {which}" if in_a_session else None
                answers: list[Json] = []
                for _ in range(2):
                    answers.append(await _asked(era, modern, older, method, which, session, key))
                first, second = answers
                assert ("error" in first) == (which in HOPELESS or method == "example/fail")
                if which in HOPELESS:
                    assert first["error"]["code"] in (-32603, 0), (method, which, first)
                if session is not None:
                    # The second was kept.
                    assert second.get("error") == first.get("error")
                    if "result" in first:
                        assert second["result"].get("a") == first["result"].get("a")


async def _asked(
    era: str,
    modern: ModernClient,
    older: RawClient,
    method: str,
    which: str,
    session: str | None,
    key: str | None,
) -> Json:
    params: Json = {"which": which}
    if era == "modern":
        return await modern.send(method, params, session=session, key=key).answer()
    if session is not None:
        params["_meta"] = session_meta(session, key=key)
    return await older.answer(method, params)


async def test_whatever_a_client_sends_can_have_a_key(
    w: World, client: ModernClient, session: str
) -> None:
    """Large integers, lone surrogates and depth in the arguments of a keyed request: the same
    content is the same, and other content is other.
    """
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    odd: list[Any] = [2**70, "\ud800", deep, {"\ud800": 2**70}, 1e22]
    for number, value in enumerate(odd):
        for _ in range(2):
            arguments = {"text": "x", "odd": value}
            text = await client.text("echo", arguments, session=session, key=f"k{number}")
            assert text == "x"
        other = client.call("echo", {"text": "x", "odd": 0}, session=session, key=f"k{number}")
        assert (await other.error())["data"] == {"reason": "key_reused"}
    assert len(w.box.calls) == len(odd)


@pytest.mark.parametrize("levels", [600, 980, 1_000, 100_000])
@pytest.mark.parametrize("described", ["clientInfo", "clientCapabilities"])
async def test_a_description_of_many_levels_has_an_answer(
    client: ModernClient, described: str, levels: int
) -> None:
    """It is served if the SDK can read it, which depends on the Python, and else refused."""
    meta = envelope()
    of_client = meta[f"io.modelcontextprotocol/{described}"]
    of_client["experimental"] = {"x": {"y": "DEEP"}}
    params = {"name": "echo", "arguments": {"text": "x"}, "_meta": meta}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    deep = body.replace('"DEEP"', "[" * levels + "]" * levels).encode()
    reply = client.post(deep, {"Mcp-Method": "tools/call", "Mcp-Name": "echo"})

    assert (await reply.done()).status in (200, 400)


async def test_whatever_a_handler_sends_its_client_arrives() -> None:
    """A session event with such values, live on a stream and from the log."""
    box = Toolbox()

    async def notify_odd(ctx: Ctx, arguments: Json) -> str:
        await current_session().notify(
            "notifications/example", {"large": 2**70, "surrogate": "\ud800"}
        )
        return "told"

    box.tools["notify_odd"] = notify_odd
    async with world(box=box) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        await client.text("notify_odd", session=session)
        received = await client.listening(session)
        await client.text("notify_odd", session=session)
        for event in await received.has_events(2):
            params = event["params"]
            assert (params["large"], params["surrogate"]) == (2**70, "\ud800")
        await _receives_odd(w, session)


async def _receives_odd(w: World, session: str) -> None:
    older = await w.connected()
    get = await older.get().started()
    await older.resume(session)
    await older.call("notify_odd", meta=keyed("k", session)).result()
    await get.until(lambda: bool(get.messages))
    assert get.messages[0]["params"]["large"] == 2**70
