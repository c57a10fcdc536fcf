"""The keys of an issuer: found, fetched with bounds, kept while it is away."""

import asyncio
import contextlib
from typing import Any

import pytest

from mcp_sessions.authentication.credential import CannotVerify
from mcp_sessions.authentication.issuer import AGAIN, AT_ONCE, KEPT
from tests.support.issuers import DOCUMENT, JWKS, URL, Json, Login, jwk
from tests.support.world import Clock


@pytest.fixture
def login() -> Login:
    return Login(Clock())


async def has(login: Login, kid: str | None = "one", algorithm: str = "RS256") -> bool:
    return await login.issuer.key(kid, algorithm) is not None


async def test_the_keys_are_fetched_once_and_then_each_hour(login: Login) -> None:
    assert login.asked == []
    for _ in range(100):
        assert await has(login)
    assert login.asked == [DOCUMENT, JWKS]
    login.clock.now += 3_601
    assert await has(login)
    await asyncio.sleep(1)
    assert login.fetches == 2


async def test_a_document_of_openid_is_good_too(login: Login) -> None:
    login.documents = {f"{URL}/.well-known/openid-configuration": {"issuer": URL, "jwks_uri": JWKS}}
    assert await has(login)


async def test_the_first_document_need_not_name_the_keys(login: Login) -> None:
    """RFC 8414, 2: ``jwks_uri`` is optional there. In OpenID Connect it is not."""
    document: Json = {"issuer": URL, "token_endpoint": f"{URL}/token"}
    openid = {"issuer": URL, "jwks_uri": JWKS}
    login.documents = {DOCUMENT: document, f"{URL}/.well-known/openid-configuration": openid}
    assert await has(login)


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://other.example", "jwks_uri": JWKS},
        {"issuer": f"{URL}/", "jwks_uri": JWKS},
        {"jwks_uri": JWKS},
        {"issuer": URL},
        {"issuer": URL, "jwks_uri": 1},
        {"issuer": URL, "jwks_uri": "http://login.example/keys"},
        {"issuer": URL, "jwks_uri": "file:///etc/passwd"},
        {"issuer": URL, "jwks_uri": "http://["},
    ],
)
async def test_a_document_that_is_not_the_issuers_is_not_used(
    login: Login, document: Json, caplog: pytest.LogCaptureFixture
) -> None:
    """RFC 8414, 3.3: the issuer in it is the same, character by character."""
    login.documents[DOCUMENT] = document
    with pytest.raises(CannotVerify):
        await has(login)
    assert JWKS not in login.asked
    assert "the keys of an issuer cannot be fetched" in caplog.text


