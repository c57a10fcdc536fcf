"""Which names a log may have: those that the server said, or served. Others may be secrets."""

from mcp_sessions.server.reporting.loggable import KnownNames


def test_what_a_list_has_may_be_logged_before_anybody_used_it() -> None:
    """A refused call of a listed tool is logged with the tool's name."""
    known = KnownNames()
    assert known.name("tools/call", "pay") is None
    known.served("tools/list", None, {"tools": [{"name": "pay"}, {"name": "count"}]})
    assert [known.name("tools/call", name) for name in ("pay", "count")] == ["pay", "count"]
    assert known.name("tools/call", "a password") is None
    assert known.name("prompts/get", "pay") is None


def test_a_uri_of_a_list_may_not_be_logged() -> None:
    known = KnownNames()
    uri = "file:///home/ann/letter.txt"
    known.served("resources/list", None, {"resources": [{"name": "letter", "uri": uri}]})
    assert known.name("resources/read", uri) is None
    assert known.name("resources/read", "letter") is None


def test_what_was_served_may_be_logged_by_its_method() -> None:
    known = KnownNames()
    known.served("tools/call", "hidden", {"content": []})
    assert known.name("tools/call", "hidden") == "hidden"
    assert known.name("prompts/get", "hidden") is None
