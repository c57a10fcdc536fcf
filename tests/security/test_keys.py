"""``SessionSecurity``: where its keys come from, and that they go nowhere."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli.keygen import main as keygen
from mcp_sessions.errors import ConfigurationError, InvalidState, StateTooLarge
from mcp_sessions.security import KEYS_VARIABLE, SessionSecurity, mint_key
from tests.security.tokens import (
    ALICE,
    EXPIRES,
    MADE,
    NEW,
    OLD,
    OTHER,
    SESSION,
    STATE,
    opened,
    sealed,
    server,
)

SHORT = "0123456789abcdef-short-key-4321"
"""One character less than a key has."""


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """To set ``MCP_SESSIONS_KEYS``, which is not set."""
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    return monkeypatch


def refused(*keys: Any, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        SessionSecurity(list(keys), **settings)
    return str(error.value)


# --- which keys ---------------------------------------------------------------------------


def test_a_key_is_any_string_of_32_characters() -> None:
    """At least; of any alphabet."""
    for key in (
        "k" * 32,
        "ключ" * 8,
        "with spaces and, punctuation; see",
        "\ud83d" * 32,
        mint_key(),
    ):
        security = SessionSecurity([key])
        assert opened(security, sealed(security)) == (STATE, 3)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([], "there is no key"),
        ([""], "key 1 of 1 has 0 characters, and needs at least 32"),
        ([SHORT], "key 1 of 1 has 31 characters"),
        ([NEW, SHORT], "key 2 of 2 has 31 characters"),
        ([NEW, OLD, NEW], "key 3 of 3 is the same as one before it"),
        ([NEW.encode()], "key 1 of 1 is a bytes, not a string"),
        ([None], "key 1 of 1 is a NoneType, not a string"),
    ],
)
def test_what_is_no_ring_of_keys_is_refused_and_not_repeated(keys: list[Any], says: str) -> None:
    """SEC2: the text names the place of a key, and nothing of the key."""
    text = refused(*keys)

    assert says in text
    assert not [key for key in keys if key and str(key) in text]


def test_one_string_is_not_a_list_of_keys() -> None:
    """To Python, and to a type checker, a string is a sequence of strings."""
    with pytest.raises(ConfigurationError, match="a list of strings, not one string"):
        SessionSecurity(NEW)


@pytest.mark.parametrize("max_token", [0, -1, 255])
def test_a_limit_that_has_no_room_for_an_empty_state_is_refused(max_token: int) -> None:
    assert "at least 256" in refused(NEW, max_token=max_token)


# --- from the environment -----------------------------------------------------------------


def test_keys_of_the_environment_are_comma_separated_and_newest_first(
    variable: pytest.MonkeyPatch,
) -> None:
    """A file of secrets often ends in a line break."""
    variable.setenv(KEYS_VARIABLE, f"{NEW}, {OLD}\n")

    security = SessionSecurity.from_env(audience="notes")

    assert not security.is_ephemeral
    assert sealed(security) == sealed(server(NEW, OLD))
    assert opened(security, sealed(server(OLD))) == (STATE, 3)


def test_another_variable_can_be_named(variable: pytest.MonkeyPatch) -> None:
    variable.setenv("NOTES_KEYS", NEW)

    assert sealed(SessionSecurity.from_env("NOTES_KEYS", audience="notes")) == sealed(server())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "the environment variable MCP_SESSIONS_KEYS is not set"),
        ("", "the environment variable MCP_SESSIONS_KEYS: key 1 of 1 has 0 characters"),
        (SHORT, "MCP_SESSIONS_KEYS: key 1 of 1 has 31 characters"),
        (f"{NEW},{SHORT}", "key 2 of 2 has 31 characters"),
        (f"{NEW},", "key 2 of 2 has 0 characters"),
        (f" {' ' * 40} ", "key 1 of 1 has 0 characters"),
        (f"{NEW},{NEW}", "key 2 of 2 is the same as one before it"),
    ],
)
def test_a_variable_without_usable_keys_is_refused_and_not_repeated(
    value: str | None, says: str, variable: pytest.MonkeyPatch
) -> None:
    """SEC2."""
    if value is not None:
        variable.setenv(KEYS_VARIABLE, value)

    with pytest.raises(ConfigurationError) as error:
        SessionSecurity.from_env()

    assert says in str(error.value)
    assert NEW not in str(error.value) and SHORT not in str(error.value)


def test_what_keygen_prints_is_what_the_environment_takes(
    variable: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several, with commas between: no key has one."""
    keygen([])
    keygen([])
    older, newer = capsys.readouterr().out.split()
    variable.setenv(KEYS_VARIABLE, f"{newer},{older}")

    security = SessionSecurity.from_env(audience="notes")

    assert opened(security, sealed(server(older))) == (STATE, 3)
    assert sealed(security) == sealed(server(newer))


def test_keygen_s_help_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        keygen(["--help"])

    assert KEYS_VARIABLE in capsys.readouterr().out


# --- ephemeral, default -------------------------------------------------------------------


