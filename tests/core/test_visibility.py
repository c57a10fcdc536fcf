"""Names that a session may see: the rule that decides, and the replacement of hidden names."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcp_sessions.core.spelling import check_plain
from mcp_sessions.core.visibility import (
    KINDS,
    PROMPTS,
    RESOURCES,
    STATE_KEY,
    TOOLS,
    Visibility,
    matches,
    restored,
)
from mcp_sessions.errors import InvalidParams

TEXTS = st.text("ab*/", max_size=8)


def is_readable(uri: str) -> bool:
    try:
        check_plain(uri)
    except InvalidParams:
        return False
    return True


def seen(*outside: str, **rules: list[list[Any]]) -> Visibility:
    return Visibility(lambda text: f"secret {text}", outside, rules)


@given(TEXTS, st.text("ab/", max_size=12))
def test_a_star_is_any_text_and_nothing_else_is_special(pattern: str, name: str) -> None:
    expected = ".*".join(re.escape(part) for part in pattern.split("*"))
    assert matches(pattern, name) == bool(re.fullmatch(expected, name, re.DOTALL))


@given(TEXTS, TEXTS, st.text("ab/", max_size=12))
def test_who_covers_a_pattern_covers_all_that_it_covers(more: str, less: str, name: str) -> None:
    """So a rule that is covered by a later one can go."""
    if matches(more, less) and matches(less, name):
        assert matches(more, name)


@given(st.lists(st.tuples(TEXTS.filter(bool), st.booleans()), max_size=8), st.text("ab/"))
def test_the_last_rule_decides_however_few_are_kept(
    said: list[tuple[str, bool]], name: str
) -> None:
    visibility = seen("a*")
    for pattern, hides in said:
        rules = visibility.changed(TOOLS, {pattern}, hides=hides)
        visibility = seen("a*", tools=rules)
    last = [hides for pattern, hides in said if matches(pattern, name)]
    assert visibility.is_hidden(TOOLS, name) == (last[-1] if last else name.startswith("a"))
    patterns = [pattern for pattern, _ in visibility.rules.get(TOOLS, ())]
    assert len(patterns) == len(set(patterns))


def test_what_is_said_again_changes_nothing() -> None:
    """However often a tool reveals the same two: its client is not notified of it each time."""
    rules = seen().changed(TOOLS, {"a", "b"}, hides=False)
    assert seen(tools=rules).changed(TOOLS, {"a"}, hides=False) == rules
    assert seen(tools=rules).changed(TOOLS, {"b"}, hides=False) == rules
    assert seen(tools=rules).changed(TOOLS, {"*"}, hides=True) == [["*", True]]


def test_a_name_of_one_kind_is_no_name_of_another() -> None:
    visibility = seen(tools=[["pay", True]])
    assert [visibility.is_hidden(kind, "pay") for kind in KINDS] == [True, False, False]
    assert not visibility.with_rules_in({}).with_rules_in({"other": 1}).is_plain
    assert seen().with_rules_in({STATE_KEY: {"rules": {}, "owed": []}}).is_plain


@pytest.mark.parametrize(
    ("scopes", "hidden"),
    [
        ((), ["admin_a", "admin_write", "write"]),
        (("write",), ["admin_a", "admin_write"]),
        (("admin",), ["admin_write", "write"]),
        (("admin", "write"), []),
        (None, []),
    ],
)
def test_a_tool_needs_the_scopes_of_all_its_patterns(
    scopes: tuple[str, ...] | None, hidden: list[str]
) -> None:
    needed = {"admin_*": ["admin"], "*write": ["write"]}
    sees = replace(seen(), needed=needed).with_scopes(scopes)
    names = ["admin_a", "admin_write", "other", "write"]
    assert [name for name in names if sees.is_hidden(TOOLS, name)] == hidden
    assert not any(sees.is_hidden(kind, "write") for kind in (PROMPTS, RESOURCES))
    assert not sees.is_plain


def test_no_rule_of_a_session_reveals_what_a_scope_is_needed_for() -> None:
    """And no spelling that a server may take for the same name."""
    rules = seen().changed(TOOLS, {"*"}, hides=False)
    sees = replace(seen(tools=rules), needed={"pay": ["write"]}).with_scopes(())
    for name in ("pay", "PAY", "Pay"):
        assert sees.is_hidden(TOOLS, name)
    assert sees.shown("tools/list", {"tools": [{"name": "pay"}], "cacheScope": "public"}) == {
        "tools": [],
        "cacheScope": "private",
    }


@pytest.mark.parametrize(
    "uri",
    [
        "notes://all/secret",
        "NOTES://all/secret",
        "notes://all/%73ecret",
        "notes://all/%2573ecret",
        "notes://all/x/../secret",
        "notes://all/./secret",
        "notes://all/x/%2e%2e/secret",
    ],
)
def test_a_resource_is_hidden_however_it_is_spelled(uri: str) -> None:
    """A server may decode what it is asked for: a template of the SDK's does."""
    assert not seen("notes://all/secret").may_receive(uri)
    assert seen("notes://all/other").may_receive("notes://all/secret")
    assert not seen("notes://all/other").is_hidden(RESOURCES, uri)
    assert not seen("notes://all/secret").is_hidden(RESOURCES, "notes://secret")


