"""Answers that are kept for copies of a request are bounded, and keep nothing else in memory."""

import gc
import weakref
from typing import Any

import pytest

from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.upstream.held_call import KEPT, HeldCall, RepeatedRounds, new_outcome
from mcp_sessions.server.upstream.port import UpstreamError

ANSWERS = {"q": {"action": "accept"}}
WHAT = (ANONYMOUS, "whose", "tools/call", "ask")


class Request:
    """What the sender of a request holds."""


def held() -> HeldCall:
    call: Any = None
    return HeldCall(call, "whose", WHAT, lambda: None, new_outcome())


def refusal(data: str) -> UpstreamError:
    return UpstreamError({"code": -32000, "message": "no", "data": data})


async def test_a_copy_gets_the_same_error_and_the_request_is_not_kept() -> None:
    """A raised error would keep each frame that it passed, and the request in it."""
    copies = RepeatedRounds(most=9, most_bytes=9 * KEPT, seconds=60)
    kept: list[weakref.ref[Request]] = []

    async def served(name: str) -> None:
        request = Request()
        kept.append(weakref.ref(request))

        async def turn() -> dict[str, Any]:
            assert request
            raise refusal("why")

        with pytest.raises(UpstreamError) as failed:
            await copies.serve(name, held(), ANSWERS, turn)
        assert failed.value.error["data"] == "why"

    await served("a")
    with pytest.raises(UpstreamError) as again:
        await copies.copy("a", WHAT, ANSWERS)
    assert again.value.error["data"] == "why"
    del again
    gc.collect()
    assert [each() for each in kept] == [None]
    await copies.close()


@pytest.mark.parametrize("size", [KEPT // 2, KEPT])
async def test_an_error_counts_by_its_bytes_as_a_result_does(size: int) -> None:
    copies = RepeatedRounds(most=9, most_bytes=KEPT, seconds=60)

    async def turn() -> dict[str, Any]:
        raise refusal("x" * size)

    for name in ("a", "b"):
        with pytest.raises(UpstreamError):
            await copies.serve(name, held(), ANSWERS, turn)
    # Of two errors of half a bound and a little, the newer one; of one that is too large, none.
    assert await copies.copy("a", WHAT, ANSWERS) is None
    if size < KEPT:
        with pytest.raises(UpstreamError):
            await copies.copy("b", WHAT, ANSWERS)
    else:
        assert await copies.copy("b", WHAT, ANSWERS) is None
    await copies.close()
