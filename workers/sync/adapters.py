"""The engine's side of low-rank adapters: the engine merges received adapters into its own copy of the base weights.

Only A and B of each adapted matrix are transferred. The engine recomputes its merged weights from the model's files in
every sync. An adapter is therefore applied exactly once, regardless of the number of syncs. The files are memory-mapped
and not kept in memory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from rltrain.base.errors import SyncError
from workers.models.adapter_weights import A, B, BaseWeights, merge
from workers.sync.buckets import Bucket, tensors_of


class Adapters:
    """The adapters of one sync, collected bucket by bucket.

    Args:
        path: model directory of the base weights.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.scale, self.parts = path, 1.0, dict[str, Tensor]()

    def take(self, bucket: Bucket, data: np.ndarray) -> None:
        """Copy the adapters of a bucket. The copy is necessary because later buckets overwrite these bytes."""
        assert bucket.scale is not None, "a bucket of adapters"
        self.scale = bucket.scale
        self.parts |= {name: tensor.clone() for name, tensor in tensors_of(bucket, data)}

    def merged(self, *, everything: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged matrices by name, in float32 and one at a time.

        Args:
            everything: whether to yield all other tensors of the model's files too.

        Raises:
            SyncError: an adapter lacks its base matrix or its other half.
        """
        base, layers = BaseWeights(self.path), {name.removesuffix(A).removesuffix(B) for name in self.parts}
        needed = {layer: {layer + A, layer + B, f"{layer}.weight"} for layer in sorted(layers)}
        missing = [layer for layer, names in needed.items() if not names <= self.parts.keys() | base.files.keys()]
        if missing:
            raise SyncError(
                f"the adapter of '{missing[0]}' came without its other half, or {self.path} has no such matrix; engine "
                "and actor do not start from the same files"
            )
        for name in base.files:
            layer, _, last = name.rpartition(".")
            if last == "weight" and layer in layers:
                yield name, merge(base.tensor(name), self.parts[layer + B], self.parts[layer + A], self.scale)
            elif everything:
                yield name, base.tensor(name)
