import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import jsonschema

from mcp_sessions_conformance.peer import Era, Transport
from mcp_sessions_conformance.values import KEY, Json

TRANSPORTS: tuple[Transport, ...] = ("http", "websocket", "stdio")
ERAS: tuple[Era, ...] = ("handshake", "modern")

METHODS = {
    "start": "session/start",
    "resume": "session/resume",
    "end": "session/end",
    "create": "sessions/create",
    "delete": "sessions/delete",
}
"""The features that are methods (CAP3)."""


LEVELS = ("resume", "calls", "data", "full")
"""Of ``spec/levels.md``: each includes those before it."""

_LEVEL_OF_FEATURE = {"requestKey": "calls", "create": "data", "delete": "data", "state": "data"}
"""The other features are of the first level."""


class BadVectors(Exception):
    """A vector cannot be used. The text is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    transports: tuple[Transport, ...] = TRANSPORTS
    eras: tuple[Era, ...] = ERAS
    fresh: bool = False
    """A pipe's program is started anew for it."""

    features: frozenset[str] = frozenset()
    """Features that it needs in addition to those whose methods it uses."""

    loopback: bool = False
    """It is about servers on a loopback address."""

    both_eras: bool = False
    """It speaks the other era as well."""

    other_server: str | None = None
    """The server next to the tested one that it is about (an optional tool starts it)."""

    anonymous: bool = False
    """It is about callers without a credential."""


@dataclass(frozen=True)
class Vector:
    id: str
    suite: str
    clauses: tuple[str, ...]
    keyword: Literal["MUST", "SHOULD", "MAY"]
    """The keyword of the clause: a failed MUST is a failure, all else is a warning."""

    description: str
    effect: str
    """The cost of a failure for a user."""

    steps: tuple[Json, ...]
    when: Conditions

    @property
    def features(self) -> frozenset[str]:
        """The features that a server needs for it (CAP3); it may leave any of them out."""
        text = json.dumps(self.steps)
        used = {feature for feature, method in METHODS.items() if f'"{method}"' in text}
        if KEY in text or any("key" in step for step in self.steps):
            used.add("requestKey")
        return self.when.features | used

    @property
    def level(self) -> str:
        """The highest level of its clauses and features; an option comes after the levels."""
        found = [level_of()[clause] for clause in self.clauses]
        found += [_LEVEL_OF_FEATURE.get(feature, LEVELS[0]) for feature in self.features]
        return max(found, key=lambda name: LEVELS.index(name) if name in LEVELS else len(LEVELS))

    @property
    def severity(self) -> Literal["failure", "warning"]:
        return "failure" if self.keyword == "MUST" else "warning"

    @property
    def connections(self) -> frozenset[str]:
        return frozenset(
            step["on"] for step in self.steps if step["step"] == "open" and _is_here(step)
        )

    @property
    def is_heard_by_all(self) -> bool:
        """Whether it makes a change that other vectors' sessions hear of."""
        return '"announce"' in json.dumps(self.steps)

    @property
    def crosses(self) -> bool:
        return any(step["step"] == "open" and not _is_here(step) for step in self.steps)

    @property
    def needs_token(self) -> bool:
        return "${token}" in json.dumps(self.steps)

    @property
    def needs_other_principal(self) -> bool:
        return any(step.get("as") == "other" for step in self.steps)

    @property
    def needs_weak_credential(self) -> bool:
        return any(step.get("as") == "weak" for step in self.steps)


def _is_here(step: Json) -> bool:
    return step.get("via", "here") == "here"


@dataclass(frozen=True)
class Duty:
    id: str
    clauses: tuple[str, ...]
    keyword: Literal["MUST", "SHOULD", "MAY"]
    description: str
    script: str
    """The behaviour of the scripted server, in words."""

    effect: str

    @property
    def severity(self) -> Literal["failure", "warning"]:
        return "failure" if self.keyword == "MUST" else "warning"


def vectors_directory() -> Path:
    shipped = Path(__file__).parent / "vectors"
    return shipped if shipped.is_dir() else Path(__file__).parents[1] / "vectors"


