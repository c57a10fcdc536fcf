"""The path of a request: the list of its stages, in their order.

The order stands here and nowhere else. It decides which error a client gets if there are several.
The lists are made at the start. A feature that is off is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mcp_sessions.core.visibility import Visibility
from mcp_sessions.server.calls.table import Acceptance, Stage
from mcp_sessions.server.dispatch.stages.association import Association
from mcp_sessions.server.dispatch.stages.audited import Audited
from mcp_sessions.server.dispatch.stages.concealing import Gates
from mcp_sessions.server.dispatch.stages.conversation_stage import (
    ConversationStage,
    HandleTools,
    LearnedTools,
)
from mcp_sessions.server.dispatch.stages.handler_session import HandlerSession
from mcp_sessions.server.dispatch.stages.host_keys import HostKeys, KeyOutside
from mcp_sessions.server.dispatch.stages.idempotency import Idempotency, KeyLock, KnownKey
from mcp_sessions.server.dispatch.stages.serving import UpstreamPeers
from mcp_sessions.server.dispatch.stages.session_methods import SessionMethods
from mcp_sessions.server.dispatch.stages.tasks import TaskCalls, TaskMethods, TaskTools
from mcp_sessions.server.requests.joining import BeginAnew
from mcp_sessions.server.requests.runner import RequestRunner


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Features:
    """Stages of features that may be off. None: it is off."""

    idempotency: Idempotency | None
    conversation: ConversationStage | None
    handles: tuple[LearnedTools, HandleTools] | None
    host_keys: tuple[HostKeys, Callable[[BeginAnew], KeyOutside]] | None = None
    tasks: tuple[TaskCalls, TaskMethods] | None = None
    task_tools: TaskTools | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Stages:
    """The stages that need other objects of the server."""

    audited: Audited
    methods: SessionMethods
    association: Association
    session: HandlerSession
    serving: UpstreamPeers
    features: Features


class Path:
    def __init__(
        self,
        stages: Stages,
        runner: RequestRunner,
        visibility: Visibility,
        *,
        begin_anew: BeginAnew,
    ) -> None:
        self._stages = stages
        self._gates, self._concealing = Gates(visibility), stages.session.concealing
        self._acceptance = Acceptance(runner.calls)
        keys = stages.features.idempotency
        self._keys = (KeyLock(keys), KnownKey(keys, begin_anew)) if keys is not None else None
        self._of_hosts: tuple[Stage, Stage] | None = None
        if stages.features.host_keys is not None:
            found, outside = stages.features.host_keys
            self._of_hosts = (found, outside(begin_anew))
        self.ours: tuple[Stage, ...] = (
            Acceptance(runner.calls, is_ours=True),
            stages.methods,
        )
        """For ``session/*`` and ``sessions/*``, which the layer answers itself."""

        tasks = stages.features.tasks
        self.of_tasks: tuple[Stage, ...] = ()
        """For ``tasks/*``, which the layer answers itself, but for tasks of the wrapped server's
        own. Empty: tasks are off."""

        if tasks is not None:
            of_server = (stages.association, stages.session, stages.serving)
            self.of_tasks = (Acceptance(runner.calls, is_ours=True), tasks[1], *of_server)
        self.of_listens: tuple[Stage, ...] = (stages.association,)
        """For a listen, which has a stream of its own, and for a notification."""

        self._make()

    def gate(self, *, tools: Iterable[str], methods: Iterable[str]) -> None:
        self._gates.add(tools=tools, methods=methods)
        self._make()

    def _make(self) -> None:
        self.keyless = tuple(self._listed(None))
        """For a request without a request key."""

        self.keyed = tuple(self._listed(self._keys))
        """For a request with one."""

        self.of_hosts: tuple[Stage, ...] = ()
        """For a request that has none of its own, but perhaps one that its host sends. Empty: no
        place of such a key is named."""

        if self._of_hosts is not None:
            self.of_hosts = tuple(self._listed(self._keys, self._of_hosts))

        stages, unused = self._stages, list[Stage]()
        if stages.features.handles is None:
            unused.append(stages.association)
        self.outside = tuple(each for each in self.keyless if each not in unused)
        """For a request without a key that names no session, on a connection without a current one.
        Only a handle could find its session.
        """

        if stages.features.conversation is None:
            unused.append(stages.session)
        self.alone = tuple(each for each in self.keyless if each not in unused)
        """The same on no connection. Its handler has a session only of a conversation."""

    def _listed(
        self,
        keys: tuple[KeyLock, KnownKey] | None,
        of_hosts: tuple[Stage, Stage] | None = None,
    ) -> Iterable[Stage]:
        stages, features = self._stages, self._stages.features
        # While the audit is on, which may change at any time, the router runs it first. Limits
        # come first: what is refused here costs nothing.
        yield self._acceptance
        if of_hosts is not None:
            yield of_hosts[0]
        if keys is not None:
            # Before the key is recorded: the same request may come twice at once.
            yield keys[0]
        if features.handles is not None:
            # Before the session is looked up: whether a call has a handle decides which it is.
            yield features.handles[0]
        # The store admits the request and records its key in one step.
        yield stages.association
        if keys is not None:
            # A request that ran needs nothing of what follows.
            yield keys[1]
        if features.conversation is not None:
            # Only a request without another session has that of its conversation.
            yield features.conversation
        if of_hosts is not None:
            # A key outside of sessions may count in the conversation only.
            yield of_hosts[1]
        if self._gates.is_on:
            # After every way to a session.
            yield self._gates
        yield stages.session
        if self._concealing.is_on:
            # The rules of that session count. Then a gated tool is refused if it is not hidden.
            yield self._concealing
        if features.handles is not None:
            # A hidden tool takes no handle. On the way up, a list is extended before names are
            # taken from it.
            yield features.handles[1]
        if features.task_tools is not None:
            # What lists of tools have is the layer's own part last.
            yield features.task_tools
        if features.tasks is not None:
            # What is refused, or answered again, starts no task.
            yield features.tasks[0]
        yield stages.serving
