"""JWTs of one issuer for one audience, and every way to forge one."""

import base64
import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions.authentication import tokens
from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.authentication.tokens import LEEWAY, REMEMBERED, Tokens
from tests.support.issuers import AUDIENCE, URL, Login, jwk, private_key
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.world import Clock


class Setup:
    def __init__(self, *keys: Any) -> None:
        self.clock = Clock()
        self.login = Login(self.clock, *keys)
        self.verifier = Tokens(self.login.issuer, AUDIENCE, self.clock)

    async def accepts(self, token: str) -> bool:
        return await self.verifier.verify(token) is not None


@pytest.fixture
def setup() -> Setup:
    return Setup()


def segment(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


async def test_a_token_stands_for_issuer_subject_and_client(setup: Setup) -> None:
    token = setup.login.token()
    ends = int(setup.clock.now) + 300 + LEEWAY
    expected = Credential("app", URL, "alice", ("use", "more"), ends)
    assert await setup.verifier.verify(token) == expected


@pytest.mark.parametrize(
    ("claims", "without", "client", "subject"),
    [
        ({"azp": "web"}, ("client_id",), "web", "alice"),
        ({"cid": "okta"}, ("client_id",), "okta", "alice"),
        ({}, ("client_id",), "alice", "alice"),
    ],
)
async def test_the_client_is_named_as_issuers_do(
    setup: Setup, claims: Any, without: tuple[str, ...], client: str, subject: str | None
) -> None:
    found = await setup.verifier.verify(setup.login.token(without=without, **claims))
    assert found is not None and (found.client_id, found.subject) == (client, subject)


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"scope": "a  b"}, ("a", "b")),
        ({"scope": None, "scp": ["a"]}, ()),
        ({"scp": ["a", 1, "b"]}, ("a", "b")),
        ({"scp": "a b"}, ("a", "b")),
        ({}, ()),
    ],
)
async def test_scopes_are_written_in_several_ways(
    setup: Setup, claims: Any, scopes: tuple[str, ...]
) -> None:
    without = () if "scope" in claims else ("scope",)
    found = await setup.verifier.verify(setup.login.token(without=without, **claims))
    assert found is not None and found.scopes == scopes


@pytest.mark.parametrize("audience", [AUDIENCE, f"{AUDIENCE}/", ["https://x.example", AUDIENCE]])
async def test_the_audience_is_one_of_several_and_a_slash_is_none(
    setup: Setup, audience: Any
) -> None:
    assert await setup.accepts(setup.login.token(aud=audience))


@pytest.mark.parametrize("kind", ["RSA", "P-256", "P-384", "P-521", "Ed25519"])
async def test_keys_of_each_kind_are_good(kind: str) -> None:
    setup = Setup(jwk(kind, "one"))
    assert await setup.accepts(setup.login.token(kind))
    assert not await setup.accepts(setup.login.token(kind, number=1)), "of another key"


# --- attacks ------------------------------------------------------------------------------


def unsigned(setup: Setup) -> str:
    """``alg: none``."""
    payload = setup.login.token().split(".")[1]
    return f"{segment({'alg': 'none', 'kid': 'one'})}.{payload}."


def none_with_capitals(setup: Setup) -> str:
    """``alg: nOnE``."""
    payload = setup.login.token().split(".")[1]
    return f"{segment({'alg': 'nOnE', 'kid': 'one'})}.{payload}."


def signed_with_the_public_key(setup: Setup) -> str:
    """HS256, whose secret is the public key."""
    public = private_key("RSA").public_key()
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    secret: bytes = public.public_bytes(encoding, form)
    payload = setup.login.token().split(".")[1]
    signed = f"{segment({'alg': 'HS256', 'kid': 'one', 'typ': 'JWT'})}.{payload}"
    digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{segment(digest)}"


def with_other_claims(setup: Setup) -> str:
    """The signature of another payload."""
    head, payload, signature = setup.login.token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    return f"{head}.{segment({**claims, 'sub': 'admin'})}.{signature}"


def with_its_own_key(setup: Setup) -> str:
    """A key, or an address of keys, in the token itself."""
    headers = {"jwk": jwk("RSA", "one", 1), "jku": "https://evil.example/keys", "x5u": "x"}
    return setup.login.token(number=1, headers=headers)


