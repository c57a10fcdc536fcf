"""The schemas and examples of ``spec/``, read for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "spec"
SCHEMAS = SPEC / "schema"
EXAMPLES = SPEC / "examples"
NOT_VALID = "not-valid.json"
"""The file of examples that their schemas refuse."""

Json = dict[str, Any]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def schemas() -> dict[str, Json]:
    """Name (without ``.json``) → schema."""
    return {path.stem: read(path) for path in sorted(SCHEMAS.glob("*.json"))}


@cache
def _registry() -> Any:
    # ``Any``: what the two libraries say of their types is not all known to a type checker.
    registry: Any = Registry
    named = ((f"{name}.json", Resource.from_contents(body)) for name, body in schemas().items())
    return registry().with_resources(named)


def faults(schema: str, message: Any) -> list[str]:
    """What is wrong with a message by one schema; empty: nothing."""
    if schema not in schemas():
        raise KeyError(f"there is no schema {schema}")
    validator: Any = Draft202012Validator({"$ref": f"{schema}.json"}, registry=_registry())
    return [f"{e.json_path}: {e.message}" for e in validator.iter_errors(message)]


@dataclass(frozen=True, slots=True)
class Example:
    file: str
    number: int
    schema: str
    message: Any
    why: str | None
    """Why its schema refuses it; None: it does not."""


def examples() -> Iterator[Example]:
    for path in sorted(EXAMPLES.glob("*.json")):
        for number, entry in enumerate(read(path)["messages"], 1):
            yield Example(path.name, number, entry["schema"], entry["message"], entry.get("why"))
