from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

import anyio
import httpx2

from mcp_sessions import method_names
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Accepted, Failure, Received
from mcp_sessions.core.messages import Json, Malformed, RequestId, decode, error_body, parse
from mcp_sessions.core.resume import FailureCause, is_sendable
from mcp_sessions.errors import INVALID_REQUEST, PARSE_ERROR
from mcp_sessions_transports.http.client.bounded_body import ResponseTooLarge, pieces, whole
from mcp_sessions_transports.http.client.failures import describe, is_sse, refusal, unfollowed
from mcp_sessions_transports.http.client.incoming import Incoming, position
from mcp_sessions_transports.http.client.requester import SESSION_HEADER, Requester
from mcp_sessions_transports.http.client.sse_reader import EventTooLarge

logger = logging.getLogger(__name__)

STOCK_ATTEMPTS = 2
"""How often the SDK's own transport opens a stream again, one after the other."""

STOCK_DELAY = 1.0
"""Seconds that it waits before, if the server does not say."""


@dataclass(frozen=True, slots=True)
class HttpExchange:
    requester: Requester
    incoming: Incoming

    async def ask(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        try:
            return await self._ask(message, headers)
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            return describe(error, name=self.requester.name)

    async def _ask(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        request_id: RequestId = message["id"]
        name = self.requester.name
        async with self.requester.stream("POST", message, headers) as response:
            status = response.status_code
            if status == 202:
                text = f"{name}: the server answered a request with 202 Accepted, and no result"
                return refusal(202, INVALID_REQUEST, text)
            redirect = unfollowed(response)
            if redirect is not None:
                return refusal(status, INVALID_REQUEST, f"{name}: {redirect}")
            if status >= 400:
                return await self.requester.refused(response, request_id)
            given = response.headers.get(SESSION_HEADER)
            if message.get("method") == method_names.INITIALIZE and given:
                if not is_sendable(given):
                    text = f"{name}: the server gave a transport session an id that cannot be sent"
                    return refusal(status, INVALID_REQUEST, text)
                self.requester.joined(given)
            content_type = response.headers.get("content-type", "").lower()
            if content_type.startswith("application/json"):
                return await self._read_json(response)
            if content_type.startswith("text/event-stream"):
                await self.incoming.emit(Accepted(request_id))
                return await self._read_answer(response, request_id)
            text = f"{name}: Unexpected content type: {content_type}. Does an MCP server run there?"
            return refusal(status, INVALID_REQUEST, text)

    async def _read_json(self, response: httpx2.Response) -> Failure | None:
        try:
            body = await whole(pieces(response), limit=self.incoming.policy.max_message)
        except ResponseTooLarge:
            return self.incoming.too_large("response")
        try:
            message = decode(body)
            parse(message)
        except (ValueError, Malformed) as error:
            text = f"{self.requester.name}: Failed to parse JSON response: {error}"
            return refusal(200, PARSE_ERROR, text)
        await self.incoming.emit(Received(message))
        return None

    async def _read_answer(
        self, response: httpx2.Response, request_id: RequestId
    ) -> Failure | None:
        last_id: str | None = None
        retry: int | None = None
        attempts = 0
        failure = Failure(
            FailureCause.CUT,
            f"{self.requester.name}: the response stream ended without an answer",
            error=error_body(CONNECTION_CLOSED, "SSE stream ended without a response"),
        )
        while True:
            try:
                async with aclosing(self.incoming.events(response)) as events:
                    async for event in events:
                        last_id = position(event, last_id)
                        retry = event.retry if event.retry is not None else retry
                        if await self.incoming.take(event, request_id):
                            return None
                attempts = 0
            except EventTooLarge:
                return self.incoming.too_large("SSE event")
            except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                logger.debug("a response stream ended: %r", error)
                failure = describe(error, name=self.requester.name, was_sent=True)
            finally:
                # The first is closed by whoever opened it as well, which does no harm.
                with anyio.CancelScope(shield=True):
                    await response.aclose()
            if self.requester.settings.has_keys or last_id is None:
                return failure
            opened = None
            while opened is None:
                if attempts >= STOCK_ATTEMPTS:
                    return failure
                attempts += 1
                await anyio.sleep(retry / 1000 if retry is not None else STOCK_DELAY)
                opened = await self._reopen(last_id)
            response = opened

    async def _reopen(self, last_id: str) -> httpx2.Response | None:
        try:
            response = await self.requester.open("GET", None, {"last-event-id": last_id})
        except (httpx2.HTTPError, OSError) as error:
            logger.debug("a response stream could not be reopened: %r", error)
            return None
        if response.status_code == 200 and is_sse(response):
            return response
        await response.aclose()
        return None
