"""What a session may see of the wrapped server, and what stands for the rest.

Rules that must hold, and that the tests in ``tests/core/test_visibility.py`` own:

1. The rule that was made last decides. What none says is hidden as it is outside of a session.
2. In a pattern ``*`` stands for any text, and nothing else is special. To match takes one pass.
3. Who names what is hidden makes the server look for what it does not have: its own words for
   that, with the name that was asked for, are the answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import unquote

from mcp_sessions.core.messages import members_of

STATE_KEY = "mcp_sessions/visibility"
"""Of a session's state: where its rules are kept."""

TOOLS, PROMPTS, RESOURCES = KINDS = ("tools", "prompts", "resources")

Rule = list[Any]
"""A pattern, and whether it hides. A list: stores keep JSON."""

Rules = Mapping[str, list[Rule]]
"""By kind; of what is said of one name the last counts."""

_LISTS = {
    "tools/list": (TOOLS, "tools", "name"),
    "prompts/list": (PROMPTS, "prompts", "name"),
    "resources/list": (RESOURCES, "resources", "uri"),
    "resources/templates/list": (RESOURCES, "resourceTemplates", "uriTemplate"),
}
_NAMES = {
    "tools/call": (TOOLS, "name"),
    "prompts/get": (PROMPTS, "name"),
    "resources/read": (RESOURCES, "uri"),
    "resources/subscribe": (RESOURCES, "uri"),
    "resources/unsubscribe": (RESOURCES, "uri"),
}
_REFERENCES = {"ref/prompt": (PROMPTS, "name"), "ref/resource": (RESOURCES, "uri")}
_LISTEN = "subscriptions/listen"

_VARIABLE = re.compile(r"\{[^{}]*\}")
_RUN = re.compile(r"(?:%[0-9A-Fa-f]{2}|[^\W_])+")
_SHORTEST = 16
"""Characters of what nothing is called."""

_TRIES = 16
"""Parts of a name that are looked at for the one to change."""


def as_pattern(kind: str, text: str) -> str:
    """A pattern as it is kept: a template hides what is made of it."""
    return _VARIABLE.sub("*", text) if kind == RESOURCES else text


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern covers a name; or, of another pattern, everything that this covers."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first):
        return False
    at = len(first)
    for part in middle:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return name.endswith(last) and len(name) - len(last) >= at


