"""A short load of streaming clients that come and go; `benchmarks/soak.py` is the long one."""

import asyncio

from benchmarks.soak import soak


def test_nothing_is_lost_mixed_or_left_after_many_clients(server):
    tasks_before = _server_tasks(server)
    result = asyncio.run(soak(server.url, clients=8, seconds=6, compare=True))
    assert result["faults"] == []
    assert result["whole"] >= 5 and result["left"] >= 1 and result["prescribed"] >= 1
    statistics = server.wait_until_idle()
    assert (statistics["pages_used"], statistics["slots_free"], statistics["live"]) == (0, 4, 0)
    assert server.engine.core.edits.constraints == {}
    assert _server_tasks(server) <= tasks_before + 1


def _server_tasks(server):
    """Tasks of the server's event loop, counted on it."""
    loop = server.server.servers[0].get_loop()

    async def count():
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), loop).result(10)
