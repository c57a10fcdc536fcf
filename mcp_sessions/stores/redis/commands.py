"""Run commands and Lua scripts for the store in Redis. Both answer as :class:`RedisLink` does.

Each write is one script, so that it is atomic and costs one round trip. The scripts are in
``lua/*.lua``. A line ``-- script NAME: LIBRARY LIBRARY`` begins one. What stands before the first
is in front of each script of that file. They are plain scripts, not functions: a function library
has one name per server, which two releases of this library on one Redis (every deploy has that
moment) would fight for; a script is named by its content.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import wraps
from importlib import resources
from types import CoroutineType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from mcp_sessions.core.life import idle_times, longest_life
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.outage import Outage
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.redis.record_codec import (
    NOTHING,
    KnownFacts,
    KnownSessions,
    ScriptAnswer,
    record_of,
    unreadable,
)
from mcp_sessions.stores.redis.redis_connection import ClusterLink, RedisLink, Value
from mcp_sessions.stores.redis.refusals import unavailable
from mcp_sessions.stores.shared_clock import SharedClock

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")
P = ParamSpec("P")

NAME = "redis"
"""The name of the store, for people."""

AT_ONCE = 200
"""Calls that are under way at once, where there is one for each of many sessions."""


MARGIN = 900
"""Seconds that a key lives on after its session's deadline; ``lua/session.lua`` has it too."""


_BEGINS = re.compile(r"^-- script (\w+):(.*)\n", re.MULTILINE)


class Script(NamedTuple):
    name: str
    text: str
    sha: str


def _scripts() -> Iterable[Script]:
    folder = resources.files("mcp_sessions.stores.redis") / "lua"
    files = {each.name: each.read_text("utf-8") for each in folder.iterdir()}
    for text in files.values():
        common, *parts = _BEGINS.split(text)
        for name, needs, own in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            whole = "\n".join([*(files[f"{each}.lua"] for each in needs.split()), common, own])
            sha = hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest()
            yield Script(name, whole, sha)


SCRIPTS = {script.name: script for script in _scripts()}


def tag_of(name: str) -> str:
    """Return the tag of a name (a session id, a URI) in a key.

    Keys turn up in monitors, slow logs and listings of backups, and must hold no credential.
    """
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40]


