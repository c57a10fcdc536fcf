"""A process that drives a stock client of another language or version.

Commands go to its stdin and answers come from its stdout, one JSON object per line;
``driving.mjs`` and ``python1/driver.py`` are at the other end. One process serves all tests; each
test opens clients of its own in it.
"""

import itertools
import json
import queue
import subprocess
import threading
from collections import deque
from typing import Any, cast

from tests.support.board import Board

Line = dict[str, Any]


class Failed(Exception):
    """The client under test raised an error for a command.

    Attributes:
        code: The JSON-RPC or HTTP code, if the client knew one.
        message: The client's text.
        data: The error's ``data``, if the client kept it.
    """

    def __init__(self, code: int | None, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} (code {self.code}, data {self.data!r})"


class Driver:
    """Starts the process, sends it commands and sorts what comes back."""

    def __init__(self, command: list[str], *, within: float = 30.0) -> None:
        self._board = Board()
        self._ids = itertools.count(1)
        self._answers: dict[int, Line] = {}
        self._events: dict[str, list[Line]] = {}
        self._collectors: dict[tuple[str, str], list[Any]] = {}
        self._errors: deque[str] = deque(maxlen=50)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._ready: queue.Queue[bool] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read_lines, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            is_ready = self._ready.get(timeout=within)
        except queue.Empty:
            is_ready = False
        if not is_ready:
            self.stop()
            raise AssertionError(f"{command} did not start:\n{self.stderr}")

    @property
    def stderr(self) -> str:
        return "".join(self._errors)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def events(self, client: str) -> tuple[Line, ...]:
        return tuple(self._events.get(client, ()))

    def collect(self, key: str, event: str, into: list[Any]) -> None:
        """Append the value of each event of a call to ``into``, as they come.

        Args:
            key: The call's ``key``.
            event: The event's name, which is also the name of the value.
            into: Filled before the event is announced.
        """
        self._collectors[key, event] = into

    @property
    def board(self) -> Board:
        return self._board

    async def run(self, op: str, *, within: float = 20.0, **arguments: object) -> Any:
        """Run one command and return its result.

        Raises:
            Failed: The client raised an error.
            AssertionError: No answer within ``within`` seconds, or the process died.
        """
        number = next(self._ids)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "op": op, **arguments}) + "\n")
        self._process.stdin.flush()

        def answered() -> Line | None:
            return self._answers.get(number) or (None if self.is_running else {"gone": True})

        answer = await self._board.until(
            answered,
            what=lambda: f"an answer to {op} {arguments}; stderr:\n{self.stderr}",
            within=within,
        )
        if "gone" in answer:
            raise AssertionError(f"the driver died during {op}:\n{self.stderr}")
        if (error := answer.get("error")) is not None:
            failed = Failed(error["code"], error["message"], error.get("data"))
            if error.get("stack"):
                failed.add_note(error["stack"])
            raise failed
        return answer["result"]

    def stop(self) -> None:
        """End the process, politely at first."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # It is dead already.
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        for thread in self._threads:
            thread.join(timeout=5)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = cast("Line", json.loads(text))
            if "id" in line:
                self._answers[line["id"]] = line
            elif "client" in line:
                self._events.setdefault(line["client"], []).append(line)
                collector = self._collectors.get((line.get("key", ""), line["event"]))
                if collector is not None:
                    collector.append(line[line["event"]])
            elif line.get("event") == "ready":
                self._ready.put(True)
            self._board.announce()
        self._ready.put(False)
        self._board.announce()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)
