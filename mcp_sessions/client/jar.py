"""Sessions that a client keeps between runs, each for one server and one user.

Rules that must hold, and that ``tests/client/test_jar.py`` owns:

1. A session is offered to the server that it is of, and to no other: the key is the target
   (for a URL without user, password and query) and the user.
2. The file is for its owner alone (0600) and is replaced as a whole: whoever reads it sees
   what was before or what is after, and a crash leaves one of the two.
3. Two processes may use one file. Each has a session of its own, since a session has one
   connection: the second to come gets another one, and both are kept.

4. A call whose result asks the user is remembered before the application gets the questions,
   and forgotten with the answer to the request that continues it. In the 2026 era such a call waits
   for the next request, which carries its ``requestState``. So a program that stops in between
   continues the call in its next run. The calls are bounded in number and in bytes; the oldest are
   forgotten first.

The state and the id are credentials; nothing here logs them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

from mcp_sessions.argument_types import checked
from mcp_sessions.core.messages import Json, encode, entries_of, members_of
from mcp_sessions.core.resume import EventId
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)

STATE: Final = "io.github.mcp-sessions/task:"
"""How the ``requestState`` of a round begins. The id of its task follows."""

SLOTS = 16
"""Processes that can keep a session of the same server and user at the same time."""

_VERSION = 1

_MOST: Final = 16
_MOST_BYTES: Final = 65_536

_NOT_ITS_OWN: Final = frozenset({"_meta", "inputResponses", "requestState"})
"""Members of a request that belong to one round of a call only."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call of this session that waits for answers of the user.

    To continue it, send the request again with this ``request_state``::

        for call in transport.open_calls:
            if call.method == "tools/call":
                name, arguments = call.params["name"], call.params.get("arguments")
                await client.call_tool(name, arguments, request_state=call.request_state)

    The server asks the same questions again, and the callbacks of the client answer them.
    """

    method: str
    """``tools/call``, ``prompts/get`` or ``resources/read``."""

    params: Json
    """The request's params, without ``_meta``."""

    questions: Json
    """Name of a question → its ``method`` and ``params``."""

    request_state: str = field(repr=False)
    """Names the call at the server. Do not log it."""


class OpenCalls:
    def __init__(self) -> None:
        self._calls: OrderedDict[str, OpenCall] = OrderedDict()

    def all(self) -> tuple[OpenCall, ...]:
        return tuple(self._calls.values())

    def restart(self, calls: Iterable[OpenCall] = ()) -> None:
        self._calls = OrderedDict((call.request_state, call) for call in calls)

    def answered(self, request: Mapping[str, Any], result: Mapping[str, Any] | None) -> bool:
        """Note the answer to a request of the application.

        Args:
            result: None: the answer is an error.

        Returns:
            Whether the open calls changed.
        """
        params = members_of(request.get("params"))
        continued = params.get("requestState")
        changed = self._calls.pop(continued, None) if isinstance(continued, str) else None
        call = _asks(str(request.get("method")), params, result or {})
        if call is not None and _size(call) <= _MOST_BYTES:
            self._calls[call.request_state] = call
            while len(self._calls) > _MOST or sum(map(_size, self._calls.values())) > _MOST_BYTES:
                self._calls.popitem(last=False)
        return changed is not None or call is not None


def saved_session_of(saved: object) -> SavedSession | None:
    """Return a session as a jar has it; None: it is none."""
    members = members_of(saved)
    session_id, position = members.get("session_id"), members.get("position")
    if not isinstance(session_id, str):
        return None
    return SavedSession(
        session_id,
        state=_text(members.get("state")),
        expires_at=_text(members.get("expires_at")),
        position=position if isinstance(position, (str, int)) else None,
        resumable=members.get("resumable") is not False,
        instance=_text(members.get("instance")),
        routes=members.get("routes") is True,
        open_calls=tuple(filter(None, map(open_call_of, entries_of(members.get("open_calls"))))),
    )


def open_task_of(saved: object) -> OpenTask | None:
    members = members_of(saved)
    task_id, tool, arguments = (members.get(name) for name in ("task_id", "tool", "arguments"))
    if not isinstance(task_id, str) or not isinstance(tool, str):
        return None
    return OpenTask(task_id, tool, members_of(arguments) if arguments is not None else None)


def open_call_of(saved: object) -> OpenCall | None:
    members = members_of(saved)
    method, state = members.get("method"), members.get("request_state")
    if not isinstance(method, str) or not isinstance(state, str):
        return None
    params, questions = members_of(members.get("params")), members_of(members.get("questions"))
    return OpenCall(method, params, questions, state)


def _size(call: OpenCall) -> int:
    return len(encode((call.params, call.questions, call.request_state)))


def _asks(method: str, params: Mapping[str, Any], result: Mapping[str, Any]) -> OpenCall | None:
    if result.get("resultType") != "input_required":
        return None
    state, questions = result.get("requestState"), members_of(result.get("inputRequests"))
    if not isinstance(state, str) or not questions:
        return None
    own = {name: value for name, value in params.items() if name not in _NOT_ITS_OWN}
    return OpenCall(method, own, questions, state)