def detached(setup: Setup) -> str:
    """RFC 7797: the payload is not in the token."""
    _, payload, signature = setup.login.token().split(".")
    head = segment({"alg": "RS256", "kid": "one", "b64": False, "crit": ["b64"]})
    return f"{head}.{payload}.{signature}"


ATTACKS: dict[str, Callable[[Setup], str]] = {
    "none": unsigned,
    "none with capitals": none_with_capitals,
    "HS256 with the public key": signed_with_the_public_key,
    "other claims": with_other_claims,
    "its own key": with_its_own_key,
    "a detached payload": detached,
    "of another issuer": lambda p: p.login.token(iss="https://evil.example"),
    "of an issuer with a slash": lambda p: p.login.token(iss=f"{URL}/"),
    "of no issuer": lambda p: p.login.token(without=("iss",)),
    "of a list of issuers": lambda p: p.login.token(iss=[URL]),
    "for another audience": lambda p: p.login.token(aud="https://mcp.example/other"),
    "for a part of the audience": lambda p: p.login.token(aud="https://mcp.example"),
    "for no audience": lambda p: p.login.token(without=("aud",)),
    "for an empty audience": lambda p: p.login.token(aud=[]),
    "expired": lambda p: p.login.token(exp=int(p.clock.now) - 61),
    "expired by a clock 5 minutes ahead": lambda p: p.login.token(exp=int(p.clock.now) - 299),
    "not yet valid": lambda p: p.login.token(nbf=int(p.clock.now) + 61),
    "of a clock 5 minutes ahead": lambda p: p.login.token(nbf=int(p.clock.now) + 300),
    "without an end": lambda p: p.login.token(without=("exp",)),
    "whose end is a text": lambda p: p.login.token(exp="tomorrow"),
    "whose end is true": lambda p: p.login.token(exp=True),
    "whose end is infinite": lambda p: p.login.token(exp=float("inf")),
    "whose end is never": lambda p: p.login.token(exp=10**400),
    "with a path as a key": lambda p: p.login.token(kid="../../../../etc/passwd"),
    "with a URL as a key": lambda p: p.login.token(kid="https://evil.example/key"),
    "with an extension": lambda p: p.login.token(headers={"crit": ["x"], "x": 1}),
    "bound to a key": lambda p: p.login.token(cnf={"jkt": "x"}),
    "of nobody": lambda p: p.login.token(without=("sub", "client_id")),
    "of a client alone": lambda p: p.login.token(without=("sub",)),
    "of an algorithm of another key": lambda p: p.login.token("P-256"),
    "encrypted": lambda p: ".".join(["e30"] * 5),
    "a list as a header": lambda p: f"{segment([])}.e30.e30",
    "a list as a key id": lambda p: (
        f"{segment({'alg': 'RS256', 'kid': ['one']})}.{'.'.join(p.login.token().split('.')[1:])}"
    ),
    "a list as claims": lambda p: jwt.api_jws.encode(
        b"[]", private_key("RSA"), "RS256", headers={"kid": "one"}
    ),
    "deep": lambda p: f"{segment(b'[' * 9_000)}.e30.e30",
    "deep claims": lambda p: jwt.api_jws.encode(
        b"[" * 9_000, private_key("RSA"), "RS256", headers={"kid": "one"}
    ),
    "no text": lambda p: "é.ü.ö",
    "empty": lambda p: "..",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_forged_token_is_refused(
    setup: Setup, attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    """O, the attacks of the design. The log says why, without the token."""
    caplog.set_level(logging.DEBUG)
    assert await setup.accepts(setup.login.token())
    token = ATTACKS[attack](setup)
    assert not await setup.accepts(token)
    assert all(len(part) < 8 or part not in caplog.text for part in token.split("."))
    assert "alice" not in caplog.text
    assert all(url.startswith(URL) for url in setup.login.asked)


async def test_clocks_may_differ_by_a_minute(setup: Setup) -> None:
    now = int(setup.clock.now)
    assert await setup.accepts(setup.login.token(exp=now - 59))
    assert await setup.accepts(setup.login.token(nbf=now + 59))
    assert await setup.accepts(setup.login.token(iat=now + 10_000)), "it does not say since when"


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_text_makes_it_fail(parts: list[bytes]) -> None:
    """Also parts that look like a token's."""
    setup = Setup()
    loop = VirtualTimeLoop()
    try:
        for text in (
            ".".join(map(segment, parts)),
            b".".join(parts).decode("latin-1"),
            ".".join([segment({"alg": "RS256", "kid": "one"}), *map(segment, parts)]),
        ):
            assert loop.run_until_complete(setup.verifier.verify(text)) is None
    finally:
        loop.close()


# --- what is kept -------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens whose signature was looked at."""
    seen: list[str] = []
    decode = jwt.decode

    def noted(token: str, **options: Any) -> Any:
        seen.append(token)
        return decode(token, **options)

    monkeypatch.setattr(jwt, "decode", noted)
    return seen


async def test_a_token_is_verified_once(setup: Setup, decoded: list[str]) -> None:
    token = setup.login.token()
    for _ in range(100):
        assert await setup.accepts(token)
    assert len(decoded) == 1
    setup.clock.now += 300 + LEEWAY
    assert not await setup.accepts(token)


async def test_a_bad_token_is_not_kept(setup: Setup, decoded: list[str]) -> None:
    token = setup.login.token(number=1)
    for _ in range(3):
        assert not await setup.accepts(token)
    assert len(decoded) == 3


async def test_a_forged_token_is_read_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of them is as expensive as each of them. Only the header is read twice."""
    read: list[int] = []
    load: Any = vars(jwt.PyJWS)["_load"]

    def counting(self: jwt.PyJWS, text: str | bytes) -> Any:
        read.append(len(text))
        return load(self, text)

    monkeypatch.setattr(jwt.PyJWS, "_load", counting)
    token = f"{setup.login.token().rpartition('.')[0]}.{'x' * 342}"
    assert not await setup.accepts(token)
    assert read and read.count(len(token)) == 1 and sum(read) < 1.5 * len(token)


async def test_what_is_kept_has_a_bound(
    decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that was used last is forgotten last."""
    assert REMEMBERED == 10_000
    monkeypatch.setattr(tokens, "REMEMBERED", 3)
    setup = Setup()
    first, *others = [setup.login.token(jti=str(number)) for number in range(5)]
    for token in others:
        assert await setup.accepts(first)
        assert await setup.accepts(token)
    assert await setup.accepts(first)
    assert len(decoded) == 5
    assert await setup.accepts(others[0])
    assert len(decoded) == 6


async def test_a_checked_token_is_good_while_the_issuer_is_away(setup: Setup) -> None:
    """O: 503 for others, and not 401."""
    token = setup.login.token(exp=int(setup.clock.now) + 100_000)
    assert await setup.accepts(token)
    setup.login.is_away = True
    setup.clock.now += 90_000
    assert await setup.accepts(token)
    with pytest.raises(CannotVerify):
        await setup.accepts(setup.login.token())


async def test_a_key_that_the_issuer_took_back_is_not_good_any_more(setup: Setup) -> None:
    """Somebody else may have it. Also for tokens that were checked."""
    token = setup.login.token(exp=int(setup.clock.now) + 100_000)
    assert await setup.accepts(token)
    setup.login.keys = [jwk("RSA", "two", 1)]
    setup.clock.now += 61
    assert await setup.accepts(setup.login.token(kid="two", number=1))
    assert not await setup.accepts(token)


async def test_an_opaque_token_does_not_reach_the_issuer(setup: Setup) -> None:
    assert not await setup.accepts("opaque")
    assert not await setup.accepts("a.b")
    assert setup.login.asked == []


async def test_refusals_are_one_line_a_minute(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(10):
        await setup.accepts(setup.login.token(exp=int(setup.clock.now) - 300))
    setup.clock.now += 60
    await setup.accepts(setup.login.token(aud="x"))
    said = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert said == [
        "1 tokens were refused; the last one: it expired 300 s ago by the clock of this machine",
        "10 tokens were refused; the last one: its audience (aud) is not the one of this server",
    ]