async def test_an_error_that_nobody_foresaw_is_no_reason_to_refuse_a_token(
    login: Login, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a proxy of the environment that cannot be used: the next fetch may work."""
    del login.documents
    for _ in range(2):
        with pytest.raises(CannotVerify):
            await has(login)
    assert "the keys of an issuer cannot be fetched" in caplog.text


@pytest.mark.parametrize("invented", [1, 9, 10, 1_000])
async def test_an_invented_key_refuses_no_token_of_a_new_key(login: Login, invented: int) -> None:
    """A client that sends one invented name at a time kept the tokens of a rotated key out for up
    to a minute. Now the issuer is asked again soon, and until then nobody knows.
    """
    assert await has(login)
    login.clock.now += 60
    for number in range(invented):
        with contextlib.suppress(CannotVerify):
            assert not await has(login, f"invented{number}")
    login.keys = [jwk("RSA", "two", 1)]
    login.clock.now += 1
    if invented >= AT_ONCE:
        with pytest.raises(CannotVerify) as unknown:
            await has(login, "two")
        assert unknown.value.retry_after == AGAIN - 1
        login.clock.now += unknown.value.retry_after
    assert await has(login, "two")


async def test_invented_keys_cause_few_fetches(login: Login) -> None:
    """A client that invents names does not reach the issuer with each."""
    assert await has(login)
    login.clock.now += 60
    for second in range(60):
        for number in range(100):
            with contextlib.suppress(CannotVerify):
                assert not await has(login, f"../../etc/passwd{second}.{number}")
        login.clock.now += 1
    assert login.fetches == 1 + AT_ONCE + 59 // AGAIN
    assert await has(login)


async def test_a_clock_that_is_set_back_keeps_no_new_key_out(login: Login) -> None:
    assert await has(login)
    login.clock.now -= 10_000
    login.keys = [jwk("RSA", "two", 1)]
    assert await has(login, "two")


async def test_a_fetch_that_began_before_a_request_does_not_refuse_it(login: Login) -> None:
    """It may have been answered before the issuer had the key."""
    assert await has(login)
    login.clock.now += 60
    login.takes = 2
    invented = asyncio.create_task(has(login, "invented"))
    await asyncio.sleep(1)
    joined = asyncio.create_task(has(login, "two"))
    await asyncio.sleep(0)
    assert not await invented
    login.keys = [jwk("RSA", "two", 1)]
    assert await joined


async def test_a_fetch_that_fails_refuses_no_token_of_a_new_key(login: Login) -> None:
    assert await has(login)
    login.clock.now += 60
    login.is_away = True
    with pytest.raises(CannotVerify):
        await has(login, "invented")
    login.is_away, login.keys = False, [jwk("RSA", "two", 1)]
    with pytest.raises(CannotVerify):
        await has(login, "two")
    login.clock.now += AGAIN
    assert await has(login, "two")


async def test_all_requests_share_one_fetch_and_it_outlives_the_first(login: Login) -> None:
    """A client that leaves at once would else keep the others from a new key."""
    login.takes = 2
    tasks = [asyncio.create_task(has(login)) for _ in range(50)]
    await asyncio.sleep(1)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert all(task.result() for task in tasks[1:])
    assert login.fetches == 1


async def test_an_issuer_that_is_away_is_no_reason_to_refuse_a_token(
    login: Login, caplog: pytest.LogCaptureFixture
) -> None:
    """O: the answer is 503, and the issuer is asked every five seconds."""
    login.is_away = True
    for _ in range(100):
        with pytest.raises(CannotVerify):
            await has(login)
    assert login.fetches == 1
    login.clock.now += 5
    login.is_away = False
    assert await has(login)
    assert caplog.text.count("cannot be fetched") == 1


async def test_an_issuer_that_takes_a_minute_is_given_up_after_ten_seconds(login: Login) -> None:
    login.takes = 60
    begun = asyncio.get_running_loop().time()
    with pytest.raises(CannotVerify):
        await has(login)
    assert asyncio.get_running_loop().time() - begun == pytest.approx(10)


async def test_the_keys_of_an_issuer_that_is_away_count_for_a_day(login: Login) -> None:
    assert await has(login)
    login.is_away = True
    for _ in range(23):
        login.clock.now += 3_600
        assert await has(login)
        await asyncio.sleep(1)
        with pytest.raises(CannotVerify):
            await has(login, "perhaps new")
    login.clock.now += KEPT
    with pytest.raises(CannotVerify):
        await has(login)


async def test_nobody_waits_for_old_keys_to_be_fetched_again(login: Login) -> None:
    assert await has(login)
    login.clock.now += 3_601
    login.takes = 9
    begun = asyncio.get_running_loop().time()
    assert await has(login)
    assert asyncio.get_running_loop().time() == begun
    await asyncio.sleep(30)
    assert login.fetches == 2


async def test_a_key_without_a_name_is_good_if_it_is_the_only_one() -> None:
    login = Login(Clock(), jwk("P-256", None))
    assert await has(login, None, "ES256")
    login = Login(Clock(), jwk("P-256", "one"))
    assert await has(login, None, "ES256")
    login = Login(Clock(), jwk("P-256", "one"), jwk("P-256", "two", 1))
    assert not await has(login, None, "ES256")


@pytest.mark.parametrize(
    ("entry", "algorithm", "is_good"),
    [
        (jwk("RSA", "one"), "RS256", True),
        (jwk("RSA", "one"), "PS512", True),
        (jwk("RSA", "one", alg="RS256"), "PS256", False),
        (jwk("RSA", "one"), "ES256", False),
        (jwk("RSA", "one", use="enc"), "RS256", None),
        (jwk("RSA-1024", "one"), "RS256", False),
        (jwk("P-256", "one"), "ES256", True),
        (jwk("P-256", "one"), "ES384", False),
        (jwk("P-384", "one"), "ES384", True),
        (jwk("P-521", "one"), "ES512", True),
        (jwk("Ed25519", "one"), "EdDSA", True),
        ({"kty": "oct", "kid": "one", "k": "c2VjcmV0"}, "HS256", None),
        ({**jwk("RSA", "one"), "d": "AQAB"}, "RS256", None),
        ({"kty": "RSA", "kid": "one"}, "RS256", False),
        ({"kty": "RSA", "kid": "one", "n": 1, "e": []}, "RS256", False),
        ({"kty": "RSA", "kid": ["one"], "n": "AQAB", "e": "AQAB"}, "RS256", None),
        ({"kty": "EC", "kid": "one", "crv": "secp256k1"}, "ES256K", None),
        ({"kty": ["RSA"], "kid": "one"}, "RS256", None),
        ("text", "RS256", None),
    ],
)
async def test_a_key_is_used_for_what_it_is_good_for(
    entry: Any, algorithm: str, is_good: bool | None
) -> None:
    """None: it is left out, and the issuer has no key at all."""
    login = Login(Clock(), entry)
    if is_good is None:
        with pytest.raises(CannotVerify):
            await has(login, "one", algorithm)
    else:
        assert await has(login, "one", algorithm) == is_good


@pytest.mark.parametrize("keys", [None, {}, "text", 1])
async def test_a_set_without_keys_is_no_answer(login: Login, keys: Any) -> None:
    login.keys = keys
    with pytest.raises(CannotVerify):
        await has(login)


async def test_of_a_hundred_thousand_keys_a_hundred_are_used() -> None:
    entry = jwk("RSA", "x")
    login = Login(Clock(), *({**entry, "kid": str(number)} for number in range(100_000)))
    assert await has(login, "99")
    assert not await has(login, "100")
