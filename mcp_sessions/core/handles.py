"""By handle: the argument by which a model says which session its call is of.

For hosts that say nothing of their conversations. A tool's listed schemas get one member more, the
first answer says what to pass in it, and the tool itself never sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from mcp_sessions.core.messages import members_of

HANDLE = "handle"
"""The kind of key that a handle is."""

_NO_MEMBER = ("$ref", "$dynamicRef", "patternProperties", "propertyNames", "maxProperties")
"""With one of these, another member of ``properties`` may not allow a value to have it."""

_PARTS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_CLOSING = ("additionalProperties", "unevaluatedProperties", *_NO_MEMBER)

_CARRIED = re.compile(r"mcp-sessions-handle:([0-9a-f]{32})(?:\.(.*))?", re.DOTALL)
"""A ``requestState`` with a handle before the server's own."""

Schema = Mapping[str, Any]


def is_extensible(schema: object, name: str) -> bool:
    """Whether a JSON Schema of objects knows no member of that name, and lets one be added."""
    members = members_of(schema)
    properties = members.get("properties", {})
    if members.get("type") != "object" or not isinstance(properties, dict):
        return False
    if name in properties or json.dumps(name) in json.dumps(members.get("required")):
        return False
    if any(keyword in members for keyword in _NO_MEMBER):
        return False
    parts = json.dumps([members[part] for part in _PARTS if part in members])
    return not any(json.dumps(keyword) in parts for keyword in (*_CLOSING, name))


def extended(schema: Schema, name: str, description: str) -> dict[str, Any]:
    member = {"type": "string", "description": description}
    return {**schema, "properties": {**schema.get("properties", {}), name: member}}


def handle_in(params: Mapping[str, Any] | None, name: str) -> object:
    """Return the handle that a call passes; None if it passes none.

    Models that fill in every argument pass null or an empty text.
    """
    given = members_of((params or {}).get("arguments")).get(name)
    return None if given == "" else given


def carried_in(params: Mapping[str, Any] | None) -> str | None:
    state: object = (params or {}).get("requestState")
    carried = _CARRIED.fullmatch(state) if isinstance(state, str) else None
    return carried[1] if carried is not None else None


def without_handle(params: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    given = members_of((params or {}).get("arguments"))
    if params is not None and name in given:
        params = {**params, "arguments": {key: given[key] for key in given if key != name}}
    state: object = (params or {}).get("requestState")
    carried = _CARRIED.fullmatch(state) if isinstance(state, str) else None
    if params is not None and carried is not None:
        params = {key: params[key] for key in params if key != "requestState"}
        if carried[2] is not None:
            params["requestState"] = carried[2]
    return params


def carrying(result: dict[str, Any], handle: str) -> dict[str, Any]:
    """A result that asks for another round, which carries the handle back: no model sees it
    yet. It is worth what it would be as an argument, so it need not be sealed.
    """
    if result.get("resultType") != "input_required":
        return result
    state: object = result.get("requestState")
    own = f".{state}" if isinstance(state, str) else ""
    return {**result, "requestState": f"mcp-sessions-handle:{handle}{own}"}


def with_handle(
    result: dict[str, Any], name: str, handle: str, tools: Iterable[str], *, is_structured: bool
) -> dict[str, Any]:
    """Add the handle to a tool's result that started it. A result that is no answer yet stays as it
    is.

    A host may show its model the structured content alone, if there is any: where the tool made
    none its texts are in there as well, as ``result``.

    Args:
        is_structured: The tool's structured content may have one member more.
    """
    content = result.get("content")
    if not isinstance(content, list):
        return result
    blocks = cast("list[dict[str, Any]]", content)
    line = f"To go on in this session, pass {name}={json.dumps(handle)} to {', '.join(tools)}."
    extended = {**result, "content": [*blocks, {"type": "text", "text": line}]}
    made: object = result.get("structuredContent")
    if made is None and not result.get("isError"):
        texts = (block["text"] for block in blocks if block.get("type") == "text")
        extended["structuredContent"] = {"result": "\n".join(texts), name: handle}
    elif isinstance(made, dict) and is_structured and name not in made:
        extended["structuredContent"] = {**made, name: handle}
    return extended


def not_a_handle(name: str) -> dict[str, Any]:
    text = (
        f"There is no session with this {name}: it has ended, or was never there. "
        f"Nothing was done. Call again without {name} to start a new one."
    )
    return {"content": [{"type": "text", "text": text}], "isError": True}
