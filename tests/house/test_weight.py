"""No package has more lines of code than ``weight.toml`` says."""

import tomllib

from tests.house.source import ROOT
from tests.house.weight import lua_lines, python_lines, weights

NUMBERS: dict[str, int] = tomllib.loads((ROOT / "tests/house/weight.toml").read_text("utf-8"))
ROOM = 100
"""A package that is lighter than its number by so many lines gets a lower number."""

PYTHON = '''\
"""A module's docstring
of two lines."""

# A comment.
A = (  # with a comment behind it
    1
)
"""The docstring of A."""

B = """A text
that is a value."""
'''


def test_no_package_is_heavier_than_its_number() -> None:
    found = weights()
    over = {name: lines for name, lines in found.items() if lines > NUMBERS.get(name, 0)}

    assert not over, (
        "More lines of code than tests/house/weight.toml says. Make it lighter, or raise the"
        " number and write the reason behind it."
    )


def test_a_number_follows_a_package_that_became_lighter() -> None:
    found = weights()
    fell = {
        name: found.get(name, 0) for name in NUMBERS if NUMBERS[name] - found.get(name, 0) >= ROOM
    }

    assert not fell, "Lower these numbers in tests/house/weight.toml: the code is lighter now."


def test_a_number_belongs_to_a_package() -> None:
    assert NUMBERS.keys() == weights().keys()


def test_blank_lines_comments_and_docstrings_weigh_nothing() -> None:
    assert python_lines(PYTHON) == 5
    assert lua_lines("-- A comment\n\nlocal a = 1 -- one\n  return a\n") == 2