@cache
def level_of() -> Mapping[str, str]:
    """Clause → its level, or its option (``spec/clauses.json``)."""
    shipped = Path(__file__).parent / "clauses.json"
    path = shipped if shipped.exists() else Path(__file__).parents[2] / "spec" / "clauses.json"
    return {clause["id"]: clause["level"] for clause in json.loads(path.read_text())}


def load_vectors(directory: Path | None = None) -> list[Vector]:
    """All server vectors, in the order of their files.

    Args:
        directory: The folder with the files, which are checked against the schema. That takes
            seconds. None: those that come along, which a test has checked.

    Raises:
        BadVectors: A file is not what the schema asks for, or an id is there twice.
    """
    named = directory or vectors_directory()
    return _vectors_of(_files(named, "vectors", checked=directory is not None))


def _conditions_of(given: Json) -> Conditions:
    return Conditions(
        transports=tuple(given.get("transports", TRANSPORTS)),
        eras=tuple(given.get("eras", ERAS)),
        fresh=given.get("fresh", False),
        features=frozenset(given.get("features", ())),
        loopback=given.get("loopback", False),
        both_eras=given.get("both_eras", False),
        other_server=given.get("beside"),
        anonymous=given.get("anonymous", False),
    )


def _vectors_of(files: Iterable[tuple[str, Json]]) -> list[Vector]:
    vectors: list[Vector] = []
    for suite, body in files:
        for given in cast("list[Json]", body["vectors"]):
            vectors.append(
                Vector(
                    id=given["id"],
                    suite=suite,
                    clauses=tuple(given["clauses"]),
                    keyword=given["keyword"],
                    description=given["description"],
                    effect=given["effect"],
                    steps=tuple(given["steps"]),
                    when=_conditions_of({**body, **given}),
                )
            )
    _check_ids(vector.id for vector in vectors)
    return vectors


OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "conversations": ("conversations", "handles"),
    "tasks": ("tasks",),
}
"""What a server may leave out → the suites about it."""


def load_optional_vectors(*features: str, checked: bool = False) -> list[Vector]:
    """Those about what a server may leave out, and which no feature of this extension says.

    Args:
        features: Of `OPTIONAL`.
        checked: Against the schema, which takes time.

    Raises:
        BadVectors: A file is not what the schema asks for, or an id is there twice.
    """
    wanted = {suite for feature in features for suite in OPTIONAL[feature]}
    files = _files(vectors_directory() / "optional", "vectors", checked=checked)
    return _vectors_of((suite, body) for suite, body in files if suite in wanted)


def load_duties(directory: Path | None = None) -> list[Duty]:
    """All that a client has to do; the argument is that of `load_vectors`.

    Raises:
        BadVectors: A file is not what the schema asks for, or an id is there twice.
    """
    duties = [
        Duty(
            id=given["id"],
            clauses=tuple(given["clauses"]),
            keyword=given["keyword"],
            description=given["description"],
            script=given["script"],
            effect=given["effect"],
        )
        for _, body in _files(
            directory or vectors_directory(), "duties", checked=directory is not None
        )
        for given in cast("list[Json]", body["duties"])
    ]
    _check_ids(duty.id for duty in duties)
    return duties


def _files(directory: Path, member: str, *, checked: bool) -> list[tuple[str, Json]]:
    # Its types are not all known to a type checker.
    validator: Any = None
    if checked:
        # A folder inside has none of its own.
        folders = (directory, directory.parent)
        folder = next(p for p in folders if (p / "vector.schema.json").exists())
        schema = json.loads((folder / "vector.schema.json").read_text())
        validator = jsonschema.Draft202012Validator(schema)
    bodies: list[tuple[str, Json]] = []
    for path in sorted(directory.glob("*.json")):
        if path.name == "vector.schema.json":
            continue
        try:
            body: Any = json.loads(path.read_text())
        except ValueError as error:
            raise BadVectors(f"{path.name} is no JSON: {error}") from error
        wrong: Any = next(validator.iter_errors(body), None) if validator is not None else None
        if wrong is not None:
            raise BadVectors(f"{path.name}, {wrong.json_path}: {wrong.message[:300]}")
        if member in body:
            bodies.append((body["suite"], body))
    return bodies


def _check_ids(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for vector_id in ids:
        if vector_id in seen:
            raise BadVectors(f"two vectors have the id {vector_id}")
        seen.add(vector_id)
