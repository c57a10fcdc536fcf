"""A store is moved: clients use it before, and the other one after."""

import contextlib
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from mcp import Client

from mcp_sessions.client_transport import resumable
from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.sqlite import SQLiteStore
from tests.faults.test_restart import Served, call
from tests.support import apps
from tests.support.postgres_server import schema, shared_postgres
from tests.support.resuming import MODES, QUICK, Received

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

OTHERS = 10_000
PATIENT = replace(QUICK, give_up_after=240)
"""A copy takes its time on a busy machine."""
ALICE = Principal("app", "https://issuer.example", "alice")


async def fill(path: Path, number: int) -> None:
    """Sessions of other clients, each with an event."""
    store, now = SQLiteStore(path), time.time()
    await store.open(SessionPolicy(max_sessions=2 * number, max_sessions_per_principal=None))

    async def make() -> None:
        record = await store.create(Mode.PROTOCOL, ALICE, peer=None, now=now)
        await store.append(record.session_id, Draft(b"{}"), now=now)

    for _ in range(number // 100):
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(make)
    await store.close()


async def store_command(*arguments: str) -> str:
    running = await create_subprocess_exec(
        *(sys.executable, "-m", "mcp_sessions.cli", "store", *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, said = await running.communicate()
    assert (running.returncode, said) == (0, b""), said
    return out.decode()


@pytest.mark.postgres
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number", [pytest.param(100, id="few"), pytest.param(OTHERS, id="all", marks=pytest.mark.full)]
)
async def test_clients_go_on_after_their_sessions_moved_to_postgres(
    number: int, tmp_path: Path
) -> None:
    """Ours keep session, state and data. Who comes in between gets one clear error."""
    await fill(tmp_path / "sessions.db", number)
    target = f"{shared_postgres().url}?schema={schema()}"
    served = Served(tmp_path)
    url = f"http://127.0.0.1:{served.port}/mcp"
    received = [Received() for _ in MODES]
    try:
        await served.start()
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    Client(
                        resumable(url, on_resume=each.on_resume, policy=PATIENT),
                        mode=mode,
                        message_handler=each.on_message,
                    )
                )
                for each, mode in zip(received, MODES, strict=True)
            ]
            for client in clients:
                assert await call(client, "remember", word="before") == "before"
            await served.kill()
            with pytest.raises(BaseException) as failed:
                async with Client(url, mode="legacy") as between:
                    await call(between, "last")
            assert "connect" in repr(flat(failed.value)).lower()
            said = await store_command("copy", served.store, target)
            # A client of the older era has a session of its own for its connection.
            assert int(said.split()[0]) >= number + len(MODES) and "copied" in said

            served.store = target
            await served.start()
            for client in clients:
                assert await call(client, "last") == "before"
                assert await call(client, "remember", word="after") == "before after"
            # The older era has a stream, which may come back later than a call is answered.
            await received[MODES.index("legacy")].outcome()
            outcomes = [outcome for each in received for outcome in each.outcomes]
            for outcome in outcomes:
                # The same session, and all is read again: no old position is good there.
                assert not outcome.is_new_session and not outcome.has_ended
                assert outcome.recovered or outcome.reason == "log_replaced"
        assert (await store_command("check", target)).endswith("are as they should be\n")
    finally:
        await served.kill()


def flat(error: BaseException) -> BaseException:
    match error:
        case BaseExceptionGroup(exceptions=(BaseException() as first, *_)):
            return flat(first)
        case _:
            return error