class Commands:
    def __init__(self, link: RedisLink, namespace: str, clock: Callable[[], float]) -> None:
        self._link: RedisLink | ClusterLink = link
        self._namespace = namespace
        self._policy = SessionPolicy()
        self._window: tuple[Value, ...] = ()
        """The bounds of a log, as the scripts take them."""

        self._idle_times = idle_times(self._policy)
        self._sessions = KnownSessions()
        self._clock = SharedClock(self._time, clock)
        self._all = f"{{{namespace}}}:all"
        self.outage = Outage(NAME)

    # --- one session ---------------------------------------------------------------------

    @property
    def clock_ahead(self) -> float:
        return self._clock.ahead

    @property
    def _list_lifetime(self) -> int:
        longest = longest_life(Mode.CONVERSATION, self._policy)
        return math.ceil((longest + MARGIN) * 1000)

    def _record(self, answer: ScriptAnswer, known: KnownFacts = NOTHING) -> SessionRecord:
        try:
            return record_of(answer, self._sessions, known)
        except UNEXPECTED as failed:
            raise unreadable(failed) from failed

    # --- keys and scripts ----------------------------------------------------------------

    def _key_of(self, tag: str) -> str:
        return f"{self._namespace}:{{{tag}}}"

    def _key(self, session_id: SessionId) -> str:
        # As _key_of, which would be one call more for each request.
        return f"{self._namespace}:{{{tag_of(session_id)}}}"

    def _owned(self, owner: bytes) -> str:
        return f"{{{self._namespace}}}:of:{tag_of(owner.decode())[:16]}"

    def _subscribers_key(self, uri: str) -> str:
        return f"{self._namespace}:uri:{{{tag_of(uri)}}}"

    async def _time(self) -> float:
        answer = await self._command("TIME")
        try:
            seconds, microseconds = answer
            return int(seconds) + int(microseconds) / 1_000_000
        except (ValueError, TypeError) as wrong:
            raise unavailable(wrong, self._link.server) from wrong

    async def _on(self, session_id: SessionId, script: str, *args: Value) -> ScriptAnswer:
        return await self._run(script, [self._key(session_id)], *args)

    async def _on_each(self, script: str, keys: Sequence[str], *args: Value) -> list[ScriptAnswer]:
        """Run a script on any number of sessions, and return its answer for each of them.

        In a cluster each session has its own slot.
        """
        if not keys:
            return []
        if len(keys) == 1 or isinstance(self._link, RedisLink):
            return await self._run(script, keys, *args)
        each = await all_of(self._run(script, [key], *args) for key in keys)
        return [answer for (answer,) in each]

    async def _run(self, name: str, keys: Sequence[str], *args: Value) -> ScriptAnswer:
        script = SCRIPTS[name]
        # A peer's text may be none in UTF-8; then it is unknown here as any other.
        args = tuple(
            [arg.encode("utf-8", "surrogatepass") if isinstance(arg, str) else arg for arg in args]
        )
        try:
            try:
                return await self._link.call("EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:
                # Said before anything ran. This sends it, and the server keeps it.
                return await self._link.call("EVAL", script.text, len(keys), *keys, *args)
        except ResponseError as refused:
            raise self._refused(refused, keys[0]) from refused
        except StoreUnavailable as failed:
            self.outage.failed(failed)
            raise

    async def _command(self, *args: Value) -> ScriptAnswer:
        try:
            return await self._link.call(*args)
        except ResponseError as refused:
            raise self._refused(refused, str(args[1]) if len(args) > 1 else "") from refused
        except StoreUnavailable as failed:
            self.outage.failed(failed)
            raise

    def _refused(self, refused: ResponseError, key: str) -> Exception:
        if "EVENTIDS" in str(refused):
            return OverflowError("this event log has issued its last id")
        named = key if self._namespace in key else None
        failed = unavailable(refused, self._link.server, key=named)
        self.outage.failed(failed)
        return failed


UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions of Python for an answer that no script of ours gives."""


def readable(method: Callable[P, Awaitable[T]]) -> Callable[P, CoroutineType[Any, Any, T]]:
    """Return ``method`` so that it raises `StoreRefused` for an answer of no script of ours.

    None of its own arguments may raise one of ``UNEXPECTED``.
    """

    @wraps(method)
    async def call(*args: P.args, **named: P.kwargs) -> T:
        try:
            return await method(*args, **named)
        except UNEXPECTED as failed:
            raise unreadable(failed) from failed

    return call


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all calls, a bounded number at once, and return their results in order."""
    answers: list[T] = []
    batch: list[Coroutine[Any, Any, T]] = []
    for call in calls:
        batch.append(call)
        if len(batch) == AT_ONCE:
            answers += await asyncio.gather(*batch)
            batch = []
    return answers + await asyncio.gather(*batch)


async def each_of(
    call: Callable[[Item], Coroutine[Any, Any, T]], items: Iterable[Item]
) -> list[T | None]:
    """As :func:`all_of`, where one call that fails is not to stop the others: None for it.

    Raises:
        StoreUnavailable: All of them failed, and there was more than none.
    """

    async def caught(item: Item) -> T | StoreUnavailable:
        try:
            return await call(item)
        except StoreUnavailable as failed:
            return failed

    outcomes = await all_of(caught(item) for item in items)
    failures = [each for each in outcomes if isinstance(each, StoreUnavailable)]
    if failures and len(failures) == len(outcomes) and not isinstance(failures[0], StoreRefused):
        raise failures[0]
    if failures:
        logger.error("%d sessions could not be reached; the first: %s", len(failures), failures[0])
    return [None if isinstance(each, StoreUnavailable) else each for each in outcomes]


def known_to_script(known: KnownFacts) -> tuple[bytes, int]:
    return known.change, int(known.peer is not None)
