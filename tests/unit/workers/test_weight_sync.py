"""Buckets, checksums and probes without an engine."""

import pickle

import numpy as np
import pytest
import torch

from rltrain.errors import SyncError
from workers import weight_sync
from workers.weight_sync import buckets_of, check_outputs, checksum, probe, probe_vector, tensors_of

pytestmark = pytest.mark.usefixtures("process_group")
NAMED = {
    "a.weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "a.bias": torch.randn(5, generator=torch.Generator().manual_seed(1)),
    "b.weight": torch.randn(4, 5, generator=torch.Generator().manual_seed(2)),
}


def make(dtype="float32", check=True, aliases=None):
    return buckets_of(NAMED.items(), aliases=aliases or {}, version=3, dtype=dtype, check=check)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_come_out_as_they_went_in(dtype):
    out = {name: tensor for bucket in make(dtype) for name, tensor in tensors_of(bucket)}
    assert list(out) == list(NAMED)
    for name, tensor in NAMED.items():
        assert torch.equal(out[name], tensor.to(getattr(torch, dtype)))


def test_large_models_go_in_several_buckets(monkeypatch):
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 70)
    buckets = make()
    assert [bucket.names for bucket in buckets] == [["a.weight"], ["a.bias"], ["b.weight"]]
    assert [name for bucket in buckets for name, _ in tensors_of(bucket)] == list(NAMED)


def test_E5_any_flipped_bit_is_seen_also_after_a_trip_through_pickle():
    (bucket,) = make()
    for byte in [*range(0, 60, 7), *range(64, 84, 7), *range(128, 208, 7)]:  # bytes of the three tensors
        broken = pickle.loads(pickle.dumps(bucket))
        broken.data = broken.data.copy()
        broken.data[byte] ^= 1
        with pytest.raises(SyncError, match="are not those that the actor sent"):
            list(tensors_of(broken))


def test_without_checks_nothing_is_computed_for_them():
    (bucket,) = make(check=False)
    assert bucket.checksums == []
    assert bucket.probes == {}


def test_the_checksum_is_the_sum_of_words_and_counts_odd_bytes():
    assert checksum(torch.tensor([1, 0, 0, 0, 2, 0, 0, 0, 5], dtype=torch.uint8)) == 8
    assert checksum(torch.tensor([7], dtype=torch.uint8)) == 7


def test_a_probe_is_the_matrix_times_a_vector_that_the_dtype_represents():
    matrix = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    v = probe_vector(2)
    assert torch.allclose(probe(matrix), torch.stack([v[0] + 2 * v[1], -v[1]]))
    coarse = probe_vector(64, torch.bfloat16)
    assert torch.equal(coarse, coarse.to(torch.bfloat16).float())


def test_tied_names_are_checked_under_both_names():
    (bucket,) = make(aliases={"head.weight": "b.weight"})
    assert np.array_equal(bucket.probes["head.weight"], bucket.probes["b.weight"])
    outputs = {name: torch.as_tensor(value) for name, value in bucket.probes.items()}
    check_outputs(outputs, bucket.probes, version=1, dtype="float32")
    stale = outputs | {"head.weight": outputs["head.weight"] * 1.001}
    with pytest.raises(SyncError, match=r"'head.weight'"):
        check_outputs(stale, bucket.probes, version=1, dtype="float32")


@pytest.mark.parametrize("change", ["missing", "extra", "nan", "shape"])
def test_an_engine_that_shows_other_layers_or_nonsense_is_refused(change):
    (bucket,) = make()
    outputs = {name: torch.as_tensor(value).clone() for name, value in bucket.probes.items()}
    if change == "missing":
        del outputs["a.bias"]
    elif change == "extra":
        outputs["c.weight"] = torch.zeros(2)
    elif change == "nan":
        outputs["a.bias"][0] = torch.nan
    else:
        outputs["a.bias"] = torch.zeros(2)
    with pytest.raises(SyncError):
        check_outputs(outputs, bucket.probes, version=1, dtype="float32")
