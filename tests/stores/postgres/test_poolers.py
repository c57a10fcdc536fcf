"""A Postgres behind PgBouncer, the real one."""

import os
import pwd
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.errors import StoreRefused
from mcp_sessions.ids import EVENTS
from mcp_sessions.stores.postgres import PostgresStore
from tests.stores.opening import NOW, POLICY, new, opened
from tests.stores.postgres.test_postgres_away import Listener
from tests.support.postgres_server import schema, shared_postgres
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.programs import system_program

pytestmark = [pytest.mark.postgres, pytest.mark.full, pytest.mark.timeout(400)]


@contextmanager
def pgbouncer(folder: Path, pool_mode: str) -> Generator[str]:
    """It, before the shared server, until the block ends: the URL for ``--store``."""
    program = system_program("pgbouncer", "pgbouncer", "brew install pgbouncer")
    port = free_port()
    file = folder / "pgbouncer.ini"
    file.write_text(
        "[databases]\n"
        f"* = host=127.0.0.1 port={shared_postgres().port} user=sessions\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = any\npool_mode = {pool_mode}\n"
    )
    options: dict[str, Any] = {}
    if os.geteuid() == 0:
        # It refuses to run as root.
        user = pwd.getpwnam("postgres")
        options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        for each in (folder, *folder.parents):
            if each.is_relative_to("/tmp") and each != Path("/tmp"):
                each.chmod(each.stat().st_mode | 0o055)
    process = subprocess.Popen[bytes](
        [program, "-q", str(file)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )
    try:
        wait_until_it_listens(process, port)
        yield f"postgresql://sessions@127.0.0.1:{port}/postgres?schema={schema()}"
    finally:
        process.terminate()
        process.wait(30)


async def test_a_pooler_in_transaction_mode_is_refused_at_the_start(tmp_path: Path) -> None:
    """What is set and listened to there would be another client's. One line says what to do."""
    with pgbouncer(tmp_path, "transaction") as url:
        store = PostgresStore(url)
        with pytest.raises(StoreRefused) as refused:
            await store.open(POLICY)
        await store.close()
    said = str(refused.value)
    assert "is behind a pooler in transaction mode. Name the server, or pool sessions" in said
    assert "\n" not in said


async def test_a_pooler_in_session_mode_serves(tmp_path: Path) -> None:
    """With a schema of its own, and with notifications."""
    with pgbouncer(tmp_path, "session") as url:
        async with opened(PostgresStore(url)) as here, opened(PostgresStore(url)) as there:
            session_id = await new(here)
            listener = Listener()
            assert here.exchange is not None and there.exchange is not None
            await here.exchange.join("here", listener)
            await there.exchange.join("there", Listener())
            await here.exchange.watch(session_id, EVENTS)
            appended = await there.append(session_id, Draft(b"{}"), now=NOW)
            assert appended is not None
            await listener.until(lambda: listener.events == [appended.event])
            assert await there.exchange.send(b"hello", to="here")
            await listener.until(lambda: listener.messages == [b"hello"])
