"""Play the conformance vectors against a server: ``mcp-sessions conformance TARGET…``.

The runner is a package of its own, outside of this one. It shares nothing with the tested code. It
is imported only if there is something to run, and so is asyncio.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli import output
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import reason_of

TOKEN = "CONFORMANCE_TOKEN"
OTHER_TOKEN = "CONFORMANCE_OTHER_TOKEN"
WEAK_TOKEN = "CONFORMANCE_WEAK_TOKEN"
NOT_CONFORMANT = 1


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not (options.list or options.client or options.targets):
        parser.error("which TARGET? a URL or stdio:COMMAND, or --client COMMAND")
    if options.client and options.targets:
        parser.error("--client tests a client: it takes no TARGET")
    if options.client and (options.suite or options.transport or options.era or options.level):
        parser.error("--suite, --transport, --era, --level choose vectors: --client takes --only")
    import asyncio

    try:
        import mcp_sessions_conformance.entry as entry
    except ImportError as error:
        raise ConfigurationError(
            f"the runner needs {error.name}: in a checkout, run pip install -e conformance"
        ) from error
    if options.list:
        output.out(entry.listing())
        return 0
    out = Path(options.json) if options.json else None
    is_new = out is not None and not out.exists()
    if out is not None:
        # A run takes a minute. An unwritable file is found before it.
        _write(out, "", mode="a")
    kept: list[entry.Tested] = []
    try:
        if options.client:
            tested = asyncio.run(
                entry.test_client(
                    options.client,
                    only=options.only or (),
                    wait=options.timeout,
                    progress=show_progress,
                    keep=kept.append,
                )
            )
        else:
            tested = asyncio.run(
                entry.test_server(
                    options.targets,
                    suites=options.suite or (),
                    transports=options.transport or (),
                    eras=options.era or (),
                    only=options.only or (),
                    level=options.level,
                    optional=[
                        each for each in ("conversations", "tasks") if getattr(options, each)
                    ],
                    # Shells and CI systems set a variable to the empty text if there is no token.
                    token=os.environ.get(TOKEN) or None,
                    other_token=os.environ.get(OTHER_TOKEN) or None,
                    weak_token=os.environ.get(WEAK_TOKEN) or None,
                    wait=options.timeout,
                    give_up=options.give_up,
                    progress=show_progress,
                    keep=kept.append,
                )
            )
        return 0 if tested.is_conformant else NOT_CONFORMANT
    except entry.BadInput as error:
        if out is not None and is_new:
            out.unlink()
        raise ConfigurationError(str(error)) from error
    finally:
        # Also of a run that a signal ended.
        for outcome in kept:
            # The file first: the reader of stdout may have left.
            if out is not None:
                _write(out, json.dumps(outcome.document, indent=1) + "\n")
            _show(outcome.text)


def _show(text: str) -> None:
    """Print a text. Characters that the terminal cannot show are escaped: the text may quote a
    server.
    """
    encoding = sys.stdout.encoding
    output.out(text.encode(encoding, "backslashreplace").decode(encoding))


def _write(out: Path, text: str, mode: Literal["a", "w"] = "w") -> None:
    try:
        with out.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {reason_of(error, out)}") from error


def show_progress(where: str, number: int, of: int, wrong: str) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == of else ""
        print(f"\r{where:<42} {number:4d} of {of}", end=end, file=sys.stderr, flush=True)
    elif number == 0:
        what = "duties" if where == "client" else "vectors"
        print(f"{where}: {of} {what}", file=sys.stderr, flush=True)
    elif wrong:
        print(f"{where}: {wrong}"[:400], file=sys.stderr, flush=True)


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions conformance",
        description="Test a server, or a client, against the sessions extension.",
        examples=(
            "mcp-sessions conformance http://127.0.0.1:8000/mcp",
            "mcp-sessions conformance http://127.0.0.1:8000/mcp ws://127.0.0.1:8000/mcp",
            "mcp-sessions conformance 'stdio:python server.py' --suite replay",
            "mcp-sessions conformance --client 'node client.js'",
        ),
        notes=f"""\
{types.LEGEND}

The server needs the fixture tools that conformance/README.md describes.
Bearer tokens are variables: {TOKEN}, {OTHER_TOKEN} for a
second principal, {WEAK_TOKEN} for the first one with fewer scopes.
Exit status: 0 if every MUST holds, 1 if not, 2 for wrong arguments.""",
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="http(s)://, ws(s):// or 'stdio:COMMAND'",
    )
    what = parser.group("what to test")
    what.add("--client COMMAND", "test the client COMMAND, which gets a URL")
    what.add("--suite SUITE", "only this suite *")
    what.add(
        "--transport NAME",
        "only http, websocket or stdio *",
        choices=("http", "websocket", "stdio"),
    )
    what.add(
        "--era NAME",
        "only handshake, or modern *",
        choices=("handshake", "modern"),
    )
    what.add(
        "--level NAME",
        "only resume, or up to calls, data or full",
        choices=("resume", "calls", "data", "full"),
    )
    what.add("--only ID", "only this vector, duty or clause *")
    what.add("--conversations", "play the vectors about conversations, too")
    what.add("--tasks", "play the vectors about tasks, too")
    run = parser.group("run and outcome")
    run.add("--json FILE", "write the outcome to FILE as well")
    run.add("--timeout TIME", "time for any one answer (5s)", types.seconds, default=5.0)
    run.add(
        "--give-up N",
        "stop after N silent vectors; 0: never (%(default)d)",
        types.count_or_none,
        default=12,
    )
    run.add("--list", "print all vectors and duties, and exit")
    return parser