def test_what_is_revealed_as_it_is_spelled_is_seen() -> None:
    """And what a server may take for something else is not: it is hidden in its other spelling."""
    rules = seen().changed(RESOURCES, {"notes://all/a%20b", "notes://all/x/*"}, hides=False)
    visibility = seen("notes://*", resources=rules)
    assert not visibility.is_hidden(RESOURCES, "notes://all/a%20b")
    assert not visibility.is_hidden(RESOURCES, "notes://all/a b")
    assert not visibility.is_hidden(RESOURCES, "notes://all/x/1")
    assert visibility.is_hidden(RESOURCES, "notes://all/x/../secret")
    assert visibility.is_hidden(RESOURCES, "notes://all/x/%2e%2e/secret")


def test_a_template_hides_what_is_made_of_it() -> None:
    visibility = seen("users://{id}/key{?form}")
    assert visibility.is_hidden(RESOURCES, "users://1/key?form=pem")
    assert visibility.is_hidden(RESOURCES, "users://{id}/key{?form}")
    assert not visibility.is_hidden(RESOURCES, "users://1/name")
    assert not seen("a{b}").is_hidden(TOOLS, "ab")
    rules = seen().changed(RESOURCES, {"users://{id}/key"}, hides=True)
    assert rules == [["users://*/key", True]]


@pytest.mark.parametrize(
    ("pattern", "uri", "kept"),
    [
        ("notes://secret", "notes://secret", r"notes://\w{16}"),
        ("notes://*", "notes://secret", r"\w{16}://secret"),
        ("users://admin/*", "users://admin/key", r"users://\w{16}/key"),
        ("*", "users://admin/key", r"\w{16}://admin/key"),
        ("a:-", "a:-", r"\w{16}:-"),
    ],
)
def test_the_nearest_name_that_is_not_hidden_stands_for_one(
    pattern: str, uri: str, kept: str
) -> None:
    """So the server looks where it looks for another of its kind: a template answers for what it
    does not have, and one that is hidden as a whole is not asked.
    """
    params, put = seen(pattern).concealed("resources/read", {"uri": uri})
    assert params is not None and re.fullmatch(kept, params["uri"])
    assert restored({"at": [f"no {params['uri']!r}"]}, put) == {"at": [f"no {uri!r}"]}


@given(st.text(), st.sampled_from(["", "*", "a*", "*b"]), st.sampled_from(KINDS))
def test_no_name_stands_for_another_that_anybody_could_have(
    name: str, hidden: str, kind: str
) -> None:
    """Short names, too: of one letter there are so few that another tool may have the next."""
    method = {TOOLS: "tools/call", PROMPTS: "prompts/get", RESOURCES: "resources/read"}[kind]
    member = "uri" if kind == RESOURCES else "name"
    visibility = seen(hidden)
    if kind == RESOURCES:
        name = "x:" + name.replace("\0", "")
        assume(is_readable(name))
    params, put = visibility.concealed(method, {member: name})
    assert params is not None
    assert bool(put) == visibility.is_hidden(kind, name) == (params[member] != name)
    if put:
        [(instead, part)] = put.items()
        assert len(instead) >= 16 and instead in params[member] and instead not in name
        assert params[member].replace(instead, part) == name
        assert visibility.concealed(method, {member: name})[0] == params


