"""Find the older notification that a new one replaces.

Only notifications of the policy's list coalesce. Callers pass no request, response, error or
cancellation (COA4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def coalescing_key(
    method: str, params: Mapping[str, Any] | None, rules: Mapping[str, str | None]
) -> str | None:
    """The key under which a newer notification replaces this one, or None for never.

    Args:
        method: The notification's method.
        params: Its params.
        rules: Method → the member of ``params`` that tells keys apart, or None where the
            method alone is the key.
    """
    if method not in rules:
        return None
    member = rules[method]
    if member is None:
        return method
    value = (params or {}).get(member)
    # A notification without the member is malformed; it is kept as it is, so that it
    # cannot hide another one.
    return f"{method} {value}" if isinstance(value, str) else None
