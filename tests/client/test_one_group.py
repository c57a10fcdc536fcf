"""The error of a block is not wrapped once more by the transport."""

import socket

import pytest
from mcp import Client, MCPError

from mcp_sessions import resumable


async def test_a_server_that_is_not_there_is_one_error_in_the_group_of_the_sdk() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    with pytest.raises(ExceptionGroup) as failed:
        async with Client(resumable(f"http://127.0.0.1:{port}/mcp")):
            pass

    [error] = failed.value.exceptions
    assert isinstance(error, MCPError)
    assert "nothing listens there" in str(error)
