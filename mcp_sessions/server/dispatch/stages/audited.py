from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mcp_sessions import metrics
from mcp_sessions.core.message import Message
from mcp_sessions.errors import WireError
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.reporting.audit import Audit, Found
from mcp_sessions.server.upstream.port import UpstreamError


@dataclass(slots=True, eq=False, repr=False)
class Audited(Stage):
    """Begins the record of a request. The answer of its :class:`Inbound` writes it."""

    _audit: Audit
    logger: logging.Logger = field(init=False)
    """The audit is on while it has a level. It may get one at any time."""

    def __post_init__(self) -> None:
        self.logger = self._audit.logger

    async def before(self, call: Call) -> Outcome | None:
        self._begin(call.request, call.inbound, call)
        return None

    @contextmanager
    def around(self, request: Message, inbound: Inbound) -> Generator[None]:
        """Audit a message that takes no path: a handshake, or a listen. The record says here that
        it gets no answer. Otherwise the answer writes it.
        """
        if self.logger.level or metrics.measures:
            self._begin(request, inbound, None)
        try:
            yield
        except (WireError, UpstreamError):
            # That is its answer.
            raise
        except BaseException as failed:
            if inbound.audit is not None:
                inbound.audit.failed(failed)
            raise

    def _begin(self, request: Message, inbound: Inbound, found: Found | None) -> None:
        inbound.audited(
            self._audit.begin(
                request,
                principal=inbound.principal,
                transport=inbound.transport,
                client=inbound.address,
                version=inbound.peer.protocol_version,
                modern=inbound.peer.modern,
                found=found,
            )
        )
