"""The names of MCP's methods, each of them once.

Those of ACP, which is another protocol, stand where ACP is spoken.
"""

from collections.abc import Mapping
from types import MappingProxyType
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
LIST_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {"tools": LIST_TOOLS, "prompts": LIST_PROMPTS, "resources": LIST_RESOURCES}
)
SUBSCRIPTIONS: Final = frozenset({SUBSCRIBE, UNSUBSCRIBE})

START_SESSION: Final = "session/start"
RESUME_SESSION: Final = "session/resume"
END_SESSION: Final = "session/end"
CREATE_SESSION: Final = "sessions/create"
DELETE_SESSION: Final = "sessions/delete"

SESSION_PREFIX: Final = "session/"
"""How a method begins whose params name its session."""

OF_A_STORE: Final = frozenset({START_SESSION, RESUME_SESSION, END_SESSION})
"""Those of sessions, which a layer without a store does not have."""

OF_SESSIONS: Final = OF_A_STORE | {CREATE_SESSION, DELETE_SESSION}
"""Those of sessions, which the layer answers itself."""

GET_TASK: Final = "tasks/get"
UPDATE_TASK: Final = "tasks/update"
CANCEL_TASK: Final = "tasks/cancel"
OF_TASKS: Final = frozenset({GET_TASK, UPDATE_TASK, CANCEL_TASK})
"""Those of tasks, which the layer answers itself if tasks are on."""

SAMPLE: Final = "sampling/createMessage"
ELICIT: Final = "elicitation/create"
LIST_ROOTS: Final = "roots/list"
QUESTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {ELICIT: "elicitation", SAMPLE: "sampling", LIST_ROOTS: "roots"}
)
"""Request to a client → the capability that it has to declare for it."""

NOTIFICATION: Final = "notifications/"
"""How the method of every notification begins."""

INITIALIZED: Final = "notifications/initialized"
CANCELLED: Final = "notifications/cancelled"
PROGRESS: Final = "notifications/progress"
LOGGED: Final = "notifications/message"
RESOURCE_UPDATED: Final = "notifications/resources/updated"
TOOLS_CHANGED: Final = "notifications/tools/list_changed"
PROMPTS_CHANGED: Final = "notifications/prompts/list_changed"
RESOURCES_CHANGED: Final = "notifications/resources/list_changed"
LIST_CHANGED: Final = "/list_changed"
"""How the method of every notification about a list ends."""

CHANGED: Final[Mapping[str, str]] = MappingProxyType(
    {"tools": TOOLS_CHANGED, "prompts": PROMPTS_CHANGED, "resources": RESOURCES_CHANGED}
)
"""Kind → the notification that its list changed."""

CHANGED_KIND: Final[Mapping[str, str]] = MappingProxyType(
    {method: kind for kind, method in CHANGED.items()}
)
CHANGES: Final = frozenset({RESOURCE_UPDATED, *CHANGED_KIND})
ROOTS_CHANGED: Final = "notifications/roots/list_changed"
ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"
TASK_CHANGED: Final = "notifications/tasks"
DETACHED: Final = "notifications/sessions/detached"
