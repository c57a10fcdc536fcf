"""Find the client of a message of a child: the rule that keeps clients apart.

Without authentication all clients are one principal, and strangers.

1. A child has one client, or several, from its start to its end. A session is one client. So is a
   connection outside of sessions. A session may take over the child of its own connection
   (``takeover.py``).
2. The client of a child with one client gets all its messages, at any time.
3. If a child has several clients, a message goes to the client of the request that it names. It
   names the request if it comes on the response of the request, or by its progress token.
4. Nobody gets another message of a child with several clients. A question is refused with an error
   that says why. No time after an answer makes a guess safe: a task of the server may run on.
5. A change of the server (a list, a resource) belongs to no request. Its listeners get it.
6. Only a child with one client gets the notifications of its client. A message that is caused by a
   notification names no request.

``sharing.py`` gives a client that can be asked a child of its own. ``slot.py`` applies these rules.
``tests/server/upstream/external/test_cause.py`` tests the property.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mcp_sessions.core.messages import progress_token

TOKEN: Final = "progressToken"


def with_own_token(request_id: int, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Replace a client's progress token. The child gives its token back, and several clients may
    share the child. So the client's token could be that of another client's request.

    Returns:
        The params with the layer's token in place of the client's. A token that is no string and no
        integer is left out.
    """
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    if not isinstance(meta, dict) or TOKEN not in meta:
        return params
    own = {name: value for name, value in meta.items() if name != TOKEN}
    if progress_token(meta) is not None:
        own[TOKEN] = request_id
    return {**(params or {}), "_meta": own}
