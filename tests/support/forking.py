"""A Python program that a test starts is forked from a process that has imported the SDK.

To import it takes 2 s of CPU, and the tests start some hundred programs. `fork_programs` puts
itself where `subprocess` starts a process. What it starts is a child of the test process, with the
arguments, the files, the directory and the environment that were asked for: only its modules are
there already. A program is started as ever where this cannot be so: it is no ``python FILE.py`` and
no ``python -m MODULE`` of ours, or its environment says how Python starts, or a file of it is a
terminal.

``SESSIONS_TESTS_FORK=no`` starts all programs as ever, as one run of ``scripts/test --all``
does. Only Linux can do this.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

IMPORTED = (
    "mcp_sessions.layer", "mcp_sessions.acp", "mcp_sessions.client.sdk", "mcp_sessions.cli.main",
    # A server of the SDK imports it.
    "rich.logging",
)  # fmt: skip
"""What takes long."""

_OURS = ("mcp_sessions", "mcp_sessions_conformance", "tests")
"""Packages whose modules are run. Another one may look what was imported before it: pytest does."""

_STARTS_PYTHON = ("PYTHON", "LD_", "TZ")
"""How the names of variables begin that count when Python starts."""

_PLAIN = ("", "C", "POSIX", "C.UTF-8", "C.utf8")
"""Locales that are one to Python."""

_SUBREAPER = 36
_LONGEST = 150_000
"""Bytes of an order; a longer one is not given."""


def fork_programs() -> None:
    """From now on, in this process."""
    if sys.platform == "linux" and os.environ.get("SESSIONS_TESTS_FORK") != "no":
        module = cast(Any, subprocess)
        forking = Forking(module._fork_exec)
        _FORKING.append(forking)
        module._fork_exec = forking.start
        # Of two ways to start a process this is the other.
        module._USE_POSIX_SPAWN = False


_FORKING: list["Forking"] = []
"""The one of this process."""


def have_imported() -> None:
    """Wait until the process that forks has imported the SDK. It blocks the event loop: a test
    whose server has a time to start in calls this before.
    """
    for forking in _FORKING:
        forking.prepare()


class Forking:
    """Starts processes."""

    def __init__(self, fork_exec: Any) -> None:
        self.fork_exec = fork_exec
        self._lock = threading.Lock()
        self._environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._channel: socket.socket | None = None
        """To the process that forks; it exits when this is closed."""

    def start(self, *given: Any) -> int:
        """What ``subprocess._fork_exec`` does; the same arguments and result."""
        order = _order(_decisive(self._environment), *given)
        if order is None:
            return self.fork_exec(*given)
        read_by, _, _, written_by, _, complained_by = given[6:12]
        files = [
            number if number != -1 else own
            for own, number in enumerate((read_by, written_by, complained_by))
        ]
        channel = self.prepare()
        with self._lock:
            # A process whose parent exits becomes a child of the nearest one that asked for it.
            _reap_orphans(True)
            try:
                socket.send_fds(channel, [order], files)
                pid = int(channel.recv(32))
            finally:
                _reap_orphans(False)
        return pid

    def prepare(self) -> socket.socket:
        with self._lock:
            if self._channel is None:
                self._channel = self._forker()
                self._channel.recv(32)
            return self._channel

    def _forker(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.set_inheritable(True)
            command = [sys.executable, __file__, str(theirs.fileno())]
            null = os.open(os.devnull, os.O_RDWR)
            os.posix_spawn(
                command[0],
                command,
                self._environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, null, number) for number in range(3)],
            )
            os.close(null)
        atexit.register(ours.close)
        return ours


def _order(
    decisive: dict[str, str],
    args: Sequence[Any],
    programs: Sequence[bytes],
    close_fds: bool,
    kept: Sequence[int],
    cwd: Any,
    environment: list[bytes] | None,
    *rest: Any,
) -> bytes | None:
    """What is to be forked; None: start it as ever."""
    read_by, _, _, written_by, _, complained_by, _, failure_pipe = rest[:8]
    _, new_session, group, *identity, before, _ = rest[8:]
    words = [os.fsdecode(word) for word in args]
    if words[0] != sys.executable or [os.fsencode(sys.executable)] != list(programs):
        return None
    is_module = words[1:2] == ["-m"] and words[2:3] and words[2].split(".")[0] in _OURS
    if not is_module and not (words[1:2] and words[1].endswith(".py")):
        return None
    if not close_fds or list(kept) != [failure_pipe] or group != -1:
        return None
    if before is not None or identity != [None, None, None, -1]:
        return None
    if any(number != -1 and os.isatty(number) for number in (read_by, written_by, complained_by)):
        return None
    position = os.path.abspath(os.fsdecode(cwd) if cwd is not None else os.getcwd())
    variables = dict(os.environ)
    if environment is not None:
        pairs = (os.fsdecode(pair).partition("=") for pair in environment)
        variables = {name: value for name, _, value in pairs}
    if not os.path.isdir(position) or _decisive(variables) != decisive:
        return None
    if any(os.path.exists(f"{entry}/sitecustomize.py") for entry in _path(variables)):
        return None
    order = json.dumps([words, position, variables, bool(new_session)]).encode()
    return order if len(order) <= _LONGEST else None


def _path(variables: Mapping[str, str]) -> list[str]:
    return [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _decisive(variables: Mapping[str, str]) -> dict[str, str]:
    named = (variables.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    locale = next(filter(None, named), "")
    return {
        "locale": "C" if locale in _PLAIN else locale,
        **{
            name: value
            for name, value in variables.items()
            if name.startswith(_STARTS_PYTHON) and name != "PYTHONPATH"
        },
    }


def _reap_orphans(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# --- in the process that forks ----------------------------------------------------------------


def _ordered(channel: socket.socket) -> list[Any] | None:
    """Fork for each order. In the child: what was ordered; None: no more will come."""
    while True:
        order, files, _, _ = socket.recv_fds(channel, _LONGEST, 3)
        if not order:
            return None
        read, write = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(write)
            # Its end tells that the parent is the one that it stays.
            os.read(read, 1)
            ordered = json.loads(order)
            # Before anybody knows of it: who ends its group must not end that of the tests.
            if ordered.pop():
                os.setsid()
            channel.send(str(os.getpid()).encode())
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(read, *files, channel.fileno()) + 1)
            channel.detach()
            return ordered
        os.waitpid(between, 0)
        for file in (read, write, *files):
            os.close(file)


def _run(words: list[str], position: str, variables: dict[str, str]) -> None:
    os.chdir(position)
    os.environ.clear()
    os.environ.update(variables)
    sys.orig_argv = words
    path = _path(variables)
    if words[1] == "-m":
        sys.path[:0] = [position, *path]
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(words[1]).resolve().parent), *path]
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")


def _leave(status: int) -> None:
    """End as Python does, but leave the modules and their objects to the system: to take apart
    what was imported takes longer than most of these programs run.
    """
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if cast(Any, stream) is not None and not stream.closed:
                stream.flush()
    except OSError:
        # Python says what is wrong with it, and has a status for it.
        return
    os._exit(status & 0xFF)


if __name__ == "__main__":
    # This file's directory.
    del sys.path[0]
    _channel = int(sys.argv[1])
    os.closerange(3, _channel)
    os.closerange(_channel + 1, os.sysconf("SC_OPEN_MAX"))
    for _name in IMPORTED:
        import_module(_name)
    gc.freeze()
    _orders = socket.socket(fileno=_channel)
    _orders.send(b"imported")
    _found = _ordered(_orders)
    if _found is not None:
        try:
            _run(*_found)
        except SystemExit as _ended:
            if _ended.code is None or isinstance(_ended.code, int):
                _leave(_ended.code or 0)
            raise
        _leave(0)