def test_names_are_found_wherever_a_request_has_them() -> None:
    visibility = seen("a*")
    prompt: Any = {"ref": {"type": "ref/prompt", "name": "ab"}, "argument": {}}
    params, put = visibility.concealed("completion/complete", prompt)
    assert params is not None and params["ref"]["name"] in put and prompt["ref"]["name"] == "ab"
    template: Any = {"ref": {"type": "ref/resource", "uri": "a://{x}"}}
    assert visibility.concealed("completion/complete", template)[1]
    listen: Any = {"notifications": {"resourceSubscriptions": ["a:b", "c:d"]}}
    params, put = visibility.concealed("subscriptions/listen", listen)
    assert params is not None and len(put) == 1
    assert params["notifications"]["resourceSubscriptions"][1:] == ["c:d"]
    assert restored(params, put) == listen


NAMED: dict[str, Any] = {
    "tools/call": {"name": "ping"},
    "prompts/get": {"name": "hello"},
    "resources/read": {"uri": "a://b"},
    "resources/subscribe": {"uri": "a://b"},
    "resources/unsubscribe": {"uri": "a://b"},
    "completion/complete": {"ref": {"type": "ref/prompt", "name": "hello"}},
    "subscriptions/listen": {"notifications": {"resourceSubscriptions": ["a://b"]}},
}
"""Requests that name something, as they should."""


def with_another_name(value: Any, name: Any) -> Any:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {
            key: each if key == "type" else with_another_name(each, name)
            for key, each in members.items()
        }
    return [name] if isinstance(value, list) else name


def is_refused(visibility: Visibility, method: str, params: Any) -> bool:
    try:
        visibility.concealed(method, params)
    except InvalidParams:
        return True
    return False


@pytest.mark.parametrize("method", NAMED)
def test_a_name_that_is_no_text_is_refused_while_something_is_hidden(method: str) -> None:
    """A server in JavaScript turns a list of one text into that text."""
    assert not is_refused(seen("secret"), method, NAMED[method])
    names: list[Any] = [None, 3, True, {}, {"href": "x"}, ["secret"], [["secret"]]]
    for name in names:
        params = with_another_name(NAMED[method], name)
        assert is_refused(seen("secret"), method, params), name
        assert is_refused(seen(tools=[["x", True]]), method.upper(), params), name
        assert seen().concealed(method, params)[1] == {}, name


@pytest.mark.parametrize("method", [each for each in NAMED if "listen" not in each])
def test_a_request_without_a_name_is_refused(method: str) -> None:
    without: list[Any] = [None, {}, {"ref": None}, {"ref": {}}, {"ref": ["x"]}]
    for params in without:
        assert is_refused(seen("secret"), method, params), params
        assert seen().concealed(method, params) == (params, {})
    assert seen("secret").concealed("tools/list", None) == (None, {})
    assert seen("secret").concealed("resources/list", {"cursor": "1"}) == ({"cursor": "1"}, {})


@pytest.mark.parametrize("kind", [None, 1, ["ref/resource"], "REF/resource", "ref/other", ""])
def test_a_reference_of_no_known_type_is_refused(kind: Any) -> None:
    ref = {"type": kind, "uri": "note://secret", "name": "x"}
    assert is_refused(seen("note://secret"), "completion/complete", {"ref": ref})
    del ref["type"]
    assert is_refused(seen("note://secret"), "completion/complete", {"ref": ref})


def test_each_name_of_a_reference_counts() -> None:
    """A server may read one that is not of its type."""
    ref = {"type": "ref/prompt", "name": "hello", "uri": "note://secret"}
    params, put = seen("note://secret").concealed("completion/complete", {"ref": ref})
    assert params is not None and params["ref"]["uri"] != "note://secret" and put


