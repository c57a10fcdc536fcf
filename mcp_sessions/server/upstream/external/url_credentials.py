from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import httpx2

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.port import UpstreamError

if TYPE_CHECKING:
    from mcp_sessions.http_server import Credential

logger = logging.getLogger(__name__)


class InUse:
    def __init__(self, given: Credential) -> None:
        self.headers: Mapping[str, str] = given if isinstance(given, Mapping) else {}
        self.auth = given if isinstance(given, httpx2.Auth) else None


class Credentials:
    """The credentials of one session, one after the other.

    Args:
        given: The first.
        ask: Asks for another one, and raises UpstreamError: there is none. None: there is no other.
    """

    def __init__(self, given: Credential, ask: Callable[[], Awaitable[Credential]] | None) -> None:
        self.current = InUse(given)
        self._ask = ask
        self._asking: asyncio.Future[None] | None = None
        self._background = Background()

    async def renewed(self, refused: InUse) -> bool:
        """Replace a refused credential, once for all requests that were refused with it. Return
        whether there is another one to try.

        Raises:
            UpstreamError: There is none.
        """
        if self._ask is None:
            return False
        if self.current is refused:
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_future()
                # The caller may be cancelled meanwhile.
                self._asking.add_done_callback(lambda it: it.cancelled() or it.exception())
                asking = self._renew(self._ask, self._asking)
                self._background.run("asking for a credential", asking)
            await asyncio.shield(self._asking)
        return True

    async def _renew(
        self, ask: Callable[[], Awaitable[Credential]], asking: asyncio.Future[None]
    ) -> None:
        try:
            self.current = InUse(await ask())
        except UpstreamError as none:
            logger.warning("a credential is refused, and there is no other: %s", none)
            asking.set_exception(none)
        else:
            asking.set_result(None)
        finally:
            self._asking = None
            asking.cancel()

    async def close(self) -> None:
        await self._background.close()
