import torch

from rltrain.algorithms import uniform_draws
from rltrain.algorithms.draws import stream_draws

# The first output of SplitMix64 from state 0, as printed by its authors' reference program.
FIRST_OUTPUT = 0xE220A8397B1DCDAF


def splitmix(state):
    """Return SplitMix64's output for `state`, computed with Python integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def draws(*lengths, seed=0, step=0):
    return uniform_draws(torch.tensor(lengths, dtype=torch.int64), seed=seed, step=step)


def test_the_oracle_is_splitmix64():
    assert splitmix(0) == FIRST_OUTPUT


def test_a_draw_is_four_hashes_in_a_chain():
    for seed, step in ((0, 0), (42, 7), (-1, 3), (2**63, 2**62), (2**64 + 5, 10**6)):
        expected = [
            (splitmix(splitmix(splitmix(splitmix(seed) + step) + row) + token) >> 11) / 2**53
            for row, length in enumerate((3, 0, 2, 1))
            for token in range(length)
        ]
        assert draws(3, 0, 2, 1, seed=seed, step=step).tolist() == expected


def test_a_draw_of_a_stream_is_two_hashes_in_a_chain():
    streams, tokens = (0, 0, 7, 2**63 - 1), (0, 1, 0, 10**6)
    expected = [
        (splitmix(splitmix(stream) + token) >> 11) / 2**53 for stream, token in zip(streams, tokens, strict=True)
    ]
    assert stream_draws(torch.tensor(streams), torch.tensor(tokens)).tolist() == expected


def test_a_few_values_never_change():
    assert draws(2, 1, seed=1, step=2).tolist() == [0.4586366009457423, 0.7816110699249976, 0.2756877083649403]


def test_the_result_is_flat_float64_in_row_order():
    drawn = draws(2, 0, 3)
    assert drawn.shape == (5,)
    assert drawn.dtype == torch.float64
    for nothing in (draws(), draws(0, 0)):
        assert nothing.shape == (0,)
        assert nothing.dtype == torch.float64


def test_a_draw_does_not_depend_on_the_lengths_of_other_rows():
    short, long = draws(2, 4, 1, seed=3), draws(9, 6, 0, 5, seed=3)
    assert torch.equal(short[:2], long[:2])
    assert torch.equal(short[2:6], long[9:13])


def test_a_draw_depends_on_each_of_its_four_keys():
    here = draws(4, 4, seed=5, step=6)
    assert len(set(here.tolist())) == 8  # draws differ between rows and between tokens
    for other in (draws(4, 4, seed=6, step=6), draws(4, 4, seed=5, step=7), draws(4, 4, seed=6, step=5)):
        assert not set(here.tolist()) & set(other.tolist())


def chi_square(numbers, bins=100):
    counts = torch.histc(numbers, bins=bins, min=0, max=1)
    expected = len(numbers) / bins
    return ((counts - expected).square() / expected).sum().item()


def test_draws_are_uniform_and_neighbours_by_any_key_are_independent():
    rows, tokens = 200, 500
    field = draws(*[tokens] * rows).view(rows, tokens)
    assert field.min() >= 0
    assert field.max() < 1
    # the chi-square distribution with 99 degrees of freedom has mean 99 and standard deviation 14
    assert 50 < chi_square(field.flatten()) < 160
    later = draws(*[tokens] * rows, step=1).view(rows, tokens)
    other = draws(*[tokens] * rows, seed=1).view(rows, tokens)
    for one, two in ((field[1:], field[:-1]), (field[:, 1:], field[:, :-1]), (field, later), (field, other)):
        correlation = torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]
        assert correlation.abs() < 0.015  # the correlation has the standard deviation 1 / sqrt(100 000) = 0.003
        assert 50 < chi_square((one + two).remainder(1).flatten()) < 160
