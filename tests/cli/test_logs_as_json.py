"""``--log-format json``: every line on stderr is one object, from the first to the last."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import INITIALIZE, serving

APP = """
    import logging
    import sys
    import threading
    import warnings

    from fastmcp import FastMCP

    warnings.warn("the target warns")
    own = logging.getLogger("own")
    own.addHandler(logging.StreamHandler(sys.stderr))
    own.propagate = False
    logging.getLogger("other").addHandler(logging.StreamHandler())

    mcp = FastMCP("logs")

    @mcp.tool
    def boom() -> str:
        own.error("the target logs")
        logging.getLogger("other").error("twice?")
        threading.Thread(target=lambda: 1 / 0).start()
        raise RuntimeError("the tool fails")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text("\n".join(line[4:] for line in APP.splitlines()))
    return tmp_path


def objects(lines: list[str]) -> list[dict[str, Any]]:
    """Each line's object; every one has what a record has."""
    parsed: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for each in parsed:
        assert {"time", "level", "logger", "message"} <= set(each)
    return parsed


def test_every_line_is_an_object_whoever_wrote_it(here: Path) -> None:
    """Of the target, of what it imports, of uvicorn and of Python, tracebacks and all."""
    lines: list[str] = []
    with serving(here, "app.py", "--log-format", "json", "--access-log") as process:
        assert process.stderr is not None
        lines += iter_until(process, "serving")
        url = json.loads(lines[-1])["url"]
        headers = {"Accept": "application/json, text/event-stream"}
        with httpx.Client(timeout=30, trust_env=False, headers=headers) as client:
            answer = client.post(url, json=INITIALIZE)
            session = {"Mcp-Session-Id": answer.headers["mcp-session-id"]}
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "boom"}}
            assert "the tool fails" in client.post(url, json=call, headers=session).text
            client.post(url, content=b"\xff", headers=session)
            lines += iter_until(process, "ZeroDivisionError")
        process.terminate()
        lines += process.stderr.read().splitlines()

    said = objects(lines)
    messages = [each["message"] for each in said]
    assert any("the target warns" in message for message in messages)
    assert messages.count("the target logs") == messages.count("twice?") == 1
    assert any("the tool fails" in each.get("traceback", "") for each in said)
    assert any(each["logger"] == "mcp_sessions.access" for each in said)
    assert any(each["message"] == "uncaught: ZeroDivisionError" for each in said)


def iter_until(process: "subprocess.Popen[str]", word: str) -> list[str]:
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or word not in lines[-1]:
        line = process.stderr.readline()
        assert line, "it ended"
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("nowhere.py",), 2, "mcp-sessions serve: no such file: nowhere.py"),
        (("app.py", "--port", "x"), 2, "mcp-sessions serve: argument --port"),
        (("app.py", "--store", "floppy://"), 2, "mcp-sessions serve: unknown store 'floppy'"),
        (
            ("app.py", "--port", "0", "--store", "redis://127.0.0.1:1"),
            *(1, "Redis at 127.0.0.1:1 is away"),
        ),
    ],
)
def test_why_it_ends_is_an_object(
    here: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mcp_sessions.cli", "serve", *arguments, "--log-format=json"],
        cwd=here,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert ended.returncode == status
    last = objects(ended.stderr.splitlines())[-1]
    assert last["level"] == "error" and said in last["message"]
