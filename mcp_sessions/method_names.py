"""The names of MCP's methods, each of them once.

Those of ACP, which is another protocol, stand where ACP is spoken.
"""

from typing import Final

INITIALIZE: Final = "initialize"
DISCOVER: Final = "server/discover"
PING: Final = "ping"
LISTEN: Final = "subscriptions/listen"
SET_LEVEL: Final = "logging/setLevel"
COMPLETE: Final = "completion/complete"

OPENING: Final = frozenset({INITIALIZE, DISCOVER})
"""Methods by which a client learns what a server can do."""

LIST_TOOLS: Final = "tools/list"
CALL_TOOL: Final = "tools/call"
LIST_PROMPTS: Final = "prompts/list"
GET_PROMPT: Final = "prompts/get"
LIST_RESOURCES: Final = "resources/list"
LIST_TEMPLATES: Final = "resources/templates/list"
READ_RESOURCE: Final = "resources/read"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"

LISTED: Final = ("tools", "prompts", "resources")
"""The kinds that a server lists, and whose changes it reports."""

LISTING: Final = frozenset({LIST_TOOLS, LIST_PROMPTS, LIST_RESOURCES, LIST_TEMPLATES})
SUBSCRIPTIONS: Final = frozenset({SUBSCRIBE, UNSUBSCRIBE})

START_SESSION: Final = "session/start"
RESUME_SESSION: Final = "session/resume"
END_SESSION: Final = "session/end"
CREATE_SESSION: Final = "sessions/create"
DELETE_SESSION: Final = "sessions/delete"

OF_SESSIONS: Final = frozenset(
    {START_SESSION, RESUME_SESSION, END_SESSION, CREATE_SESSION, DELETE_SESSION}
)
"""Those of sessions, which the layer answers itself."""

SAMPLE: Final = "sampling/createMessage"
ELICIT: Final = "elicitation/create"
LIST_ROOTS: Final = "roots/list"

INITIALIZED: Final = "notifications/initialized"
CANCELLED: Final = "notifications/cancelled"
PROGRESS: Final = "notifications/progress"
LOGGED: Final = "notifications/message"
RESOURCE_UPDATED: Final = "notifications/resources/updated"
TOOLS_CHANGED: Final = "notifications/tools/list_changed"
PROMPTS_CHANGED: Final = "notifications/prompts/list_changed"
RESOURCES_CHANGED: Final = "notifications/resources/list_changed"
CHANGES: Final = frozenset({RESOURCE_UPDATED, TOOLS_CHANGED, PROMPTS_CHANGED, RESOURCES_CHANGED})
ROOTS_CHANGED: Final = "notifications/roots/list_changed"
ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"
ELICITED: Final = "notifications/elicitation/complete"
TASK_STATUS: Final = "notifications/tasks/status"
DETACHED: Final = "notifications/sessions/detached"
