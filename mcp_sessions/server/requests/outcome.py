"""Represent the outcome of a running request: plain values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mcp_sessions.core.messages import error_body, error_outcome, result_outcome
from mcp_sessions.errors import INTERNAL_ERROR, StoreUnavailable
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)

NOT_JSON = (TypeError, ValueError, RecursionError)
"""Exceptions of JSON writers for a value that they cannot write."""

MOST_OWED: Final = 16_777_216
"""Bytes of outcomes that wait for a store that is away; of later ones only the end is kept."""

Stamp = Callable[[dict[str, Any], SessionRecord], dict[str, Any]]
"""Adds a session's ``_meta`` to a result."""


class Outcome(NamedTuple):
    """A result or, if that is None, an error."""

    result: dict[str, Any] | None
    error: dict[str, Any] | None
    away: StoreUnavailable | None = None
    """The store's failure of which the error tells: nothing ran."""

    def encoded(self, method: str) -> bytes | None:
        """Encode the outcome for the store; None: JSON cannot represent it.

        Args:
            method: The method of its request, for the log.
        """
        try:
            if self.result is not None:
                return result_outcome(self.result)
            return error_outcome(self.error or {})
        except NOT_JSON:
            logger.exception("the outcome of %s cannot be kept", method)
            return None


def store_error(failed: StoreUnavailable) -> dict[str, Any]:
    """The error of an answer where a store that fails has no status of its own (HTP5)."""
    return error_body(INTERNAL_ERROR, f"{failed.told}: ask again later")
