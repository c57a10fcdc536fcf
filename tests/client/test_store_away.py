"""The store of a server goes away under a client: a real one that stands still, and goes on.

The server refuses what it has not begun, and says so (ERR17). Over HTTP it answers 503 (HTP5). The
application does not notice either.
"""

import anyio
import mcp_types as types
import pytest
from mcp import Client
from mcp.client import ClientRequestContext

from mcp_sessions import SessionLayer
from mcp_sessions.client_transport import resumable
from tests.support.apps import make_app
from tests.support.resuming import MODES, QUICK, serving, text_of
from tests.support.store_servers import StoreServer, on_each_server, store_server

pytestmark = on_each_server

SCHEMES = ("ws", "http")


async def go_on_after_a_refusal(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    """The store is back once the server has refused something for it."""
    with anyio.fail_after(20):
        while "the session store failed" not in caplog.text:  # noqa: ASYNC110  (another thread)
            await anyio.sleep(0.02)
    server.resume()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_the_store_refuses_is_sent_again(
    mode: str, scheme: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app("mcpserver")
    with store_server(store) as away:
        layer = SessionLayer(app.server, store=f"{away.url}?timeout=1")
        with serving((app, layer)) as (_, _, server), anyio.fail_after(60):
            transport = resumable(server.url(scheme=scheme), policy=QUICK)
            async with Client(transport, mode=mode) as client:
                assert text_of(await client.call_tool("remember", {"text": "a"})) == "1 notes: a"
                away.suspend()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(go_on_after_a_refusal, away, caplog)
                    assert (
                        text_of(await client.call_tool("remember", {"text": "b"}))
                        == "2 notes: a, b"
                    )


@pytest.mark.parametrize(
    ("mode", "scheme"), [("legacy", "http"), *(("auto", scheme) for scheme in SCHEMES)]
)
async def test_an_answer_to_a_question_that_the_store_refuses_is_sent_again(
    mode: str, scheme: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the 2026 era the answer is another sending of the call. In the era before, over HTTP, it
    was kept for another connection, and nobody waited for one: the call never ended.
    """
    app, questions, said = make_app("mcpserver"), list[str](), ""
    with store_server(store) as away:
        layer = SessionLayer(app.server, store=f"{away.url}?timeout=1")
        with serving((app, layer)) as (_, _, server), anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:

                async def answer(
                    context: ClientRequestContext, params: types.ElicitRequestParams
                ) -> types.ElicitResult:
                    questions.append(params.message)
                    away.suspend()
                    tasks.start_soon(go_on_after_a_refusal, away, caplog)
                    return types.ElicitResult(action="accept", content={"answer": "yes"})

                transport = resumable(server.url(scheme=scheme), policy=QUICK)
                async with Client(transport, mode=mode, elicitation_callback=answer) as client:
                    said = text_of(await client.call_tool("ask", {"question": "?"}))
            assert (said, questions) == ("accept: yes", ["?"])


async def test_a_cancellation_that_the_store_refuses_is_sent_again(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """REQ7: in the era of handshakes it was refused over HTTP, and sent no more: the call ran on.
    In the 2026 era a server that has the call needs no store to cancel it.
    """
    app = make_app("mcpserver")
    with store_server(store) as away:
        layer = SessionLayer(app.server, store=f"{away.url}?timeout=1")
        with serving((app, layer)) as (_, _, server), anyio.fail_after(60):
            transport = resumable(server.url(scheme="http"), policy=QUICK)
            async with (
                Client(transport, mode="legacy") as client,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(client.call_tool, "slow", {"steps": 1, "gate": "g"})
                await app.stage.reached("g:started")
                away.suspend()
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await go_on_after_a_refusal(away, caplog)
                    await app.stage.reached("g:cancelled")
