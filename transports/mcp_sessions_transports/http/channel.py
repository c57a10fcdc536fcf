"""The way back for one POST: a JSON body if the answer comes soon, else a stream.

On a transport-mode session a stream's messages are kept, each with an id, before they are
sent: a client that was cut comes back with ``Last-Event-ID`` and gets the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import NamedTuple, cast

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.messages import RequestId, error_message, plain_draft, wire_error
from mcp_sessions.errors import OutcomeUnknown, StoreUnavailable
from mcp_sessions.ids import Position, SessionEventId, SessionId, StreamName, position_of
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.connection.connection import (
    ClientConnection,
    Unless,
    WatchedChannel,
    unwatched,
)
from mcp_sessions.server.delivery.pending_writes import PendingWrite
from mcp_sessions.server.delivery.streams import LogAppend, StreamLog, Streams
from mcp_sessions.stores.records import Appended
from mcp_sessions_transports.http.io import HttpCall, send_json
from mcp_sessions_transports.http.post_streams import (
    MAX_REQUEST_ID,
    post_event_id,
    post_stream_name,
)
from mcp_sessions_transports.http.remote_response import RemoteResponse
from mcp_sessions_transports.http.sse import (
    HttpTransport,
    SseStream,
    priming_event,
    sse_event,
    sse_headers,
)
from mcp_sessions_transports.outbox import LogFeed

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

NO_SCOPES: frozenset[str] = frozenset()

JSON_DEADLINE = 0.1
"""Seconds within which an answer without anything before it goes as plain JSON."""


class Finished(NamedTuple):
    """A response stream that was answered and that nobody reads: all that stays of its request
    next to the messages.
    """

    request_id: RequestId
    final: SessionEventId
    """The id of its answer."""

    size: int
    """Bytes of its messages."""

    is_sent: bool
    """All of them were handed to the network."""


@dataclass(slots=True, eq=False, repr=False)
class ResponseStreams:
    """The response streams of one transport-mode session that this process answers: those that
    are running, and the newest of those that were answered, which can be fetched for a while;
    and those of other processes that are read here.

    Args:
        primes: The client understands an event without data.
    """

    session_id: SessionId
    _streams: Streams
    _policy: SessionPolicy
    primes: bool
    channels: dict[StreamName, PostChannel] = field(
        init=False, default_factory=dict[StreamName, "PostChannel"]
    )
    remote: dict[RemoteResponse, None] = field(
        init=False, default_factory=dict[RemoteResponse, None]
    )
    # A process has many connections, and most of them have none.
    _finished: dict[StreamName, Finished] | None = field(init=False, default=None)
    _forgotten: list[StreamName] | None = field(init=False, default=None)

    def log(self, name: StreamName) -> StreamLog:
        return self._streams(self.session_id, name)

    @property
    def has_any(self) -> bool:
        return bool(self.channels or self._finished)

    def knows(self, name: StreamName) -> bool:
        return name in self.channels or name in (self._finished or ())

    def read_again(self, name: StreamName) -> PostChannel | None:
        """Keep a stream while a client reads it again. None: it is not known any more."""
        finished = self._finished.pop(name, None) if self._finished is not None else None
        if finished is not None:
            self.channels[name] = PostChannel.of_finished(name, finished, self, self._policy)
        return self.channels.get(name)

    async def finished(self, name: StreamName, what: Finished) -> None:
        self.channels.pop(name, None)
        if self._finished is None:
            self._finished = {}
        self._finished[name] = what
        while (oldest := self._surplus(self._finished)) is not None:
            # Before the store forgets it: nobody may begin to read it any more.
            del self._finished[oldest]
            self._forgotten = [*(self._forgotten or ()), oldest]
        while self._forgotten:
            oldest = self._forgotten[-1]
            try:
                await self.log(oldest).drop()
            except StoreUnavailable:
                # A client that got its answer is not notified of it. The session's end forgets it,
                # too.
                logger.warning("a response stream is deleted later: the store is away")
                return
            self._forgotten = [name for name in self._forgotten or () if name != oldest] or None

    def _surplus(self, finished: dict[StreamName, Finished]) -> StreamName | None:
        policy = self._policy
        if len(finished) > policy.max_finished_streams:
            return next(iter(finished))
        # Only the last bytes of a sent answer can be missing at the client. All of an unsent one
        # are.
        for is_sent, most in ((True, policy.max_bytes), (False, policy.max_unread_bytes)):
            some = {name: each.size for name, each in finished.items() if each.is_sent is is_sent}
            if len(some) > 1 and sum(some.values()) > most:
                return next(iter(some))
        return None

    def close(self) -> None:
        for channel in list(self.channels.values()):
            channel.close()
        for remote in list(self.remote):
            remote.stream.finish()


def http_transport(connection: ClientConnection) -> HttpTransport[ResponseStreams]:
    transport: object = connection.transport
    if not isinstance(transport, HttpTransport):
        raise AssertionError("it is of no transport-mode session")
    return cast("HttpTransport[ResponseStreams]", transport)


async def _unheard(_: Appended | None) -> None:
    """Nobody reads it: it is handed to nobody."""


async def _nothing() -> None:
    """Nothing takes its place."""


@dataclass(eq=False, repr=False)
class PostChannel(WatchedChannel):
    """A :class:`~mcp_sessions.server.connection.binding.RequestChannel` over one POST.

    Args:
        prefers_stream: Answer with a stream even if the answer comes soon.
        streams: Its connection's; None: a lone POST, whose stream cannot be resumed.
        process: This one: its streams say who answers.
        scopes_beyond: Those of who sent the request that its connection does not need.
        answered: The stream of a request that was answered, and what is known of it. None: the
            request is new.
    """

    _request_id: RequestId
    _streams: ResponseStreams | None
    _policy: SessionPolicy
    _loop: asyncio.AbstractEventLoop
    _prefers_stream: bool
    _process: str
    _scopes_beyond: frozenset[str]
    _answered: InitVar[tuple[StreamLog, Finished] | None] = None
    readers: set[str] = field(init=False, default_factory=set[str])
    """The processes that serve its stream from the store."""

    close_stream: Callable[[], Awaitable[None]] | None = field(init=False, default=None)
    is_admitted = True
    _is_read: bool = field(init=False, default=True)
    _json: bytes | None = field(init=False, default=None)
    _away: StoreUnavailable | None = field(init=False, default=None)
    _stream: SseStream | None = field(init=False, default=None)
    _feed: LogFeed | None = field(init=False, default=None)
    _log: StreamLog | None = field(init=False, default=None)
    _final: SessionEventId | None = field(init=False, default=None)
    _size: int = field(init=False, default=0)
    _is_whole: bool = field(init=False, default=False)
    _is_broken: bool = field(init=False, default=False)
    _is_stream: bool = field(init=False, default=False)
    _opening: asyncio.Lock | None = field(init=False, default=None)
    _wanted: StreamLog | None = field(init=False, default=None)
    _retired: StreamName | None = field(init=False, default=None)
    """Its stream, when it was answered and nobody reads it."""

    _unstored: dict[str, Draft] | None = field(init=False, default=None)
    """The newest message of each key, until it is stored. None: there was none."""

    _keyed: asyncio.Lock | None = field(init=False, default=None)
    """Held while one with a key is stored: the newer one takes the place of the older."""

    @classmethod
    def of_finished(
        cls, name: StreamName, finished: Finished, streams: ResponseStreams, policy: SessionPolicy
    ) -> PostChannel:
        return cls(
            finished.request_id,
            streams,
            policy,
            asyncio.get_running_loop(),
            _prefers_stream=True,
            _process="",
            _scopes_beyond=NO_SCOPES,
            _answered=(streams.log(name), finished),
        )

    def __post_init__(self, answered: tuple[StreamLog, Finished] | None) -> None:
        self._turn: asyncio.Future[None] = self._loop.create_future()
        if answered is not None:
            self._log, (_, self._final, self._size, _) = answered
            self._is_read, self._is_stream = False, True
        request_id, streams = self._request_id, self._streams
        # A response whose id is longer is sent without ids: no event is larger than what it says
        # by much, and a client that was cut asks again (ERR6).
        self._is_kept = streams is not None and (
            not isinstance(request_id, str) or len(request_id) <= MAX_REQUEST_ID
        )
        self._primes = streams is not None and streams.primes
        if self._is_kept and self._primes:
            self.close_stream = self._close_stream

    # --- the way back --------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._is_read or bool(self.readers)

    async def emit(self, message: bytes, key: str | None = None) -> None:
        if self._retired is not None:
            await self._replace(message, key, self._retired)
            return
        await self._commit()
        await self._store_and_push(message, final=False, key=key)
        if self._stream is not None:
            await self._stream.drain()

    async def answer(
        self,
        message: bytes,
        *,
        code: int | None = None,
        away: StoreUnavailable | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Send the answer. The code changes nothing here: the status is 200."""
        if away is not None and not self._is_stream:
            self._away = away
            self._decided()
            return
        if self._prefers_stream:
            await self._commit()
        if not self._is_stream:
            self._json = message
            self._decided()
            return
        # It may still be opening, for a message before this one or for the deadline.
        await self._commit()
        await self._store_and_push(message, final=True)

    async def _retire(self) -> None:
        """Allow an answered stream that nobody reads to be forgotten."""
        final, log, streams = self._final, self._log, self._streams
        if final is None or self.is_open or streams is None or log is None:
            return
        is_sent = self._is_whole and self._feed is not None and self._feed.last == final
        # Only the request's messages stay. Their readers have channels of their own, and this one
        # retires nothing any more.
        self.on_closed = self.on_reopened = unwatched
        self.close_stream = self._stream = self._feed = self._opening = self._log = None
        self._retired = log.name
        what = Finished(self._request_id, final, self._size, is_sent)
        await streams.finished(log.name, what)

    async def _replace(self, message: bytes, key: str | None, name: StreamName) -> None:
        """Replace a message of the answered stream: who comes back for it does not get that one.
        What replaces it stands behind the answer, where nobody reads.
        """
        streams = self._streams
        if key is None or streams is None or not streams.knows(name):
            return

        async def is_forgotten() -> bool:
            return not streams.knows(name)

        log, draft = streams.log(name), plain_draft(message, key)
        await log.append(draft, _unheard, lost=lambda: _nothing, unless=is_forgotten)

    async def _store_and_push(self, message: bytes, *, final: bool, key: str | None = None) -> None:
        log = self._log
        if self._is_broken:
            return
        if log is None:
            self._push_unkept(message, final=final)
            return
        draft = plain_draft(message, key)
        unless: Unless | None = None
        if key is not None:
            self._unstored = self._unstored or {}
            self._unstored[key] = draft
            self._keyed = self._keyed or asyncio.Lock()
            unless = partial(self._is_left_out, draft)
        stored = partial(self._stored, draft, final)
        async with (key and self._keyed) or nullcontext():
            if await log.append(draft, stored, lost=self._break, unless=unless):
                return
        if final and self._feed is not None:
            # The store is away. Who listens gets all the same what it will have.
            waiting = [each for each in log.waiting if not await self._is_left_out(each)]
            self._feed.foresee(waiting)

    async def _is_left_out(self, draft: Draft) -> bool:
        """Whether a newer message replaces it. It is appended all the same if the store may have
        it, and the newer one waits: the number of the newer one is known then.
        """
        if draft.key is None:
            return False
        newest = (self._unstored or {}).get(draft.key)
        return newest is None or (newest is not draft and draft.since is None)

    async def _stored(self, draft: Draft, final: bool, appended: Appended | None) -> None:
        message = draft.before
        if draft.key is not None and self._unstored is not None:
            if self._unstored.get(draft.key) is not draft:
                # Who listens gets the newer one, which takes its place in the log.
                return
            del self._unstored[draft.key]
        if appended is None:
            # The transport session has ended: nobody can come back for this. A client that still
            # listens gets the outcome (END6).
            self._push_unkept(message, final=final)
            return
        self._size += len(message)
        if final:
            self._final = appended.event.event_id
        if self._feed is not None:
            self._feed.offer(appended.event, final=final)
        if final:
            await self._retire()

    def _break(self) -> PendingWrite:
        """End the stream: some of its messages are lost. Each reader gets an error (HTL11)."""
        log, unknown = self._log, error_message(self._request_id, wire_error(OutcomeUnknown()))
        if log is None:
            raise AssertionError("what is not kept cannot be lost")
        self._is_broken = True
        self._push_unkept(unknown, final=True)
        draft = plain_draft(unknown)
        return LogAppend(log, draft, partial(self._stored, draft, True))

    def _push_unkept(self, message: bytes, *, final: bool) -> None:
        if self._stream is not None:
            self._stream.push(sse_event(message))
            if final:
                self._stream.finish()

    # --- the response --------------------------------------------------------------------

    @property
    def has_stream(self) -> bool:
        return self._stream is not None and not self._stream.closed

    async def respond(self, call: HttpCall, *, opened: SessionId | None = None) -> None:
        """Send the response: called once, by the task that took the POST.

        Args:
            opened: The transport session that the request made.
        """
        try:
            try:
                stream = await self._until_decided()
            except BaseException:
                # Nobody will ever read it: what runs for it is without a listener from now on.
                self._is_read = False
                self.on_closed()
                raise
            if self._away is not None:
                self._is_read = False
                raise self._away
            session_id = self._streams.session_id if self._streams is not None else opened
            if self._json is not None:
                self._is_read = False
                self.on_closed = self.on_reopened = unwatched
                self.close_stream = None
                await send_json(call.send, self._json, session_id=session_id)
                return
            if stream is None:
                raise AssertionError("a response is either JSON or a stream")
            await self._serve(stream, session_id, call)
        finally:
            if self.follows is not None:
                self.run_after_answer()

    async def _until_decided(self) -> SseStream | None:
        if not self._turn.done():
            timer = self._loop.call_later(JSON_DEADLINE, self._decided)
            try:
                await self._turn
            finally:
                timer.cancel()
            if self._json is None and self._away is None:
                # Neither answered nor streaming: the deadline it was. Or its stream is opening
                # just now, for a message that came right before the deadline.
                await self._commit()
        return self._stream

    async def resume(self, position: str, call: HttpCall) -> None:
        streams, log = self._streams, self._log
        if streams is None or log is None:
            raise AssertionError("only a connection's streams can be resumed")
        if self._stream is not None:
            self._stream.cut()
        stream = self._open_stream(log, position)
        if self._primes:
            stream.push(priming_event(self._sse_id(position)))
        self._is_read = True
        self.on_reopened()
        await self._serve(stream, streams.session_id, call)

    def read_at_replica(self, process: str) -> None:
        """Close what is open here: another process serves the stream, from the store."""
        self.readers.add(process)
        if self._stream is not None:
            self._stream.cut()
        self.on_reopened()

    async def left_at_replica(self, process: str) -> None:
        self.readers.discard(process)
        if self.is_open:
            return
        self.on_closed()
        await self._retire()

    async def _serve(self, stream: SseStream, session_id: SessionId | None, call: HttpCall) -> None:
        try:
            self._is_whole = False
            async with call.watch(stream.cut) as watched:
                send, headers = watched.guarding(call.send), sse_headers(session_id)
                self._is_whole = await stream.serve(call.receive, send, headers)
        finally:
            stream.cut()
            if self._stream is stream:
                self._is_read = False
                if not self.is_open:
                    self.on_closed()
                    await self._retire()

    async def _commit(self) -> None:
        """Make the response a stream; return when it can be written. Callers share one opening."""
        if self._stream is not None or self._json is not None or self._away is not None:
            return
        self._is_stream = True
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._stream is None:
                await self._open()
        self._decided()

    async def _open(self) -> None:
        streams = self._streams
        if streams is None or not self._is_kept:
            self._stream = SseStream(self._policy)
            return
        if self._wanted is None:
            # Kept: who opened it may be cancelled when the store has it already. Not by the
            # time of day: two calls of one instant must not share a stream.
            self._wanted = streams.log(post_stream_name(self._process, self._scopes_beyond))
        log = self._wanted
        try:
            head = await log.open()
        except StoreUnavailable:
            # It runs already, and is answered: on a stream that nobody can come back to.
            logger.warning("a response stream is not stored: the store is away")
            head = None
        if head is None:
            self._stream = SseStream(self._policy)
            return
        self._log = log
        streams.channels[log.name] = self
        position = Position(head.log_epoch, 0).event_id()
        stream = self._open_stream(log, position, is_behind=head.number > 0)
        if self._primes:
            stream.push(priming_event(self._sse_id(position)))

    def _decided(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)

    def _open_stream(self, log: StreamLog, after: str, *, is_behind: bool = True) -> SseStream:
        stream = SseStream(self._policy)

        def frame(event: LoggedEvent) -> bytes:
            return sse_event(event.payload, self._sse_id(event.event_id))

        feed = LogFeed(stream, log.read, position_of(after), frame=frame, is_behind=is_behind)
        if self._final is not None:
            feed.end_at(self._final)
        self._stream, self._feed = stream, feed
        return stream

    def _sse_id(self, position: str) -> str:
        name = self._log.name if self._log is not None else StreamName("")
        return post_event_id(name, position, self._request_id)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.finish()

    async def _close_stream(self) -> None:
        await self._commit()
        if self._stream is not None:
            # Pushed events are sent first, with the priming event: without an id the client could
            # not resume.
            self._stream.finish()