@dataclass(frozen=True, slots=True)
class Visibility:
    """What is hidden.

    Args:
        pseudonym: Of a text, under a secret of the server's: nothing is called so.
        outside: Patterns of what is hidden where no rule says otherwise.
        rules: Those of a session.
    """

    pseudonym: Callable[[str], str] = field(repr=False)
    outside: Collection[str] = ()
    rules: Rules = field(default_factory=dict[str, list[Rule]])

    def of(self, state: Mapping[str, Any]) -> Visibility:
        """That of a session."""
        kept = state.get(STATE_KEY)
        return replace(self, rules=kept["rules"]) if kept is not None else self

    @property
    def is_plain(self) -> bool:
        """Whether nothing is hidden, and never was from this session."""
        return not self.outside and not self.rules

    def is_hidden(self, kind: str, name: str) -> bool:
        """Whether a name is. A resource is, if it is in any spelling that a server may take for
        the same one.
        """
        spellings = _spellings(name) if kind == RESOURCES else (name,)
        return any(self._is_hidden(kind, each) for each in spellings)

    def _is_hidden(self, kind: str, name: str) -> bool:
        for pattern, hides in reversed(self.rules.get(kind, ())):
            if _covers(kind, pattern, name):
                return hides
        return any(_covers(kind, as_pattern(kind, pattern), name) for pattern in self.outside)

    def changed(self, kind: str, patterns: Collection[str], *, hides: bool) -> list[Rule]:
        """The rules of a kind with more of them; the same ones, if these change nothing."""
        rules = list(self.rules.get(kind, ()))
        for pattern in sorted(as_pattern(kind, each) for each in patterns):
            rule = [pattern, hides]
            if rule in rules and all(each[1] == hides for each in rules[rules.index(rule) :]):
                continue
            rules = [each for each in rules if not matches(pattern, each[0])]
            rules.append(rule)
        return rules

    # --- on the way of a request -------------------------------------------------------------

    def concealed(
        self, method: str, params: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """A request's params, with something that nothing is called for each hidden name; and
        what was put for what, for :func:`restored`. Nothing, if it names nothing that is hidden.
        """
        put: dict[str, str] = {}

        def conceal(kind: str, holder: dict[str, Any], member: str) -> dict[str, Any]:
            name = holder.get(member)
            if not isinstance(name, str) or not self.is_hidden(kind, name):
                return holder
            return {**holder, member: self._put_for(kind, name, put)}

        if params is None:
            return None, put
        if method in _NAMES:
            kind, member = _NAMES[method]
            params = conceal(kind, params, member)
        elif method == "completion/complete":
            reference = members_of(params.get("ref"))
            kind, member = _REFERENCES.get(str(reference.get("type")), (TOOLS, ""))
            params = {**params, "ref": conceal(kind, reference, member)} if member else params
        elif method == _LISTEN:
            wanted = members_of(params.get("notifications"))
            uris = wanted.get("resourceSubscriptions")
            if isinstance(uris, list):
                seen = [
                    self._put_for(RESOURCES, uri, put)
                    if isinstance(uri, str) and self.is_hidden(RESOURCES, uri)
                    else uri
                    for uri in cast("list[Any]", uris)
                ]
                params = {**params, "notifications": {**wanted, "resourceSubscriptions": seen}}
        return params, put

    def _put_for(self, kind: str, name: str, put: dict[str, str]) -> str:
        """The nearest name to a hidden one that is not hidden itself: so the server looks for it
        where it looks for any other that the session could make up.
        """
        runs = list(_RUN.finditer(name))
        if not runs:
            stands = self._called_nothing(name, _SHORTEST)
            put[stands] = name
            return stands
        nearest, instead, changed = "", "", runs[0]
        for run in [*reversed(runs[-_TRIES:]), runs[0]]:
            changed = run
            instead = self._called_nothing(run[0], max(_SHORTEST, len(run[0])))
            nearest = name[: run.start()] + instead + name[run.end() :]
            if not self.is_hidden(kind, nearest):
                break
        put[instead] = changed[0]
        return nearest

    def _called_nothing(self, text: str, length: int) -> str:
        digits = hashlib.sha256(self.pseudonym(text).encode()).hexdigest()
        return ("x" + digits * (length // len(digits) + 1))[:length]

    def shown(self, method: str, result: dict[str, Any]) -> dict[str, Any]:
        """A result without what is hidden. What a session sees is nobody else's to keep."""
        if method not in _LISTS:
            return self._private(result) if method == "resources/read" else result
        kind, member, name = _LISTS[method]
        entries: object = result.get(member)
        if not isinstance(entries, list):
            return result
        seen = [
            entry
            for entry in cast("list[Any]", entries)
            if not self.is_hidden(kind, str(members_of(entry).get(name)))
        ]
        return self._private({**result, member: seen})

    def _private(self, result: dict[str, Any]) -> dict[str, Any]:
        if not self.rules or "cacheScope" not in result:
            return result
        return {**result, "cacheScope": "private"}


def restored(value: Any, put: Mapping[str, str]) -> Any:
    """What the server said, with the names that were asked for.

    Args:
        value: JSON.
        put: See :meth:`Visibility.concealed`.
    """
    if isinstance(value, str):
        for instead, name in put.items():
            value = value.replace(instead, name)
        return value
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        return {restored(key, put): restored(each, put) for key, each in members.items()}
    if isinstance(value, (list, tuple)):
        return [restored(each, put) for each in cast("list[Any]", value)]
    return value


def _covers(kind: str, pattern: str, name: str) -> bool:
    # A pattern that is itself encoded is meant in its plain spelling, too.
    return matches(pattern, name) or (kind == RESOURCES and matches(_decoded(pattern), name))


def _spellings(uri: str) -> Iterator[str]:
    """A URI, and as servers may read it that decode it, or resolve its dots, once or twice."""
    yield uri
    for _ in range(2):
        plain = _decoded(uri)
        if plain == uri:
            return
        yield plain
        uri = plain


def _decoded(uri: str) -> str:
    uri = unquote(uri)
    scheme, colon, rest = uri.partition(":")
    if not colon:
        return uri
    authority = 3 if rest.startswith("//") else 0
    segments = rest.split("/")
    kept = segments[:authority]
    for segment in segments[authority:]:
        if segment == "..":
            del kept[max(authority, len(kept) - 1) :]
        elif segment != ".":
            kept.append(segment)
    return scheme.lower() + colon + "/".join(kept)
