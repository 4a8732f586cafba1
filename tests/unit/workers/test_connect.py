"""Ray that does not start, or is not where it was looked for, is told in one line."""

import pytest
import ray

from rltrain.compose import compose
from rltrain.errors import ConfigError, WorkerError
from workers.placement import connect


@pytest.mark.parametrize(
    ("address", "raised", "kind", "said"),
    [
        ("local", Exception("The node timed out.\nIt may be overloaded."), WorkerError, "placement=inprocess"),
        ("10.0.0.1:6379", ConnectionError("no GCS"), ConfigError, "address=10.0.0.1:6379: no cluster answers"),
    ],
)
def test_ray_that_does_not_come_up_is_one_line_with_the_way_out(monkeypatch, address, raised, kind, said):
    def init(**_):
        raise raised

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(kind) as told:
        connect(compose(["verbose=true", f"placement.address={address}"])[0])
    assert said in str(told.value)
    assert "\n" not in str(told.value)
