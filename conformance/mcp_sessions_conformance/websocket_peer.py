import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)
from websockets.typing import Subprotocol

from mcp_sessions_conformance.peer import SMALL_BUFFER, Era, Failure, Limits, Peer, Sent, Transport
from mcp_sessions_conformance.transcript import Transcript

MAX_FRAME = 16 * 1024 * 1024


class WebSocketPeer(Peer):
    transport: Transport = "websocket"

    def __init__(
        self,
        name: str,
        url: str,
        era: Era,
        *,
        transcript: Transcript,
        limits: Limits,
        token: str | None = None,
    ) -> None:
        super().__init__(name, era, transcript=transcript, limits=limits)
        self.url = url
        self.token = token
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(
        self,
        *,
        subprotocols: Sequence[str] = ("mcp",),
        headers: Mapping[str, str] | None = None,
        compression: bool = False,
        host: str | None = None,
    ) -> int:
        """Open the connection. Return the HTTP status: 101, or that of the refusal.

        Args:
            subprotocols: The subprotocols to offer.
            compression: Offer it.
            host: The header ``Host``; None: the server's own address.

        Raises:
            Failure: The server is not there, or it is no WebSocket server.
        """
        given = dict(headers or {})
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "wss" else 80)
        # The library asks the URL for Host, and these for the way.
        address: dict[str, Any] = {} if host is None else {"host": parts.hostname, "port": port}
        if self.token is not None:
            given.setdefault("Authorization", f"Bearer {self.token}")
        try:
            socket = await connect(
                self.url if host is None else parts._replace(netloc=host).geturl(),
                subprotocols=[Subprotocol(name) for name in subprotocols] or None,
                additional_headers=given,
                compression="deflate" if compression else None,
                open_timeout=self.limits.wait,
                close_timeout=1,
                ping_interval=None,
                max_size=MAX_FRAME,
                proxy=None,
                **address,
            )
        except InvalidStatus as refused:
            self.accepted = {k.lower(): v for k, v in refused.response.headers.raw_items()}
            self.ended_by(f"refused with HTTP {refused.response.status_code}")
            return refused.response.status_code
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError, WebSocketException) as error:
            raise Failure(f"no WebSocket: {type(error).__name__}: {error}") from None
        self._socket = socket
        socket.transport.get_extra_info("socket").setsockopt(*SMALL_BUFFER)
        response = socket.response
        self.accepted = {k.lower(): v for k, v in response.headers.raw_items()} if response else {}
        self._reader = asyncio.create_task(self._read(socket))
        return 101

    async def _read(self, socket: ClientConnection) -> None:
        how = "the server closed it"
        try:
            async for frame in socket:
                await self.takes.wait()
                if isinstance(frame, bytes):
                    self.problem("a binary frame came; messages are text frames")
                    continue
                self.took(frame, "socket")
        except ConnectionClosed as closed:
            how = f"broken: {closed}"
        except (OSError, WebSocketException) as error:
            how = f"broken: {type(error).__name__}: {error}"
        except Failure as flood:
            self.problem(str(flood))
        except Exception as error:
            # The boundary to a server that may do anything, and to the library that reads it.
            how = f"broken: {type(error).__name__}: {error}"
            self.problem(f"the WebSocket cannot be read: {error}")
        self.close_code = socket.close_code
        self.ended_by(f"{how} (code {socket.close_code})")

    async def post(self, message: Any, sent: Sent | None, headers: Mapping[str, str]) -> None:
        await self.frame(json.dumps(message))

    async def frame(self, data: str | bytes) -> None:
        socket = self._socket
        if socket is None:
            raise Failure(f"connection {self.name} is not open")
        try:
            async with asyncio.timeout(self.limits.wait):
                await socket.send(data)
        except TimeoutError:
            raise Failure(f"the server took nothing for {self.limits.wait:g} s") from None
        except (OSError, WebSocketException) as error:
            raise Failure(f"the server closed the connection: {error}") from None

    async def fence(self) -> None:
        """Await the answer of a ping: messages arrive in order."""
        if self.ended:
            return
        sent = await self.request("ping")
        await self.answer(sent)
        await asyncio.sleep(0.02)

    async def cut(self, what: str) -> None:
        if self._socket is not None:
            self.transcript.note(self.name, "--", "the client cuts the connection")
            self._socket.transport.abort()
            if self._reader is not None:
                await asyncio.wait([self._reader], timeout=self.limits.wait)

    async def close(self) -> None:
        if self._socket is not None:
            try:
                async with asyncio.timeout(2):
                    await self._socket.close()
            except (OSError, WebSocketException, TimeoutError) as error:
                self.transcript.note(self.name, "--", f"closing: {type(error).__name__}")
            finally:
                # A server that never closes its end, and goes on reading, is left there.
                self._socket.transport.abort()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader], timeout=1)


def bearer_subprotocol(token: str) -> str:
    encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return f"mcp.bearer.{encoded}"
