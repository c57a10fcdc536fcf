"""Replicas in processes of their own: clients answer at another one than asked, and askers die."""

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcp_sessions.security import mint_key
from tests.server.upstream.external.test_peer_in_rounds import UNKNOWN, again
from tests.support.modern import ModernClient
from tests.support.processes import ROOT, free_port, wait_until_it_listens
from tests.support.raw import Json, SocketCarrier, text_of
from tests.support.store_servers import on_each_server, store_server

pytestmark = [
    pytest.mark.full,
    pytest.mark.in_process,
    pytest.mark.on_network,
    pytest.mark.timeout(240),
]

ASKERS, ANSWERERS = 4, 2
OF_EACH, KILLED = 25, 5
"""Calls that each asker has, and how many of them it has open when it is killed."""


@dataclass
class Replica:
    """One process, and the way to it."""

    process: "subprocess.Popen[bytes]"
    carrier: SocketCarrier


@dataclass
class Open:
    """A call whose client was asked."""

    question: str
    session: str | None
    asked: Json

    def client(self, at: Replica) -> ModernClient:
        return ModernClient(at.carrier, capabilities={"elicitation": {}})

    @property
    def params(self) -> Json:
        return {"name": "ask", "arguments": {"question": self.question}}

    @property
    def brought(self) -> Json:
        """The request with the answer, which only this client has."""
        answer: Json = {"action": "accept", "content": {"answer": f"<{self.question}>"}}
        return again(self.asked, answer, params=self.params)


@asynccontextmanager
async def replicas(count: int, store: str, runs: Path) -> AsyncGenerator[list[Replica]]:
    """That serve `tests.support.asking` and share a store."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(store_server(store))
        environment = {
            **os.environ,
            "MCP_SESSIONS_KEYS": mint_key(),
            "RUNS": str(runs),
            "PYTHONPATH": f"{ROOT}:{ROOT}/transports",
        }
        served: list[Replica] = []
        try:
            ports = [free_port() for _ in range(count)]
            for port in ports:
                command = [
                    sys.executable, "-m", "mcp_sessions.cli", "serve",
                    str(ROOT / "tests/support/asking.py"), "--store", server.url,
                    "--port", str(port), "--log-level", "error",
                ]  # fmt: skip
                process = subprocess.Popen(command, env=environment)  # noqa: ASYNC220
                carrier = SocketCarrier("127.0.0.1", port)
                served.append(Replica(process, carrier))
                stack.push_async_callback(carrier.aclose)
            for port, replica in zip(ports, served, strict=True):
                await asyncio.to_thread(wait_until_it_listens, replica.process, port)
            yield served
        finally:
            for replica in served:
                replica.process.kill()
                replica.process.wait(10)


async def asked(at: Replica, question: str, *, in_session: bool) -> Open:
    """A client calls a tool there, and gets its own question and no other."""
    call = Open(question, None, {})
    client = call.client(at)
    if in_session:
        call.session = (await client.create())["sessionId"]
    call.asked = await client.send("tools/call", call.params, session=call.session).result()
    assert call.asked["resultType"] == "input_required"
    questions = [each["params"]["message"] for each in call.asked["inputRequests"].values()]
    assert questions == [question]
    return call


async def answered(at: Replica, call: Open) -> str | int:
    """The client answers there: the text of the result, or the code of the error."""
    sent = call.client(at).send("tools/call", call.brought, session=call.session)
    # It takes a while until a replica is known to be dead.
    await sent.reply.until(lambda: sent.reply.ended, "it is over", within=60)
    answer = await sent.answer()
    return text_of(answer["result"]) if "result" in answer else answer["error"]["code"]


@on_each_server
async def test_of_a_hundred_answers_at_another_replica_those_whose_asker_is_killed_are_unknown(
    store: str,
    tmp_path: Path,
) -> None:
    """80 results, 20 times -31012. No handler runs twice. No question reaches another client."""
    chance, runs = random.Random(0), tmp_path / "runs"
    async with replicas(ASKERS + ANSWERERS, store, runs) as served:
        askers, answerers = served[:ASKERS], served[ASKERS:]
        results: list[tuple[Open, str | int]] = []
        left: list[Open] = []
        for number, asker in enumerate(askers):
            calls = await asyncio.gather(
                *(asked(asker, f"{number}-{n}", in_session=n % 2 == 0) for n in range(OF_EACH))
            )
            chance.shuffle(calls)
            left += calls[:KILLED]
            others = [each for each in served if each is not asker]
            continues = calls[KILLED:]
            texts = await asyncio.gather(*(answered(chance.choice(others), c) for c in continues))
            results += zip(continues, texts, strict=True)
        for asker in askers:
            asker.process.kill()
        unknown = await asyncio.gather(*(answered(chance.choice(answerers), c) for c in left))
        again_at_replica = await asyncio.gather(*(answered(answerers[0], c) for c in left))
    assert [text for _, text in results] == [f"accept: <{call.question}>" for call, _ in results]
    assert len(results) == 80
    assert unknown == again_at_replica == [UNKNOWN] * 20
    ran = Counter(runs.read_text().split())
    assert len(ran) == 100 and set(ran.values()) == {1}, ran
