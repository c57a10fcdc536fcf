"""What a layer is made with: the arguments of ``SessionLayer``, and what replaces them.

A command loads a file whose code makes a layer. Its options win over what that code says. They have
to be there when the layer is made: the code may use ``layer.store`` or ``layer.sessions`` at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mcp_sessions.conversations import Conversations
from mcp_sessions.policy import SessionPolicy, TaskPolicy
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.security import SessionSecurity

if TYPE_CHECKING:
    from mcp_sessions.server.upstream.sdk.authentication import Authentication
    from mcp_sessions.stores.contract import SessionStore

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """Each field is the argument of its name, but for the last one."""

    store: SessionStore | str | os.PathLike[str] | None = "memory://"
    policy: SessionPolicy = field(default_factory=SessionPolicy)
    security: SessionSecurity | None = None
    encrypt_store: bool = False
    conversations: Conversations | None = None
    hidden: Collection[str] = ()
    tasks: TaskPolicy | None = None
    eras: Eras = "both"
    request_keys: Sequence[str] = ()
    audit_key_names: bool = False
    authentication: Callable[[], Authentication | None] = lambda: None
    """Makes what stands before the endpoint. It is called only if nothing replaces it."""


REPLACED: ContextVar[Callable[[LayerSettings], LayerSettings] | None] = ContextVar(
    "replaced", default=None
)
"""Set where code that makes layers is loaded: returns the settings that win."""

AGENT_REPLACED: ContextVar[Mapping[str, Any]] = ContextVar("agent_replaced")
"""The same for arguments of ``AcpSessionLayer``."""


@contextmanager
def replacing(variable: ContextVar[_Value], value: _Value) -> Generator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
