"""The path of a request: one flat list, in one order, of the features that are on."""

from mcp_sessions import Conversations
from mcp_sessions.assembly import Assembly
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.server.dispatch.path import Path
from mcp_sessions.stores.memory.memory_store import MemoryStore
from tests.support.apps import make_mcpserver


def path(
    *,
    remembers: bool = True,
    conversations: Conversations | None = None,
    hidden: tuple[str, ...] = (),
) -> Path:
    """That of a server with these features."""
    settings = LayerSettings(
        store=MemoryStore() if remembers else None, conversations=conversations, hidden=hidden
    )
    assembly = Assembly(make_mcpserver().server, settings, clock=lambda: 0.0)
    return assembly.router.path


def names(stages: tuple[object, ...]) -> list[str]:
    return [type(stage).__name__ for stage in stages]


def test_a_feature_that_is_off_is_not_in_the_list() -> None:
    plain = ["Acceptance", "Association", "HandlerSession", "UpstreamPeers"]

    assert names(path().keyless) == plain
    assert names(path(remembers=False).keyed) == plain


def test_a_request_that_can_have_no_session_is_not_looked_up() -> None:
    assert names(path().outside) == ["Acceptance", "HandlerSession", "UpstreamPeers"]
    assert names(path().alone) == ["Acceptance", "UpstreamPeers"]


def test_a_conversation_or_a_handle_may_find_a_session_for_it() -> None:
    bound = path(conversations=Conversations())
    by_handle = path(conversations=Conversations(handle=["echo"]))

    assert names(bound.alone) == names(bound.outside)
    assert names(bound.alone) == [
        "Acceptance",
        "ConversationStage",
        "HandlerSession",
        "UpstreamPeers",
    ]
    assert by_handle.alone == by_handle.outside == by_handle.keyless


def test_every_feature_has_its_position() -> None:
    full = path(conversations=Conversations(handle=["echo"]), hidden=("secret",))
    full.gate(tools=["echo"], methods=[])

    assert names(full.keyed) == [
        "Acceptance",
        "KeyLock",
        "LearnedTools",
        "Association",
        "KnownKey",
        "ConversationStage",
        "Gates",
        "HandlerSession",
        "Concealing",
        "HandleTools",
        "UpstreamPeers",
    ]
    assert names(full.keyless) == [
        each for each in names(full.keyed) if each not in ("KeyLock", "KnownKey")
    ]


def test_the_layers_own_methods_take_a_path_of_their_own() -> None:
    assert names(path().ours) == ["Acceptance", "SessionMethods"]
