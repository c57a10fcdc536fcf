"""What a session may see of the wrapped server, and what stands for the rest.

Rules that must hold, and that the tests in ``tests/core/test_visibility.py`` own:

1. The rule that was made last decides. What none says is hidden as it is outside of a session.
2. In a pattern ``*`` stands for any text, and nothing else is special. To match takes one pass.
3. A client that names something hidden makes the server look for a name that it does not have.
   The server's own error, with the name that the client sent, is the answer.
4. A server may take another spelling for the same name. :mod:`mcp_sessions.core.readings`
   decides which spellings these are.
5. While a resource may be hidden, the server gets no URI that servers read differently: such a
   request is refused.
6. No result has a link to a hidden resource, or its contents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mcp_sessions.core.messages import members_of
from mcp_sessions.core.readings import (
    check_readable,
    fits,
    hides_name,
    hides_uri,
    reveals_name,
    reveals_uri,
    subsumes_name,
    subsumes_uri,
)
from mcp_sessions.errors import InvalidParams

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
_MEMBERS = {TOOLS: "name", PROMPTS: "name", RESOURCES: "uri"}
"""Of a request whose method begins with the kind, such as ``tools/call``: where its name is."""

_REFERENCES = {"ref/prompt": (PROMPTS, "name"), "ref/resource": (RESOURCES, "uri")}
_LISTEN = "subscriptions/listen"
_CONTENTS = {"tools/call": "content", "prompts/get": "messages", "resources/read": "contents"}
"""Where a result has links to resources, and their contents."""

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
    return fits(pattern.split("*"), name)


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
        """Whether a name is hidden, or another spelling that a server may take for it."""
        is_uri = kind == RESOURCES
        hides, reveals = (hides_uri, reveals_uri) if is_uri else (hides_name, reveals_name)
        for pattern, is_hiding in reversed(self.rules.get(kind, ())):
            if is_hiding and hides(pattern, name):
                return True
            if not is_hiding and reveals(pattern, name):
                return False
        return any(hides(as_pattern(kind, pattern), name) for pattern in self.outside)

    def may_hear(self, uri: str) -> bool:
        """Whether a subscription to a resource counts. One may be older than what hides it."""
        try:
            self._check(RESOURCES, uri)
        except InvalidParams:
            return False
        return not self.is_hidden(RESOURCES, uri)

    def _check(self, kind: str, name: str) -> None:
        if kind == RESOURCES and (self.outside or self.rules.get(RESOURCES)):
            check_readable(name)

    def changed(self, kind: str, patterns: Collection[str], *, hides: bool) -> list[Rule]:
        """The rules of a kind with more of them; the same ones, if these change nothing."""
        rules = list(self.rules.get(kind, ()))
        for pattern in sorted(as_pattern(kind, each) for each in patterns):
            rule = [pattern, hides]
            if rule in rules and all(each[1] == hides for each in rules[rules.index(rule) :]):
                continue
            subsumes = subsumes_uri if kind == RESOURCES else subsumes_name
            rules = [each for each in rules if not subsumes(pattern, each[0])]
            rules.append(rule)
        return rules

    # --- on the way of a request -------------------------------------------------------------

    def names_hidden(self, method: str, params: dict[str, Any] | None) -> dict[str, str]:
        """What :meth:`concealed` puts for the hidden names of a request. Nothing of a request
        that it refuses.
        """
        try:
            return self.concealed(method, params)[1]
        except InvalidParams:
            return {}

    def concealed(
        self, method: str, params: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """A request's params, with something that nothing is called for each hidden name; and
        what was put for what, for :func:`restored`. Nothing, if it names nothing that is hidden.

        Raises:
            InvalidParams: A resource may be hidden, and it names one by a URI that servers read
                differently. See :func:`~mcp_sessions.core.readings.check_readable`.
        """
        put: dict[str, str] = {}

        def instead_of(kind: str, name: Any) -> Any:
            if not isinstance(name, str):
                return name
            self._check(kind, name)
            return self._put_for(kind, name, put) if self.is_hidden(kind, name) else name

        def conceal(kind: str, holder: dict[str, Any], member: str) -> dict[str, Any]:
            if member not in holder:
                return holder
            return {**holder, member: instead_of(kind, holder[member])}

        if params is None:
            return None, put
        kind = method.partition("/")[0]
        if kind in KINDS:
            params = conceal(kind, params, _MEMBERS[kind])
        elif method == "completion/complete":
            reference = members_of(params.get("ref"))
            kind, member = _REFERENCES.get(str(reference.get("type")), (TOOLS, ""))
            params = {**params, "ref": conceal(kind, reference, member)} if member else params
        elif method == _LISTEN:
            wanted = members_of(params.get("notifications"))
            uris = wanted.get("resourceSubscriptions")
            if isinstance(uris, list):
                seen = [instead_of(RESOURCES, uri) for uri in cast("list[Any]", uris)]
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
            if self.may_hear(nearest) if kind == RESOURCES else not self.is_hidden(kind, nearest):
                break
        put[instead] = changed[0]
        return nearest

    def _called_nothing(self, text: str, length: int) -> str:
        digits = hashlib.sha256(self.pseudonym(text).encode()).hexdigest()
        return ("x" + digits * (length // len(digits) + 1))[:length]

    def shown(self, method: str, result: dict[str, Any]) -> dict[str, Any]:
        """A result without what is hidden. What a session sees is nobody else's to keep."""
        if method in _LISTS:
            kind, member, name = _LISTS[method]
            result = self._without(
                result, member, lambda entry: (kind, members_of(entry).get(name))
            )
            return self._private(result)
        if method in _CONTENTS:
            member = _CONTENTS[method]
            result = self._without(result, member, lambda entry: (RESOURCES, _uri_of(entry)))
        return self._private(result) if method == "resources/read" else result

    def _without(
        self, result: dict[str, Any], member: str, named: Callable[[Any], tuple[str, Any]]
    ) -> dict[str, Any]:
        entries: object = result.get(member)
        if not isinstance(entries, list):
            return result
        of_all = cast("list[Any]", entries)
        seen = [
            entry
            for entry in of_all
            if not (isinstance((each := named(entry))[1], str) and self.is_hidden(*each))
        ]
        return result if len(seen) == len(of_all) else {**result, member: seen}

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


def _uri_of(entry: Any) -> Any:
    """Of the resource that a block of a result links to, or holds; None: of none."""
    block = members_of(entry)
    content = block.get("content")
    if isinstance(content, Mapping):  # a message of a prompt
        block = members_of(content)
    resource = block.get("resource")
    if isinstance(resource, Mapping):
        return members_of(resource).get("uri")
    return block.get("uri")