def test_ephemeral_keys_are_nobody_else_s() -> None:
    """What is sealed ends with the process."""
    one, other = SessionSecurity.ephemeral(), SessionSecurity.ephemeral()
    token = sealed(one)

    assert one.is_ephemeral
    assert opened(one, token) == (STATE, 3)
    with pytest.raises(InvalidState):
        opened(other, token)


def test_the_default_is_the_variable_if_it_is_set_and_else_ephemeral(
    variable: pytest.MonkeyPatch,
) -> None:
    """And ephemeral keys end with the process."""
    assert SessionSecurity.default().is_ephemeral

    variable.setenv(KEYS_VARIABLE, NEW)
    security = SessionSecurity.default(audience="notes")
    assert not security.is_ephemeral
    assert sealed(security) == sealed(server())


@pytest.mark.parametrize("value", ["", "too short"])
def test_the_default_never_passes_over_a_variable_that_is_set(
    value: str, variable: pytest.MonkeyPatch
) -> None:
    """Else a slip in a deployment would lose all state at the next restart, in silence."""
    variable.setenv(KEYS_VARIABLE, value)

    with pytest.raises(ConfigurationError):
        SessionSecurity.default()


def test_each_way_to_make_one_takes_the_same_settings(variable: pytest.MonkeyPatch) -> None:
    variable.setenv(KEYS_VARIABLE, NEW)

    settings: dict[str, Any] = {"sign_only": True, "audience": "notes", "max_token": 300}

    for security in (
        SessionSecurity([NEW], **settings),
        SessionSecurity.ephemeral(**settings),
        SessionSecurity.from_env(**settings),
        SessionSecurity.default(**settings),
    ):
        assert sealed(security, {}).startswith("v1s.")
        assert security.audience == "notes"
        with pytest.raises(StateTooLarge):
            sealed(security, {"text": "x" * 300})


# --- the audience -------------------------------------------------------------------------


def test_without_an_audience_the_server_s_name_becomes_it() -> None:
    """The layer passes it: two services with the same keys do not take each other's tokens."""
    security = SessionSecurity([NEW])

    bound = security.bound_to("notes")

    assert sealed(bound) == sealed(server(audience="notes"))
    assert sealed(security) == sealed(server(audience=None)), "which is left as it was"


def test_an_audience_that_was_given_stays() -> None:
    assert sealed(server(audience="mail").bound_to("notes")) == sealed(server(audience="mail"))
    assert sealed(server(audience="").bound_to("notes")) == sealed(server(audience=""))


def test_an_ephemeral_one_stays_ephemeral_when_bound() -> None:
    assert SessionSecurity.ephemeral().bound_to("notes").is_ephemeral


# --- keys go nowhere ----------------------------------------------------------------------


@pytest.mark.parametrize("sign_only", [False, True])
def test_no_key_is_in_what_is_printed_of_it(sign_only: bool) -> None:
    """SEC2."""
    security = server(NEW, OLD, sign_only=sign_only)
    shown = [repr(security), str(security), f"{security}", repr(vars(security))]
    for part in vars(security).values():
        shown.append(repr(getattr(part, "__dict__", None)))

    form = "signing" if sign_only else "sealing"
    assert repr(security) == f"<SessionSecurity 2 keys, {form}, audience='notes'>"
    assert repr(SessionSecurity.ephemeral()) == (
        "<SessionSecurity 1 key, sealing, audience=None, ephemeral>"
    )
    assert not [text for text in shown if NEW in text or OLD in text]


@pytest.mark.parametrize("sign_only", [False, True])
def test_no_key_is_in_a_log_or_a_traceback(
    sign_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """SEC2."""
    caplog.set_level(logging.DEBUG)
    security = server(NEW, OLD, sign_only=sign_only, max_token=300)
    errors: list[BaseException] = []
    for fails in (
        lambda: opened(security, sealed(server(OTHER, sign_only=sign_only))),
        lambda: sealed(security, {"text": "secret " * 100}),
        lambda: sealed(security, {"secret": object()}),
        lambda: sealed(security, {"secret": float("nan")}),
    ):
        with pytest.raises(Exception) as error:
            fails()
        errors.append(error.value)
    security.open_session_id(
        server(OTHER).seal_session_id(principal=ALICE, created_at=MADE, expires_at=EXPIRES),
        principal=ALICE,
        now=MADE,
    )

    shown = [caplog.text, *(repr(vars(record)) for record in caplog.records)]
    for error in errors:
        shown += [str(error), repr(error), *traceback.format_exception(error)]
    assert len(caplog.records) == 2
    for secret in (NEW, OLD, OTHER, SESSION, "secret secret"):
        assert not [text for text in shown if secret in text]


def test_it_can_be_copied() -> None:
    security = server(NEW)

    assert sealed(copy.copy(security)) == sealed(security)


@pytest.mark.parametrize(
    "code",
    [
        "import mcp_sessions",
        "from mcp_sessions.security import SessionSecurity, mint_session_id; mint_session_id()",
        "from mcp_sessions.cli.main import main; main(['keygen'])",
    ],
)
def test_cryptography_is_loaded_when_a_key_is_used_and_not_before(
    code: str, tmp_path: Path
) -> None:
    """Architecture: small starts stay small."""
    report = "import sys; print(*{'cryptography', 'itsdangerous', 'orjson'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
