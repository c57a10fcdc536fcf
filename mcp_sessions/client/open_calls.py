"""Remember the calls whose results ask the user, until the application answers.

In the 2026 era a server asks by the result ``input_required``. The call waits there for the next
request, which carries its ``requestState``. A program that stops in between continues the call in
its next run, if a jar keeps it.

1. A call is remembered before the application gets the questions, and forgotten with the answer
   to the request that continues it.
2. The calls are bounded in number and in bytes. The oldest are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mcp_sessions.core.messages import encode, members_of

Json = dict[str, Any]

_MOST: Final = 16
_MOST_BYTES: Final = 65_536

_NOT_ITS_OWN: Final = frozenset({"_meta", "inputResponses", "requestState"})
"""Members of a request that belong to one round of a call only."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call of this session that waits for answers of the user.

    To continue it, send the request again with this ``request_state``::

        for call in transport.open_calls:
            if call.method == "tools/call":
                name, arguments = call.params["name"], call.params.get("arguments")
                await client.call_tool(name, arguments, request_state=call.request_state)

    The server asks the same questions again, and the callbacks of the client answer them.
    """

    method: str
    """``tools/call``, ``prompts/get`` or ``resources/read``."""

    params: Json
    """The request's params, without ``_meta``."""

    questions: Json
    """Name of a question → its ``method`` and ``params``."""

    request_state: str = field(repr=False)
    """Names the call at the server. Do not log it."""


class OpenCalls:
    def __init__(self) -> None:
        self._calls: OrderedDict[str, OpenCall] = OrderedDict()

    def all(self) -> tuple[OpenCall, ...]:
        return tuple(self._calls.values())

    def restart(self, calls: Iterable[OpenCall] = ()) -> None:
        self._calls = OrderedDict((call.request_state, call) for call in calls)

    def answered(self, request: Mapping[str, Any], result: Mapping[str, Any] | None) -> bool:
        """Note the answer to a request of the application.

        Args:
            result: None: the answer is an error.

        Returns:
            Whether the open calls changed.
        """
        params = members_of(request.get("params"))
        continued = params.get("requestState")
        changed = self._calls.pop(continued, None) if isinstance(continued, str) else None
        call = _asks(str(request.get("method")), params, result or {})
        if call is not None and _size(call) <= _MOST_BYTES:
            self._calls[call.request_state] = call
            while len(self._calls) > _MOST or sum(map(_size, self._calls.values())) > _MOST_BYTES:
                self._calls.popitem(last=False)
        return changed is not None or call is not None


def open_call_of(saved: object) -> OpenCall | None:
    members = members_of(saved)
    method, state = members.get("method"), members.get("request_state")
    if not isinstance(method, str) or not isinstance(state, str):
        return None
    params, questions = members_of(members.get("params")), members_of(members.get("questions"))
    return OpenCall(method, params, questions, state)


def _size(call: OpenCall) -> int:
    return len(encode((call.params, call.questions, call.request_state)))


def _asks(method: str, params: Mapping[str, Any], result: Mapping[str, Any]) -> OpenCall | None:
    if result.get("resultType") != "input_required":
        return None
    state, questions = result.get("requestState"), members_of(result.get("inputRequests"))
    if not isinstance(state, str) or not questions:
        return None
    own = {name: value for name, value in params.items() if name not in _NOT_ITS_OWN}
    return OpenCall(method, own, questions, state)
