"""Tests of the transformers engine's batch: its KV cache, its attention, and how rows are added and removed."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workers.rollout.engines.hf.decoding import ROOM, RoomyLayer, different_prompts, grouped_attention, new_batch
from workers.rollout.messages import Request

CPU = torch.device("cpu")


def states(batch: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, 2, columns, 4, generator=generator)
    return keys, values


def filled(kind: type[DynamicLayer], batch: int, columns: int, tokens: int, seed: int = 0) -> DynamicLayer:
    layer = kind()
    layer.update(*states(batch, columns, seed))
    for token in range(tokens):
        layer.update(*states(batch, 1, seed + 1 + token))
    return layer


def request(number: int, prompt: list[int], max_tokens: int = 2) -> Request:
    return Request((0, number), prompt, 1.0, max_tokens, number)


@pytest.mark.parametrize("tokens", [0, 1, 2 * ROOM + 3])
def test_a_cache_with_room_holds_what_one_without_room_holds(tokens):
    roomy, plain = filled(RoomyLayer, 3, 5, tokens), filled(DynamicLayer, 3, 5, tokens)
    assert roomy.get_seq_length() == plain.get_seq_length() == 5 + tokens
    assert torch.equal(roomy.keys, plain.keys)
    assert torch.equal(roomy.values, plain.values)


def test_rows_are_taken_without_their_first_columns_and_go_on_growing():
    roomy, plain = filled(RoomyLayer, 3, 5, 2), filled(DynamicLayer, 3, 5, 2)
    roomy.batch_select_indices(torch.tensor([2, 0]), 3)
    new = states(2, 1, 99)
    keys, values = roomy.update(*new)
    assert torch.equal(keys, torch.cat([plain.keys[[2, 0], :, 3:], new[0]], 2))
    assert torch.equal(values, torch.cat([plain.values[[2, 0], :, 3:], new[1]], 2))


@pytest.mark.parametrize(("above", "below"), [(7, 4), (4, 7), (5, 5)])
def test_joined_rows_end_in_the_same_column(above, below):
    one, two = filled(RoomyLayer, 2, above, 0), filled(RoomyLayer, 1, below, 0, seed=50)
    expected = one.keys.clone(), two.values.clone()
    one.join(two)
    assert one.keys.shape == (3, 2, max(above, below), 4)
    assert torch.equal(one.keys[:2, :, -above:], expected[0])
    assert torch.equal(one.values[2:, :, -below:], expected[1])
    assert not one.keys[:2, :, :-above].any()
    one.update(*states(3, 1, 99))
    assert torch.equal(one.keys[:2, :, -above - 1 : -1], expected[0])


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_over_shared_keys_is_that_of_transformers(queries, masked):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, queries, 8, generator=generator)
    key, value = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(2))
    mask = (torch.arange(5) >= torch.tensor([[0], [2]]))[:, None, None] if masked else None
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    actual, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert actual.shape == expected.shape == (2, queries, 6, 8)
    assert torch.allclose(actual, expected, atol=1e-6)


def test_different_prompts_are_found_once():
    requests = [request(0, [5, 6]), request(1, [7]), request(2, [5, 6]), request(3, [7])]
    prompts, which = different_prompts(requests)
    assert ([prompt.prompt_ids for prompt in prompts], which) == ([[5, 6], [7]], [0, 1, 0, 1])


def test_an_answer_ends_at_its_limit_or_at_a_stop_token_and_only_once():
    batch = new_batch([request(0, [5, 6], 2), request(1, [7], 3), request(2, [8], 9)], CPU)
    stops, found = torch.tensor([3]), []
    for number, tokens in enumerate([[10, 11, 12], [20, 21, 3], [30, 31, 32]]):
        batch.append(torch.tensor(tokens), -torch.tensor(tokens) / 10, number)
        found += batch.finish(stops)
    assert [(one.key[1], list(one.token_ids), list(one.versions), one.finish_reason) for one in found] == [
        (0, [10, 20], [0, 1], "length"), (2, [12, 3], [0, 1], "stop"), (1, [11, 21, 31], [0, 1, 2], "length")
    ]  # fmt: skip
    assert list(found[0].log_probs) == [-1.0, -2.0]


def test_rows_that_stay_lose_the_columns_that_only_the_others_needed():
    batch = new_batch([request(0, [5, 6, 7]), request(1, [8])], CPU)
    batch.append(torch.tensor([10, 11]), torch.zeros(2), 4)
    assert batch.positions(0).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert batch.mask(0).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    batch.take(torch.tensor([1]))
    assert (batch.ids.tolist(), batch.versions, batch.padded) == ([[8, 11]], [0, 4], False)
    assert batch.mask(0) is None
    batch.append(torch.tensor([12]), torch.zeros(1), 4)
    assert [list(answer.token_ids) for answer in batch.finish(torch.tensor([3]))] == [[11, 12]]


def test_a_joined_batch_keeps_each_rows_tokens_and_versions():
    batch, late = new_batch([request(0, [5])], CPU), new_batch([request(1, [6, 7, 8])], CPU)
    batch.append(torch.tensor([10]), torch.zeros(1), 1)
    batch.join(late)
    assert batch.mask(0).tolist() == [[0, 1, 1], [1, 1, 1]]
    batch.append(torch.tensor([11, 12]), torch.zeros(2), 2)
    (answer,) = batch.finish(torch.tensor([3]))
    assert (answer.key[1], list(answer.token_ids), list(answer.versions)) == (0, [10, 11], [1, 2])
    batch.take(torch.tensor([1]))
    assert (batch.ids.tolist(), batch.versions[3:]) == ([[6, 7, 8, 12]], [2])
