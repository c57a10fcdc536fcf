from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

_EXPRESSION = re.compile(r"\{([+#./;?&]?)([^{}]*)\}")
_FORMS = {
    "": ("", ",", False),
    "+": ("", ",", False),
    "#": ("#", ",", False),
    ".": (".", ".", False),
    "/": ("/", "/", False),
    ";": (";", ";", True),
    "?": ("?", "&", True),
    "&": ("&", "&", True),
}
"""By operator: what its text begins with, what stands between two values, whether with names."""

_OPTIONAL = "#;?&"
"""Operators of parts that a URI may do without."""


def variables_of(template: str) -> list[str]:
    return [name for match in _EXPRESSION.finditer(template) for name in _names(match)]


def expansions(template: str, given: Mapping[str, str]) -> tuple[str, str]:
    """Expand a template with these values: percent-encoded, and as they are.

    A variable without a value is not replaced.
    """
    encoded = {name: quote(value, safe="", errors="replace") for name, value in given.items()}
    return _expanded(template, encoded), _expanded(template, given)


def _expanded(template: str, given: Mapping[str, str]) -> str:
    def text(match: re.Match[str]) -> str:
        begins, between, is_named = _FORMS[match[1]]
        values = [(name, given[name]) for name in _names(match) if name in given]
        if not values:
            return "" if match[1] and match[1] in _OPTIONAL else match[0]
        return begins + between.join(
            f"{name}={value}" if is_named else value for name, value in values
        )

    return _EXPRESSION.sub(text, template)


def _names(match: re.Match[str]) -> list[str]:
    return [each.partition(":")[0].rstrip("*") for each in match[2].split(",")]
