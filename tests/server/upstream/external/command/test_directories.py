"""A directory that is made for a session stays as long as that does, and no longer."""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import Conversations, SessionSecurity
from mcp_sessions.server.upstream.external.command import Directories
from tests.support.children import child_world, is_alive, until
from tests.support.modern import ModernClient, session_meta
from tests.support.raw import RawClient, in_session
from tests.support.world import World

KEYS = SessionSecurity(["k" * 32])


async def slot(client: RawClient | ModernClient, **named: Any) -> Path:
    return Path(json.loads(await client.text("environ", **named))["cwd"])


async def replaced(w: World, pid: int) -> None:
    """A process died, and that was noticed."""
    upstream: Any = w.inside.upstream
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid), "it is dead")
    await until(lambda: any(each.has_ended for each in upstream.children._living), "it is noticed")


@pytest.mark.parametrize("template", ["{session}", "of/{principal}/s-{session}/work"])
async def test_a_session_has_one_directory_until_it_has_ended(
    tmp_path: Path, template: str
) -> None:
    """Whichever process runs there, and whatever that leaves."""
    (tmp_path / "of").mkdir()
    async with child_world(options={"cwd": f"{tmp_path}/{template}"}, store="memory://") as w:
        client = await w.connected()
        found = await slot(client)
        (found / "file").write_text("kept")
        await replaced(w, int(await client.text("pid")))
        assert await slot(client) == found and (found / "file").read_text() == "kept"
        meta = in_session((await client.start())["sessionId"])
        assert await slot(client, meta=meta) != found
        mine = found if found.name != "work" else found.parent
        await client.delete().done()
        await until(lambda: not mine.exists(), "it is deleted")
        assert mine.parent.exists(), "others may be there"
    left = [path for path in tmp_path.rglob("*") if path.name not in ("of", mine.parent.name)]
    assert left == [], "this store does not outlive the layer"


async def test_what_belongs_to_no_session_leaves_no_directory(tmp_path: Path) -> None:
    """A handshake, a request outside of any session, one that cannot be started."""
    async with child_world(options={"cwd": f"{tmp_path}/{{session}}", "child_idle": 0.3}) as w:
        for _ in range(3):
            client = await w.connected()
            assert (await client.delete().done()).status == 200
        assert (await slot(ModernClient(w.carrier))).is_dir()
        await until(lambda: not os.listdir(tmp_path), "none is left")
    dies = {"cwd": f"{tmp_path}/{{session}}"}
    async with child_world("dies", "key", options=dies) as w:
        assert "error" in await ModernClient(w.carrier).call("count").answer()
        await until(lambda: not os.listdir(tmp_path), "none is left")


async def test_a_session_that_outlives_the_layer_keeps_its_directory(tmp_path: Path) -> None:
    """And one that ends after that loses it, though no process ran there since."""
    (tmp_path / "at").mkdir()
    store = f"sqlite:///{tmp_path}/sessions.db"
    options = {"cwd": f"{tmp_path}/at/{{session}}"}
    async with child_world(options=options, store=store, security=KEYS) as w:
        client = await w.connected()
        found = await slot(client)
        (found / "file").write_text("kept")
    assert (found / "file").exists()
    async with child_world(options=options, store=store, security=KEYS) as w:
        client.carrier = w.carrier
        assert (await client.delete().done()).status == 200
        await until(lambda: not found.exists(), "it is deleted")


async def test_a_session_that_sleeps_keeps_its_directory(tmp_path: Path) -> None:
    """Its process ends; what it kept in files is there when it goes on."""
    limits: dict[str, Any] = {
        "conversations": Conversations(), "idle_timeout": 10, "forget_after": 1_000,
    }  # fmt: skip
    options = {"cwd": f"{tmp_path}/{{session}}"}
    async with child_world(options=options, **limits) as w:
        client = await w.connected()
        found = await slot(client)
        (found / "file").write_text("kept")
        pid = int(await client.text("pid"))
        w.clock.now += 20
        await w.inside.lifecycle.sleep()
        await until(lambda: not is_alive(pid), "it ended")
        assert await slot(client) == found and (found / "file").exists()


async def test_a_modern_session_has_one_too(tmp_path: Path) -> None:
    async with child_world(options={"cwd": f"{tmp_path}/{{session}}"}) as w:
        client = ModernClient(w.carrier)
        session = (await client.create())["sessionId"]
        found = await slot(client, meta=session_meta(session))
        assert await client.send("sessions/delete", session=session).result() is not None
        await until(lambda: not found.exists(), "it is deleted")


async def test_what_cannot_be_deleted_is_said_and_nothing_else_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link in its place leads nowhere, and what is gone is no fault."""
    directories = Directories(lasting=False)
    other, mine, gone = (tmp_path / name for name in ("other", "mine", "gone"))
    other.mkdir()
    (other / "file").touch()
    for each in (mine, gone):
        await directories.enter(str(each), str(each), each.name)
        directories.leave(str(each))
        assert each.is_dir()
        each.rmdir()
    mine.symlink_to(other)
    with caplog.at_level(logging.WARNING):
        await directories.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (other / "file").exists()
