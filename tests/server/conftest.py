"""One checkpoint, one engine and one server for all tests of the server: compiling is what costs."""

import pytest

from tests.helpers import servers
from tests.helpers.scripted_engine import ScriptedEngine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return servers.write_checkpoint(tmp_path_factory.mktemp("server") / servers.MODEL)


@pytest.fixture(scope="session")
def engine(checkpoint):
    with servers.open_engine(checkpoint) as engine:
        yield engine


@pytest.fixture(scope="session")
def server(engine):
    with servers.running(engine) as server:
        yield server


@pytest.fixture(scope="session")
def client(server):
    return server.client()


@pytest.fixture(scope="session")
def http(server):
    with server.http() as http:
        yield http


@pytest.fixture(scope="session")
def scripted():
    """A server whose engine has no model: cheap, for tests of what stands in front of it."""
    with servers.running(ScriptedEngine()) as server:
        yield server
