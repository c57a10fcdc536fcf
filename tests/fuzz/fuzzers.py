"""All fuzzers, one for each door."""

from tests.fuzz.child_output import CHILD
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.http_requests import HTTP
from tests.fuzz.redis_answers import REDIS
from tests.fuzz.url_answers import URL
from tests.fuzz.websocket_frames import WEBSOCKET

FUZZERS: tuple[Fuzzer, ...] = (HTTP, WEBSOCKET, CHILD, URL, REDIS)
