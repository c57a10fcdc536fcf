"""While a target is loaded, nothing in it is served: ``serve`` does that, and afterwards.

A file that calls ``mcp.run()`` unguarded would be served without sessions, where its own
arguments say, and the command that loads it would wait for it for ever. Whatever a server's
``run`` is called and however it was reached, it ends in one of three places: uvicorn, standard
input, or `SessionLayer.run`. These are shut until the target is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn, TextIO, cast

from mcp_sessions.errors import ConfigurationError

_BANNER = "FASTMCP_SHOW_SERVER_BANNER"


class Runs:
    """What was tried while it was shut."""

    def __init__(self) -> None:
        self.tried = False
        """Something in the target wanted to serve, whatever became of the error."""

    def refuse(self) -> NoReturn:
        """Shut the way.

        Raises:
            ConfigurationError: Always.
        """
        self.tried = True
        raise ConfigurationError("nothing is served while it is loaded")


@contextmanager
def nothing_runs() -> Generator[Runs]:
    """Shut the ways to serve until the block ends."""
    import uvicorn

    from mcp_sessions.serve.http import RUN_IS_REFUSED

    runs = Runs()

    async def serve(self: uvicorn.Server, sockets: object = None) -> None:
        runs.refuse()

    # Nothing between `mcp.run()` and uvicorn asks anybody whether to serve, so that there is
    # no other place for this. It is put back below.
    kept_serve, kept_stdin, kept_banner = uvicorn.Server.serve, sys.stdin, os.environ.get(_BANNER)
    uvicorn.Server.serve = serve
    if sys.stdin is not None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = cast("TextIO", _NotForProtocol(sys.stdin, runs))
    # FastMCP shows one before it serves; this command has lines of its own.
    os.environ[_BANNER] = "false"
    refused = RUN_IS_REFUSED.set(runs.refuse)
    try:
        yield runs
    finally:
        RUN_IS_REFUSED.reset(refused)
        if kept_banner is None:
            del os.environ[_BANNER]
        else:
            os.environ[_BANNER] = kept_banner
        sys.stdin = kept_stdin
        uvicorn.Server.serve = kept_serve


class _NotForProtocol:
    """Standard input, whose bytes nobody may have. What is asked of it otherwise, such as
    whether it is a terminal, it says.
    """

    def __init__(self, stdin: TextIO, runs: Runs) -> None:
        self._stdin = stdin
        self._runs = runs

    @property
    def buffer(self) -> BinaryIO:
        self._runs.refuse()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdin, name)
