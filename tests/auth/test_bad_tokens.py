"""Many bad tokens next to one good client, in virtual time."""

import asyncio
import gc
import secrets
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from mcp.server import MCPServer

from mcp_sessions import SessionLayer
from mcp_sessions.authentication.pace import LONGEST_WAIT, RATE
from mcp_sessions.server.upstream.sdk.authentication import SdkVerifier, resource_server
from tests.authentication.test_tokens import Setup, segment
from tests.support.identities import FAR
from tests.support.issuers import AUDIENCE, URL
from tests.support.modern import BearerCarrier
from tests.support.raw import AsgiCarrier, RawClient, in_process

KEPT = 30_000
"""Bytes that 1,000 bad tokens may leave: some for counters and the log, and none for each. If those
of one kind were kept, it would be twice as many."""


class Crowd:
    """Sends bad tokens of each kind, all of them different."""

    def __init__(self, setup: Setup, carrier: AsgiCarrier) -> None:
        self._carrier = carrier
        self._good = setup.login.token()
        self._payload = self._good.split(".")[1]

    def _bad(self, number: int) -> str:
        signature = secrets.token_urlsafe(64)
        match number % 4:
            case 0:
                return f"{self._good.rpartition('.')[0]}.{signature}"
            case 1:
                kid = secrets.token_hex(8)
                return f"{segment({'alg': 'RS256', 'kid': kid})}.{self._payload}.{signature}"
            case 2:
                return signature
            case _:
                return f"mcp_sessions_key_{secrets.token_hex(4)}_{secrets.token_hex(32)}"

    async def come(self, count: int, good: RawClient) -> float:
        """Come at once. The good client calls while they wait.

        Returns:
            Seconds until the last one was answered.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        replies = [
            BearerCarrier(self._carrier, self._bad(number)).send("POST", "/mcp", [], b"{}")
            for number in range(count)
        ]
        await good.result("ping")
        assert loop.time() == begun, "a good token does not wait"
        assert sum(reply.ended for reply in replies) <= RATE + 1
        for reply in replies:
            assert (await reply.done()).status == 401
        self._carrier.forget()
        return loop.time() - begun


async def test_bad_tokens_wait_leave_nothing_and_keep_no_good_client_waiting() -> None:
    """O: 10,000 different bad tokens a second next to one good client, and memory is bounded."""
    setup = Setup()
    before = resource_server(SdkVerifier([setup.verifier]), URL, AUDIENCE, ["use"])
    server: Any = MCPServer[Any]("open")
    layer = SessionLayer(server, auth=before)
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        good = RawClient(BearerCarrier(carrier, setup.login.token(exp=FAR)))
        await good.initialize()
        crowd = Crowd(setup, carrier)
        assert await crowd.come(1_500, good) == pytest.approx(LONGEST_WAIT)
        gc.collect()
        tracemalloc.start()
        try:
            kept = [0]
            for _ in range(3):
                await crowd.come(1_000, good)
                # A pause after which the pace is as in the beginning.
                await asyncio.sleep(2 * LONGEST_WAIT)
                gc.collect()
                kept.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        # What tests before left in this process may grow once. What tokens leave grows each time.
        assert min(after - before for before, after in pairwise(kept)) < KEPT
