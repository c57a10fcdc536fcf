"""``mcp_sessions.fastmcp.resumable``: FastMCP's client keeps its session."""

import anyio
import fastmcp

from mcp_sessions.fastmcp import resumable
from tests.support.proxy import TcpProxy
from tests.support.resuming import QUICK, app_of, serving


async def test_a_call_of_fastmcps_client_survives_a_cut_and_a_move() -> None:
    with serving(app_of("fastmcp")) as (app, _, server):
        async with TcpProxy(server.host, server.port) as proxy:
            transport = resumable(proxy.url(), policy=QUICK)
            with anyio.fail_after(30):
                async with fastmcp.Client(transport) as client:
                    first = (await client.call_tool("session_id")).data
                    answers: list[str] = []
                    async with anyio.create_task_group() as tasks:

                        async def call() -> None:
                            arguments = {"steps": 2, "gate": "g"}
                            answers.append((await client.call_tool("slow", arguments)).data)

                        tasks.start_soon(call)
                        await app.stage.reached("g:started")
                        proxy.cut_all()
                        assert (await transport.move_to(proxy.url(scheme="ws"))).recovered
                        app.stage.mark("g:go")
                    assert answers == ["2 steps"]
                    assert (await client.call_tool("session_id")).data == first != "none"


async def test_a_transport_can_be_used_again_after_it_was_left() -> None:
    with serving(app_of("fastmcp")) as (_, _, server), anyio.fail_after(30):
        transport = resumable(server.url(), policy=QUICK)
        found: list[str] = []
        for _ in range(2):
            async with fastmcp.Client(transport) as client:
                found.append((await client.call_tool("session_id")).data)
        assert found[0] != found[1]
