"""URI templates, by the examples of RFC 6570."""

import pytest

from mcp_sessions.core.visibility import expansions, variables_of

GIVEN = {"var": "value", "hello": "Hello World!", "x": "1024", "y": "768", "empty": ""}


@pytest.mark.parametrize(
    ("template", "encoded"),
    [
        ("{var}", "value"),
        ("{hello}", "Hello%20World%21"),
        ("map?{x,y}", "map?1024,768"),
        ("X{#var}", "X#value"),
        ("X{#x,y}", "X#1024,768"),
        ("X{.var}", "X.value"),
        ("X{.x,y}", "X.1024.768"),
        ("{/var}", "/value"),
        ("{/var,x}/here", "/value/1024/here"),
        ("{;x,y}", ";x=1024;y=768"),
        ("{?x,y}", "?x=1024&y=768"),
        ("?fixed=yes{&x,y}", "?fixed=yes&x=1024&y=768"),
        ("{+x,y}", "1024,768"),
        ("{?x,none}", "?x=1024"),
        ("here{?none}", "here"),
        ("here{#none}", "here"),
        ("here{;none}{&none}", "here"),
        ("here/{none}", "here/{none}"),
        ("here{/none}", "here{/none}"),
    ],
)
def test_an_expansion(template: str, encoded: str) -> None:
    """A part that a URI may do without is left out; another one stays as it is."""
    assert expansions(template, GIVEN)[0] == encoded


def test_values_are_encoded_and_as_they_are() -> None:
    assert expansions("n/{hello}", GIVEN) == ("n/Hello%20World%21", "n/Hello World!")
    assert expansions("n/{a}", {"a": "b/c"}) == ("n/b%2Fc", "n/b/c")


def test_the_variables_of_a_template() -> None:
    assert variables_of("a/{b}{?c,d*}{+e:3}/{f}") == ["b", "c", "d", "e", "f"]
    assert variables_of("a/b") == []
