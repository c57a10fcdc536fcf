"""The ACP face: an agent's conversations on a durable log.

::

    from mcp_sessions.acp import AcpSessionLayer, current_conversation

    AcpSessionLayer(agent, store="sqlite:///conversations.db").run()

``agent`` is any ``acp.Agent`` of the Python ACP library. Needs the extra:
``pip install mcp-sessions[acp]``. Nothing else of this project knows ACP.
"""

try:
    import acp as _library
except ModuleNotFoundError as error:
    if error.name != "acp":
        raise
    raise ModuleNotFoundError(
        "mcp_sessions.acp needs the Python ACP library: pip install 'mcp-sessions[acp]'",
        name="acp",
    ) from error

from mcp_sessions.acp.agent_layer import AcpSessionLayer
from mcp_sessions.acp.open_conversation import Conversation, current_conversation

__all__ = ["AcpSessionLayer", "Conversation", "current_conversation"]

del _library
