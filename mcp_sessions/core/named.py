"""Tables of what methods name: the member of a request's params, and those of a list's entries."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mcp_sessions import method_names

MEMBERS: Mapping[str, str] = MappingProxyType(
    {"tools": "name", "prompts": "name", "resources": "uri"}
)
"""Kind → the member of params that names one of it, if the method begins with the kind."""


def _members(*methods: str) -> Mapping[str, str]:
    return MappingProxyType({method: MEMBERS[method.partition("/")[0]] for method in methods})


NAMED = _members(method_names.CALL_TOOL, method_names.GET_PROMPT, method_names.READ_RESOURCE)
"""Methods whose name a header repeats, and whose result may ask for input (2026-07-28)."""

NAMING = _members(*NAMED, method_names.SUBSCRIBE, method_names.UNSUBSCRIBE)
"""Methods that have no meaning without a name."""


class Listing(NamedTuple):
    kind: str
    entries: str
    """The member of the result that has the list."""

    name: str
    """The member of an entry that is its name."""

    named_by: str
    """The method whose params name an entry."""


LISTS: Mapping[str, Listing] = MappingProxyType(
    {
        method_names.LIST_TOOLS: Listing("tools", "tools", "name", method_names.CALL_TOOL),
        method_names.LIST_PROMPTS: Listing("prompts", "prompts", "name", method_names.GET_PROMPT),
        method_names.LIST_RESOURCES: Listing(
            "resources", "resources", "uri", method_names.READ_RESOURCE
        ),
        method_names.LIST_TEMPLATES: Listing(
            "resources", "resourceTemplates", "uriTemplate", method_names.READ_RESOURCE
        ),
    }
)
"""Method → what its result lists."""

_PLAIN = re.compile(r"(?!=\?base64\?)(?! )[\x20-\x7e]*(?<! )")


def name_in(method: str, params: Mapping[str, Any] | None) -> str | None:
    """Return the name that the params of a method of ``NAMED`` have, if it is a text."""
    if params is None or method not in NAMED:
        return None
    name = params.get(NAMED[method])
    return name if isinstance(name, str) else None


def repeated_name(method: str, params: Mapping[str, Any] | None) -> str | None:
    """Return what the header ``Mcp-Name`` of a request repeats, if it repeats something: the name
    that :func:`name_in` returns, or the id of a task.
    """
    if method in method_names.OF_TASKS:
        named = params.get("taskId") if params is not None else None
        return named if isinstance(named, str) else None
    return name_in(method, params)


def updated_uri(method: str, params: Mapping[str, Any] | None) -> str | None:
    """Return the resource of which a notification is an update; None: it is none of that kind.
    Empty: it names no resource.
    """
    if method != method_names.RESOURCE_UPDATED:
        return None
    return str(params["uri"]) if params and "uri" in params else ""


def header_value(text: str) -> str:
    """Return a text as a header has it. Text that no header may have is encoded."""
    if _PLAIN.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'replace')).decode()}?="
