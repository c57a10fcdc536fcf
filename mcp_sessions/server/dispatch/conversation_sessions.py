"""The session of a request's conversation: found, and made at the first of its requests.

Its id is made of the key, the sender's identity and a secret of the server's, so that it is found
on every replica without anything that says where. No message names it by that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.conversations import Conversations
from mcp_sessions.core.conversation_keys import (
    PLATFORM,
    ConversationKey,
    checked_key,
    conversation_key,
)
from mcp_sessions.core.handles import HANDLE, carried_in
from mcp_sessions.core.message import Message
from mcp_sessions.core.nearness import is_near
from mcp_sessions.core.states import Mode
from mcp_sessions.core.visibility import TOOLS, Visibility
from mcp_sessions.errors import LimitReached
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import SessionSecurity, is_minted, mint_handle
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import OfConversation
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.upstream.handle_argument import HandleArgument
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_OF_NONE = frozenset({method_names.PING, method_names.DISCOVER, method_names.LISTEN})
"""Methods that never reach a handler of the application with a use for a session."""


class UnknownHandle(Exception):
    """The handle of a call is invalid, or its session has ended or belongs to another principal."""


class ConversationSessions:
    def __init__(
        self,
        settings: Conversations,
        replica: Replica,
        lifecycle: Lifecycle,
        *,
        security: SessionSecurity,
        argument: HandleArgument | None,
        held: Collection[SessionId],
        visibility: Visibility,
    ) -> None:
        self._settings, self._lifecycle, self._security = settings, lifecycle, security
        self._store, self._clock = replica.store, replica.clock
        self._held, self._visibility, self.argument = held, visibility, argument
        self._rules = self._settings.rules
        self._of_pipe = _named_in(os.environ, settings.env)
        """Key of the client on standard input and output."""

    def argument_for(self, inbound: Inbound) -> HandleArgument | None:
        argument = self.argument
        if argument is None or not self._may_send_keys(inbound.principal, inbound.scope):
            return None
        return argument

    async def session_of(self, request: Message, inbound: Inbound) -> OfConversation | None:
        """The session of a request's conversation, its idle time begun anew; None: it is of none,
        or there are too many sessions for one more.

        Raises:
            UnknownHandle: It passes a handle, and that opens nothing.
            StoreUnavailable: Unknown.
        """
        if request.method in _OF_NONE or not self._may_send_keys(inbound.principal, inbound.scope):
            return None
        argument, handle = self.argument, None
        takes_handle = argument is not None and argument.takes(argument.tool_of(request))
        if argument is not None and takes_handle:
            given, carried = argument.given_in(request), carried_in(request.params)
            # One that is hidden answers as if it were not there: it starts nothing, and knows of
            # no handles but those of sessions that may see it.
            sees = self._visibility
            if sees.needed:
                sees = sees.with_scopes(inbound.principal.checked_scopes)
            is_hidden = sees.is_hidden(TOOLS, str(argument.tool_of(request)))
            takes_handle = not is_hidden
            if given is not None or carried is not None:
                try:
                    if given is not None:
                        return OfConversation(await self._of_handle(given, inbound))
                    # A further round of the call that started it, whose answer has to say so.
                    return OfConversation(await self._of_handle(carried, inbound), carried)
                except UnknownHandle:
                    if not is_hidden:
                        raise
        key = self._key(request, inbound)
        if takes_handle and (key is None or not key.source):
            # A name of its own says more than who its sender is.
            handle = mint_handle()
            key = ConversationKey(HANDLE, handle)
        if key is None:
            return None
        record = await self._found_or_made(key, inbound)
        return OfConversation(record, handle) if record is not None else None

    async def _of_handle(self, given: object, inbound: Inbound) -> SessionRecord:
        # Nothing is made here: what the server did not make is nobody's handle.
        try:
            key = checked_key(HANDLE, given)
        except ValueError:
            raise UnknownHandle from None
        for session_id in self._ids(key, inbound.principal):
            record = await self._admitted(session_id, inbound)
            if record is not None:
                inbound.belongs_to(key)
                return record
        raise UnknownHandle

    def _ids(self, key: ConversationKey, principal: Principal) -> list[SessionId]:
        return self._security.conversation_ids(key.source, key.text, principal=principal)

    async def _found_or_made(self, key: ConversationKey, inbound: Inbound) -> SessionRecord | None:
        principal, ids = inbound.principal, self._ids(key, inbound.principal)
        # By an older secret it was made before the newest was there.
        for session_id in ids:
            record = await self._admitted(session_id, inbound)
            if record is not None:
                inbound.belongs_to(key)
                return record
        try:
            record = await self._lifecycle.create(Mode.CONVERSATION, principal, None, ids[0])
        except LimitReached as reached:
            logger.warning(
                "the limit %s is reached: a request runs without its conversation", reached.limit
            )
            return None
        logger.debug("session %s is that of a key in %s", digest(ids[0]), key.source)
        inbound.belongs_to(key)
        return record

    async def _admitted(self, session_id: SessionId, inbound: Inbound) -> SessionRecord | None:
        admitted = await self._store.admit(
            session_id,
            inbound.principal,
            mode=Mode.CONVERSATION,
            now=self._clock(),
            held=session_id in self._held,
        )
        return admitted.record if admitted is not None else None

    def _key(self, request: Message, inbound: Inbound) -> ConversationKey | None:
        settings, rules = self._settings, self._rules
        if settings.platform_ids and inbound.connection is None:
            # Otherwise this server gave the id to the client.
            rules = (*rules, PLATFORM)
        meta, headers = request.meta, inbound.headers
        try:
            key = self._own_key(meta, headers) or conversation_key(rules, meta, headers)
        except ValueError as malformed:
            _ignored(malformed)
            return None
        if key is None and inbound.transport == "stdio":
            key = self._of_pipe
        if key is None and settings.per_principal and inbound.principal != ANONYMOUS:
            return ConversationKey("", "")
        return key

    def _own_key(
        self, meta: Mapping[str, Any], headers: Mapping[str, str]
    ) -> ConversationKey | None:
        if self._settings.key is None:
            return None
        try:
            found = self._settings.key(meta, headers)
        except Exception:
            # The boundary to the application: its client is served all the same.
            logger.exception("the application's function for conversation keys failed")
            return None
        return checked_key("key", found) if found is not None else None

    def is_platforms(
        self, session_header: str, principal: Principal, scope: Mapping[str, Any]
    ) -> bool:
        """Whether an ``Mcp-Session-Id`` that names no session is a platform's. One that was made
        here has ended: its client has to receive that.

        Args:
            scope: The ASGI scope of the request that it came with.
        """
        return (
            self._settings.platform_ids
            and not is_minted(session_header)
            and self._may_send_keys(principal, scope)
        )

    def _may_send_keys(self, principal: Principal, scope: Mapping[str, Any] | None) -> bool:
        if principal != ANONYMOUS:
            return True
        if self._settings.anonymous is not None:
            return self._settings.anonymous
        if scope is None:
            # A pipe: nobody else is at its other end.
            return True
        return is_near(scope)


def _named_in(environment: Mapping[str, str], variables: Collection[str]) -> ConversationKey | None:
    for name in variables:
        if environment.get(name):
            try:
                return checked_key(name, environment[name])
            except ValueError as malformed:
                _ignored(malformed)
    return None


def _ignored(source: ValueError) -> None:
    logger.info("the value of %s is not a conversation key: it is ignored", source)
