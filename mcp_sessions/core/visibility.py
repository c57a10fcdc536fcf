"""Hide parts of the wrapped server from a session, and replace their names in requests.

Rules that must hold, and that the tests in ``tests/core/test_visibility.py`` own:

1. The rule that was made last decides. Without a rule, a name is hidden as it is outside of a
   session.
2. In a pattern ``*`` stands for any text, and nothing else is special. To match takes one pass.
3. A client that names something hidden makes the server look for a name that it does not have.
   The server's own error, with the name that the client sent, is the answer.
4. A server may take another spelling for the same name. :mod:`mcp_sessions.core.spelling`
   decides which spellings these are.
5. While a resource may be hidden, the server gets no URI that servers read differently: such a
   request is refused.
6. No result has a link to a hidden resource, or its contents, whatever its method. No completion
   of a template makes a hidden URI.
7. While something is hidden, the server gets no request that leaves open which name it has: one
   without a name, with a name that is no text, or with a member in another spelling. Servers in
   Go read ``URI`` as ``uri``; others turn a list into text. Such a request is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, cast
from urllib.parse import quote

from mcp_sessions import method_names
from mcp_sessions.core.messages import members_of
from mcp_sessions.core.named import LISTS, MEMBERS, NAMING
from mcp_sessions.core.spelling import (
    check_plain,
    fits,
    folded,
    hides_name,
    hides_uri,
    is_one_of,
    reveals_name,
    reveals_uri,
    subsumes_name,
    subsumes_uri,
)
from mcp_sessions.errors import InvalidParams

_EXPRESSION = re.compile(r"\{([+#./;?&]?)([^{}]*)\}")
_FORMS = {
    "": ("", ",", False),
    "+": ("", ",", False),
    "#": ("#", ",", False),
    ".": (".", ".", False),
    "/": ("/", "/", False),
    ";": (";", ";", True),
    "?": ("?", "&", True),
    "&": ("&", "&", True),
}
"""By operator: what its text begins with, what stands between two values, whether with names."""

_OPTIONAL = "#;?&"
"""Operators of parts that a URI may do without."""


def variables_of(template: str) -> list[str]:
    return [name for match in _EXPRESSION.finditer(template) for name in _names(match)]


def expansions(template: str, given: Mapping[str, str]) -> tuple[str, str]:
    """Expand a template with these values: percent-encoded, and as they are.

    A variable without a value is not replaced.
    """
    encoded = {name: quote(value, safe="", errors="replace") for name, value in given.items()}
    return _expanded(template, encoded), _expanded(template, given)


def _expanded(template: str, given: Mapping[str, str]) -> str:
    def text(match: re.Match[str]) -> str:
        begins, between, is_named = _FORMS[match[1]]
        values = [(name, given[name]) for name in _names(match) if name in given]
        if not values:
            return "" if match[1] and match[1] in _OPTIONAL else match[0]
        return begins + between.join(
            f"{name}={value}" if is_named else value for name, value in values
        )

    return _EXPRESSION.sub(text, template)


def _names(match: re.Match[str]) -> list[str]:
    return [each.partition(":")[0].rstrip("*") for each in match[2].split(",")]


STATE_KEY = "mcp_sessions/visibility"
"""The key of a session's state that holds its rules."""

TOOLS, PROMPTS, RESOURCES = KINDS = method_names.LISTED

VisibilityRule = list[Any]
"""A pattern, and whether it hides. A list: stores keep JSON."""

Rules = Mapping[str, list[VisibilityRule]]
"""By kind; of what is said of one name the last counts."""

_REFERENCES = {"ref/prompt": PROMPTS, "ref/resource": RESOURCES}
_COMPLETE, _LISTEN = method_names.COMPLETE, method_names.LISTEN
_CONTENTS = ("content", "contents", "messages")
"""Members of a result that have links to resources, or their contents."""

_HIDDEN = object()
"""Stands for a block of a result that is left out."""

_VARIABLE = re.compile(r"\{[^{}]*\}")
_RUN = re.compile(r"(?:%[0-9A-Fa-f]{2}|[^\W_])+")
_SHORTEST = 16
"""Characters of what nothing is called."""

_TRIES = 16
"""Parts of a name that are looked at for the one to change."""