SPELLINGS: list[Callable[[str], str]] = [
    str.upper, str.title, lambda key: "_".join(key), lambda key: key + " ",
    lambda key: key.replace("s", "\u017f").replace("i", "\uff49"),
    lambda key: key[0] + "\u00ad" + key[1:],
]  # fmt: skip


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize("method", NAMED)
def test_a_member_in_another_spelling_is_refused(
    method: str, spelled: Callable[[str], str]
) -> None:
    """Go's ``encoding/json`` compares members without case, and takes the last."""

    def each(value: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for key, inner in value.items():
            if spelled(key) != key:
                found.append({**value, spelled(key): "secret"})
            if isinstance(inner, dict):
                found += [{**value, key: more} for more in each(inner)]  # pyright: ignore[reportUnknownArgumentType]
        return found

    variants = each(NAMED[method])
    for params in variants:
        assert is_refused(seen("secret"), method, params), params
        assert seen().concealed(method, params) == (params, {})
    assert not is_refused(seen("secret"), method, {**NAMED[method], "_meta": {}, "arguments": {}})


@pytest.mark.parametrize("odd", [None, 3, {}, [], "ref/prompt"])
def test_a_result_that_is_malformed_passes(odd: Any) -> None:
    visibility = seen("*")
    for method in ("tools/list", "resources/templates/list", "completion/complete", "tools/call"):
        result = {"tools": odd, "resourceTemplates": odd, "completion": odd, "messages": odd}
        for each in ({}, result):
            assert visibility.shown(method, each, {"ref": odd, "argument": odd}) == each


LINK: Any = {"type": "resource_link", "uri": "note://secret", "name": "s"}
HELD: Any = {"type": "resource", "resource": {"uri": "note:///secret", "text": "the key"}}
TEXT: Any = {"type": "text", "text": "see"}


RESULTS: list[tuple[Any, Any]] = [
    ({"content": [LINK, TEXT, HELD]}, {"content": [TEXT]}),
    ({"contents": [HELD["resource"]]}, {"contents": []}),
    ({"messages": [{"role": "user", "content": LINK}]}, {"messages": []}),
    ({"messages": [{"role": "user", "content": [HELD]}]}, {"messages": []}),
    (
        {"messages": [{"role": "user", "content": [HELD, TEXT]}, {"content": []}]},
        {"messages": [{"role": "user", "content": [TEXT]}, {"content": []}]},
    ),
    (
        {"content": [{"type": "tool_result", "content": [LINK, TEXT]}]},
        {"content": [{"type": "tool_result", "content": [TEXT]}]},
    ),
    (
        {"taskId": "1", "result": {"content": [HELD]}},
        {"taskId": "1", "result": {"content": []}},
    ),
]


@pytest.mark.parametrize(
    "method", ["tools/call", "prompts/get", "tasks/result", "tasks/get", "x/y"]
)
@pytest.mark.parametrize(("result", "expected"), RESULTS)
def test_no_result_of_any_method_has_what_is_hidden(
    method: str, result: Any, expected: Any
) -> None:
    assert seen("note://secret").shown(method, result) == expected
    assert seen("note://other").shown(method, result) == result


@pytest.mark.parametrize(
    ("template", "argument", "given", "hidden"),
    [
        ("note://{id}", "id", {}, "note://secret"),
        ("note://{+path}", "path", {}, "note://secret"),
        ("note://x{/path*}", "path", {}, "note://x/secret"),
        ("note://{a}/{b}", "b", {"a": "x"}, "note://x/secret"),
        ("note://{a}/{b}", "a", {}, "note://secret/*"),
        ("note://x{?q,r}", "q", {"r": "1"}, "note://x?q=secret"),
        ("note://{id}{?q}", "id", {}, "note://secret"),
        ("note://{id}", "ID", {}, "note://secret"),
        ("note://{id}", None, {}, "note://secret"),
    ],
)
def test_no_completion_makes_what_is_hidden(
    template: str, argument: Any, given: Any, hidden: str
) -> None:
    params: Any = {
        "ref": {"type": "ref/resource", "uri": template},
        "argument": {"name": argument, "value": "s"},
        "context": {"arguments": given},
    }
    result: Any = {"completion": {"values": ["secret", "SECRET", "open"], "total": 3}}
    shown = seen(hidden).shown("completion/complete", result, params)
    assert shown == {"completion": {"values": ["open"]}}
    assert seen("note://other").shown("completion/complete", result, params) == result
    prompt: Any = {**params, "ref": {"type": "ref/prompt", "name": "hello"}}
    assert seen(hidden).shown("completion/complete", result, prompt) == result


def test_what_a_session_sees_is_nobody_elses_to_keep() -> None:
    """A shared cache may not answer others with it."""
    page: Any = {"tools": [{"name": "a"}, {"name": "b"}], "cacheScope": "public", "nextCursor": "2"}
    outside = seen("a").shown("tools/list", page)
    assert outside == {"tools": [{"name": "b"}], "cacheScope": "public", "nextCursor": "2"}
    inside = seen("a", tools=[["a", False]])
    assert inside.shown("tools/list", page) == {**page, "cacheScope": "private"}
    assert inside.shown("resources/read", {"cacheScope": "public"}) == {"cacheScope": "private"}
    assert inside.shown("tools/call", {"cacheScope": "public"}) == {"cacheScope": "public"}
