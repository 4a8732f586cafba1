"""Sampling of training prompts from pools by difficulty, with a preference for prompts that the policy solves sometimes
but not always.

The success rate p of a prompt is the share of correct answers in the prompt's most recent group of answers. A group
whose answers are all correct or all wrong has GRPO advantages of 0. For a prompt with success rate p, the variance
p (1 - p) of the outcomes is largest at p = 1/2, so the policy learns most from prompts of medium difficulty (arXiv
2502.12272). `PromptPools` stores the success rate of each prompt, and sorts the prompts into four pools:

    unseen: the success rate has not been measured yet
    easy:   success rate >= easy_threshold
    hard:   success rate <= hard_threshold
    normal: hard_threshold < success rate < easy_threshold

Each pool is assigned a subinterval of [0, 1) whose length is the fraction of draws that is configured for the pool. The
subintervals of the pools lie in the order normal, unseen, hard, easy. Draw number n, counted from 0, takes a prompt
from the pool whose subinterval contains the point u(n):

    u(n) = frac(u(0) + n * 0x9E3779B97F4A7C15 / 2^64)

The first point, u(0), is a pseudo-random number in [0, 1) that depends on the seed. The points u(n) are spread evenly
over [0, 1), because the factor of n in the formula for u(n) is the golden ratio minus 1. A pool whose configured
fraction is f is chosen for about m * f of any m consecutive draws, with a small deviation.

If the pool that is chosen for a draw is empty, a prompt is drawn from the normal pool instead. If the pool that is
chosen for a draw and the normal pool are both empty, a prompt is drawn from the unseen pool. If the pool that is chosen
for a draw, the normal pool and the unseen pool are all empty, a random prompt is drawn from the hard and easy pools. If
every prompt is either hard or easy, the normal and unseen pools are empty, and each draw that chooses an empty pool
takes a random prompt instead. If every prompt is either hard or easy, and the hard and easy pools have small configured
fractions, most draws choose an empty pool and take a random prompt. If most draws take a random prompt, training is
almost the same as with shuffled passes through all prompts. Random draws from the hard and easy pools include easy
prompts, because otherwise the policy would train only on prompts that it fails to solve.

Within a pool, prompts are drawn without replacement: each pass through a pool is a random permutation of the prompts in
the pool. A prompt that was drawn in one pass through a pool can be drawn again only in a later pass. A prompt is called
*in flight* from its draw until the training step of its prompt group ends. A prompt in flight is in no pool, so a
training step never has two groups of the same prompt. In a pool with n prompts and a configured fraction f, each prompt
is drawn once in n / f draws on average.

The success rate of a prompt changes only at the end of a training step, when the prompts of the step are returned to
the pools in the order of their draws. Which prompts are drawn depends on the seed and on the outcomes of finished
steps, and never on the order in which answers arrive. If `trainer.max_staleness` is k, the prompts of a step are drawn
while the k preceding steps are unfinished. With `trainer.max_staleness` = k, the draws of step s depend on the outcomes
of the steps before step s - k, and not on the outcomes of the steps s - k to s - 1.
"""

import base64
import random
import sys
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rltrain.settings.sampling_config import DifficultyConfig
from rltrain.settings.typed import require

# Names of the pools. If a pool is empty, a prompt is drawn from "normal" instead, or from "unseen" if "normal" is
# empty.
POOLS = ("normal", "unseen", "hard", "easy")
_GOLDEN, _BITS = 0x9E3779B97F4A7C15, 64
_LARGEST = 2**16 - 1  # Maximum number of answers per prompt group; counts of answers are stored in 16 bits.


