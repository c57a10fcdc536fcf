from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity behind a credential, never the credential itself.

    Two principals are the same if client id, issuer and subject are: a refreshed token of
    one identity keeps its sessions (SES8). Scopes do not take part in that; they are
    compared where a weaker credential must not read a stronger one's events (F3).
    """

    client_id: str | None = None
    issuer: str | None = None
    subject: str | None = None
    scopes: frozenset[str] = field(default=frozenset(), compare=False)
    expires_at: float | None = field(default=None, compare=False)
    """When the credential of this request ends, in seconds since 1970; None: never."""

    @property
    def user(self) -> tuple[str | None, ...]:
        """The unit that limits count: the user, for whom many clients may act. A credential without
        a subject is the client's own.
        """
        if self.subject is None:
            return self.issuer, None, self.client_id
        return self.issuer, self.subject

    @property
    def checked_scopes(self) -> frozenset[str] | None:
        """The scopes of the credential. None: there is none, and the caller needs none. A server
        that asks for scopes has callers without a credential on standard input only.
        """
        return None if self == ANONYMOUS else self.scopes


ANONYMOUS = Principal()
"""Everyone, on a server without authentication: there the session id is the credential."""
