"""What a new child is told before it is asked anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from mcp_sessions.core.listening import SET_LEVEL
from mcp_sessions.server.upstream.external.child import ANSWERING, Child
from mcp_sessions.server.upstream.external.place import Place
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)


async def tell_what_was_told(place: Place, child: Child) -> None:
    """Tell it what the child before it was told, or would have been.

    Raises:
        UpstreamError: It is over.
    """
    again: list[tuple[str, Mapping[str, Any]]] = []
    if place.level is not None:
        again.append((SET_LEVEL, {"level": place.level}))
    left = [uri for uri in place.subscribers if uri not in child.subscribed]
    again += [("resources/subscribe", {"uri": uri}) for uri in left]
    for method, params in again:
        try:
            async with asyncio.timeout(ANSWERING):
                await child.request(None, method, params)
        except TimeoutError:
            # Nor would it the others.
            logger.warning("%s: a new one does not answer %s", place.label(), method)
            return
        except UpstreamError as refused:
            if child.is_over:
                raise
            logger.warning("%s: a new one refuses %s: %s", place.label(), method, refused)
