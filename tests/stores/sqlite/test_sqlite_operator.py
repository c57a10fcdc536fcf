"""An operator ends sessions in a file that another process serves from."""

from pathlib import Path

from mcp_sessions import SessionLayer
from mcp_sessions.core.ends import EndReason
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.operator import open_for_operator
from mcp_sessions.stores.records import SessionRecord
from tests.support.raw import RawClient, in_process
from tests.support.world import Toolbox


async def test_an_end_by_an_operator_is_remembered_if_the_server_stops_at_once(
    tmp_path: Path,
) -> None:
    async def no_client(store: SessionStore, record: SessionRecord) -> None:
        raise AssertionError("a file is served by one process, which is asked")

    url = f"sqlite:///{tmp_path}/sessions.db"
    layer = SessionLayer(Toolbox().server, store=url)
    app = layer.asgi_app()
    operator_store = None
    async with layer.lifespan(), in_process(app) as carrier:
        client = RawClient(carrier)
        await client.initialize()
        session_id = SessionId((await client.start())["sessionId"])
        operator_store = await open_for_operator(url, no_client)
        assert await operator_store.end(session_id)
    [end] = [each for each in await operator_store.ends() if each.session == digest(session_id)]
    assert end.reason is EndReason.OPERATOR
