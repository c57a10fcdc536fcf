"""Our own client does every duty, and each duty is caught failing."""

import asyncio
import sys

import httpx
import pytest

from mcp_sessions_conformance.broken_clients import CLIENT_CAUGHT_BY, CLIENT_FAULTS
from mcp_sessions_conformance.client_runner import run_client
from mcp_sessions_conformance.loader import Duty, load_duties
from mcp_sessions_conformance.report import client_as_json, client_as_text
from mcp_sessions_conformance.scripted import ELEVATION, ScriptedServer, serving
from tests.conformance.conftest import CLIENT_COMMAND

DUTIES = load_duties()


async def expect_done(duties: list[Duty]) -> None:
    done = await run_client(CLIENT_COMMAND, duties, wait=15)
    assert done.count("passed") == len(duties), client_as_text(done)
    assert client_as_json(done)["conformant"]


async def test_one_duty_is_done() -> None:
    await expect_done([duty for duty in DUTIES if duty.id == "resume-names-the-last-event"])


async def test_one_duty_is_caught() -> None:
    await expect_caught(next(duty for duty in DUTIES if duty.id == "state-is-echoed-exactly"))


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_every_duty_is_done() -> None:
    await expect_done(DUTIES)


async def expect_caught(duty: Duty) -> None:
    fault = CLIENT_FAULTS[CLIENT_CAUGHT_BY[duty.id]]
    done = await run_client(CLIENT_COMMAND, [duty], wait=6, fault=fault)
    (outcome,) = done.outcomes
    assert outcome.verdict == duty.severity, f"{duty.id} survives {fault.name}"
    assert duty.effect in client_as_text(done)


@pytest.mark.full
@pytest.mark.parametrize("duty", DUTIES, ids=lambda duty: duty.id)
async def test_every_duty_is_caught(duty: Duty) -> None:
    await expect_caught(duty)


@pytest.mark.parametrize(
    ("program", "expected"),
    [("pass", "ended with status 0"), ("raise SystemExit(3)", "ended with status 3")],
)
async def test_a_program_that_does_nothing_fails(program: str, expected: str) -> None:
    command = f'{sys.executable} -c "{program}"'
    done = await run_client(command, DUTIES[:1], wait=1)
    assert expected in done.outcomes[0].sentence


async def test_a_program_that_never_connects_fails() -> None:
    command = f'{sys.executable} -c "import time; time.sleep(60)"'
    done = await run_client(command, DUTIES[:1], wait=1)
    assert not done.is_conformant


async def test_a_program_that_is_not_there_fails() -> None:
    done = await run_client("/no/such/program", DUTIES[:1], wait=1)
    assert "cannot be started" in done.outcomes[0].sentence


async def test_the_script_does_not_answer_a_call_that_was_cut() -> None:
    """A client that was quick to ask again lost its connection, and the instruction with it: its
    repetition got the one after that.
    """
    server = ScriptedServer(speaks=ELEVATION)

    def call(number: int) -> dict[str, object]:
        params = {"name": "next", "arguments": {"n": number}}
        return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}

    async with serving(server) as url, httpx.AsyncClient() as client:
        cut = asyncio.ensure_future(client.post(url, json=call(1)))
        await server.until(lambda: server.requests(tool="next"), "the first call")
        server.cut()
        await asyncio.wait({cut})
        repeated = asyncio.ensure_future(client.post(url, json=call(2)))

        assert await server.instruct({"do": "nothing"}) == {"n": 2}
        assert '"id": 2' in (await repeated).text
        # It came to an end, or broke, as the client's library has it: nothing was in it.
        assert cut.exception() is not None or "result" not in cut.result().text
