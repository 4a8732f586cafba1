import pytest

from workers.cluster import node_settings
from workers.cluster.node_settings import Sharing, interface_of


def test_the_interface_of_an_address_is_found_and_a_foreign_address_has_none():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""


@pytest.mark.parametrize(
    ("sharing", "amount", "threads"),
    [
        (Sharing("GPU", 1.0, 16, None), 8.0, 8),  # Only 8 of the 16 processes fit on the node.
        (Sharing("GPU", 0.5, 16, None), 8.0, 4),  # The 8 GPUs are shared by 16 processes.
        (Sharing("GPU", 1.0, 2, None), 8.0, 32),  # The whole cluster has only two processes.
        (Sharing("CPU", 1.0, 4, None), 128.0, 16),
        (Sharing("CPU", 1.0, 4, None), 0.0, 64),
        (Sharing("CPU", 1.0, 1000, None), 1000.0, 1),
        (Sharing("GPU", 1.0, 16, 3), 8.0, 3),
    ],
)
def test_the_processes_of_a_node_share_the_cores_of_that_node(monkeypatch, sharing, amount, threads):
    monkeypatch.setattr(node_settings, "cpu_cores", lambda: 64)
    assert sharing.threads_on(amount) == threads
