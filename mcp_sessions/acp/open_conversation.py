"""One open conversation: its record, the client that sees it, and its MCP servers.

Rules that must hold, and that ``tests/acp/`` owns:

1. No update reaches a client that is not in the record. A client gets the record: whole, in order,
   nothing twice, whichever process wrote it.
2. One client sees it. It is the client that loads it last. The client before gets only the answers
   to its own requests.
3. Waits for a slow client are outside of the lock, so that another client can always take the
   conversation over.
4. An entry of the record is stored whole or not at all, also if it is several updates: a user's
   message is one entry, however many parts it has.
5. Nothing in the record is merged, replaced or left out. It stays for ever.
6. Reading takes memory for one page, however long the conversation is.

An entry is one update per line; each line is the ``params`` of its ``session/update`` but
for ``sessionId``, which is the same in all and would be one more copy of a credential.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

from acp.schema import SessionNotification

from mcp_sessions.acp.acp_errors import internal_error, session_not_found
from mcp_sessions.acp.agent_questions import Json
from mcp_sessions.acp.link import Link
from mcp_sessions.acp.servers import Servers
from mcp_sessions.background import to_the_end
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.core.story import NOTHING, Entry, Why, detaches
from mcp_sessions.errors import SessionRequired, StoreUnavailable
from mcp_sessions.ids import ConnectionId, FencingEpoch, Position, SessionId, digest, parse_position
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Appended, Attachment

if TYPE_CHECKING:
    from mcp import Client


PAGE = 1_024
"""Entries of a page at the most; the store ends it earlier if they are large."""


class Record:
    def __init__(
        self, store: SessionStore, session_id: SessionId, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._session_id = session_id
        self._clock = clock
        self._opening = (
            b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":'
            + encode(session_id)
            + b","
        )

    async def append(self, updates: Iterable[dict[str, Any]]) -> Appended:
        """Store one entry: it is durable when this returns.

        Args:
            updates: The ``params`` of each ``session/update``, without ``sessionId``.

        Raises:
            StoreUnavailable: Unknown whether it was stored.
            RequestError: The conversation was deleted.
        """
        draft = Draft(b"\n".join(encode(update) for update in updates))
        appended = await self._store.append(self._session_id, draft, now=self._clock())
        if appended is None:
            raise session_not_found(self._session_id)
        return appended

    async def head(self) -> Position:
        """The position after the newest entry.

        Raises:
            StoreUnavailable: The store did not answer.
            RequestError: The conversation was deleted.
        """
        position = await self._store.head(self._session_id)
        if position is None:
            raise session_not_found(self._session_id)
        return position

    async def pages(
        self, after: Position | None = None
    ) -> AsyncGenerator[Sequence[LoggedEvent], None]:
        """The entries, oldest first, in pages that are not empty.

        Args:
            after: Where to begin; None: with the first.

        Raises:
            StoreUnavailable: The store did not answer, or has lost a part of it.
            RequestError: The conversation was deleted.
        """
        if after is None:
            after = Position((await self.head()).log_epoch, 0)
        position = after.event_id()
        while True:
            page, refusal = await self._store.read(
                self._session_id, position, now=self._clock(), limit=PAGE
            )
            if refusal is not None:
                raise StoreUnavailable(f"a conversation cannot be read completely: {refusal.value}")
            if not page:
                return
            position = page[-1].event_id
            yield page

    def wire(self, events: Iterable[LoggedEvent]) -> bytes:
        opening = self._opening
        return b"".join(
            [opening + line[1:] + b"}\n" for event in events for line in event.payload.split(b"\n")]
        )

    @staticmethod
    def updates(events: Iterable[LoggedEvent]) -> list[dict[str, Any]]:
        return [decode(line) for event in events for line in event.payload.split(b"\n")]


class Conversation:
    """The conversation that an agent's method was called for; see `current_conversation`."""

    def __init__(self, session_id: str, record: Record, servers: Servers) -> None:
        self.id = session_id
        """The session's id on the wire: unlike an agent's own it stays the same for ever. It
        is a credential: whoever has it can load the conversation."""

        self._record = record
        self._servers = servers

    def __repr__(self) -> str:
        return f"<Conversation {digest(self.id)}>"

    @property
    def cwd(self) -> str:
        """The working directory that the client named last: absolute."""
        return self._servers.cwd

    @property
    def mcp(self) -> Mapping[str, Client]:
        """The MCP servers that the client named: name → a connected ``mcp.Client``.

        One that could not be reached is not in it; the client got an error.
        """
        return self._servers.clients

    async def history(self) -> AsyncGenerator[Any, None]:
        """Every update of the conversation, oldest first, in the ACP library's classes.

        The user's messages are ``UserMessageChunk``; inside a prompt its own are the last. It
        is read page by page: the memory it takes does not grow with the conversation.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        async for page in self._record.pages():
            for update in Record.updates(page):
                notification = {"sessionId": self.id, **update}
                yield SessionNotification.model_validate(notification).update


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Turn:
    link: Link
    """The client that waits for its answer."""

    task: asyncio.Task[Any] | None = None
    """The agent's; None: it did not begin."""

    cancelled: bool = False
    """The client asked for its end."""

    fault: Exception | None = None
    """An update of it could not be stored."""

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(eq=False, repr=False)
class OpenConversation:
    session_id: SessionId
    _store: SessionStore
    servers: Servers
    _clock: Callable[[], float] = time.time
    link: Link | None = field(init=False, default=None)
    """The client that sees it; None: nobody."""

    fencing_epoch: FencingEpoch | None = field(init=False, default=None)
    """The epoch of this process's attachment."""

    taken_away: bool = field(init=False, default=False)
    """Another process has it now."""

    _has_title: bool = field(init=False, default=False)
    """Its first message was looked at for a title."""

    _replaying: bool = field(init=False, default=False)
    _shown: Position | None = field(init=False, default=None)
    """The newest entry that the client has, or that is its own."""

    def __post_init__(self) -> None:
        self.turns: set[Turn] = set()
        """The running prompts."""

        self.agent_ids: list[str] = []
        """The agent's own names for it, the newest last."""

        self._seen_by: set[ConnectionId] = set()
        self._record = Record(self._store, self.session_id, self._clock)
        self.handle = Conversation(self.session_id, self._record, self.servers)
        """The agent's view of the conversation."""

        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return repr(self.handle)

    @property
    def agent_id(self) -> str | None:
        return self.agent_ids[-1] if self.agent_ids else None

    def was_seen_by(self, link: Link) -> bool:
        return link.connection_id in self._seen_by

    def takes_title(self) -> bool:
        had_title, self._has_title = self._has_title, True
        return not had_title

    def named_by_agent(self, agent_id: str) -> None:
        if agent_id in self.agent_ids:
            self.agent_ids.remove(agent_id)
        self.agent_ids.append(agent_id)

    async def record(self, updates: Iterable[Json], *, sent_by: Link | None = None) -> None:
        """Store updates as one entry, then show them to the client.

        Args:
            updates: The ``params`` of each ``session/update``, without ``sessionId``.
            sent_by: This client has them already: it sent them.

        Raises:
            StoreUnavailable: Unknown whether they were stored; nothing was shown.
            RequestError: The conversation was deleted.
        """
        link = self.link
        if link is not None and link is not sent_by:
            await link.outgoing.drain(until=lambda: self.link is not link)
        # To the end, whatever becomes of the caller: an entry that is stored is also shown.
        await to_the_end(self._record_now(list(updates), sent_by))

    async def _record_now(self, updates: list[Json], sent_by: Link | None) -> None:
        async with self._lock:
            appended = await self._record.append(updates)
            link, event = self.link, appended.event
            if link is None or self._shown is None or self._replaying:
                return
            if not self._is_ours(appended.attachment):
                logger.info("%r was taken over by another process", self)
                self.taken_away = True
                return
            if event.number > self._shown.number + 1:
                # Another process, or a write whose outcome was not known.
                await self._show_until(event.number - 1)
            if link is not sent_by:
                link.push(self._record.wire([event]))
            self._shown = Position(self._shown.log_epoch, event.number)

    async def catch_up(self) -> None:
        """Show the updates of the record that were not shown: for example, if their outcome was not
        known.

        Raises:
            StoreUnavailable: The store did not answer.
            RequestError: The conversation was deleted.
        """
        async with self._lock:
            if self.link is None or self._shown is None:
                return
            if not self.taken_away and not self._replaying:
                head = await self._record.head()
                if head.number > self._shown.number:
                    await self._show_until(head.number)

    async def _show_until(self, number: int) -> None:
        assert self._shown is not None and self.link is not None
        async for page in self._record.pages(self._shown):
            due = [event for event in page if event.number <= number]
            self._show(self.link, due)
            if len(due) < len(page):
                return

    def _show(self, link: Link, events: Sequence[LoggedEvent]) -> None:
        if events:
            link.push(self._record.wire(events))
            self._shown = parse_position(events[-1].event_id)

    def _is_ours(self, attachment: Attachment | None) -> bool:
        return (
            self.link is not None
            and attachment is not None
            and attachment.connection_id == self.link.connection_id
        )

    async def show_to(self, link: Link, *, from_start: bool, answer: Callable[[], None]) -> None:
        """From now on this client sees it; the one before does not.

        Args:
            from_start: Replay the whole record first.
            answer: Called when the replay is handed over and before anything newer is.

        Raises:
            StoreUnavailable: The store did not answer; the client before keeps it.
            RequestError: The conversation was deleted.
        """
        shown: Position | None = None
        if from_start:
            # Its own client asks for it all again: what is said meanwhile comes in its place.
            self._replaying = self.link is link
            try:
                # Without the lock: what runs for the client before continues.
                async for page in self._record.pages():
                    await link.outgoing.drain()
                    if link.outgoing.closed:
                        raise internal_error("the client is gone")
                    link.push(self._record.wire(page))
                    shown = parse_position(page[-1].event_id)
            except BaseException:
                self._replaying = False
                raise
        await to_the_end(self._attach(link, shown, from_start, answer))

    async def _attach(
        self, link: Link, shown: Position | None, from_start: bool, answer: Callable[[], None]
    ) -> None:
        async with self._lock:
            self._replaying = False
            now = self._clock()
            entry = Entry(now, f"attached acp {NOTHING} {Why.OPENED}")
            attached = await self._store.attach(
                self.session_id, link.connection_id, now=now, entry=entry
            )
            if attached is None:
                raise session_not_found(self.session_id)
            rest: list[bytes] = []
            if from_start:
                async for page in self._record.pages(shown):
                    rest.append(self._record.wire(page))
                    shown = parse_position(page[-1].event_id)
            before, self.link = self.link, link
            self._shown = shown or parse_position(attached.head)
            self.fencing_epoch = attached.fencing_epoch
            self.taken_away = False
            self._seen_by.add(link.connection_id)
            for chunk in rest:
                link.push(chunk)
            answer()
            if before is not None and before is not link:
                logger.info("%r was taken over by another client", self)
                before.outgoing.wake()
                for question in before.questions.about(self.session_id):
                    # One that this client cannot answer is left to the one before.
                    if link.questions.may_be_asked(question):
                        link.questions.ask(question)

    async def release(self) -> None:
        """Nobody sees it any more, and its servers are disconnected.

        Raises:
            StoreUnavailable: The store did not answer; the rest is done.
        """
        link, self.link = self.link, None
        if link is not None:
            link.outgoing.wake()
        await self.servers.close()
        if self.fencing_epoch is not None:
            entry = detaches(self._clock(), Why.CLOSED, NOTHING)
            await self._store.detach(self.session_id, self.fencing_epoch, entry)


Default = TypeVar("Default")


@dataclass(slots=True, eq=False)
class Opening:
    """A ``session/new``, ``session/load`` or ``session/resume`` that is being answered."""

    is_new: bool
    held: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Messages that the agent sends meanwhile. They are sent after the answer."""

    ended: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    link: Link
    conversation: OpenConversation | None = None
    turn: Turn | None = None
    opening: Opening | None = None


CALL: ContextVar[Call | None] = ContextVar("mcp_sessions_acp_call", default=None)


class _Required:
    """Stands for "no default was given"."""


@overload
def current_conversation() -> Conversation: ...
@overload
def current_conversation(*, default: Default) -> Conversation | Default: ...
def current_conversation(*, default: object = _Required) -> object:
    """The conversation that the agent's method was called for.

    In ``new_session`` and ``load_session`` it is the one that is being opened.

    Args:
        default: The value outside of a conversation.

    Raises:
        SessionRequired: There is none, and no default was given.
    """
    call = CALL.get()
    if call is not None and call.conversation is not None:
        return call.conversation.handle
    if default is _Required:
        raise SessionRequired
    return default
