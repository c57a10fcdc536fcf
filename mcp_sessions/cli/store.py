"""Check, dump, load, copy and back up a store: ``mcp-sessions store``.

A dump has whole sessions: ids, which are credentials, and all that they hold. Its file has mode
0600. Each sub-command prints one line about what it did. What is wrong with a session goes to
stderr, a line each, and then the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mcp_sessions.cli import arguments as types
from mcp_sessions.cli.arguments import redacted
from mcp_sessions.cli.output import out
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores import dumps
from mcp_sessions.stores.dumps import Moved
from mcp_sessions.stores.urls import open_store, sqlite_file

FAULTS = 1
"""Exit status if something is wrong with a session."""

_EXAMPLES = (
    "mcp-sessions store check sqlite:///notes.db",
    "mcp-sessions store dump sqlite:///notes.db notes.dump",
    "mcp-sessions store load notes.dump postgresql://localhost/sessions",
    "mcp-sessions store copy sqlite:///notes.db postgresql://localhost/sessions",
    "mcp-sessions store backup sqlite:///notes.db notes-backup.db",
)

_NOTES = """\
A dump and a backup hold session ids, which can be credentials, and what clients
and tools wrote. Only their owner can read the files."""


def main(arguments: Sequence[str]) -> int:
    """Run the sub-command, and return the exit status.

    Raises:
        ConfigurationError: A URL or a file is wrong.
        StoreUnavailable: A store is away.
    """
    options = make_parser().parse_args(list(arguments))
    match options.what:
        case "check":
            found = asyncio.run(_check(options))
            text = _all_well(found.done)
        case "dump":
            found = asyncio.run(_dump(options))
            text = f"{_sessions(found.done)} dumped to {options.file}{_key_of(options.store)}"
        case "load":
            found = asyncio.run(_load(options))
            text = f"{_sessions(found.done)} loaded{_there(found)}"
        case "copy":
            found = asyncio.run(_copy(options))
            text = f"{_sessions(found.done)} copied{_there(found)}{_key_of(options.source)}"
        case "backup":
            found = Moved()
            text = _back_up(options)
        case _:
            raise AssertionError("argparse accepts these only")
    for fault in found.faults:
        print(fault, file=sys.stderr)
    out(text)
    return FAULTS if found.faults else 0


async def _check(options: argparse.Namespace) -> Moved:
    async with dumps.reading(options.store) as store:
        return await dumps.check(store)


async def _dump(options: argparse.Namespace) -> Moved:
    async with dumps.reading(options.store) as store:
        return await dumps.dump(store, Path(options.file), time.time())


async def _load(options: argparse.Namespace) -> Moved:
    file = dumps.read(Path(options.file))
    async with dumps.writing(options.store) as store:
        return await dumps.load(store, file, time.time())


async def _copy(options: argparse.Namespace) -> Moved:
    async with dumps.reading(options.source) as source, dumps.writing(options.target) as target:
        return await dumps.copy(source, target, time.time())


def _back_up(options: argparse.Namespace) -> str:
    if open_store(options.store).name != "sqlite":
        raise ConfigurationError(
            f"store backup is for sqlite:///…, not {redacted(options.store)}: back up Postgres "
            "with pg_dump, and Redis with its own copies, or use store dump"
        )
    from mcp_sessions.stores.sqlite.backup import back_up

    path, target = sqlite_file(options.store)[0], Path(options.file)
    back_up(path, target)
    return f"{path} backed up to {target}{_key_of(options.store)}"


def _key_of(url: str) -> str:
    """Say where the sealing key is that goes with the sessions of a SQLite file."""
    if open_store(url).name != "sqlite":
        return ""
    key = Path(f"{os.path.realpath(sqlite_file(url)[0])}-key")
    return f"; keep its sealing key with it: {key}" if key.exists() else ""


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def _all_well(count: int) -> str:
    return f"{_sessions(count)} {'is as it' if count == 1 else 'are as they'} should be"


def _there(found: Moved) -> str:
    if not found.there:
        return ""
    return f"; {_sessions(found.there)} there already, and left as they are"


def make_parser() -> types.OneLineParser:
    parser = types.OneLineParser(
        prog="mcp-sessions store",
        description="Check, dump, load, copy and back up a store.",
        examples=_EXAMPLES,
        notes=_NOTES,
    )
    command = parser.sub_commands("check", "dump", "load", "copy", "backup", notes=_NOTES)
    checking = command("check", "read every session, and name what is wrong", _EXAMPLES[0])
    checking.add_argument("store", metavar="STORE", help="URL of the store")
    dumping = command("dump", "write the sessions to a file, as lines of JSON", _EXAMPLES[1])
    dumping.add_argument("store", metavar="STORE", help="URL of the store")
    dumping.add_argument("file", metavar="FILE", help="a new file")
    loading = command("load", "add the sessions of a dump to a store", _EXAMPLES[2])
    loading.add_argument("file", metavar="FILE", help="what store dump wrote")
    loading.add_argument("store", metavar="STORE", help="URL of the store")
    copying = command("copy", "add the sessions of a store to another one", _EXAMPLES[3])
    copying.add_argument("source", metavar="FROM", help="URL of the store that has them")
    copying.add_argument("target", metavar="TO", help="URL of the store that gets them")
    backing = command("backup", "copy a SQLite file while a server uses it", _EXAMPLES[4])
    backing.add_argument("store", metavar="STORE", help="sqlite:///…")
    backing.add_argument("file", metavar="FILE", help="a new file")
    return parser
