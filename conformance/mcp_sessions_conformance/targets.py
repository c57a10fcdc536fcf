"""Describe the tested thing: ``http(s)://…``, ``ws(s)://…`` or ``stdio:COMMAND``, in each era."""

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mcp_sessions_conformance.http_peer import HttpPeer
from mcp_sessions_conformance.peer import Era, Failure, Limits, Peer, Transport
from mcp_sessions_conformance.stdio_peer import Program, StdioPeer
from mcp_sessions_conformance.transcript import Transcript
from mcp_sessions_conformance.websocket_peer import WebSocketPeer

REACHABLE_WITHIN = 10.0
"""Seconds that a server may take until its port is open, or its program is started."""

IN_VAIN = 10
"""Programs in a row that may end without having said anything."""


class BadTarget(Exception):
    """It is neither a URL nor a command that can be tested. The text is one sentence."""


@dataclass(frozen=True)
class Target:
    transport: Transport
    text: str
    """A URL, or a command."""


def parse_target(text: str) -> Target:
    if text.startswith("stdio:"):
        command = text.removeprefix("stdio:").strip()
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BadTarget(f"the command of {text!r} cannot be read: {error}") from None
        if not words:
            raise BadTarget("stdio: needs a command, as in 'stdio:python server.py'")
        return Target("stdio", command)
    scheme, _, _ = text.partition("://")
    transports: dict[str, Transport] = {
        "http": "http",
        "https": "http",
        "ws": "websocket",
        "wss": "websocket",
    }
    if scheme not in transports or "://" not in text:
        raise BadTarget(f"TARGET is an http(s):// or ws(s):// URL or stdio:COMMAND, not {text!r}")
    try:
        parts = urlsplit(text)
        has_host = parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        has_host = None
    if not has_host:
        raise BadTarget(f"{text!r} names no host")
    return Target(transports[scheme], text)


@dataclass(frozen=True)
class Credentials:
    """Bearer tokens of two principals; None: there is none."""

    token: str | None = None
    other: str | None = None
    weak: str | None = None
    """A credential of the first principal, with fewer scopes."""

    def token_of(self, who: str) -> str | None:
        return {"one": self.token, "other": self.other, "weak": self.weak}[who]

    def names(self) -> dict[str, str]:
        given = {"token": self.token, "other_token": self.other, "weak_token": self.weak}
        return {name: token for name, token in given.items() if token is not None}


@dataclass
class UrlWay:
    target: Target
    era: Era
    limits: Limits
    credentials: Credentials
    issued: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def transport(self) -> Transport:
        return self.target.transport

    @property
    def port(self) -> int:
        parts = urlsplit(self.target.text)
        return parts.port or (443 if parts.scheme in ("https", "wss") else 80)

    @property
    def is_loopback(self) -> bool:
        host = urlsplit(self.target.text).hostname
        return host in ("localhost", "::1") or str(host).startswith("127.")

    @property
    def name(self) -> str:
        return f"{self.transport}/{self.era}"

    @property
    def tokens(self) -> Mapping[str, str]:
        return self.credentials.names()

    async def peer(
        self, name: str, transcript: Transcript, *, who: str = "one", at: str | None = None
    ) -> Peer:
        make = HttpPeer if self.transport == "http" else WebSocketPeer
        token, url = self.credentials.token_of(who), at or self.target.text
        if self.transport == "websocket" and url.startswith("http"):
            url = url.replace("http", "ws", 1)
        return make(name, url, self.era, transcript=transcript, limits=self.limits, token=token)

    async def renew(self) -> None:
        """Do nothing: no state outlives a vector here."""

    async def reachable(self) -> None:
        parts = urlsplit(self.target.text)
        deadline = asyncio.get_running_loop().time() + REACHABLE_WITHIN
        while asyncio.get_running_loop().time() < deadline:
            try:
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection(parts.hostname, self.port)
                writer.close()
                return
            except (OSError, TimeoutError):
                await asyncio.sleep(0.05)


@dataclass
class Pipe:
    """The only running program of a ``stdio:`` target."""

    target: Target
    limits: Limits
    _peer: StdioPeer | None = field(default=None, init=False)
    starts: int = field(default=0, init=False)
    """Programs that were started."""

    in_vain: int = field(default=0, init=False)
    """How many of the last ones said nothing: such a program is not started for ever."""

    async def peer(self, era: Era) -> StdioPeer:
        """The pipe, to a program that has spoken no other era.

        Raises:
            Failure: The program cannot be started, or ends again and again.
        """
        if self._peer is not None and (self._peer.era != era or self._peer.ended):
            await self.stop()
        if self._peer is None:
            if self.in_vain >= IN_VAIN:
                raise Failure(f"the program was started {self.in_vain} times, and said nothing")
            self.starts += 1
            self.in_vain += 1
            program = Program(shlex.split(self.target.text), ends_within=self.limits.end)
            peer = StdioPeer(program, era, self.limits)
            await peer.start()
            self._peer = peer
        return self._peer

    async def stop(self) -> None:
        if self._peer is not None:
            if self._peer.has_received:
                self.in_vain = 0
            await self._peer.close()
            self._peer = None


@dataclass
class PipeWay:
    pipe: Pipe
    era: Era
    transport: Transport = "stdio"
    is_loopback: bool = False
    port: None = None
    issued: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def target(self) -> Target:
        return self.pipe.target

    @property
    def name(self) -> str:
        return f"stdio/{self.era}"

    @property
    def tokens(self) -> Mapping[str, str]:
        """Return none: the peer of a pipe is the user who started the program."""
        return {}

    async def peer(
        self, name: str, transcript: Transcript, *, who: str = "one", at: str | None = None
    ) -> StdioPeer:
        if at is not None:
            raise AssertionError("a server at a URL is not on this pipe")
        is_new = self.pipe.starts
        peer = await self.pipe.peer(self.era)
        peer.lend(name, transcript)
        if self.pipe.starts != is_new and self.era == "modern":
            # A program may take longer to start than to answer; in the handshake era it is
            # ``initialize`` that waits longer.
            sent = await peer.request("server/discover")
            await peer.answer(sent, within=self.pipe.limits.start)
        return peer

    async def renew(self) -> None:
        await self.pipe.stop()

    async def reachable(self) -> None:
        try:
            await self.pipe.peer(self.era)
        except Failure:
            # Each vector says so.
            return


RunningWay = UrlWay | PipeWay
