"""An issuer in the test's own process: its keys, its documents, and the tokens that it signs."""

import asyncio
import json
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from mcp_sessions.authentication.fetching import FetchFailed
from mcp_sessions.authentication.issuer import Issuer
from tests.support.world import Clock

URL = "https://login.example"
AUDIENCE = "https://mcp.example/mcp"
JWKS = f"{URL}/keys"
DOCUMENT = f"{URL}/.well-known/oauth-authorization-server"

Json = dict[str, Any]


@cache
def private_key(kind: str, number: int = 0) -> Any:
    """A key: ``RSA``, ``RSA-1024``, a curve, or ``Ed25519``; another one for each number."""
    del number
    match kind.partition("-"):
        case ("RSA", _, bits):
            return rsa.generate_private_key(65_537, int(bits or 2_048))
        case ("Ed25519", _, _):
            return ed25519.Ed25519PrivateKey.generate()
        case _:
            curves: Any = {
                "P-256": ec.SECP256R1(),
                "P-384": ec.SECP384R1(),
                "P-521": ec.SECP521R1(),
            }
            return ec.generate_private_key(curves[kind])


ALGORITHM_OF = {
    "RSA": "RS256",
    "RSA-1024": "RS256",
    "P-256": "ES256",
    "P-384": "ES384",
    "P-521": "ES512",
    "Ed25519": "EdDSA",
}


def jwk(kind: str, kid: str | None, number: int = 0, **members: Any) -> Json:
    """A public key as an issuer shows it."""
    public = private_key(kind, number).public_key()
    shown: Json = get_default_algorithms()[ALGORITHM_OF[kind]].to_jwk(public, as_dict=True)
    shown.pop("key_ops", None)
    return {**shown, **({"kid": kid} if kid is not None else {}), **members}


class Login:
    """An authorization server, asked by a function instead of over HTTP."""

    def __init__(self, clock: Clock, *keys: Json) -> None:
        self.clock = clock
        self.keys: list[Json] = list(keys) or [jwk("RSA", "one")]
        self.documents: dict[str, Any] = {DOCUMENT: {"issuer": URL, "jwks_uri": JWKS}}
        self.asked: list[str] = []
        self.is_away = False
        self.takes = 0.0
        """Seconds for each answer."""

        self.issuer = Issuer(URL, clock, self.fetch)

    async def fetch(self, url: str) -> Json:
        self.asked.append(url)
        await asyncio.sleep(self.takes)
        if self.is_away:
            raise FetchFailed(f"{url} cannot be reached: refused")
        if url == JWKS:
            return {"keys": self.keys}
        if url not in self.documents:
            raise FetchFailed(f"{url} answers 404")
        return self.documents[url]

    @property
    def fetches(self) -> int:
        """How often its keys were fetched, or something before that failed."""
        return self.asked.count(DOCUMENT)

    def token(
        self,
        kind: str = "RSA",
        kid: str | None = "one",
        *,
        number: int = 0,
        algorithm: str | None = None,
        headers: Json | None = None,
        without: tuple[str, ...] = (),
        **claims: Any,
    ) -> str:
        """A token for alice, good for five minutes."""
        given: Json = {
            "iss": URL,
            "aud": AUDIENCE,
            "sub": "alice",
            "client_id": "app",
            "scope": "use more",
            "iat": int(self.clock.now),
            "exp": int(self.clock.now) + 300,
            **claims,
        }
        given = {name: value for name, value in given.items() if name not in without}
        head = {**({"kid": kid} if kid is not None else {}), **(headers or {})}
        key = private_key(kind, number)
        payload = json.dumps(given).encode()
        # What PyJWT would not make of claims, others may.
        return jwt.api_jws.encode(payload, key, algorithm or ALGORITHM_OF[kind], headers=head)
