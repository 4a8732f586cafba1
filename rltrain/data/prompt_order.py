"""The order, shuffled or not, in which training uses the prompts.

A checkpoint stores the position in the prompt order, so that a resumed run continues at the saved position.
"""

import random
from collections.abc import Sequence
from typing import Any

from rltrain.settings.typed import require


class PromptOrder:
    """The order in which training uses the prompts. The position in the prompt order can be saved and loaded.

    Each epoch uses every prompt index once. If the prompts are shuffled, each epoch has a permutation of its own.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        """Create an order of the prompt indices 0..size-1. If `shuffle` is false, the prompt indices ascend in every
        epoch.
        """
        assert size > 0, "a prompt order needs at least one prompt"
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._drawn = 0
        # `_permutation` is a pair of an epoch number and the prompt indices in the order of that epoch.
        self._permutation: tuple[int, Sequence[int]] = (-1, ())

    def next(self, count: int) -> list[int]:
        """Return the next `count` prompt indices, which may span several epochs."""
        taken = [self.at(position) for position in range(self._drawn, self._drawn + count)]
        self._drawn += count
        return taken

    def at(self, position: int) -> int:
        """Return the prompt index at a position of the prompt order; positions are counted over all epochs.

        The method `at` accepts any position, even a position that `next` has not reached yet.
        """
        return self._of_epoch(position // self._size)[position % self._size]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the prompt order as plain values, which `load_state_dict` accepts."""
        return {"size": self._size, "seed": self._seed, "shuffle": self._shuffle, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the prompt order from a state that `state_dict` returned.

        Raises:
            ConfigError: `state` comes from a prompt order whose size, seed or shuffle setting differs from `self`.
        """
        for name, value in self.state_dict().items():
            require(
                name == "drawn" or state[name] == value,
                f"{name}={value}: the checkpoint's prompts were ordered with {name}={state[name]}, so their order "
                "cannot be continued; use the data and seed of the checkpoint, or start a new run",
            )
        self._drawn = state["drawn"]

    def _of_epoch(self, epoch: int) -> Sequence[int]:
        if self._permutation[0] != epoch:
            indices = list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed}/prompt order/{epoch}").shuffle(indices)
            self._permutation = (epoch, indices)
        return self._permutation[1]
