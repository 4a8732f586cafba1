"""Fixtures that build a batch with every column that a registered function may read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.algorithms import columns_of

Batch = dict[str, Tensor]
UID = [5, 9, 5, 9, 5, 9, 5, 7]  # the group id of each row: interleaved groups of 4, 3 and 1 rows
SUCCESSES = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]  # 1 = the answer of the row is correct
TAUGHT = [True, True, False, True, True, True, False, True]  # True = a teacher has scored the row
VALID = [True, True, True, True, True, True, False, True]


def build_batch(seed: int = 0, *, length: int = 9, spread: float = 0.8) -> Batch:
    """Build 8 rows in float64, with gaps (tool tokens) in the masks and no trained token at all in row 3."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = len(UID)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[:, 0], mask[:, -1], mask[0], mask[3] = True, False, True, False
    old_log_probs = -normal(rows, length).abs() - 0.5
    return {
        "response_mask": mask,
        "old_log_probs": old_log_probs,
        "log_probs": old_log_probs + spread * normal(rows, length),
        "ref_log_probs": old_log_probs + spread * normal(rows, length),
        "rollout_log_probs": old_log_probs + spread * normal(rows, length),
        "advantages": normal(rows, length),
        "values": normal(rows, length),
        "old_values": normal(rows, length),
        "returns": normal(rows, length),
        "token_level_rewards": normal(rows, length),
        "reward_components": normal(rows, 2),
        "baseline_rewards": normal(rows),
        "successes": torch.tensor(SUCCESSES, dtype=torch.float64),
        "selected": torch.rand(rows, length, generator=generator) < 0.5,
        "entropies": normal(rows, length).abs(),
        "turn_index": torch.arange(length).repeat(rows, 1) // 3,
        "turn_states": torch.arange(length).repeat(rows, 1) // 3 % 2,
        "random_draws": torch.rand(rows, length, generator=generator, dtype=torch.float64),
        "positive_mask": (torch.tensor(SUCCESSES) > 0)[:, None].expand(rows, length),
        "teacher_log_probs": old_log_probs + spread * normal(rows, length),
        "taught": mask & torch.tensor(TAUGHT)[:, None],
        "uid": torch.tensor(UID),
        "valid": torch.tensor(VALID),
    }


def call_by_columns(function: Callable[..., Any], batch: Batch, **knobs: Any) -> Any:
    return function(*(batch[column] for column in columns_of(function)), **knobs)


def rows_of(batch: Batch, index: Any) -> Batch:
    return {name: column[index] for name, column in batch.items()}


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return build_batch


@pytest.fixture
def call() -> Callable[..., Any]:
    """Call a registered function with the columns that its signature names."""
    return call_by_columns


@pytest.fixture
def take_rows() -> Callable[[Batch, Any], Batch]:
    return rows_of
