"""The certificate that a server shows, and the TLS settings that use it.

A certificate is looked at before it is used: a server never starts with one that its clients would
refuse. :meth:`Certificate.read_again` takes new files into the same settings, so that new
connections get the new certificate and open ones go on.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mcp_sessions.authentication.key_file import check_status
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.security import KEYFILE_PASSWORD_VARIABLE
from mcp_sessions.serve.open_connections import Looked
from mcp_sessions.serve.sockets import accept_some
from mcp_sessions.unopened import reason_of

if TYPE_CHECKING:
    from cryptography import x509

    from mcp_sessions.serve.protocols import LimitedConfig


@dataclass(frozen=True, slots=True)
class Facts:
    names: tuple[str, ...]
    until: datetime
    serial: int


class Certificate:
    """A certificate with its key, from files.

    Args:
        certfile: PEM, the server's own certificate first.
        keyfile: PEM. None: the key is in ``certfile``.
        clock: Seconds since 1970.

    Raises:
        ConfigurationError: A file cannot be read or used; the key is another certificate's, or
            others may read it; or the certificate expired, or is not valid yet.
    """

    def __init__(self, certfile: str, keyfile: str | None, clock: Callable[[], float]) -> None:
        self._certfile = certfile
        self._keyfile = keyfile or certfile
        self._clock = clock
        self.context = _context()
        """The context of new connections."""

        self.facts = self._checked()
        self._load(self.context)

    @property
    def files(self) -> tuple[str, ...]:
        return self._certfile, self._keyfile

    def read_again(self) -> bool:
        """Take what the files have now. New connections get it. Return whether it is another one.

        Raises:
            ConfigurationError: As at first. Then everything stays as it was.
        """
        facts = self._checked()
        self._load(self.context)
        before, self.facts = self.facts, facts
        return facts != before

    async def reload(self) -> str:
        return "the certificate" if self.read_again() else "nothing has changed"

    def _checked(self) -> Facts:
        facts = _facts(self._certfile, datetime.fromtimestamp(self._clock(), UTC))
        _read("key", self._keyfile)
        # Settings of its own: what fails half-way leaves the others as they are.
        self._load(_context())
        try:
            check_status(self._keyfile, os.stat(self._keyfile))
        except ConfigurationError as refused:
            raise ConfigurationError(f"key {refused}") from None
        except OSError as failed:
            raise ConfigurationError(f"key {self._keyfile}: {failed}") from None
        return facts

    def _load(self, context: ssl.SSLContext) -> None:
        # Without a function OpenSSL would ask at the terminal.
        password = os.environ.get(KEYFILE_PASSWORD_VARIABLE, "")
        try:
            context.load_cert_chain(self._certfile, self._keyfile, lambda: password)
        except ssl.SSLError as failed:
            raise ConfigurationError(self._why_not(failed)) from None
        except (OSError, ValueError) as failed:
            raise ConfigurationError(f"key {self._keyfile}: {failed}") from None

    def _why_not(self, failed: ssl.SSLError) -> str:
        if failed.reason == "KEY_VALUES_MISMATCH":
            return f"key {self._keyfile}: it is not the key of certificate {self._certfile}"
        if b"ENCRYPTED" in _read("key", self._keyfile):
            variable = KEYFILE_PASSWORD_VARIABLE
            if variable in os.environ:
                return f"key {self._keyfile}: the password in {variable} does not open it"
            return f"key {self._keyfile}: it is encrypted: set {variable} to its password"
        return f"key {self._keyfile}: there is no private key in PEM format in it"


def certificate_of(certfile: str | None, keyfile: str | None) -> Certificate | None:
    if certfile is not None:
        return Certificate(certfile, keyfile, time.time)
    if keyfile is not None:
        raise ConfigurationError("ssl_keyfile needs ssl_certfile: name the certificate")
    return None


ACCEPTED_AT_ONCE = 4
"""Connections that are accepted before others are closed to make room."""

HANDSHAKE = 10.0
"""Seconds that a client has for its TLS handshake; ``receive_timeout``, if that is shorter."""


class Handshaking(asyncio.Transport):
    """A connection until its TLS handshake is complete. It counts as one that waits for a request.

    Args:
        connection: An accepted one.
        protocol: Makes the protocol that serves it then.
    """

    def __init__(
        self,
        connection: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        config: LimitedConfig,
    ) -> None:
        super().__init__({"socket": connection, "peername": connection.getpeername()})
        loop, self._connections = asyncio.get_running_loop(), config.open_connections
        self.transport: asyncio.Transport = self
        within = min(HANDSHAKE, self._connections.limits.receive_timeout)
        self.looked = Looked(received_at=loop.time(), late_at=loop.time() + within)
        completing = loop.connect_accepted_socket(protocol, connection, ssl=config.ssl)
        self._completing = loop.create_task(completing)
        self._completing.add_done_callback(self._completed)
        self._connections.opened(self)

    def _completed(self, completing: asyncio.Task[object]) -> None:
        self._connections.closed(self)
        failed = asyncio.CancelledError() if completing.cancelled() else completing.exception()
        if failed is None:
            return
        # The client is gone, or late, or what it sent is no TLS.
        self.get_extra_info("socket").close()
        if not isinstance(failed, (OSError, asyncio.CancelledError)):
            said = {"message": "a TLS handshake failed", "exception": failed}
            completing.get_loop().call_exception_handler(said)

    def abort(self) -> None:
        self._completing.cancel()

    def is_closing(self) -> bool:
        return self._completing.done()

    def get_write_buffer_size(self) -> int:
        return 0

    def serve_only(self, paths: frozenset[str]) -> None:
        """Do nothing: it is looked at again when its handshake is complete."""

    def waits(self) -> bool:
        return True

    def is_stuck(self) -> bool:
        return False

    def drop(self) -> None:
        self.abort()

    def give_up(self) -> bool:
        self.abort()
        return True


class TlsListener:
    """Listens as uvicorn does, but counts each connection from its start. uvicorn would give a
    silent client a minute, in which nothing counts its connection.

    Args:
        listener: Is not closed.
        protocol: Makes the protocol of a connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        config: LimitedConfig,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        accepted, failed = accept_some(self._listener, ACCEPTED_AT_ONCE)
        for connection in accepted:
            try:
                Handshaking(connection, self._protocol, self._config)
            except OSError:
                # Its client is gone.
                connection.close()
        if failed is not None:
            # There is no descriptor or no memory for one more.
            self._config.open_connections.count_reason("kept waiting: none could be accepted")
            self._loop.remove_reader(self._listener)
            self._again = self._loop.call_later(1, self._listen)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return: uvicorn has waited for its connections."""


def _context() -> ssl.SSLContext:
    # Python's own least version is TLS 1.2.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _facts(certfile: str, now: datetime) -> Facts:
    # Imported here: most servers have no certificate.
    from cryptography import x509

    data = _read("certificate", certfile)
    try:
        own = x509.load_pem_x509_certificates(data)[0]
    except ValueError:
        raise ConfigurationError(
            f"certificate {certfile}: there is no certificate in PEM format in it"
        ) from None
    until = own.not_valid_after_utc
    if until <= now:
        days = (now - until).days
        raise ConfigurationError(
            f"certificate {certfile}: it expired on {until:%Y-%m-%d}, {days} days ago: renew it"
        )
    if own.not_valid_before_utc > now:
        since = own.not_valid_before_utc
        raise ConfigurationError(
            f"certificate {certfile}: it is not valid before {since:%Y-%m-%d %H:%M} UTC: look at "
            "the clock of this machine"
        )
    return Facts(_names(own), until, own.serial_number)


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    addresses = (str(each) for each in found.get_values_for_type(x509.IPAddress))
    return (*found.get_values_for_type(x509.DNSName), *addresses)


def _read(what: str, file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(_LARGEST)
    except OSError as failed:
        raise ConfigurationError(f"{what} {file}: {reason_of(failed, file)}") from None


_LARGEST = 1_048_576
"""Bytes of a file that are read."""