@dataclass(frozen=True, slots=True)
class SavedSession:
    session_id: str
    state: str | None = None
    expires_at: str | None = None
    position: EventId | None = None
    resumable: bool = True
    instance: str | None = None
    """How its client calls itself: what an earlier run gave up may be served in this one."""

    routes: bool = False
    """Its server asks that requests name their session, for proxies (RTE1)."""

    open_calls: tuple[OpenCall, ...] = ()
    """Its calls that wait for answers of the user."""


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that a call of this program became, in this run or in an earlier one.

    ``await transport.task(task_id)`` waits for its result. A task that asks its user is continued
    by the call, as in :class:`~mcp_sessions.OpenCall`::

        for task in transport.tasks():
            await client.call_tool(task.tool, task.arguments, request_state=task.request_state)
    """

    task_id: str = field(repr=False)
    """Names the task at the server. Do not log it."""

    tool: str
    arguments: Json | None = None

    @property
    def request_state(self) -> str:
        return STATE + self.task_id


class JarSlot(Protocol):
    """Keeps one client's session and its tasks, until it is closed."""

    def load(self) -> SavedSession | None:
        """Return the saved session; None: there is none, or it cannot be read."""
        ...

    def save(self, session: SavedSession | None) -> None:
        """Keep ``session``; None: there is none any more.

        Raises:
            OSError: It could not be written.
        """
        ...

    def load_tasks(self) -> Sequence[OpenTask]:
        """Return the saved tasks, oldest first."""
        ...

    def save_tasks(self, tasks: Sequence[OpenTask]) -> None:
        """Keep these tasks, and no others.

        Raises:
            OSError: It could not be written.
        """
        ...

    def close(self) -> None: ...


class Jar(Protocol):
    def open(self, target: str, user: str) -> JarSlot | None:
        """Open a slot for a session of that server and user; None: all are taken.

        Raises:
            OSError: The jar cannot be used.
        """
        ...


class FileJar:
    """A jar in one file.

    Args:
        path: The file; its folder must exist. Its lock files are next to it, and empty.
        user: The owner of these sessions, if one file serves several users.

    Raises:
        ConfigurationError: There is no such folder, or the file cannot be read or is no jar. It is
            left as it is: it may be somebody's.
    """

    @checked()
    def __init__(self, path: str | os.PathLike[str], *, user: str = "") -> None:
        self.path = Path(path)
        self.user = user
        try:
            os.stat(self.path.absolute().parent)
            self._content()
        except OSError as error:
            reason = reason_of(error, self.path)
            raise ConfigurationError(f"the jar {self.path}: {reason}") from error
        except ValueError as error:
            raise ConfigurationError(
                f"the jar {self.path}: this file is no jar: name another one, or delete it"
            ) from error

    def open(self, target: str, user: str = "") -> JarSlot | None:
        for number in range(SLOTS):
            name = json.dumps([target, user or self.user, number])
            held = _try_lock(self._lock_path(name))
            if held is not None:
                return _FileSlot(self, name, held)
        logger.warning("the jar is full: it has %d sessions of this user at this server", SLOTS)
        return None

    def _lock_path(self, name: str) -> Path:
        import hashlib

        short = hashlib.sha256(name.encode()).hexdigest()[:16]
        return self.path.with_name(f".{self.path.name}.{short}.lock")

    def read(self, kind: str = "sessions") -> dict[str, Any]:
        """Name → what was saved; empty if there is no file or it cannot be understood.

        Args:
            kind: ``sessions``, or ``tasks``, which do not end with a session.
        """
        try:
            content = self._content()
        except ValueError:
            logger.warning("%s is not a jar: its sessions are given up", self.path)
            return {}
        if content and content["version"] != _VERSION:
            logger.warning("%s is of another version: its sessions are given up", self.path)
            return {}
        return members_of(content.get(kind))

    def _content(self) -> Mapping[str, Any]:
        """What the file has; empty if there is no file, or nothing in it.

        Raises:
            ValueError: It is no jar.
            OSError: It cannot be read.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        content = members_of(json.loads(text)) if text else {}
        if text and not isinstance(content.get("version"), int):
            raise ValueError("no version of a jar")
        return content

    def change(self, name: str, saved: object, kind: str = "sessions") -> None:
        """Replace one entry. Others' entries are left as they are, also while they write.

        Raises:
            OSError: It could not be written.
        """
        with self._locked():
            content = {each: self.read(each) for each in ("sessions", "tasks")}
            if saved:
                content[kind][name] = saved
            else:
                content[kind].pop(name, None)
            self._replace({"version": _VERSION, **content})

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        with _open_private(self.path.with_name(f".{self.path.name}.lock")) as lock:
            _lock(lock, wait=True)
            yield

    def _replace(self, content: dict[str, Any]) -> None:
        # mkstemp makes it 0600 from the start: there is no moment in which others can read.
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


class _FileSlot:
    def __init__(self, jar: FileJar, name: str, held: IO[bytes]) -> None:
        self._jar = jar
        self._name = name
        self._held = held

    def load(self) -> SavedSession | None:
        return saved_session_of(self._jar.read().get(self._name))

    def save(self, session: SavedSession | None) -> None:
        self._jar.change(self._name, asdict(session) if session is not None else None)

    def load_tasks(self) -> Sequence[OpenTask]:
        saved = entries_of(self._jar.read("tasks").get(self._name))
        return [task for each in saved if (task := open_task_of(each))]

    def save_tasks(self, tasks: Sequence[OpenTask]) -> None:
        self._jar.change(self._name, [asdict(task) for task in tasks], "tasks")

    def close(self) -> None:
        """Unlock and close the file. The lock goes with the file, also if the process is killed."""
        self._held.close()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _open_private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def _try_lock(path: Path) -> IO[bytes] | None:
    file = _open_private(path)
    try:
        _lock(file, wait=False)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes], *, wait: bool) -> None:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error

else:
    import fcntl

    def _lock(file: IO[bytes], *, wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
