"""What the store in Redis does for many sessions at once."""

import asyncio
import gc

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.redis.commands import each_of


async def test_calls_that_are_cancelled_before_they_begin_leave_no_warning() -> None:
    begun: list[int] = []

    async def call(number: int) -> int:
        begun.append(number)
        return number

    many = asyncio.create_task(each_of(call, range(3)))
    await asyncio.sleep(0)
    many.cancel()
    with pytest.raises(asyncio.CancelledError):
        await many
    # A coroutine that nobody awaited warns when it is collected.
    gc.collect()

    assert begun == []


async def test_one_call_that_fails_does_not_stop_the_others() -> None:
    async def call(number: int) -> int:
        if number == 1:
            raise StoreUnavailable("away")
        return number

    assert await each_of(call, range(3)) == [0, None, 2]


async def test_calls_that_all_fail_raise() -> None:
    async def call(number: int) -> int:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        await each_of(call, range(2))
