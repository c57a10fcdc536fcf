import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_sessions_conformance import report
from mcp_sessions_conformance.client_runner import ClientRun, run_client
from mcp_sessions_conformance.loader import (
    LEVELS,
    BadVectors,
    load_duties,
    load_optional_vectors,
    load_vectors,
)
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.runner import Progress, Run, Selection, run
from mcp_sessions_conformance.targets import BadTarget, Credentials, parse_target

AT_ONCE = 3
"""Vectors that one way plays at the same time."""

_TOKEN = re.compile(r"[\x21-\x7e]+")


class BadInput(Exception):
    """An option or a file cannot be used. The text is one sentence."""


@dataclass(frozen=True)
class Tested:
    text: str
    document: dict[str, Any]
    is_conformant: bool


Keep = Callable[[Tested], None]


def listing() -> str:
    lines = [
        f"{vector.suite:<20} {vector.id:<48} {vector.keyword:<6} {vector.level:<13} "
        f"{', '.join(vector.clauses):<20} {vector.description}"
        for vector in load_vectors()
    ]
    lines += [
        f"{'client-duties':<20} {duty.id:<48} {duty.keyword:<6} "
        f"{', '.join(duty.clauses):<20} {duty.description}"
        for duty in load_duties()
    ]
    return "\n".join(lines)


async def test_server(
    targets: Sequence[str],
    *,
    suites: Sequence[str] = (),
    transports: Sequence[str] = (),
    eras: Sequence[str] = (),
    only: Sequence[str] = (),
    level: str | None = None,
    optional: Sequence[str] = (),
    token: str | None = None,
    other_token: str | None = None,
    weak_token: str | None = None,
    wait: float = 5.0,
    give_up: int = Limits.give_up,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> Tested:
    """Play the vectors against the server that all targets lead to.

    Args:
        only: Ids of vectors, or of clauses.
        level: One of `LEVELS`: what is of this level, or of one before it; None: of all.
        optional: Play what is about these, too. ``conversations``: the server binds conversations,
            by ``openai/session`` and ``threadId`` of ``_meta``. ``tasks``: it has tasks.
        wait: Seconds that any one answer may take.
        give_up: See `Limits`.
        progress: Gets each outcome.
        keep: Gets the outcome at the end, also where the run is cancelled or breaks: what there
            is of it by then.

    Raises:
        BadInput: A target, a suite, an id or a token is none.
    """
    for given in (token, other_token, weak_token):
        # As a header it would fail each vector, and none of them would say why.
        if given is not None and not _TOKEN.fullmatch(given):
            raise BadInput("a bearer token is of visible ASCII characters, without a space")
    try:
        parsed = [parse_target(text) for text in targets]
        vectors = [*load_vectors(), *load_optional_vectors(*optional)]
    except (BadTarget, BadVectors) as error:
        raise BadInput(str(error)) from error
    _known("suite", suites, {vector.suite for vector in vectors})
    _known("vector or clause", only, {name for v in vectors for name in (v.id, *v.clauses)})
    done = Run([])
    try:
        await run(
            parsed,
            vectors,
            selection=Selection(
                frozenset(suites),
                frozenset(transports),
                frozenset(eras),
                frozenset(only),
                frozenset(LEVELS[: LEVELS.index(level) + 1] if level is not None else ()),
            ),
            credentials=Credentials(token, other_token, weak_token),
            limits=Limits(wait=wait, give_up=give_up, at_once=AT_ONCE),
            progress=progress,
            done=done,
        )
    finally:
        tested = Tested(report.as_text(done), report.as_json(done), done.is_conformant)
        if keep is not None:
            keep(tested)
    return tested


async def test_client(
    command: str,
    *,
    only: Sequence[str] = (),
    wait: float = 5.0,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> Tested:
    """Look at what a client program does.

    Args:
        command: Started once for each duty, with a URL as its last argument.
        only: Ids of duties, or of clauses; empty: all.
        wait: Seconds that the client may take for anything.
        progress: Gets each outcome.
        keep: As for `test_server`.

    Raises:
        BadInput: The command is none, or an id is.
    """
    try:
        words = shlex.split(command)
        duties = load_duties()
    except (ValueError, BadVectors) as error:
        raise BadInput(str(error)) from error
    if not words:
        raise BadInput("--client needs a command")
    _known("duty or clause", only, {name for d in duties for name in (d.id, *d.clauses)})
    chosen = [duty for duty in duties if not only or {duty.id, *duty.clauses} & set(only)]
    done = ClientRun(command)
    try:
        await run_client(command, chosen, wait=wait, progress=progress, run=done)
    finally:
        tested = Tested(
            report.client_as_text(done), report.client_as_json(done), done.is_conformant
        )
        if keep is not None:
            keep(tested)
    return tested


def _known(what: str, given: Sequence[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise BadInput(f"there is no {what} {name!r} (--list prints all)")