class _Pool:
    """One pool of prompt indices, which contains no prompts in flight. A prompt is in flight from its draw until the
    training step of its prompt group ends.

    Attributes:
        passes: number of passes through the pool that have begun.
        left: prompt indices that the current pass has not drawn yet. The next draw from the pool takes the
            last prompt index in `left`.
        returned: indices of the prompts that the next pass through the pool will draw, in the order in which the
            prompts were put into the pool.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.passes, self.left, self.returned = 0, array("i"), array("i")

    def __len__(self) -> int:
        return len(self.left) + len(self.returned)

    def draw(self) -> int:
        if not self.left:
            self.left, self.returned = self.returned, array("i")
            random.Random(f"{self.seed}/pool {self.name}/{self.passes}").shuffle(self.left)
            self.passes += 1
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "left": _encoded(self.left), "returned": _encoded(self.returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes = _whole(state["passes"])
        self.left, self.returned = (_decoded(state[name], "i") for name in ("left", "returned"))


class PromptPools:
    """The order in which training uses the prompts, if prompts are sampled from pools by difficulty.

    Each draw has a position, counted from 0, which is also the uid of the draw's prompt group. The state of
    `PromptPools` can be saved and loaded, and takes eight bytes per prompt.

    Args:
        size: number of training prompts.
        seed: seed of the run.
        difficulty: the config's thresholds and fractions of the prompt pools.
    """

    def __init__(self, size: int, seed: int, difficulty: DifficultyConfig) -> None:
        assert size > 0, "pools need at least one prompt"
        self._size, self._seed, self._difficulty = size, seed, difficulty
        self._first = random.Random(f"{seed}/pools").getrandbits(_BITS)
        self._ends = _ends(difficulty)
        self._drawn = self._drawn_in_step = self._fallbacks = 0
        # Numbers of correct and of judged answers in the most recent group of each prompt; 0 and 0 for an unseen
        # prompt.
        self._correct, self._judged = (array("H", bytes(2 * size)) for _ in range(2))
        self._pools = {name: _Pool(name, seed) for name in POOLS}
        self._pools["unseen"].returned.extend(range(size))
        self._in_flight: dict[int, int] = {}  # Maps a draw's position to the drawn prompt's index.
        self._sizes = Counter({"unseen": size})

    def next(self, count: int) -> list[int]:
        """Draw `count` prompts, and return their prompt indices."""
        return [self._draw() for _ in range(count)]

    def at(self, position: int) -> int:
        """Return the index of the prompt that draw number `position` took. The prompt must still be in flight."""
        return self._in_flight[position]

    def give_back(self, outcomes: Mapping[int, tuple[int, int]]) -> None:
        """Put the prompts of a finished training step back into the pools, and store the outcomes of the prompts.

        If none of a prompt's answers in the finished step was judged, the prompt keeps its previous success rate.

        Args:
            outcomes: dict with one entry for each prompt that the training step has used or discarded. The key is the
                position of the prompt's draw. The value is a pair (number of correct answers, number of judged
                answers).
        """
        for position, (correct, judged) in sorted(outcomes.items()):
            assert 0 <= correct <= judged <= _LARGEST, f"invalid outcome: {correct} of {judged} answers are correct"
            index = self._in_flight.pop(position)
            if judged:
                self._sizes[self._pool_of(index)] -= 1
                self._correct[index], self._judged[index] = correct, judged
                self._sizes[self._pool_of(index)] += 1
            self._pools[self._pool_of(index)].returned.append(index)
        self._drawn_in_step = self._fallbacks = 0

    def metrics(self) -> dict[str, float]:
        """Return each pool's share of all prompts, and the share of draws that had to fall back to another pool.

        The share of a pool includes the prompts that were drawn from the pool and have not yet been returned to a pool.
        The metric `difficulty/fallback_fraction` is the share of draws, since the end of the previous step, that took a
        prompt from another pool because the chosen pool was empty.
        """
        shares = {f"difficulty/{name}_fraction": self._sizes[name] / self._size for name in POOLS}
        return shares | {"difficulty/fallback_fraction": self._fallbacks / max(1, self._drawn_in_step)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pools as plain values, which `load_state_dict` accepts."""
        return {
            "size": self._size,
            "seed": self._seed,
            "drawn": self._drawn,
            "drawn_in_step": self._drawn_in_step,
            "fallbacks": self._fallbacks,
            "correct": _encoded(self._correct),
            "judged": _encoded(self._judged),
            "in_flight": [[position, index] for position, index in self._in_flight.items()],
            "pools": {name: pool.state_dict() for name, pool in self._pools.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the sampling from a state that `state_dict` returned.

        Raises:
            ConfigError: the state comes from a run with another number of prompts or another seed.
            ValueError: the state is damaged.
        """
        for name, value in (("size", self._size), ("seed", self._seed)):
            require(
                state[name] == value,
                f"{name}={value}: the checkpoint's prompts were sampled with {name}={state[name]}, so their order "
                "cannot be continued; use the data and seed of the checkpoint, or start a new run",
            )
        self._drawn, self._drawn_in_step, self._fallbacks = (
            _whole(state[name]) for name in ("drawn", "drawn_in_step", "fallbacks")
        )
        self._correct, self._judged = (_decoded(state[name], "H") for name in ("correct", "judged"))
        self._in_flight = {_whole(position): _whole(index) for position, index in state["in_flight"]}
        for name, pool in self._pools.items():
            pool.load_state_dict(state["pools"][name])
        self._require_whole()
        self._sizes = Counter(map(self._pool_of, range(self._size)))

    def _draw(self) -> int:
        point = (self._first + self._drawn * _GOLDEN) % 2**_BITS
        intended = next(name for name, end in self._ends if point < end)
        name = next((name for name in (intended, "normal", "unseen") if self._pools[name]), None) or self._extreme()
        index = self._pools[name].draw()
        self._in_flight[self._drawn] = index
        self._drawn, self._drawn_in_step = self._drawn + 1, self._drawn_in_step + 1
        self._fallbacks += name != intended
        return index

    def _extreme(self) -> str:
        """Return "hard" or "easy" at random, with probabilities proportional to the sizes of the two pools."""
        hard, easy = len(self._pools["hard"]), len(self._pools["easy"])
        assert hard + easy, f"all {self._size} prompts are in flight"
        which = random.Random(f"{self._seed}/empty pool/{self._drawn}").randrange(hard + easy)
        return "hard" if which < hard else "easy"

    def _pool_of(self, index: int) -> str:
        judged = self._judged[index]
        if not judged:
            return "unseen"
        success = self._correct[index] / judged
        if success >= self._difficulty.easy_threshold:
            return "easy"
        return "hard" if success <= self._difficulty.hard_threshold else "normal"

    def _require_whole(self) -> None:
        """Raise ValueError unless a loaded state holds each prompt exactly once and all outcomes are valid."""
        held = [index for pool in self._pools.values() for part in (pool.left, pool.returned) for index in part]
        if sorted([*held, *self._in_flight.values()]) != list(range(self._size)):
            raise ValueError("the pools do not hold each prompt exactly once")
        if not len(self._correct) == len(self._judged) == self._size:
            raise ValueError("the number of stored outcomes is not the number of prompts")
        if any(map(int.__gt__, self._correct, self._judged)) or any(n >= self._drawn for n in self._in_flight):
            raise ValueError(
                "a prompt has more correct answers than judged answers, or an unfinished draw has a position that was "
                "not drawn yet"
            )


def _ends(difficulty: DifficultyConfig) -> list[tuple[str, float]]:
    """Return the name of each pool, and the upper end of the pool's subinterval of [0, 1), scaled by 2^64.

    The upper ends of the subintervals are scaled by 2^64, because `_draw` compares each upper end with an integer below
    2^64. The upper end of the last pool's subinterval is infinite, because rounding errors can make the sum of the
    configured fractions less than 1.
    """
    ends, end = list[tuple[str, float]](), 0.0
    for name in POOLS:
        end += getattr(difficulty, f"{name}_fraction")
        ends.append((name, end * 2**_BITS))
    return [*ends[:-1], (POOLS[-1], float("inf"))]


def most_in_flight(prompts_per_step: int, steps_ahead: int, dynamic_sampling: int) -> int:
    """Return the largest number of prompts that can be in flight (drawn, and not yet returned) at the same time.

    Args:
        prompts_per_step: number of prompt groups of a training step.
        steps_ahead: number of training steps for which prompt groups are generated in advance.
        dynamic_sampling: value of `algorithm.dynamic_sampling`: the maximum number of prompt groups that a step
            generates, divided by `prompts_per_step`; 0 without dynamic sampling.
    """
    return prompts_per_step * (steps_ahead + max(1, dynamic_sampling))


def _encoded(numbers: "array[int]") -> str:
    """Encode an array of integers as little-endian bytes, and return the bytes as base64 text."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _decoded(text: str, typecode: str) -> "array[int]":
    numbers = array(typecode, base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number >= 0")
    return value
