"""Low-rank adapters that a rollout engine receives, and their merging into the engine's copy of the base weights.

If the actor trains low-rank adapters, a weight sync transfers only the matrices A and B of each adapted matrix. vLLM
can apply the adapters beside the base weights (see `workers.rollout.engines.vllm.adapters`). Otherwise, in every sync,
the engine reads the base weights from the model's files and merges the adapters into the base weights. Because every
sync starts from the base weights, each adapter is applied exactly once, regardless of the number of syncs. The model's
files are memory-mapped during the merge, so the engine keeps no second copy of the base weights in memory.
"""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rltrain.base.errors import SyncError
from workers.models.adapter_weights import A, B, BaseWeights, merge
from workers.sync.buckets import Bucket, tensors_of


class Adapters:
    """The adapters that an engine receives in one sync, collected from the buckets.

    Args:
        path: model directory of the base weights.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.scale, self.parts = path, 1.0, dict[str, Tensor]()

    def take(self, bucket: Bucket, data: Tensor) -> None:
        """Copy the adapters out of a bucket, because a later bucket will overwrite the bucket's bytes."""
        assert bucket.scale is not None, "a weight-sync bucket of LoRA adapters must contain the adapters' scale"
        self.scale = bucket.scale
        self.parts |= {name: tensor.to("cpu", copy=True) for name, tensor in tensors_of(bucket, data)}

    def merged(self, *, everything: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, merged matrix in float32) for each adapted matrix, one at a time.

        Args:
            everything: whether to yield all tensors; tensors without an adapter are yielded unchanged from the model's
                files.

        Raises:
            SyncError: the base matrix of an adapter is missing, or only one of an adapter's matrices A and B has
                arrived.
        """
        base, layers = BaseWeights(self.path), {name.removesuffix(A).removesuffix(B) for name in self.parts}
        needed = {layer: {layer + A, layer + B, f"{layer}.weight"} for layer in sorted(layers)}
        missing = [layer for layer, names in needed.items() if not names <= self.parts.keys() | base.files.keys()]
        if missing:
            raise SyncError(
                f"matrix A or B of the adapter for '{missing[0]}' did not arrive, or {self.path} contains no weights "
                "for this layer; start engine and actor from the same model files"
            )
        for name in base.files:
            layer, _, last = name.rpartition(".")
            if last == "weight" and layer in layers:
                yield name, merge(base.tensor(name), self.parts[layer + B], self.parts[layer + A], self.scale)
            elif everything:
                yield name, base.tensor(name)
