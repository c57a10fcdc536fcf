"""Keep the code of a target from serving while it is loaded; ``serve`` serves it afterwards.

A file may call ``mcp.run()`` unguarded. It would then be served without sessions, with its own
arguments, and the command that loads it would wait for ever. Every ``run`` of a server, by any name
and any way, ends in one of three places: uvicorn, standard input, or `SessionLayer.run`. These are
blocked until the target is loaded.
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
    def __init__(self) -> None:
        self.tried = False
        """Whether code of the target tried to serve, even if it caught the error."""

    def refuse(self) -> NoReturn:
        self.tried = True
        raise ConfigurationError("nothing is served while it is loaded")


@contextmanager
def nothing_runs() -> Generator[Runs]:
    import uvicorn

    from mcp_sessions.serve.uvicorn_server import RUN_IS_REFUSED

    runs = Runs()

    async def serve(self: uvicorn.Server, sockets: object = None) -> None:
        runs.refuse()

    # No code between `mcp.run()` and uvicorn asks whether to serve, so this is the only place. It
    # is restored below.
    kept_serve, kept_stdin, kept_banner = uvicorn.Server.serve, sys.stdin, os.environ.get(_BANNER)
    uvicorn.Server.serve = serve
    if sys.stdin is not None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = cast("TextIO", _NotForProtocol(sys.stdin, runs))
    # FastMCP prints a banner before it serves. This command prints lines of its own.
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
    """Stand in for standard input, and refuse its bytes. Other questions, such as whether it is a
    terminal, go to the real one.
    """

    def __init__(self, stdin: TextIO, runs: Runs) -> None:
        self._stdin = stdin
        self._runs = runs

    @property
    def buffer(self) -> BinaryIO:
        self._runs.refuse()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdin, name)
