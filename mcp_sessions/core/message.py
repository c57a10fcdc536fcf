"""A message of a client, read once: at the door of each transport, by :func:`read`.

Below that nobody opens ``_meta`` again (``tests/house/test_read_once.py``). A malformed member is
refused only where it matters: a notification gets no answer, and for some requests the member has
no meaning. So reading refuses nothing, and :meth:`Message.named` and :meth:`Message.keyed` do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mcp_sessions import method_names
from mcp_sessions.core.messages import (
    INSTANCE_META,
    MAX_INSTANCE,
    REQUEST_KEY_META,
    SESSION_META,
    Notification,
    NotNamed,
    Request,
    RequestId,
    as_id,
    members_of,
    named_session,
    progress_token,
    request_key,
    without_session,
)
from mcp_sessions.errors import InvalidParams
from mcp_sessions.ids import RequestKey, SessionId

_INSTANCE = re.compile(r"[\x21-\x7e]+", re.ASCII)
_NO_META: Mapping[str, Any] = {}
MALFORMED_KEY = RequestKey("")
"""In place of a request key that is none. A key has at least one character."""


class Message(NamedTuple):
    id: RequestId
    """Empty for a notification."""

    method: str
    params: dict[str, Any] | None
    """As the client sent them."""

    forwarded: dict[str, Any] | None
    """As the wrapped server gets them: without session, ``state`` and request key."""

    meta: Mapping[str, Any] = _NO_META
    """Empty: there is none, or it is no object."""

    session: SessionId | NotNamed = NotNamed.ABSENT
    """The session that it names (rule 1)."""

    key: RequestKey | None = None
    """Its request key, or ``MALFORMED_KEY``: see :meth:`keyed`."""

    is_notification: bool = False

    def named(self) -> SessionId | NotNamed:
        """The session that it names, or how it names none.

        Raises:
            InvalidParams: The metadata is there but is not ``{"sessionId": string, …}``.
        """
        return named_session(self.meta) if self.session is NotNamed.MALFORMED else self.session

    def keyed(self) -> RequestKey | None:
        """Its request key, or None if it has none.

        Raises:
            InvalidParams: It is not a string of 1 to 256 characters.
        """
        return request_key(self.meta) if self.key is MALFORMED_KEY else self.key

    @property
    def names_session(self) -> bool:
        """Whether it names a session, or means to: malformed metadata is answered as what it is."""
        return self.session not in (NotNamed.ABSENT, NotNamed.NULL)

    @property
    def about(self) -> str | None:
        """The session that its params name, as those of ``session/*`` do, or its metadata. Nobody
        has checked it.
        """
        said = (self.params or {}).get("sessionId")
        if self.method.startswith(method_names.SESSION_PREFIX) and isinstance(said, str):
            return said
        return None if isinstance(self.session, NotNamed) else self.session

    @property
    def cancels(self) -> RequestId | None:
        """The id of a request, if it is ``notifications/cancelled``."""
        if self.method != method_names.CANCELLED:
            return None
        return as_id((self.params or {}).get("requestId"))

    @property
    def token(self) -> RequestId | None:
        """Under which its sender learns of its progress."""
        return progress_token(self.meta)

    @property
    def instance(self) -> str | None:
        """The client instance that asks to attach a session (TKO12). None: the client names none,
        or names it in a form that the server does not repeat to others.
        """
        given = self.meta.get(INSTANCE_META)
        if isinstance(given, str) and len(given) <= MAX_INSTANCE and _INSTANCE.fullmatch(given):
            return given
        return None

    @property
    def only_meta(self) -> dict[str, Any]:
        return {name: it for name, it in (self.forwarded or {}).items() if name == "_meta"}

    @property
    def state(self) -> Any:
        return members_of(self.meta.get(SESSION_META)).get("state")


def read(message: Request | Notification) -> Message:
    is_notification = isinstance(message, Notification)
    request_id = "" if is_notification else message.id
    method, params = message.method, message.params
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    if not meta or not isinstance(meta, dict):
        return Message(request_id, method, params, params, is_notification=is_notification)
    session: SessionId | NotNamed = NotNamed.ABSENT
    key: RequestKey | None = None
    forwarded = params
    if SESSION_META in meta or REQUEST_KEY_META in meta:
        forwarded = without_session(params)
        try:
            session = named_session(meta)
        except InvalidParams:
            session = NotNamed.MALFORMED
        try:
            key = request_key(meta)
        except InvalidParams:
            key = MALFORMED_KEY
    return Message(request_id, method, params, forwarded, meta, session, key, is_notification)
