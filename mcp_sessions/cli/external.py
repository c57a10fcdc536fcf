from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from mcp_sessions.cli.arguments import once
from mcp_sessions.cli.serve_options import EXTERNAL_OPTIONS
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.http_server import HTTPServer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.stdio_server import StdioServer


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in EXTERNAL_OPTIONS}
    given["try_at_start"] = _tries(options)
    return {name: value for name, value in given.items() if value is not None}


def task_policy(options: argparse.Namespace) -> TaskPolicy | None:
    if not options.tasks:
        return None
    policy = TaskPolicy(tools=bool(options.task_tools))
    return policy if options.task_after is None else replace(policy, after=options.task_after)


def _tries(options: argparse.Namespace) -> bool:
    if options.lazy or options.check:
        return False
    if options.worker is not None:
        # Imported here, since few commands have workers.
        from mcp_sessions.cli.workers import is_first_worker

        return is_first_worker(options.worker)
    # On standard input and output a client is there at once.
    return not options.stdio or options.port is not None


def external_server(options: argparse.Namespace) -> ExternalServer | None:
    """Return the command or the URL to serve. None: the target is neither.

    Raises:
        ConfigurationError: It cannot be served.
    """
    given = given_options(options)
    if options.command:
        env: dict[str, str] = dict(options.env or ())
        warm = options.warm or 0
        return StdioServer(*options.command, env=env, cwd=options.cwd, warm=warm, **given)
    if options.url:
        return HTTPServer(options.url, headers=once(options.header or ()), **given)
    return None
