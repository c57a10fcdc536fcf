"""Reading what a client sent: each member is checked here, and the error names it.

The ACP library's models are lenient where it would hurt: a malformed entry of ``mcpServers``
is left out in silence. So what the layer acts on is read by hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from mcp_sessions.acp.acp_errors import invalid_params, session_not_found
from mcp_sessions.ids import SessionId, parse_session_id

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One entry of ``mcpServers``. Its values may be credentials."""

    name: str
    kind: Literal["stdio", "http", "sse", "other", "unknown"]
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    url: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def session_id_of(params: Params) -> SessionId:
    """``sessionId``.

    Raises:
        RequestError: It is missing or no string, or no conversation can have such an id.
    """
    value = params.get("sessionId")
    if not isinstance(value, str):
        raise invalid_params("sessionId must be a string")
    session_id = parse_session_id(value)
    if session_id is None:
        raise session_not_found(value)
    return session_id


def cwd_of(params: Params) -> str:
    """``cwd``: an absolute path of a directory that exists.

    Raises:
        RequestError: It is missing, no string, relative, or no directory that exists here.
    """
    value = params.get("cwd")
    if not isinstance(value, str):
        raise invalid_params("cwd must be a string")
    return _directory(value, "cwd")


def absolute(path: str, member: str) -> str:
    """``path`` if it is absolute.

    Raises:
        RequestError: It is not, or cannot be a path.
    """
    if not os.path.isabs(path):
        raise invalid_params(f"{member} must be an absolute path")
    if "\0" in path:
        raise invalid_params(f"{member} must be a path: it holds a NUL character")
    return path


def _directory(path: str, member: str) -> str:
    # Else MCP servers and tools would fail later, one by one, with less to say.
    absolute(path, member)
    if not os.path.exists(path):
        raise invalid_params(f"{member} does not exist where the agent runs; create the directory")
    if not os.path.isdir(path):
        raise invalid_params(f"{member} is not a directory")
    return path


def directories_of(params: Params) -> list[str]:
    """``additionalDirectories``: absolute paths of directories that exist; empty if it is not
    there.

    Raises:
        RequestError: It is no array of such paths.
    """
    value = params.get("additionalDirectories")
    if value is None:
        return []
    paths = _strings(value, "additionalDirectories")
    return [_directory(path, f"additionalDirectories[{at}]") for at, path in enumerate(paths)]


def optional_text(params: Params, member: str) -> str | None:
    """A string that may be left out, or null.

    Raises:
        RequestError: It is something else.
    """
    value = params.get(member)
    if value is None or isinstance(value, str):
        return value
    raise invalid_params(f"{member} must be a string")


def servers_of(params: Params, *, required: bool, others: frozenset[str]) -> list[ServerSpec]:
    """``mcpServers``, each with the members of its transport. Whether a server can be reached with
    their values is seen when it is connected: a wrong one keeps no other server away.

    Args:
        required: Whether it must be there.
        others: Transports that the agent itself says it supports; they are its business.

    Raises:
        RequestError: An entry lacks a member, or has one of the wrong type.
    """
    value = params.get("mcpServers")
    if value is None and not required:
        return []
    if not isinstance(value, list):
        raise invalid_params("mcpServers must be an array")
    return [
        _server(entry, f"mcpServers[{at}]", others)
        for at, entry in enumerate(cast("list[object]", value))
    ]


def _server(value: object, at: str, others: frozenset[str]) -> ServerSpec:
    if not isinstance(value, dict):
        raise invalid_params(f"{at} must be an object")
    entry = cast("dict[str, Any]", value)
    name = _text(entry, "name", at)
    kind = entry.get("type", "stdio")
    if kind == "stdio":
        command = _text(entry, "command", at)
        args = tuple(_strings(entry.get("args"), f"{at}.args"))
        # Not among what the document calls required; the library's clients always send it.
        env = entry.get("env")
        pairs = [] if env is None else _pairs(env, f"{at}.env")
        return ServerSpec(name, "stdio", command=command, args=args, env=dict(pairs))
    if kind in ("http", "sse"):
        headers = tuple(_pairs(entry.get("headers"), f"{at}.headers"))
        return ServerSpec(name, kind, url=_text(entry, "url", at), headers=headers)
    if isinstance(kind, str):
        return ServerSpec(name, "other" if kind in others else "unknown")
    raise invalid_params(f'{at}.type must be "http" or "sse", or be left out for stdio')


def _text(entry: Mapping[str, Any], member: str, at: str) -> str:
    value = entry.get(member)
    if not isinstance(value, str) or not value:
        raise invalid_params(f"{at}.{member} must be a string that is not empty")
    return value


def _strings(value: object, at: str) -> list[str]:
    if not isinstance(value, list):
        raise invalid_params(f"{at} must be an array")
    strings: list[str] = []
    for number, item in enumerate(cast("list[object]", value)):
        if not isinstance(item, str):
            raise invalid_params(f"{at}[{number}] must be a string")
        strings.append(item)
    return strings


def _pairs(value: object, at: str) -> list[tuple[str, str]]:
    """``[{"name": …, "value": …}]``. The values may be credentials: no error repeats one."""
    if not isinstance(value, list):
        raise invalid_params(f"{at} must be an array")
    pairs: list[tuple[str, str]] = []
    for number, item in enumerate(cast("list[object]", value)):
        if not isinstance(item, dict):
            raise invalid_params(f"{at}[{number}] must be an object")
        entry = cast("dict[str, Any]", item)
        name, content = entry.get("name"), entry.get("value")
        if not isinstance(name, str):
            raise invalid_params(f"{at}[{number}].name must be a string")
        if not isinstance(content, str):
            raise invalid_params(f"{at}[{number}].value must be a string")
        pairs.append((name, content))
    return pairs