def as_pattern(kind: str, text: str) -> str:
    """Return a pattern as it is stored. A template hides every URI that it makes."""
    return _VARIABLE.sub("*", text) if kind == RESOURCES else text


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern covers a name, or everything that another pattern covers."""
    return fits(pattern.split("*"), name)


@dataclass(frozen=True, slots=True)
class Visibility:
    """Decides which names are hidden.

    Args:
        pseudonym: Maps a text to a name that nothing has, under a secret of the server's.
        outside: Patterns of names that are hidden unless a rule says otherwise.
        rules: The rules of a session.
        needed: Patterns of tools → the scopes that a caller needs for them.
        denied: Those of them that are hidden from the caller, whatever a rule says.
    """

    pseudonym: Callable[[str], str] = field(repr=False)
    outside: Collection[str] = ()
    rules: Rules = field(default_factory=dict[str, list[VisibilityRule]])
    needed: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    denied: Collection[str] = ()

    def with_scopes(self, scopes: Collection[str] | None) -> Visibility:
        """Return what a caller with these scopes sees. None: the caller needs none."""
        if scopes is None:
            return self
        each = self.needed.items()
        denied = [pattern for pattern, needed in each if not set(needed) <= set(scopes)]
        return replace(self, denied=denied)

    def with_rules_in(self, state: Mapping[str, Any]) -> Visibility:
        kept = state.get(STATE_KEY)
        return replace(self, rules=kept["rules"]) if kept is not None else self

    @property
    def is_plain(self) -> bool:
        return not self.outside and not self.rules and not self.needed

    def is_hidden(self, kind: str, name: str) -> bool:
        """Whether a name is hidden, or another spelling that a server may take for it."""
        if kind == TOOLS and any(hides_name(pattern, name) for pattern in self.denied):
            return True
        is_uri = kind == RESOURCES
        hides, reveals = (hides_uri, reveals_uri) if is_uri else (hides_name, reveals_name)
        for pattern, is_hiding in reversed(self.rules.get(kind, ())):
            if is_hiding and hides(pattern, name):
                return True
            if not is_hiding and reveals(pattern, name):
                return False
        return any(hides(as_pattern(kind, pattern), name) for pattern in self.outside)

    def may_receive(self, uri: str) -> bool:
        """Whether a subscription to a resource counts. It may be older than the rule that hides the
        resource.
        """
        try:
            self._check(RESOURCES, uri)
        except InvalidParams:
            return False
        return not self.is_hidden(RESOURCES, uri)

    def _check(self, kind: str, name: str) -> None:
        if kind == RESOURCES and (self.outside or self.rules.get(RESOURCES)):
            check_plain(name)

    def changed(self, kind: str, patterns: Collection[str], *, hides: bool) -> list[VisibilityRule]:
        """Return the rules of a kind with more rules; the same ones, if these change nothing."""
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

    def concealed(
        self, method: str, params: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return a request's params with replacements for hidden names, and those replacements
        for :func:`restored`. There are none if it names nothing hidden.

        Raises:
            InvalidParams: Something may be hidden, and it is not sure which name the server
                reads. A resource may be hidden, and it names one by a URI that servers read
                differently. See :func:`~mcp_sessions.core.spelling.check_plain`.
        """
        rewritten: dict[str, str] = {}
        if self.is_plain:
            return params, rewritten

        def instead_of(kind: str, name: Any) -> str:
            if not isinstance(name, str):
                raise InvalidParams("a request whose name or URI is missing or is no text")
            self._check(kind, name)
            return self._rewrite(kind, name, rewritten) if self.is_hidden(kind, name) else name

        def conceal(kind: str, holder: dict[str, Any], member: str) -> dict[str, Any]:
            return {**holder, member: instead_of(kind, holder.get(member))}

        # A server may read a method as loosely as a name.
        method, given = folded(method), params or {}
        kind = method.partition("/")[0]
        if kind in KINDS:
            member = MEMBERS[kind]
            _check_spelled(given, member)
            if member in given or method in NAMING:
                params = conceal(kind, given, member)
        elif method == _COMPLETE:
            _check_spelled(given, "ref", "argument", "context")
            _check_spelled(members_of(given.get("argument")), "name", "value")
            reference = members_of(given.get("ref"))
            _check_spelled(reference, "type", "name", "uri")
            named_by: Any = reference.get("type")
            if not isinstance(named_by, str) or named_by not in _REFERENCES:
                raise InvalidParams("a reference that is of no known type")
            for each, kind in _REFERENCES.items():
                member = MEMBERS[kind]
                if each == named_by or member in reference:
                    reference = conceal(kind, reference, member)
            params = {**given, "ref": reference}
        elif method == _LISTEN:
            _check_spelled(given, "notifications")
            filters: Any = given.get("notifications")
            wanted = members_of(filters)
            _check_spelled(wanted, "resourceSubscriptions")
            uris: Any = wanted.get("resourceSubscriptions")
            if not isinstance(filters, (dict, NoneType)) or not isinstance(uris, (list, NoneType)):
                raise InvalidParams("a listen whose notifications or URIs are malformed")
            if uris is not None:
                seen = [instead_of(RESOURCES, uri) for uri in cast("list[Any]", uris)]
                params = {**given, "notifications": {**wanted, "resourceSubscriptions": seen}}
        return params, rewritten

    def _rewrite(self, kind: str, name: str, rewritten: dict[str, str]) -> str:
        """Return the nearest name that is not hidden. The server handles it as any other name that
        the session could make up.
        """
        runs = list(_RUN.finditer(name))
        if not runs:
            stands = self._called_nothing(name, _SHORTEST)
            rewritten[stands] = name
            return stands
        nearest, instead, changed = "", "", runs[0]
        for run in [*reversed(runs[-_TRIES:]), runs[0]]:
            changed = run
            instead = self._called_nothing(run[0], max(_SHORTEST, len(run[0])))
            nearest = name[: run.start()] + instead + name[run.end() :]
            if (
                self.may_receive(nearest)
                if kind == RESOURCES
                else not self.is_hidden(kind, nearest)
            ):
                break
        rewritten[instead] = changed[0]
        return nearest

    def _called_nothing(self, text: str, length: int) -> str:
        digits = hashlib.sha256(self.pseudonym(text).encode()).hexdigest()
        return ("x" + digits * (length // len(digits) + 1))[:length]

    def shown(
        self, method: str, result: dict[str, Any], params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A result without what is hidden. No cache may give a session's result to another one.

        Args:
            params: Of its request, as the client sent them.
        """
        method = folded(method)
        if method in LISTS:
            kind, member, name, _ = LISTS[method]
            result = self._without(
                result, member, lambda entry: (kind, members_of(entry).get(name))
            )
            return self._private(result)
        if method == _COMPLETE:
            return self._completed(result, params or {})
        result = self._unlinked(result)
        return self._private(result) if method == method_names.READ_RESOURCE else result

    def _unlinked(self, result: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for member in _CONTENTS:
            entries: Any = result.get(member)
            if isinstance(entries, list):
                changed[member] = self._seen_of(cast("list[Any]", entries))
        inner: Any = result.get("result")
        if isinstance(inner, dict):  # of a task that ended
            changed["result"] = self._unlinked(cast("dict[str, Any]", inner))
        return {**result, **changed} if changed else result

    def _seen_of(self, entries: list[Any]) -> list[Any]:
        seen = [self._seen(entry) for entry in entries]
        return [each for each in seen if each is not _HIDDEN]

    def _seen(self, entry: Any) -> Any:
        """Return a block of a result, or a message, without hidden parts; ``_HIDDEN``: nothing is
        left.
        """
        block = members_of(entry)
        for uri in (block.get("uri"), members_of(block.get("resource")).get("uri")):
            if isinstance(uri, str) and self.is_hidden(RESOURCES, uri):
                return _HIDDEN
        content: Any = block.get("content")
        if not content or not isinstance(content, (dict, list)):
            return entry
        is_list = isinstance(content, list)
        seen = self._seen_of(cast("list[Any]", content)) if is_list else self._seen(content)
        return _HIDDEN if seen is _HIDDEN or not seen else {**block, "content": seen}

    def _completed(self, result: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """The completions of a template's variable that make no hidden URI."""
        reference, completion = members_of(params.get("ref")), members_of(result.get("completion"))
        template, values = reference.get("uri"), completion.get("values")
        if not isinstance(template, str) or not isinstance(values, list):
            return result
        variables = variables_of(template)
        asked: Any = members_of(params.get("argument")).get("name")
        asked = [asked] if asked in variables else variables
        context = members_of(members_of(params.get("context")).get("arguments"))
        given = {name: value for name, value in context.items() if isinstance(value, str)}

        def is_hidden(value: Any) -> bool:
            return isinstance(value, str) and any(
                self.is_hidden(RESOURCES, uri)
                for name in asked
                for uri in expansions(template, {**given, name: value})
            )

        of_all = cast("list[Any]", values)
        seen = [value for value in of_all if not is_hidden(value)]
        if len(seen) == len(of_all):
            return result
        # How many there are in all would tell of the hidden ones.
        kept = {name: value for name, value in completion.items() if name != "total"}
        return {**result, "completion": {**kept, "values": seen}}

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
        # Another caller with the same session may have other scopes.
        if not (self.rules or self.needed) or "cacheScope" not in result:
            return result
        return {**result, "cacheScope": "private"}


def restored(value: Any, rewritten: Mapping[str, str]) -> Any:
    """Return a message of the server with the names that the client asked for.

    Args:
        value: JSON.
        rewritten: See :meth:`Visibility.concealed`.
    """
    if isinstance(value, str):
        for instead, name in rewritten.items():
            value = value.replace(instead, name)
        return value
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        return {
            restored(key, rewritten): restored(each, rewritten) for key, each in members.items()
        }
    if isinstance(value, (list, tuple)):
        return [restored(each, rewritten) for each in cast("list[Any]", value)]
    return value


def calls_one(params: Mapping[str, Any]) -> bool:
    """Whether it is certain which tool the server reads in the params of a call."""
    try:
        _check_spelled(params, MEMBERS[TOOLS])
    except InvalidParams:
        return False
    return isinstance(params.get(MEMBERS[TOOLS], ""), str)


def _check_spelled(holder: Mapping[str, Any], *members: str) -> None:
    """Whether an object has these members in no spelling but their own.

    Raises:
        InvalidParams: It has one in another case, or with other dashes and spaces.
    """
    known = {each.lower() for each in members}
    for key in holder:
        if key not in members and is_one_of(key.replace("_", "").replace("-", ""), known):
            raise InvalidParams(f"a member that may be read as one of these: {', '.join(members)}")
