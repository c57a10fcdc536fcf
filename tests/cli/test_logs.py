"""The command's logs: one line per record, and other libraries kept quiet."""

import io
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Generator

import pytest

from mcp_sessions.cli import logs

Configure = Callable[..., io.StringIO]


@pytest.fixture
def logs_are_pytests() -> None:
    """Instead of that of the folder: what is configured here is the logs."""


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Generator[Configure]:
    """``logs.configure`` into a string; afterwards logging is as it was."""
    for holder, hook in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(holder, hook, getattr(holder, hook))
    monkeypatch.setenv("FASTMCP_LOG_ENABLED", "true")
    root, ours = logging.getLogger(), logging.getLogger("mcp_sessions")
    before = root.handlers[:], root.level, ours.level

    def into_a_string(level: str = "info", format: str = "text") -> io.StringIO:
        stream = io.StringIO()
        logs.configure(level=level, format=format, stream=stream)
        return stream

    yield into_a_string
    logging.captureWarnings(False)
    root.handlers[:], root.level, ours.level = before
    # Levels are cached per logger; setting one the official way empties the caches.
    root.setLevel(before[1])


@pytest.mark.skipif(os.name != "posix", reason="pipes are asked with poll")
@pytest.mark.parametrize("size", [100, 10_000])
def test_a_log_that_nobody_reads_stops_nobody_and_says_later_what_is_missing(size: int) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb", buffering=0) as reader, os.fdopen(writes, "w") as stream:
        handler = logs.NeverWaiting(stream)
        handler.setFormatter(logs.TextFormatter())

        def notified(text: str) -> None:
            handler.emit(logging.LogRecord("own", logging.INFO, "", 0, text, (), None))

        for _ in range(2_000):
            notified("x" * size)
        # As much as the pipe holds, which is less than was written.
        read = bytearray()
        while select.select((reader,), (), (), 0)[0]:
            read += reader.read(65_536)
        whole = read.count(b"\n")
        assert whole < 2_000
        notified("heard again")
        notified("the last one")
        lines = reader.read(65_536).decode().splitlines()[-3:]
        assert f"WARNING mcp_sessions.cli: {2_000 - whole} log lines were dropped" in lines[0]
        assert lines[1].endswith(": heard again") and lines[2].endswith(": the last one")


def test_a_text_record_is_one_line_with_time_level_and_name(configure: Configure) -> None:
    stream = configure()

    logging.getLogger("mcp_sessions.server").info("session %s started", "3f2a")

    time, rest = stream.getvalue().split(" ", 1)
    assert rest == "INFO mcp_sessions.server: session 3f2a started\n"
    assert len(time) == len("2026-07-28T12:00:00.000Z") and time.endswith("Z")


def test_a_line_break_in_a_message_does_not_make_a_second_record(configure: Configure) -> None:
    """A peer's text may be logged; it must not look like a record of ours."""
    stream = configure()

    logging.getLogger("mcp_sessions.x").info("from %s", "peer\r\n2026 INFO mcp_sessions: forged")

    assert stream.getvalue().count("\n") == 1


def test_a_json_record_is_one_object_with_its_extra_members(configure: Configure) -> None:
    stream = configure(format="json")

    logging.getLogger("mcp_sessions.server").warning("x\ny", extra={"session": "3f2a", "n": 2})

    [line] = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "warning",
        "logger": "mcp_sessions.server",
        "message": "x\ny",
        "session": "3f2a",
        "n": 2,
    }


def test_an_extra_member_replaces_none_of_the_record_s_own(configure: Configure) -> None:
    stream = configure(format="json")

    logging.getLogger("mcp_sessions.server").warning("kept", extra={"level": "x", "time": "y"})

    record = json.loads(stream.getvalue())
    assert record["level"] == "warning" and record["time"] != "y"


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_traceback_is_part_of_its_record(format: str, configure: Configure) -> None:
    stream = configure(format=format)

    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("mcp_sessions.server").exception("failed")

    text = stream.getvalue()
    if format == "json":
        text = json.loads(text)["traceback"]
    assert "Traceback (most recent call last)" in text and "ValueError: broken" in text


def test_the_level_is_ours_alone(configure: Configure) -> None:
    """At debug level the SDK logs whole messages, and session ids with them (SEC2)."""
    stream = configure(level="debug")

    logging.getLogger("mcp_sessions.core").debug("ours")
    logging.getLogger("mcp.server").info("theirs")
    logging.getLogger("mcp.server").warning("their warning")

    logged = [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()]
    assert logged == ["ours", "their warning"]


def test_configuring_again_does_not_log_twice(configure: Configure) -> None:
    configure()
    stream = configure(level="error")

    logging.getLogger("mcp_sessions.core").warning("not this")
    logging.getLogger("mcp_sessions.core").error("once")

    assert stream.getvalue().count("\n") == 1
