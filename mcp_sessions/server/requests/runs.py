"""Sendings of keyed requests that this process admits, and which of them never began.

A key is recorded before its handler starts. If the reply to that is lost, or something fails
in between, the key is known and nothing runs. Then the process that recorded it is the one
that knows: what it never began, and never will, may be begun anew (``KeyUse.instead_of``).
"""

from __future__ import annotations

import itertools
import secrets

_MOST = 50_000
"""Runs that never began and are remembered, about 150 bytes each; of an older one nobody can
know any more."""


class Runs:
    """Names of runs. The holder of a key's lock may ask whether a run never started: then none is
    about to start.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._prefix = secrets.token_urlsafe(9)
        self._numbers = itertools.count(1)
        self._not_begun: dict[str, None] = {}
        self._most = most

    def mint(self) -> str:
        """Make the name of a run that has not started, unique over all processes."""
        run = f"{self._prefix}-{next(self._numbers)}"
        self._not_begun[run] = None
        if len(self._not_begun) > self._most:
            del self._not_begun[next(iter(self._not_begun))]
        return run

    def settle(self, run: str) -> None:
        """Forget a run that starts now, or whose request recorded no key."""
        self._not_begun.pop(run, None)

    def never_began(self, run: str | None) -> bool:
        return run in self._not_begun
