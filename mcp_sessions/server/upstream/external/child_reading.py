"""Read the messages of a child: each is an answer, a question or a notification, or cannot be read.

A line may hold several messages, or a text that is no message. It costs the one request that it
answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Protocol

from mcp_sessions.background import TimeSlice, give_way
from mcp_sessions.core.messages import (
    Answer,
    AnyMessage,
    Malformed,
    Notification,
    Request,
    RequestId,
    decode,
    parse,
)
from mcp_sessions.errors import INVALID_REQUEST
from mcp_sessions.server.upstream.external.child_requests import Waiting
from mcp_sessions.server.upstream.external.child_wire import Later
from mcp_sessions.server.upstream.external.unreadable import (
    Unreadable,
    is_deep,
    messages_of,
    own_id,
)


class Reader(Protocol):
    def answered(self, answer: Answer) -> None: ...

    def question(self, request: Request, about: Waiting | None) -> None: ...

    async def notified(self, notification: Notification, about: Waiting | None) -> None: ...

    def answered_unreadably(self, request_id: int | None, why: str) -> None:
        """Take an answer that cannot be read.

        Args:
            request_id: The id of the request that it answers. None: it is no id of the layer's.
        """
        ...

    def refuse(self, request_id: RequestId, code: int, text: str) -> None: ...

    def noise(self, size: int, why: str) -> None:
        """Take bytes that are no message and answer nothing."""
        ...


class Reading:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def take(self, line: bytes, about: Waiting | None = None) -> Later | None:
        try:
            value = decode(line)
            message = parse(value)
        except (ValueError, Malformed):
            return self._take_rare(line, about)
        if isinstance(message, Request) and ("result" in value or "error" in value):
            return self._take_rare(line, about)
        if is_deep(line, value):
            return self._take_rare(line, about)
        if isinstance(message, Answer):
            self._reader.answered(message)
            return None
        return self._take_message(message, about)

    def _take_message(self, message: AnyMessage, about: Waiting | None) -> Later | None:
        match message:
            case Answer():
                self._reader.answered(message)
            case Request():
                self._reader.question(message, about)
            case Notification():
                return partial(self._reader.notified, message, about)
        return None

    def _take_rare(self, line: bytes, about: Waiting | None) -> Later | None:
        said = messages_of(line)
        first, second = next(said), next(said, None)
        if second is None:
            return self._take_one(first, len(line), about)
        return partial(self._take_each, chain((first, second), said), len(line), about)

    async def _take_each(
        self, said: Iterator[AnyMessage | Unreadable], size: int, about: Waiting | None
    ) -> None:
        time_slice = TimeSlice()
        for each in said:
            later = self._take_one(each, size, about)
            if isinstance(each, Unreadable):
                # The line counts only once.
                size = 0
            if later is not None:
                await later()
            if time_slice.has_ended():
                await give_way()

    def _take_one(
        self, said: AnyMessage | Unreadable, size: int, about: Waiting | None
    ) -> Later | None:
        if not isinstance(said, Unreadable):
            return self._take_message(said, about)
        self.cannot_read(said, size)
        return None

    def cannot_read(self, said: Unreadable, size: int) -> None:
        if said.is_answer:
            self._reader.answered_unreadably(own_id(said.id), said.why)
        elif said.has_method and said.id is not None:
            # Otherwise the server would wait for ever.
            self._reader.refuse(said.id, INVALID_REQUEST, f"Invalid request: it {said.why}")
        else:
            self._reader.noise(size, said.why)
