"""A run on a cluster that requires a token of Ray's authentication."""

import pytest
from hosts import Cluster, hosts
from refusals import check, refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_without_the_token_of_the_cluster_is_refused(tmp_path):
    with hosts(1) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64})
        cluster.start()
        assert check(cluster, tmp_path).returncode == 0
        cluster.env["RAY_AUTH_MODE"] = "disabled"
        line = refused(check(cluster, tmp_path))
    assert line.startswith(f"error: placement.address={cluster.address}: the cluster requires a token of Ray's auth")
    assert "set RAY_AUTH_MODE=disabled on all of them" in line
