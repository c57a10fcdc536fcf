"""Does what a tutorial says: writes its files, runs its commands, compares what they print.

A tutorial is read from top to bottom:

* A block of code whose first line is ``# NAME.py`` is a file.
* A block ``sh`` is run. After "terminal 1" with "leave it running" it runs until "Press Ctrl+C in
  terminal 1"; else it has to end with status 0.
* A block ``text`` is what the last command prints, or the terminal that the words before it name.
  ``…`` stands for anything.

Only two things differ from a reader's machine: ports are free ones, and what is about installing
(``pip``, ``apt``, ``brew``) is left to the test of the installation.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import free_port

WITHIN = 60.0
"""Seconds in which a command ends, or prints what the page shows."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_PORT = re.compile(r"\b(80[08]\d|2?639\d)\b")
_INSTALLS = re.compile(r"^(pip|apt|brew|git|python3 -m venv|source|sudo) ?", re.M)


@dataclass(frozen=True)
class Step:
    """One block, and the words between it and the block before it: on one line."""

    before: str
    language: str
    code: str


def steps(page: str) -> Iterator[Step]:
    end = 0
    for block in _BLOCK.finditer(page):
        yield Step(" ".join(page[end : block.start()].split()), block[1], block[2])
        end = block.end()
    yield Step(" ".join(page[end:].split()), "", "")


@dataclass
class Terminal:
    """One command and what it has printed, into a file of its own."""

    process: "subprocess.Popen[bytes]"
    output: Path

    def has_printed(self, shown: str) -> bool:
        """Whether each line of a block has come, in its order."""
        parts = [re.escape(part.strip()) for part in re.split(r"…|\n", shown) if part.strip()]
        return re.search(".*?".join(parts), self.output.read_text("utf-8"), re.S) is not None

    def prints(self, shown: str) -> None:
        """Wait until it has."""
        deadline = time.monotonic() + WITHIN
        while not self.has_printed(shown):
            assert time.monotonic() < deadline, f"not printed:\n{shown}\n--- but:\n{self.said()}"
            time.sleep(0.05)

    def ends(self) -> int:
        return self.process.wait(WITHIN)

    def interrupt(self) -> None:
        """Ctrl+C: what runs there, the shell too."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.ends()

    def said(self) -> str:
        return self.output.read_text("utf-8")[-3_000:]


@dataclass
class Reader:
    """A reader with some terminals, in a folder of his own."""

    folder: Path
    environment: Mapping[str, str]
    ports: dict[str, str] = field(default_factory=dict[str, str])
    """What stands in the page → the port that is used."""
    terminals: dict[str, Terminal] = field(default_factory=dict[str, Terminal])
    last: Terminal | None = None
    count: int = 0

    def expect_what_it_says(self, page: str) -> None:
        """Do it, and stop what is left running."""
        try:
            for step in steps(page):
                self._do(step)
        finally:
            for terminal in self.terminals.values():
                if terminal.process.poll() is None:
                    os.killpg(terminal.process.pid, signal.SIGKILL)
                    terminal.ends()

    def _do(self, step: Step) -> None:
        for name in re.findall(r"Press Ctrl\+C in terminal (\d)", step.before):
            self.terminals.pop(name).interrupt()
        where = re.findall(r"terminal (\d)", step.before)
        code = _PORT.sub(lambda found: self.port(found[0]), step.code)
        file = re.match(r"# (\w+\.(?:py|conf))\n", code)
        if step.language == "text":
            terminal = self.terminals[where[-1]] if where else self.last
            assert terminal is not None, f"nothing was run before {step.code!r}"
            terminal.prints(code)
        elif file is not None:
            (self.folder / file[1]).write_text(code, "utf-8")
        elif step.language == "sh" and not _INSTALLS.search(code):
            self.last = self._run(code)
            if "leave it running" in step.before:
                self.terminals[where[-1]] = self.last
            else:
                assert self.last.ends() == 0, f"{code}\n{self.last.said()}"

    def _run(self, code: str) -> Terminal:
        self.count += 1
        output = self.folder / f".output-{self.count}"
        with output.open("wb") as written:
            process = subprocess.Popen(
                ["bash", "-euc", code],
                cwd=self.folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell's background jobs, and what they start, ignore Ctrl+C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        return Terminal(process, output)

    def port(self, named: str) -> str:
        return self.ports.setdefault(named, str(free_port()))


def path_of_this_python() -> str:
    """``PATH`` on which ``python`` and ``mcp-sessions`` are those of this environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
