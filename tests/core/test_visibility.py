"""What a session may see: which rule decides, and what stands for what is hidden."""

import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcp_sessions.core.readings import check_readable
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
        check_readable(uri)
    except InvalidParams:
        return False
    return True


def seen(*outside: str, **rules: list[list[Any]]) -> Visibility:
    """What hides that."""
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
    """However often a tool reveals the same two: its client is not told of it each time."""
    rules = seen().changed(TOOLS, {"a", "b"}, hides=False)
    assert seen(tools=rules).changed(TOOLS, {"a"}, hides=False) == rules
    assert seen(tools=rules).changed(TOOLS, {"b"}, hides=False) == rules
    assert seen(tools=rules).changed(TOOLS, {"*"}, hides=True) == [["*", True]]


def test_a_name_of_one_kind_is_no_name_of_another() -> None:
    visibility = seen(tools=[["pay", True]])
    assert [visibility.is_hidden(kind, "pay") for kind in KINDS] == [True, False, False]
    assert not visibility.of({}).of({"other": 1}).is_plain
    assert seen().of({STATE_KEY: {"rules": {}, "owed": []}}).is_plain


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
    assert seen("notes://all/secret").is_hidden(RESOURCES, uri)
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
    listen: Any = {"notifications": {"resourceSubscriptions": ["a:b", "c:d", 3]}}
    params, put = visibility.concealed("subscriptions/listen", listen)
    assert params is not None and len(put) == 1
    assert params["notifications"]["resourceSubscriptions"][1:] == ["c:d", 3]
    assert restored(params, put) == listen


@pytest.mark.parametrize("odd", [None, 3, {}, [], "ref/prompt"])
def test_what_is_malformed_is_the_servers_to_refuse(odd: Any) -> None:
    visibility = seen("*")
    for method in ("tools/call", "resources/read", "completion/complete", "subscriptions/listen"):
        for params in (None, {}, {"name": odd, "uri": odd, "ref": odd, "notifications": odd}):
            if not isinstance(odd, str):
                assert visibility.concealed(method, params) == (params, {})
    for method in ("tools/list", "resources/templates/list"):
        for result in ({}, {"tools": odd, "resourceTemplates": odd}):
            assert visibility.shown(method, result) == result


def test_what_a_session_sees_is_nobody_elses_to_keep() -> None:
    """A shared cache may not answer others with it."""
    page: Any = {"tools": [{"name": "a"}, {"name": "b"}], "cacheScope": "public", "nextCursor": "2"}
    outside = seen("a").shown("tools/list", page)
    assert outside == {"tools": [{"name": "b"}], "cacheScope": "public", "nextCursor": "2"}
    inside = seen("a", tools=[["a", False]])
    assert inside.shown("tools/list", page) == {**page, "cacheScope": "private"}
    assert inside.shown("resources/read", {"cacheScope": "public"}) == {"cacheScope": "private"}
    assert inside.shown("tools/call", {"cacheScope": "public"}) == {"cacheScope": "public"}
