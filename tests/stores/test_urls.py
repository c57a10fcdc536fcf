"""The URLs of stores: what is wrong with one, or where nobody answers, is said, but no password."""

import socket
from pathlib import Path

import pytest

from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.stores.urls import open_store

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"redis:/:{SECRET}@localhost", "has two slashes and a host: redis://localhost:6379/0"),
        (f"rediss:/:{SECRET}@localhost", "has two slashes and a host: rediss://localhost:6379/0"),
        (f"redis://:{SECRET}@localhost:99999", "the port in a redis:// URL is a number from 0"),
        (f"redis://:{SECRET}@localhost:port", "the port in a redis:// URL is a number from 0"),
        (f"redis://:{SECRET}@localhost/notes", "the database in a redis:// URL is a number"),
        (f"redis:///{SECRET}", "the database in a redis:// URL is a number"),
        (
            f"redis://:{SECRET}@localhost?client_nam=a",
            "an unknown option, or a wrong value of it: client_nam",
        ),
        (
            f"redis://:{SECRET}@localhost?db={SECRET}",
            "an unknown option, or a wrong value of it: db",
        ),
        ("unix://", "a unix:// URL names a socket"),
        (
            f"redis://localhost?password={SECRET}?namespace=a",
            "a redis:// URL has one ?: write & before namespace=",
        ),
        ("sqlite:notes.db", "a sqlite URL names a file: sqlite:///relative.db or sqlite:////abs"),
        ("sqlite:/notes.db", "a sqlite URL names a file: sqlite:///relative.db or sqlite:////abs"),
        ("sqlite://notes.db", "a sqlite URL names a file: sqlite:///relative.db or sqlite:////abs"),
        ("memory://notes", "a memory URL names nothing: memory://"),
        ("memory:", "a memory URL names nothing: memory://"),
        ("", "unknown store ''"),
        ("notes.db", "sqlite:///relative.db or sqlite:////absolute.db"),
    ],
)
def test_what_is_wrong_with_a_url_is_named(url: str, said: str) -> None:
    """Some of it redis-py takes for another server, or another database, in silence."""
    with pytest.raises(ConfigurationError) as refused:
        open_store(url)

    assert said in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["redis://", "redis:///0", "redis://[::1]:6379/2", "unix:///r.sock"]
)
def test_what_redis_py_has_a_default_for_may_be_left_out(url: str) -> None:
    assert isinstance(open_store(url), RedisStore)


async def test_where_nobody_answers_and_why_is_named() -> None:
    """A wrong port and a wrong name are not the same, and neither is a password."""
    with socket.socket() as no_client:
        no_client.bind(("127.0.0.1", 0))
        port = no_client.getsockname()[1]
        for position, reason, following in (
            (f"127.0.0.1:{port}", "ConnectionRefusedError: ", "start it, or correct the URL"),
            ("redis.invalid:6379", "gaierror: ", "Correct the host in the URL"),
        ):
            store = open_store(f"redis://user:{SECRET}@{position}/0")
            with pytest.raises(StoreUnavailable) as away:
                await store.open(SessionPolicy())
            await store.close()

            assert f"Redis at {position} is away: {reason}" in str(away.value)
            assert str(away.value).endswith(following)
            assert SECRET not in str(away.value)


# --- a file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path", "durability"),
    [
        ("sqlite:///notes.db", "notes.db", "normal"),
        ("sqlite:///data/a%20b.db?durability=full", "data/a b.db", "full"),
        ("sqlite:////var/lib/notes.db?durability=normal", "/var/lib/notes.db", "normal"),
    ],
)
def test_a_url_names_a_file(url: str, path: str, durability: str) -> None:
    store = open_store(url)
    assert isinstance(store, SQLiteStore)
    assert (store.path, store.durability) == (Path(path), durability)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://notes.db", "sqlite:///relative.db or sqlite:////absolute.db"),
        ("sqlite://", "names a file"),
        ("sqlite:///", "names a file"),
        ("sqlite:////var/lib/", "names a file"),
        ("sqlite:///a.db?durability=most", "not durability=most"),
        ("sqlite:///a.db?mode=ro", "not mode=ro"),
    ],
)
def test_a_url_that_names_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("?", r"\?")):
        open_store(url)
