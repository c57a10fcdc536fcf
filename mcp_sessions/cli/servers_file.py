"""Read the file in which hosts name their MCP servers, as the hosts read it.

{"mcpServers": {"files": {"command": "npx", "args": ["-y", "…"], "env": {"TOKEN": "${TOKEN}"}},
"search": {"type": "http", "url": "https://host/mcp", "headers": {…}}}}
"""

from __future__ import annotations

import json
import logging
import re
from argparse import ArgumentTypeError
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from mcp_sessions.argument_types import did_you_mean
from mcp_sessions.cli.arguments import duration, expanded
from mcp_sessions.core.conversation_keys import place_of
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer, HTTPServer, StdioServer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.protocol_versions import ERAS, Eras
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)

_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters of a name that cannot stand in a path here."""

_AS_SHELLS_DO: Final = re.compile(r"(?:^|\s)\$[A-Za-z_][A-Za-z0-9_]*\Z")
_LARGEST: Final = 1_048_576
"""Bytes of a file, at most."""

_STRING = r'"(?:[^"\\]|\\.)*(?:"|\Z)'
_COMMENT: Final = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_LAST_COMMA: Final = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)
"""JSON extensions that editors allow. The pattern skips strings first, so that it finds only text
outside of them.
"""

_OF_COMMAND: Final = frozenset({"command", "args", "env", "cwd"})
_OF_URL: Final = frozenset({"url", "headers"})


def _as_in_files(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.title, rest))


_OURS: Final = {
    _as_in_files(name): name
    for name in ("per", "max_children", "child_idle", "start_timeout", "warm")
}
"""Members that only this file has → their names in ``StdioServer`` and ``HTTPServer``."""

_OF_TASKS: Final = {_as_in_files(each.name): each.name for each in fields(TaskPolicy)}
"""Members of ``tasks`` → their names in ``TaskPolicy``."""

_TIMES: Final = {"childIdle", "startTimeout"} | {
    _as_in_files(each.name) for each in fields(TaskPolicy) if each.type == "float"
}
_OTHERS: Final = {"type", "disabled", "enabled", "auth", "eras", "requestKeys", "tasks"}
_USED: Final = _OF_COMMAND | _OF_URL | _OURS.keys() | _OTHERS
_TYPES: Final = {
    "stdio": _OF_COMMAND,
    "http": _OF_URL,
    "streamable-http": _OF_URL,
    "streamableHttp": _OF_URL,
    "streamable_http": _OF_URL,
}
_NOT_SPOKEN: Final = {"sse": "the transport of 2024 (sse)", "ws": "a WebSocket"}
"""Types that hosts know and ``serve`` does not, and what they are. Such an entry is no mistake."""

_URLS: Final = ("serverUrl", "httpUrl")
"""Other names of ``url`` in some hosts."""


def servers_of(
    file: str,
    given: Mapping[str, Any],
    env: Mapping[str, str] = MappingProxyType({}),
    tasks: TaskPolicy | None = None,
    eras: Eras = "both",
    request_keys: Sequence[str] = (),
) -> dict[str, ExternalServer]:
    """Return the enabled servers that the file names, each by the part of its path. A server of
    a kind that is not spoken is left out, with a warning: the others are served.

    Args:
        given: Options for all servers, as ``StdioServer`` and ``HTTPServer`` call them. A server's
            own options replace them.
        env: Variables for all commands. A command's own replace them.
        tasks: Which calls of servers become tasks that say nothing of it.
        eras: The eras that are spoken for servers that say nothing of it.
        request_keys: The places of request keys that hosts send, for servers that name none.

    Raises:
        ConfigurationError: The file is missing or invalid, or an entry cannot be served. The error
            names the entry.
    """
    servers: dict[str, ExternalServer] = {}
    text = _text_of(file)
    for name, entry in _entries(file, text).items():
        try:
            part = _NO_NAME.sub("-", name).strip("-.")
            if not part or part in servers:
                raise ConfigurationError("its name is no path, or that of another one")
            if not isinstance(entry, dict):
                raise ConfigurationError("must be an object")
            # null counts as absent, as in some hosts.
            given_members = cast("dict[str, Any]", entry).items()
            members: dict[str, Any] = {
                each: value for each, value in given_members if value is not None
            }
            for each in _URLS:
                if each in members and "url" not in members:
                    members = {**members, "url": members[each]}
                    del members[each]
            switches = {each: members.get(each) for each in ("disabled", "enabled")}
            for each, value in switches.items():
                if value is not None and not isinstance(value, bool):
                    raise ConfigurationError(f"{each} must be true or false")
            if switches["disabled"] or switches["enabled"] is False:
                logger.info("%s: %s is disabled", file, name)
                continue
            kind: object = members.get("type")
            if isinstance(kind, str) and kind in _NOT_SPOKEN:
                spoken = "only Streamable HTTP is spoken"
                logger.warning(
                    "%s: %s is not served: %s; %s", file, name, _NOT_SPOKEN[kind], spoken
                )
                continue
            unused = [
                f"{each}{did_you_mean(each, _USED)}" for each in sorted(members.keys() - _USED)
            ]
            if unused:
                logger.warning("%s: %s: serve ignores %s", file, name, ", ".join(unused))
            server = _server(members, {"title": f"the server {name}", **given}, env)
            server.tasks = _tasks(members.get("tasks"), tasks)
            server.eras = _eras(members.get("eras", eras))
            server.request_keys = _places(members.get("requestKeys"), request_keys)
            servers[part] = server
        except ConfigurationError as failed:
            raise ConfigurationError(f"{file}{_line_of(text, name)}: {name}: {failed}") from failed
    if not servers:
        raise ConfigurationError(f"{file}: there is no server in it that can be served")
    return servers


def _text_of(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            text = opened.read(_LARGEST + 1)
    except OSError as failed:
        raise ConfigurationError(f"{file}: {reason_of(failed, file)}") from failed
    if len(text) > _LARGEST:
        raise ConfigurationError(f"{file}: more than {_LARGEST} bytes")
    try:
        return _without_comments(text)
    except ValueError as failed:
        raise ConfigurationError(f"{file}: not JSON ({failed})") from failed


def _line_of(text: str, name: str) -> str:
    """Return the line where an entry begins. Empty: its name is in several places."""
    found = list(re.finditer(rf"{re.escape(json.dumps(name, ensure_ascii=False))}\s*:", text))
    return f", line {text.count(chr(10), 0, found[0].start()) + 1}" if len(found) == 1 else ""


def _entries(file: str, text: str) -> dict[str, Any]:
    try:
        # A second server of the same name would hide the first.
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as failed:
        where = f"line {failed.lineno}, column {failed.colno}"
        raise ConfigurationError(f"{file}, {where}: {failed.msg}") from failed
    except (ValueError, RecursionError) as failed:
        raise ConfigurationError(f"{file}: not JSON ({failed})") from failed
    members = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if "mcpServers" in members and "servers" in members:
        raise ConfigurationError(f"{file}: both mcpServers and servers: hosts read one of them")
    # VS Code calls it "servers".
    entries = members.get("mcpServers", members.get("servers"))
    if not isinstance(entries, dict):
        hints = (did_you_mean(name, ("mcpServers", "servers")) for name in members)
        hint = next(filter(None, hints), "")
        raise ConfigurationError(f'{file}: must be {{"mcpServers": {{NAME: {{…}}}}}}{hint}')
    return cast("dict[str, Any]", entries)


def _without_comments(text: bytes) -> str:
    """Return the JSON without comments and last commas. Each line keeps its number."""

    def blank(found: re.Match[str]) -> str:
        return found[1] or re.sub(r"[^\n]", " ", found[0])

    # As JSON allows, a file may be UTF-16, and begin with a byte order mark.
    decoded = text.decode(json.detect_encoding(text)).removeprefix("\ufeff")
    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, decoded))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is there twice in an object")
        found[name] = value
    return found


def _server(
    members: dict[str, Any], given: Mapping[str, Any], env: Mapping[str, str]
) -> ExternalServer:
    kind = members.get("type", "http" if "url" in members else "stdio")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ConfigurationError(f"type: stdio or http, not {kind!r}")
    foreign = sorted(members.keys() & (_OF_COMMAND | _OF_URL) - _TYPES[kind])
    if foreign:
        raise ConfigurationError(f"{foreign[0]} is not for servers of type {kind}: leave it out")
    own = {_OURS[each]: _read(each, members[each]) for each in _OURS if each in members}
    options = {**given, **own, **_needed_scopes(members.get("auth"))}
    if _TYPES[kind] is _OF_URL and "warm" in members:
        raise ConfigurationError("warm is only for commands: leave it out")
    with _named_as_in_files(_OURS | {"auth.tools": "tool_scopes"}):
        return _made(members, _TYPES[kind] is _OF_URL, options, env)


@contextmanager
def _named_as_in_files(names: Mapping[str, str], within: str = "") -> Generator[None]:
    """Let an error name members of the file.

    Args:
        names: These members → the names of the arguments.
        within: What the error begins with.
    """
    try:
        yield
    except ConfigurationError as failed:
        said = str(failed)
        for member, argument in names.items():
            said = re.sub(rf"\b{argument}\b", member, said)
        raise ConfigurationError(within + said) from failed


def _eras(given: object) -> Eras:
    for eras in ERAS:
        if given == eras:
            return eras
    raise ConfigurationError(f"eras must be '2025', '2026' or 'both', not {given!r}")


def _places(given: Any, usual: Sequence[str]) -> Sequence[str]:
    """Return the places of request keys.

    Raises:
        ConfigurationError: They are none.
    """
    if given is None:
        return usual
    places: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [None]
    if not all(isinstance(each, str) for each in places):
        raise ConfigurationError("requestKeys must be a list of places")
    try:
        for each in places:
            place_of(each)
    except ConfigurationError as wrong:
        raise ConfigurationError(f"requestKeys {wrong}") from wrong
    return tuple(places)


def _tasks(given: Any, usual: TaskPolicy | None) -> TaskPolicy | None:
    """Return which calls of a server become tasks.

    Raises:
        ConfigurationError: It is not said as a policy.
    """
    if given is None:
        return usual
    policy = usual or TaskPolicy()
    if isinstance(given, bool):
        return policy if given else None
    if not isinstance(given, dict):
        raise ConfigurationError("tasks must be true, false or an object")
    members = cast("dict[str, Any]", given)
    for name in members.keys() - _OF_TASKS.keys():
        raise ConfigurationError(f"tasks has no {name}{did_you_mean(name, _OF_TASKS)}")
    changes = {_OF_TASKS[name]: _read(f"tasks.{name}", value) for name, value in members.items()}
    with _named_as_in_files(_OF_TASKS, "tasks: "):
        return replace(policy, **changes)


def _read(name: str, value: Any) -> Any:
    """Return a value as Python takes it, which checks its type."""
    if name.rpartition(".")[2] in _TIMES:
        return _time(name, value)
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _time(name: str, value: Any) -> float:
    """Return the seconds of a number, or of a text such as "15m".

    Raises:
        ConfigurationError: It is no time.
    """
    if isinstance(value, str):
        try:
            return duration(value)
        except ArgumentTypeError as wrong:
            raise ConfigurationError(f"{name} {wrong}") from wrong
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f'{name} must be a time, such as "15m" or 900')
    return value


def _needed_scopes(auth: Any) -> dict[str, Any]:
    """Return the scopes that callers need.

    Raises:
        ConfigurationError: They are no scopes. Nothing unknown is ignored: it may restrict the
            access.
    """
    if auth is None:
        return {}
    if not isinstance(auth, dict):
        raise ConfigurationError("auth must be an object")
    given = cast("dict[str, Any]", auth)
    foreign = sorted(given.keys() - {"scopes", "tools"})
    if foreign:
        hint = did_you_mean(foreign[0], ("scopes", "tools"))
        raise ConfigurationError(f"auth: has scopes and tools, and no {foreign[0]}{hint}")
    tools: Any = given.get("tools", {})
    each = cast("dict[str, Any]", tools).items() if isinstance(tools, dict) else ()
    if tools is None or not all(pattern and scopes for pattern, scopes in each):
        raise ConfigurationError("auth.tools: a pattern, or its list of scopes, is empty")
    return {"scopes": given.get("scopes", []), "tool_scopes": tools}


def _made(
    members: dict[str, Any], is_url: bool, options: dict[str, Any], env: Mapping[str, str]
) -> ExternalServer:
    if is_url:
        return HTTPServer(_text(members, "url"), headers=_texts(members, "headers"), **options)
    args: Any = members.get("args", [])
    if not isinstance(args, list) or not all(isinstance(each, str) for each in cast(Any, args)):
        raise ConfigurationError("args must be a list of strings")
    if members.get("command") is None:
        raise ConfigurationError("command must be a string, if there is no url")
    command = _text(members, "command")
    cwd = _text(members, "cwd") if members.get("cwd") is not None else None
    # An argument for a shell may have other text in ${}.
    arguments = [expanded(each, may_be_others=True) for each in cast("list[str]", args)]
    env = {**env, **_texts(members, "env")}
    return StdioServer(command, *arguments, env=env, cwd=cwd, **options)


def _text(members: Mapping[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be a string")
    return _substitute(name, value)


def _texts(members: Mapping[str, Any], name: str) -> dict[str, str]:
    value = members.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be an object of strings")
    for key, each in cast("dict[str, Any]", value).items():
        if not isinstance(each, str):
            raise ConfigurationError(f"{name} must be an object of strings, and {key} is none")
        if _AS_SHELLS_DO.search(each):
            logger.warning("%s.%s: $NAME is not expanded here; write ${NAME}", name, key)
    return {
        key: _substitute(f"{name}.{key}", each)
        for key, each in cast("dict[str, str]", value).items()
    }


def _substitute(name: str, value: str) -> str:
    try:
        return expanded(value)
    except ConfigurationError as failed:
        raise ConfigurationError(f"{name}: {failed}") from failed
