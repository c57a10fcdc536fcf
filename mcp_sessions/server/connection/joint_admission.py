"""Admit a request to its connection and to the connection's current session in one step.

Otherwise each of them takes a step of its own. Only the store knows the current session. The layer
passes the one that it saw last. If it is another one by now, the request takes two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mcp_sessions.core.request_keys import Begun
from mcp_sessions.stores.records import Admitted, CurrentSession, CurrentUse


@dataclass(slots=True, eq=False, repr=False)
class JointAdmission:
    """Admits one request to a connection and its current session in one step.

    Args:
        settle: Gets the run of a key that this step did not record.
        lock: The lock of its key, held as long as this is entered and of use; None: it has no key.
    """

    use: CurrentUse
    _settle: Callable[[str], None]
    _lock: asyncio.Lock | None
    _admitted: Admitted | None = field(init=False, default=None)

    async def __aenter__(self) -> JointAdmission:
        if self._lock is not None:
            await self._lock.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def became(self, admitted: Admitted | None) -> None:
        """Note the store's answer about the current session; None: the step did nothing there."""
        self._admitted = admitted
        key = self.use.key
        if key is not None and (admitted is None or admitted.key is not Begun.FIRST):
            self._settle(key.run)
        if admitted is None:
            # It goes on to another session, whose key has another lock: two such requests must
            # not wait for each other.
            self._release()

    @property
    def is_admitted(self) -> bool:
        return self._admitted is not None

    def taken(self, current: CurrentSession) -> Admitted | None:
        """Return the admission to that session, once; None: the request has to be admitted."""
        admitted, self._admitted = self._admitted, None
        if admitted is None or admitted.record.session_id != current.session_id:
            return None
        return admitted if admitted.record.fencing_epoch == current.fencing_epoch else None

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
