"""Commands that misbehave: their clients get clear answers within bounds, and the layer lives."""

import asyncio
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mcp_sessions import StdioServer
from mcp_sessions.server.upstream.external.process import ChildProcess
from tests.support.children import CHILD, child_world, children_of, is_alive, until
from tests.support.raw import Json, RawClient, initialize_params, keyed
from tests.support.world import world

CHILD_LOG = "mcp_sessions.server.upstream"

TOO_LARGE = (
    "refused requests: 1. The limit max_answer (4194304) is reached. "
    "To raise it, set max_answer in SessionPolicy, or --max-answer"
)


on_each_loop = pytest.mark.parametrize(
    "anyio_backend",
    [
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio", marks=pytest.mark.full),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ],
)


def noted(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


async def refused(client: RawClient) -> Json:
    params = initialize_params()
    error = await client.error("initialize", params)
    assert (error["code"], error["data"]["started"]) == (-32603, False)
    return error


async def expect_served(client: RawClient) -> None:
    assert await client.text("echo", text="still here") == "still here"


# --- before it serves ----------------------------------------------------------------------------


async def test_one_that_exits_at_once_is_said_with_its_last_words_and_not_started_in_a_loop(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    options = {"env": {"CALLS": str(notes)}}
    async with child_world("dies", "API key", options=options) as w:
        for _ in range(5):
            error = await refused(w.client())
            assert "it ended with status 1: the API key is missing" in error["message"]
        assert noted(notes) == ["started"]


async def test_one_that_never_answers_initialize_is_given_up() -> None:
    others = set(children_of(os.getpid()))
    async with child_world("silent", options={"start_timeout": 0.5}) as w:
        error = await refused(w.client())
        assert "did not answer initialize in 0.5 seconds" in error["message"]
        left = set(children_of(os.getpid())) - others
        assert len(left) <= 1, "the guard is left, and no child"


async def test_a_banner_is_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with child_world("banner", "40") as w:
        await expect_served(await w.connected())
    said = [record for record in caplog.records if record.name.startswith(CHILD_LOG)]
    assert [record.levelname for record in said] == ["WARNING"]


async def test_a_banner_without_end_is_not_skipped_for_ever() -> None:
    async with child_world("banner", "10000000") as w:
        assert "is not a message" in (await refused(w.client()))["message"]


async def test_a_version_that_nobody_knows_is_refused() -> None:
    async with child_world("version", "1999-01-01") as w:
        assert "it speaks version '1999-01-01'" in (await refused(w.client()))["message"]


async def test_what_it_says_before_the_handshake_reaches_nobody(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with child_world("early", options={"env": {"CALLS": str(notes)}}) as w:
        client = await w.connected(capabilities={"roots": {}})
        await expect_served(client)
        answers = [json.loads(line) for line in noted(notes) if line.startswith("{")]
        assert {answer["id"]: "error" in answer for answer in answers[:2]} == {
            "early": True,
            "p": False,
        }


async def test_one_that_cannot_be_executed_after_all_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    async with world(server=StdioServer(str(script))) as w:
        assert "cannot be run: No such file" in (await refused(w.client()))["message"]


# --- while it serves -----------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["die", "half"])
async def test_who_waits_for_one_that_ends_is_notified_that_nobody_knows(tool: str) -> None:
    """It exits, or it exits in the middle of a line."""
    async with child_world() as w:
        client = await w.connected()
        assert (await client.call(tool).error())["code"] == -31012
        await expect_served(client)


@pytest.mark.parametrize("given", ["1.5", "null", "true", "[1]", "4711", '"x"'])
async def test_an_answer_to_nothing_costs_nothing(given: str) -> None:
    """Other clients of such a server pay no attention either."""
    async with child_world() as w:
        client = await w.connected()
        assert await client.text("no_id", id=given) == "later"
        assert await client.text("count") == "2", "in its own process"


async def test_one_that_answers_notifications_serves_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Many servers that were written by hand do."""
    async with child_world("answers all") as w:
        client = await w.connected()
        for count in ("1", "2"):
            await client.notify("notifications/roots/list_changed")
            assert await client.text("count") == count
    said = [
        record.getMessage() for record in caplog.records if "did not send" in record.getMessage()
    ]
    assert len(said) == 1


async def test_one_that_writes_as_windows_does_is_read() -> None:
    """A byte order mark before the first line, and CR LF at the end of each."""
    async with child_world("windows") as w:
        client = await w.connected()
        assert [await client.text("count") for _ in range(2)] == ["1", "2"]


async def test_half_a_surrogate_pair_reaches_the_client() -> None:
    """Servers in JavaScript cut a text in the middle of a character, and clients there take it."""
    async with child_world() as w:
        client = await w.connected()
        sent = await client.call("no_json", given='"cut \\ud83d"', id="first").result()
        assert sent == {"n": "cut \ud83d"}
        session = (await client.start())["sessionId"]
        for _ in range(2):
            meta = keyed("k", session)
            kept = client.call("no_json", given='"\\uDE00"', id="first", meta=meta)
            assert (await kept.result())["n"] == "\ude00"
        assert await client.text("count") == "2", (
            "in its own process: what was kept is not asked again"
        )


NO_JSON = [
    *("NaN", "-Infinity", '{"method": "ols", "r2": NaN}', '{"id": 9, "method": "x", "n": NaN}'),
    *('"\xff"', "1e400", '"', "1" * 5_000, "[" * 2_000 + "]" * 2_000),
]


@pytest.mark.parametrize("given", NO_JSON, ids=lambda given: str(given)[:30])
@pytest.mark.parametrize("position", ["first", "last"])
async def test_an_answer_that_is_no_json_is_an_error_of_its_request_alone(
    given: str, position: str
) -> None:
    """Some servers write NaN, or bytes of a file's name."""
    async with child_world() as w:
        client = await w.connected()
        error = await client.call("no_json", given=given, id=position).error()
        assert error["code"] == -32603
        # How many levels JSON may have differs between releases of Python.
        assert error["message"] in (
            "the server's answer is no JSON",
            *["the server's answer has too many levels"] * ("[[" in given),
        )
        assert await client.text("count") == "2"


async def test_a_malformed_answer_is_an_error_of_its_request_alone() -> None:
    async with child_world() as w:
        client = await w.connected()
        error = await client.call("malformed").error()
        assert error["code"] == -32603 and "malformed" in error["message"]
        assert await client.text("count") == "2"


async def test_a_second_answer_is_none() -> None:
    async with child_world() as w:
        client = await w.connected()
        assert await client.text("twice") == "first"
        assert await client.text("count") == "2"


async def test_an_answer_of_120_mb_is_an_error_and_takes_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operator learns of it from one line, however many such answers come."""
    async with child_world() as w:
        client = await w.connected()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error = await client.call("endless", size=120_000_000).error()
        assert "has more than 4194304 bytes" in error["message"]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000
        assert "has more than" in (await client.call("endless", size=5_000_000).error())["message"]
        assert await client.text("count") == "3"
    assert [line for line in caplog.messages if "The limit" in line] == [TOO_LARGE]


async def test_a_large_answer_passes_and_one_of_nobody_ends_the_process() -> None:
    async with child_world() as w:
        client = await w.connected()
        assert len(await client.text("large", size=4_000_000)) == 4_000_000
        assert (await client.call("anonymous", size=5_000_000).error())["code"] == -31012
        await expect_served(client)


LARGE = '{"jsonrpc":"2.0","id":4711,"result":{"x":"$"}}'
OWN = '{"jsonrpc":"2.0","id":@,"result":{"n":1}}'


@pytest.mark.parametrize(
    "given", ['[{"jsonrpc":"2.0","id":@,"result":{"x":"$"}}]', f"[{LARGE},{OWN}]"]
)
async def test_a_batch_that_is_too_large_ends_its_process(given: str) -> None:
    """Nobody knows whose answers are in it. No request waits for one without an end."""
    async with child_world() as w:
        client = await w.connected()
        assert (await client.call("prints", given=given, size=5_000_000).error())["code"] == -31012
        await expect_served(client)


SPREAD = json.dumps({"jsonrpc": "2.0", "id": "@", "result": {"n": ["a", {"b": 1}]}}, indent=2)


@pytest.mark.parametrize(
    "given",
    [
        SPREAD,
        f"[\n{SPREAD}\n]",
        f"debug\n{SPREAD}",
        json.dumps({"result": {"id": 1, "n": "'"}, "id": "@", "jsonrpc": "2.0"}, indent=0),
        '{"jsonrpc":"2.0",\r\n"id":@,\r\n"result":{}\r\n}',
    ],
)
async def test_an_answer_on_several_lines_is_an_error_of_its_request(given: str) -> None:
    """As a program writes JSON for people. Whoever waited for it waited without an end."""
    async with child_world() as w:
        client = await w.connected()
        error = await client.call("prints", given=given.replace('"@"', "@")).error()
        assert error["message"] == "the server's answer is written on several lines"
        assert await client.text("count") == "2"


@pytest.mark.parametrize("given", ["{", "[", '{"a":', '{"x": [', "{'", '{"a": 1}', "[\n{\n{"])
async def test_lines_that_look_like_a_message_cost_no_message_behind_them(given: str) -> None:
    async with child_world() as w:
        client = await w.connected()
        assert (await client.call("prints", given=f"{given}\n{OWN}").result())["n"] == 1
        for bad in ('"result":NaN', '"result":null', "\"error\":'x'", '"result":{"n":01}'):
            line = f'{{"jsonrpc":"2.0","id":@,{bad}}}'
            error = await client.call("prints", given=f"{given}\n{line}").error()
            assert error["code"] == -32603
        assert await client.text("count") == "6"


async def test_noise_between_messages_is_bounded() -> None:
    """In bytes, of which each line of noise has 110; an answer in between makes room."""
    async with child_world() as w:
        client = await w.connected()
        for _ in range(3):
            assert await client.text("noise", lines=5_000) == "noisy"
        assert (await client.call("noise", lines=20_000).error())["code"] == -31012
        await expect_served(client)


async def test_a_flood_on_stderr_is_read_and_its_log_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=CHILD_LOG)
    async with child_world(options={"title": "the server notes"}) as w:
        client = await w.connected()
        assert await client.text("errors", lines=20_000) == "told"
    notified = [record for record in caplog.records if "error 0 eee" in record.getMessage()]
    assert len(notified) == 1 and notified[0].getMessage().startswith("the server notes of ")
    assert len(caplog.records) < 2_000


async def test_one_that_asks_and_does_not_read_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    """What answers its pings waits for nobody, and would be held for ever."""
    async with child_world() as w:
        client = await w.connected()
        sent = client.call("pings", count=400, size=65_536)
        assert (await sent.error())["code"] == -31012
        await expect_served(client)
    assert any("does not read" in record.getMessage() for record in caplog.records)


def lines_written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines that processes are given from now on."""
    lines: list[bytes] = []
    write = ChildProcess.write

    def noting(process: ChildProcess, line: bytes) -> None:
        lines.append(line)
        write(process, line)

    monkeypatch.setattr(ChildProcess, "write", noting)
    return lines


async def test_what_is_cancelled_before_one_could_take_it_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes no input is handed no more than it was: what its clients give up is gone."""
    notes = tmp_path / "notes"
    async with child_world(options={"env": {"CALLS": str(notes)}}) as w:
        client = await w.connected()
        pid = int(await client.text("pid"))
        runner = w.inside.runner
        os.kill(pid, signal.SIGSTOP)
        try:
            written = lines_written(monkeypatch)
            taken = client.call("echo", text="x" * 1_000_000)
            await until(lambda: len(written) == 1, "its process has the first one, in part")
            for number in range(5):
                given_up = client.call("mark", text=f"{number} " + "x" * 1_000_000)
                await until(lambda: runner.running == 2, "it waits")
                await client.notify("notifications/cancelled", {"requestId": given_up.id})
                assert (await given_up.error())["message"] == "Request cancelled"
        finally:
            os.kill(pid, signal.SIGCONT)
        await taken.result()
        await expect_served(client)
        assert [word for word in noted(notes) if not word.startswith("{")] == [
            *("started", "pid", "echo", "echo")
        ]


@on_each_loop
async def test_one_that_gets_nothing_any_more_is_replaced() -> None:
    """Not every event loop says that a pipe is closed before it is written to."""
    async with child_world() as w:
        client = await w.connected()
        assert await client.text("deaf") == "deaf"
        # Asked when that was not learned of yet, nobody knows whether it ran.
        answer = await client.call("count").answer()
        assert "result" in answer or answer["error"]["code"] == -31012
        await expect_served(client)


@on_each_loop
async def test_what_one_that_gets_nothing_any_more_did_not_read_is_answered(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    async with child_world(options={"env": {"CALLS": str(notes)}}) as w:
        client = await w.connected()
        deaf = client.call("deaf and mute")
        await until(lambda: "deaf and mute" in noted(notes), "it runs")
        unread = client.call("count")
        assert [(await sent.error())["code"] for sent in (deaf, unread)] == [-31012] * 2
        assert "count" not in noted(notes)
        await expect_served(client)


# --- nothing is left -----------------------------------------------------------------------------


async def test_one_whose_pipes_another_holds_has_ended_all_the_same() -> None:
    """What left its group is found by nobody: the calls of the process do not wait for it."""
    async with child_world() as w:
        client = await w.connected()
        other = int(await client.text("leave apart"))
        try:
            assert (await client.call("die").error())["code"] == -31012
            await expect_served(client)
            assert is_alive(other)
        finally:
            os.kill(other, signal.SIGKILL)


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with child_world("stubborn", options={"env": {"CALLS": str(notes)}}) as w:
        await expect_served(await w.connected())
        pid = int(noted(notes)[0])
        assert is_alive(pid)
    assert not is_alive(pid)


@pytest.mark.parametrize("ends", ["session", "crash"])
async def test_what_it_leaves_behind_is_ended_with_it(ends: str) -> None:
    async with child_world() as w:
        client = await w.connected()
        left = int(await client.text("leave"))
        assert is_alive(left)
        if ends == "session":
            await client.delete().done()
        else:
            os.kill(int(await client.text("pid")), signal.SIGKILL)
        await until(lambda: not is_alive(left), "its own process ended")


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    """The layer stops while a child that never answers is being started."""
    notes = tmp_path / "notes"
    others = set(children_of(os.getpid()))
    async with child_world("silent", options={"env": {"CALLS": str(notes)}}) as w:
        w.client().send("initialize", initialize_params())
        await until(lambda: noted(notes), "it was started")
        left = [pid for pid in set(children_of(os.getpid())) - others if is_alive(pid)]
        await w.inside.upstream.children.close()  # type: ignore[attr-defined]
        assert left and not any(is_alive(pid) for pid in left)


LAYER = """
    import asyncio, os, sys
    sys.path.insert(0, {root!r})
    from tests.support.children import child_world

    async def main():
        async with child_world() as w:
            client = await w.connected()
            print(await client.text("pid"), await client.text("leave"), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            {then}

    asyncio.run(main())
"""


async def expect_ended(pids: list[int]) -> None:
    await until(lambda: not any(is_alive(pid) for pid in pids), "all of them ended")


def start_layer(folder: Path, then: str) -> "subprocess.Popen[str]":
    program = folder / "layer.py"
    root = str(Path(CHILD).parents[2])
    program.write_text(textwrap.dedent(LAYER).format(root=root, then=then), "utf-8")
    # A file, and started by no event loop: it is forked (`tests.support.forking`).
    return subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@asynccontextmanager
async def another_layer(
    folder: Path, then: str
) -> AsyncGenerator[tuple["subprocess.Popen[str]", list[int]]]:
    """Another process with a layer: it, its child, and what the child started."""
    with start_layer(folder, then) as process:
        try:
            pids = await printed_by(process)
            assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
            pids += children_of(process.pid)
            assert process.stdin is not None
            # Not before: it may be over a moment later.
            process.stdin.write("\n")
            process.stdin.flush()
            yield process, pids
        finally:
            process.kill()


async def printed_by(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        line = await asyncio.to_thread(process.stdout.readline)
    return [int(pid) for pid in line.split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_survives_a_layer_that_is_killed(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with another_layer(tmp_path, "await asyncio.sleep(600)") as (process, pids):
        process.send_signal(number)
        await asyncio.to_thread(process.wait, 30)
        await expect_ended(pids)


async def test_nothing_survives_a_layer_that_fails(tmp_path: Path) -> None:
    async with another_layer(tmp_path, "os._exit(3)") as (process, pids):
        assert await asyncio.to_thread(process.wait, 30) == 3
        await expect_ended(pids)


async def test_the_guard_is_started_again_and_knows_of_all(tmp_path: Path) -> None:
    steps = (
        "guard = w.inside.upstream.children.starter._processes._guard",
        "guard.kill()",
        "await guard.wait()",
        "other = await w.connected()",
        "print(await other.text('pid'), await other.text('leave'), flush=True)",
        "await asyncio.sleep(600)",
    )
    async with another_layer(tmp_path, "; ".join(steps)) as (process, pids):
        pids += await printed_by(process)
        process.kill()
        await asyncio.to_thread(process.wait, 30)
        await expect_ended(pids)
