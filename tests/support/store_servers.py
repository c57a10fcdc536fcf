"""The servers that replicas can share, each a parameter of a test: one of the test's own, which it
may stop, kill and suspend, and which keeps its data over that.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import pytest

from tests.support.postgres_server import postgres_server
from tests.support.redis_server import redis_server


class StoreServer(Protocol):
    @property
    def url(self) -> str:
        """For ``--store``."""
        ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...


@contextmanager
def store_server(name: str) -> Generator[StoreServer]:
    """Args:
    name: ``redis`` or ``postgres``.
    """
    if name == "postgres":
        with postgres_server() as postgres:
            yield postgres
    else:
        with redis_server("--appendonly", "yes", "--appendfsync", "always") as redis:
            yield redis


STORE_SERVERS = [
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("postgres", marks=pytest.mark.postgres),
]

on_each_server = pytest.mark.parametrize("store", STORE_SERVERS)
