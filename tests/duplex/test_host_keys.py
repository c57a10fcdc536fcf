"""Request keys that hosts send on a pipe and on a WebSocket (KEY22)."""

import pytest

from tests.support.duplex import DuplexPeer, duplex_world
from tests.support.raw import call_params

MEMBER = "claudecode/toolUseId"


async def said(client: DuplexPeer, text: str = "hi") -> str:
    call = call_params("echo", {"text": text})
    result = await client.result("tools/call", call, meta={MEMBER: "k"})
    return str(result["content"][0]["text"])


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("kind", ["websocket", "stdio"])
async def test_on_a_pipe_there_is_no_stranger_whose_key_it_could_be(
    kind: str, modern: bool
) -> None:
    async with duplex_world(request_keys=(f"meta:{MEMBER}",)) as w:
        client = await w.connected(kind, modern=modern)
        assert [await said(client), await said(client)] == ["hi", "hi"]
        runs = 1 if kind == "stdio" else 2
        assert w.inner.box.calls == ["echo"] * runs
        # The same text on another connection is another key, whoever sends it.
        assert await said(await w.connected(kind, modern=modern), "there") == "there"
        assert w.inner.box.calls == ["echo"] * (runs + 1)
