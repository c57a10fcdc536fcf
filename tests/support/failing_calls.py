"""A store that fails at a call: before its effect, or after it, when only the reply is lost."""

from collections.abc import Callable
from typing import Any

from mcp_sessions.errors import StoreUnavailable


def fails(
    store: object,
    method: str,
    *,
    after: bool,
    times: int = 1,
    when: Callable[[dict[str, Any]], bool] = lambda _: True,
    failure: StoreUnavailable | None = None,
) -> list[str]:
    """The next ``times`` calls of a store's method raise `StoreUnavailable`; a list of those
    that did.

    Args:
        store: Or whatever else has the method.
        method: Its name.
        after: The call has its effect, and its reply is lost.
        times: How often.
        when: Whether a call is one of them, by its named arguments.
        failure: What they raise; None: a `StoreUnavailable`.
    """
    real: Any = getattr(store, method)
    failed: list[str] = []

    async def call(*args: Any, **kwargs: Any) -> Any:
        if len(failed) >= times or not when(kwargs):
            return await real(*args, **kwargs)
        failed.append(method)
        if after:
            await real(*args, **kwargs)
        raise failure or StoreUnavailable("the reply was lost" if after else "away")

    setattr(store, method, call)
    return failed


def is_keyed(arguments: dict[str, Any]) -> bool:
    """Whether an admission is that of a request with a key, by itself or with its connection's."""
    current = arguments.get("current")
    return arguments.get("key") is not None or (current is not None and current.key is not None)
