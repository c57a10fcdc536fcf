from collections.abc import Awaitable, Callable, Mapping

from mcp_sessions_conformance import steps_events, steps_open, steps_raw, steps_talk
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.matching import mismatch
from mcp_sessions_conformance.peer import Failure, Limits, OtherError
from mcp_sessions_conformance.scene import Scene, Way
from mcp_sessions_conformance.stdio_peer import StdioPeer
from mcp_sessions_conformance.transcript import Transcript
from mcp_sessions_conformance.values import Json, UnknownName

VERBS: Mapping[str, Callable[[Scene, Json], Awaitable[None]]] = {
    "open": steps_open.open_connection,
    "cut": steps_open.cut,
    "ended": steps_open.ended,
    "leave": steps_open.leave,
    "stall": steps_open.stall,
    "take": steps_open.take,
    "send": steps_talk.send,
    "notify": steps_talk.notify,
    "expect": steps_talk.expect,
    "reply": steps_talk.reply,
    "wait": steps_talk.wait,
    "collect": steps_events.collect,
    "silence": steps_events.silence,
    "subscribe": steps_events.subscribe,
    "listen": steps_events.listen,
    "stream": steps_raw.stream,
    "http": steps_raw.http,
    "frame": steps_raw.frame,
    "spoil": steps_raw.spoil,
    "check": steps_raw.check,
    "beside": steps_talk.other_server,
    "pause": steps_talk.pause,
}
"""The steps, by their names in the schema."""


class Player:
    def __init__(self, vector: Vector, here: Way, *, other: Way | None, limits: Limits) -> None:
        self.scene = Scene(vector, here, other=other, limits=limits)
        self.step: Json = vector.steps[0]
        """The one that is played, or was last."""

        self.found_other_error = False
        """That step expected an error, and another one came."""

    @property
    def transcript(self) -> Transcript:
        return self.scene.transcript

    async def play(self) -> None:
        for number, step in enumerate(self.scene.vector.steps, start=1):
            if not self._applies(step):
                continue
            self.step = step
            try:
                await VERBS[step["step"]](self.scene, step)
                self._look_for_problems()
            except UnknownName as unknown:
                raise Failure(f"{self._at(number, step)}: {unknown}") from None
            except Failure as failure:
                self.found_other_error = isinstance(failure, OtherError)
                raise Failure(f"{self._at(number, step)}: {failure}") from None

    def _at(self, number: int, step: Json) -> str:
        where = f" on {step['on']}" if "on" in step else ""
        what = f" {step['method']}" if "method" in step else ""
        return f"step {number} ({step['step']}{what}{where})"

    @property
    def has_received(self) -> bool:
        return any(peer.has_received for peer in self.scene.peers.values())

    async def leave(self) -> None:
        for session_id, peer in self.scene.sessions.items():
            if peer.ended:
                continue
            try:
                sent = await peer.request("session/end", {"sessionId": session_id})
                await peer.answer(sent, within=1)
            except Failure as failure:
                self.scene.transcript.note(peer.name, "--", f"not tidied up: {failure}")
                if isinstance(peer, StdioPeer):
                    # The next vector must not inherit it.
                    peer.ended_by("given up")
        for peer in self.scene.peers.values():
            peer.takes.set()
            if not isinstance(peer, StdioPeer) or peer.problems:
                await peer.close()

    def _look_for_problems(self) -> None:
        for peer in self.scene.peers.values():
            if peer.problems:
                raise Failure(peer.problems[0])

    def _applies(self, step: Json) -> bool:
        only = step.get("only")
        if only is None:
            return True
        if "shape" in only and mismatch(
            self.scene.fill(only["shape"]), self.scene.fill(only["value"])
        ):
            return False
        peer = self.scene.peers.get(step.get("on", ""))
        way = peer or (self.scene.here if step.get("via", "here") == "here" else self.scene.other)
        if way is None:
            raise AssertionError("a vector with another way is played with one")
        return way.transport in only.get("transports", [way.transport]) and way.era in only.get(
            "eras", [way.era]
        )
