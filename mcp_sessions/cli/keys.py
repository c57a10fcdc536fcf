"""Make, list and revoke the API keys of a file: ``mcp-sessions keys add NAME --file FILE``.

Rules, owned by ``tests/cli/test_keys.py``:

1. ``add`` prints the new key once, alone on stdout. No other command prints a key, or can.
2. A server that uses the file notices a change within a second or so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from mcp_sessions.authentication import key_file
from mcp_sessions.authentication.key_file import ApiKey
from mcp_sessions.cli.arguments import LEGEND, OneLineParser, Options, seconds
from mcp_sessions.cli.option_variables import variable_of
from mcp_sessions.cli.output import OutputFailed, out, print_table
from mcp_sessions.errors import ConfigurationError

_VARIABLE = variable_of("--api-keys")
_EXAMPLES = (
    "mcp-sessions keys add alice --file keys.json --expires 90d",
    "mcp-sessions keys list --file keys.json",
    "mcp-sessions keys revoke alice --file keys.json",
)

_NOTES = f"""\
A client sends its key as a bearer token: Authorization: Bearer KEY.
The variable {_VARIABLE} names the file as well.
{LEGEND}"""


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    path: str | None = options.file or os.environ.get(_VARIABLE)
    if not path:
        raise ConfigurationError(f"which file? Give --file FILE, or set {_VARIABLE}")
    match options.what:
        case "add":
            _add(path, options)
        case "list":
            _list(path)
        case "revoke":
            _revoke(path, options)
        case _:
            raise AssertionError("argparse accepts these three only")
    return 0


def _add(path: str, options: argparse.Namespace) -> None:
    key, entry = key_file.minted(options.name, options.scope or (), time.time(), options.expires)

    def added(keys: list[ApiKey]) -> list[ApiKey]:
        if entry.id in {each.id for each in keys}:
            raise ConfigurationError("the new key has the id of another one: run the command again")
        return [*keys, entry]

    key_file.change(path, added)
    try:
        out(key)
    except OutputFailed:
        # Nobody has seen it.
        key_file.change(path, lambda keys: [each for each in keys if each.id != entry.id])
        raise
    same = sum(each.name == entry.name for each in key_file.read(path, by_command=True)[0].values())
    if same > 1:
        _say(f"{entry.name} has {same} keys now; they own the same sessions")
    _say(f"{path} has a hash of this key only: it cannot be shown again")


def _list(path: str) -> None:
    keys = sorted(
        key_file.read(path, by_command=True)[0].values(), key=lambda key: (key.name, key.created_at)
    )
    rows = [("ID", "NAME", "SCOPES", "CREATED", "EXPIRES")]
    rows += [
        (key.id, key.name, " ".join(key.scopes) or "-", _day(key.created_at), _end(key))
        for key in keys
    ]
    print_table(rows, wraps=[1, 2])


def _revoke(path: str, options: argparse.Namespace) -> None:
    if bool(options.all) == (options.name is not None) or (options.all and options.id):
        raise ConfigurationError("revoke NAME [--id ID], or revoke --all")
    revoked: list[ApiKey] = []

    def left(keys: list[ApiKey]) -> list[ApiKey]:
        for key in keys:
            if options.all or (key.name == options.name and options.id in (None, key.id)):
                revoked.append(key)
        if not revoked and not options.all:
            raise ConfigurationError(f"{path} has no such key: see mcp-sessions keys list")
        return [key for key in keys if key not in revoked]

    key_file.change(path, left)
    for key in revoked:
        out(f"{key.id} {key.name} revoked")


def _day(at: int) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return str(at)


def _end(key: ApiKey) -> str:
    if key.expires_at is None:
        return "never"
    return f"{_day(key.expires_at)}{' (expired)' if key.expires_at <= time.time() else ''}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="mcp-sessions keys",
        description="Make, list and revoke API keys for serve --api-keys FILE.",
        examples=_EXAMPLES,
        notes=_NOTES,
    )
    added = parser.sub_commands("add", "list", "revoke", notes=_NOTES)

    def command(name: str, what: str, example: str) -> tuple[OneLineParser, Options]:
        made = added(name, what, example)
        group = made.group("keys")
        group.add("--file FILE", "the file of keys (the variable)")
        return made, group

    add, group = command("add", "make a key, and print it once", _EXAMPLES[0])
    add.add_argument("name", metavar="NAME", help="owner of the key and its sessions")
    group.add("--scope SCOPE", "a scope of the key *")
    group.add("--expires TIME", "life of the key, such as 90d (no end)", seconds)
    command("list", "list the keys, without the keys themselves", _EXAMPLES[1])
    revoke, group = command("revoke", "refuse a key, and end its streams", _EXAMPLES[2])
    revoke.add_argument("name", metavar="NAME", nargs="?", help="all keys of this name")
    group.add("--id ID", "only the key with this id")
    group.add("--all", "all keys of the file")
    return parser
