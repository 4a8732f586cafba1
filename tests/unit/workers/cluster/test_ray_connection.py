"""Tests that a one-line error is raised if Ray does not start, or if no Ray cluster is at the given address."""

import atexit
import socket
import threading

import pytest
import ray

from rltrain.base.errors import ConfigError, WorkerError
from rltrain.settings.compose import compose
from workers.cluster import ray_connection
from workers.cluster.ray_connection import connect, disconnect
from workers.cluster.ray_daemons import Daemons, RemoteDaemon

UNASKED = AssertionError("not to be asked")


@pytest.fixture(scope="module")
def server():
    """Yield the port of a server that listens but is not a Ray cluster."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "raised", "kind", "said"),
    [
        ("local", Exception("The node timed out.\nIt may be overloaded."), WorkerError, "placement=inprocess"),
        ("127.0.0.1:{port}", ConnectionError("no GCS"), ConfigError, ": no cluster answers there (no GCS)"),
        ("127.0.0.1:9", UNASKED, ConfigError, ":9: no cluster answers there ([Errno"),
        ("127.0.0.1:{beyond}", UNASKED, ConfigError, ": no cluster answers there (the highest port number is 65535)"),
        ("no.such.host.invalid:6379", UNASKED, ConfigError, ": no cluster answers there ("),
    ],
)
def test_ray_that_does_not_come_up_is_one_line_with_the_way_out(monkeypatch, server, address, raised, kind, said):
    def init(**_):
        raise raised

    monkeypatch.setattr(ray, "init", init)
    # some C libraries treat two port numbers that differ by 65536 as the same port
    address = address.format(port=server, beyond=server + 65536)
    with pytest.raises(kind) as told:
        connect(compose(["verbose=true", f"placement.address={address}"])[0])
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("answers", [False, True])
def test_a_run_does_not_wait_for_a_lost_head_when_it_ends(monkeypatch, answers):
    head = RemoteDaemon("gcs_server", "10.0.0.1", 6379)
    monkeypatch.setattr(head, "ended", lambda: True)
    monkeypatch.setattr(ray_connection._connection, "daemons", Daemons([head]))
    monkeypatch.setattr(ray_connection, "_DISCONNECT_S", 0.05)
    end, registered = threading.Event(), []
    monkeypatch.setattr(ray, "shutdown", lambda: None if answers else end.wait(60))
    monkeypatch.setattr(atexit, "register", registered.append)
    disconnect()
    assert not end.is_set()
    # Ray's own exit handler would wait for the head again.
    assert registered == ([] if answers else [ray_connection._exit_at_once])
    end.set()


def test_a_ray_of_its_own_has_the_cores_that_may_be_used(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(ray_connection, "cpu_cores", lambda: 12)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray_connection.ray_daemons, "find", lambda: (tmp_path, []))
    connect(compose(["verbose=true"])[0])
    disconnect()
    assert asked["num_cpus"] == 12
