"""Tests of the order of prompts over epochs and seeds, and of the saved state of the prompt order."""

import json

import pytest

from rltrain.base.errors import ConfigError
from rltrain.data.prompt_order import PromptOrder


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_uses_each_prompt_once_whatever_the_size_of_the_draws(shuffle):
    order = PromptOrder(10, seed=3, shuffle=shuffle)
    drawn = [index for count in (4, 4, 4, 0, 25, 3) for index in order.next(count)]
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 4
    assert (len({tuple(epoch) for epoch in epochs}) == 4) == shuffle
    assert shuffle or epochs[0] == list(range(10))


def test_the_seed_decides_the_order():
    first, same, other = (PromptOrder(50, seed, True).next(120) for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize("before", [0, 7, 10, 23])
def test_a_restored_order_goes_on_where_it_stopped_also_at_an_edge(before):
    whole = PromptOrder(10, seed=5, shuffle=True)
    expected = whole.next(before + 30)[before:]
    first = PromptOrder(10, seed=5, shuffle=True)
    first.next(before)
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptOrder(10, seed=5, shuffle=True)
    second.next(4)
    second.load_state_dict(state)
    assert second.next(30) == expected


def test_a_state_of_other_prompts_is_refused():
    state = PromptOrder(10, seed=5, shuffle=True).state_dict()
    with pytest.raises(ConfigError, match="size=11: the checkpoint's prompts were ordered with size=10"):
        PromptOrder(11, seed=5, shuffle=True).load_state_dict(state)
