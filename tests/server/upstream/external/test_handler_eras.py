"""Handlers of a server of both eras: some ask in the middle of a call, others by a result.

The rules are in ``external/sharing.py``. The servers are the SDK's own.
"""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import ConfigurationError, HTTPServer, SessionLayer, StdioServer
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.server.upstream.external.sharing import HandlerEras
from tests.house.source import ROOT
from tests.server.upstream.external.test_peer_in_rounds import ELICITS, QUESTION, TWO, again
from tests.server.upstream.external.test_upstream import calls
from tests.support.asking import mcp_server
from tests.support.children import child
from tests.support.modern import ModernClient
from tests.support.raw import Json, text_of
from tests.support.urls import url_of
from tests.support.world import World, world

ROUNDS: Json = {"name": "rounds", "arguments": {}}
INVALID = -32603
KINDS = pytest.mark.parametrize("kind", ["url", pytest.param("command", marks=pytest.mark.full)])
"""One object knows the handlers of both (``sharing.py``). A command imports the SDK each time: by
default it is the server of one test.
"""


@asynccontextmanager
async def asking_world(
    kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncGenerator[World]:
    """A layer before a server of both eras, which notes each call in a file."""
    if kind == "command":
        command = (sys.executable, "-m", "tests.support.asking")
        server = StdioServer(*command, env={"RUNS": str(runs)}, cwd=str(ROOT))
        async with world(server=server, **options) as w:
            yield w
        return
    monkeypatch.setenv("RUNS", str(runs))
    app = mcp_server().streamable_http_app()
    async with app.router.lifespan_context(app), url_of(app) as url:
        async with world(server=HTTPServer(url), **options) as w:
            yield w


class Host:
    def __init__(self, w: World) -> None:
        self.client = ModernClient(w.carrier, capabilities=ELICITS)
        self.session: str | None = None

    async def answer(self, params: Json) -> Json:
        """The answer to a call. A process of the SDK's starts slowly."""
        sent = self.client.send("tools/call", params, session=self.session)
        await sent.reply.until(lambda: sent.reply.ended, "it is answered", within=60)
        (answer,) = [m for m in sent.messages if "result" in m or "error" in m]
        return answer

    async def result(self, params: Json) -> Json:
        answer = await self.answer(params)
        assert "error" not in answer, answer
        return answer["result"]

    async def code(self, params: Json) -> int:
        return (await self.answer(params))["error"]["code"]

    async def asks_in_the_call(self) -> None:
        asked = await self.result(QUESTION)
        assert text_of(await self.result(again(asked, TWO))) == "accept: two"

    async def asks_by_its_result(self) -> None:
        asked = await self.result(ROUNDS)
        assert asked["resultType"] == "input_required"
        answered = await self.result(again(asked, TWO, params=ROUNDS))
        assert text_of(answered) == "own: ['mine']"


@pytest.mark.parametrize("kind", ["command", "url"])
async def test_a_handler_that_asks_by_its_result_fails_once_and_changes_nothing_for_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs twice: each run is noted, and a round is a run of its own there."""
    noted = tmp_path / "runs"
    async with asking_world(kind, noted, monkeypatch) as w:
        host = Host(w)
        await host.asks_in_the_call()
        assert await host.code(ROUNDS) == INVALID
        for _ in range(2):
            await host.asks_by_its_result()
            await host.asks_in_the_call()
        runs = ["how many?", "rounds", *["rounds", "rounds", "how many?"] * 2]
        assert calls(noted) == runs


@KINDS
async def test_only_an_error_makes_a_handler_doubtful_and_only_a_question_settles_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def either(how: str) -> Json:
        return {"name": "either", "arguments": {"how": how}}

    noted = tmp_path / "runs"
    async with asking_world(kind, noted, monkeypatch) as w:
        host = Host(w)
        assert await host.code(either("by its result")) == INVALID
        assert text_of(await host.result(either("not at all"))) == "nothing asked"
        for _ in range(2):
            params = either("in the call")
            asked = await host.result(params)
            assert text_of(await host.result(again(asked, TWO, params=params))) == "accept: two"
            assert await host.code(either("by its result")) == INVALID
        assert calls(noted) == [
            "either by its result",
            "either not at all",
            *["either in the call", "either by its result"] * 2,
        ]


@KINDS
async def test_with_the_2026_era_alone_a_handler_asks_by_its_result_from_its_first_call(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "runs"
    async with asking_world(kind, noted, monkeypatch, eras="2026") as w:
        host = Host(w)
        await host.asks_by_its_result()
        host.session = (await host.client.send("session/start").result())["sessionId"]
        await host.asks_by_its_result()
        assert calls(noted) == ["rounds"] * 4


async def test_a_server_of_the_handshake_era_alone_is_never_taken_for_another() -> None:
    """Its handlers ask in the middle of a call, also after an error with that code."""
    error = '{"jsonrpc":"2.0","id":@,"error":{"code":-32603,"message":"it failed"}}'
    for eras in ("both", "2026"):
        async with world(server=child(), eras=eras) as w:
            host = Host(w)
            for _ in range(2):
                failing = {"name": "prints", "arguments": {"given": error}}
                assert await host.code(failing) == INVALID
                asked = await host.result(QUESTION)
                assert asked["resultType"] == "input_required"
                await host.result(again(asked, TWO))


def test_what_is_known_of_handlers_is_bounded() -> None:
    eras = HandlerEras()

    def ended(name: str, **how: Any) -> None:
        facts: Json = {"is_modern": False, "has_asked": False, "code": None, "kind": None, **how}
        eras.ended("tools/call", {"name": name}, **facts)

    def is_modern(name: str) -> bool:
        return eras.is_modern("tools/call", {"name": name})

    ended("seen", is_modern=True, kind="input_required")
    for number in range(3_000):
        ended(f"{number}" * 50, code=INVALID)
    assert is_modern("seen"), "made-up names do not replace what was seen"
    assert sum(is_modern(f"{number}" * 50) for number in range(3_000)) == 1_000


@pytest.mark.parametrize("eras", ["2024", "", None, 2025])
def test_eras_are_2025_2026_or_both(eras: Any) -> None:
    wrong: Eras = eras
    with pytest.raises(ConfigurationError, match="'2025' or '2026' or 'both'"):
        SessionLayer(child(), eras=wrong)
