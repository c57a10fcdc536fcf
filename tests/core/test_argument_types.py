"""A wrong type is one line that names the argument, and what is wanted.

The annotation of each public name says what it takes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from mcp.server import MCPServer

from mcp_sessions import (
    ConfigurationError,
    Conversations,
    FileJar,
    HTTPServer,
    ReconnectPolicy,
    RedisStore,
    SessionLayer,
    SessionPolicy,
    SessionSecurity,
    SQLiteStore,
    StdioServer,
    TaskPolicy,
    resumable,
)
from mcp_sessions.acp import AcpSessionLayer
from mcp_sessions.argument_types import checked
from mcp_sessions.security import mint_key
from tests.support.conversations import ScriptedAgent

SERVER = MCPServer("s")
URL = "http://127.0.0.1:1/mcp"


def layer(**options: Any) -> SessionLayer:
    return SessionLayer(SERVER, **options)


def url(**options: Any) -> object:
    return resumable(URL, **options)


def agent(**options: Any) -> object:
    return AcpSessionLayer(ScriptedAgent(), **options)


def app(**options: Any) -> object:
    return layer().asgi_app(**options)


def run(**options: Any) -> object:
    return layer().run(**options)


def command(**options: Any) -> object:
    return StdioServer("true", **options)


def there(**options: Any) -> object:
    return HTTPServer(URL, **options)


A_STORE = 'a store, such as "sqlite:///sessions.db", or a path'
A_JAR = 'a jar, such as FileJar("sessions.json")'
WRONG: list[tuple[Callable[..., object], str, object, str]] = [
    (layer, "policy", {}, "a SessionPolicy, not a dict"),
    (layer, "policy", SessionPolicy, "a SessionPolicy, not the class SessionPolicy"),
    (layer, "security", "s3cret", "a SessionSecurity, not a str"),
    (layer, "conversations", True, "a Conversations, not a bool"),
    (layer, "store", 5, f"{A_STORE}, not an int"),
    (layer, "store", SQLiteStore, f"{A_STORE}, not the class SQLiteStore"),
    (layer, "hidden", "s3cret", "a list of texts, not a str"),
    (layer, "auth", 3, "an AuthSettings or an Authentication or a text, not an int"),
    (layer, "token_verifier", 3, "a TokenVerifier, not an int"),
    (layer, "tasks", True, "a TaskPolicy, not a bool"),
    (app, "path", 3, "a text, not an int"),
    (app, "security", {}, "a SecuritySettings, not a dict"),
    (run, "port", "8000", "a whole number, not a str"),
    (run, "grace", "3", "a number, not a str"),
    (layer().require_session, "tools", "add", "a list of texts, not a str"),
    (url, "jar", "s.json", f"{A_JAR}, not a str"),
    (url, "jar", Path("s.json"), f"{A_JAR}, not a PosixPath"),
    (url, "jar", FileJar, f"{A_JAR}, not the class FileJar"),
    (url, "policy", {}, "a ReconnectPolicy, not a dict"),
    (url, "on_lost", 3, "a function, not an int"),
    (url, "headers", ["s3cret"], "a mapping, not a list"),
    (agent, "store", 5, f"{A_STORE}, not an int"),
    (agent, "connect_timeout", "3", "a number, not a str"),
    (agent, "connect_servers", "no", "True or False, not a str"),
    (command, "cwd", 3, "a text or a path, not an int"),
    (command, "max_children", "3", "a whole number, not a str"),
    (command, "max_children", True, "a whole number, not a bool"),
    (there, "headers", "s3cret", "a mapping, not a str"),
    (Conversations, "per_principal", "yes", "True or False, not a str"),
    (Conversations, "key", "s3cret", "a function, not a str"),
    (Conversations, "meta", "key", "a list of texts, not a str"),
    (ReconnectPolicy, "connect_timeout", "3", "a number, not a str"),
    (TaskPolicy, "after", "3", "a number, not a str"),
    (TaskPolicy, "always", "add", "a list of texts, not a str"),
    (SessionPolicy, "coalescing", 3, "a mapping, not an int"),
    (SessionSecurity, "keys", None, "a list of strings"),
    (SessionSecurity.ephemeral, "max_token", "300", "a whole number, not a str"),
    (SQLiteStore, "path", 3, "a text or a Path, not an int"),
    (RedisStore, "url", 3, "a text, not an int"),
    (FileJar, "path", 3, "a text or a path, not an int"),
]


@pytest.mark.parametrize(("make", "name", "value", "wanted"), WRONG)
def test_a_wrong_type_is_one_line(
    make: Callable[..., object], name: str, value: object, wanted: str
) -> None:
    """Rule 1: with what is wanted, and without the value."""
    with pytest.raises(ConfigurationError) as raised:
        make(**{name: value})
    assert str(raised.value) == f"{name} must be {wanted}"


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (layer, {"hidden": ["a", 1]}, "each of hidden must be a text, not an int"),
        (command, {"env": {1: "a"}}, "each of env must be a text, not an int"),
        (command, {"env": {"A": 1}}, "each value of env must be a text, not an int"),
        (url, {"auth": "s3cret"}, "auth must be an httpx2.Auth"),
        (there, {"auth": "s3cret"}, "auth must be an httpx2.Auth, or a function of a principal"),
    ],
)
def test_what_is_in_it_has_its_type_too(
    make: Callable[..., object], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make(**options)
    assert str(raised.value) == text


def test_a_path_is_a_store(tmp_path: Path) -> None:
    """Of a SQLite file."""
    for made in (layer, agent):
        store = cast("Any", made(store=tmp_path / "a.db")).store
        assert isinstance(store, SQLiteStore) and store.path == tmp_path / "a.db"


def test_what_fits_is_taken() -> None:
    """A whole number is a number, and an option may be None."""
    layer(policy=SessionPolicy(), hidden={"a"}, security=SessionSecurity([mint_key()]))
    url(jar=FileJar("s.json"), headers={"A": "b"}, on_lost=print)
    agent(connect_timeout=3)
    command(scopes=["a"], tool_scopes={"b": ("c",)}, cwd=Path())
    Conversations(meta=("a",), anonymous=None)


def test_an_argument_that_is_missing_or_unknown_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'server'"):
        cast("Any", SessionLayer)()
    with pytest.raises(TypeError, match="unexpected keyword argument 'polcy'"):
        layer(polcy=None)


def test_what_only_a_type_checker_knows_is_not_checked() -> None:
    """Rule 2."""

    def takes(what: object, number: int = 1) -> object:
        return what, number

    takes.__annotations__["what"] = "Unknown"
    assert checked()(takes)(5, 2) == (5, 2)
    with pytest.raises(ConfigurationError, match="^number must be a whole number, not a str$"):
        checked()(takes)(5, cast("Any", "2"))


@pytest.mark.parametrize(
    ("make", "options", "near"),
    [
        (SessionPolicy, {"max_evens": 4}, "max_events"),
        (TaskPolicy, {"afer": 2}, "after"),
        (Conversations, {"header": ["x"]}, "headers"),
        (ReconnectPolicy, {"give_up_afer": 2}, "give_up_after"),
        (layer, {"storre": "memory://"}, "store"),
        (url, {"header": {}}, "headers"),
        (agent, {"stroe": "memory://"}, "store"),
        (command, {"argz": []}, "args"),
    ],
)
def test_a_name_that_is_nearly_an_argument_gets_a_hint(
    make: Callable[..., object], options: dict[str, Any], near: str
) -> None:
    with pytest.raises(TypeError) as refused:
        make(**options)
    said = str(refused.value)
    assert f"unexpected keyword argument {next(iter(options))!r}; did you mean {near}?" in said


def test_what_python_refuses_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        cast("Any", SessionPolicy)(zzz=1)
