"""Robust means: what a minority can do to them, and that the order of operations is fixed."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression.registry import get_codec
from shoal.compression.robust_mean import (
    LENGTHENING,
    TRIMMED_SHARE,
    Method,
    RobustMean,
    clipped_mean,
    mean_of_groups,
    norms_of,
    sorted_keys,
    trimmed_mean,
)

METHODS: list[Method] = ["clip", "trimmed"]
FLOAT32 = get_codec("float32")
N = 300

Mean = Callable[[Sequence[Tensor], Sequence[float], Sequence[float]], Tensor]


def mean_by(method: Method) -> Mean:
    return clipped_mean if method == "clip" else trimmed_mean


def drawn(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def made(method: Method, sent: Sequence[tuple[Tensor, float, int]], codec: str = "float32") -> Tensor:
    """``sent``: values, weight and row of each."""
    work, n = RobustMean(sent[0][0].numel(), method), sent[0][0].numel()
    for values, weight, row in sent:
        work.add_packed(get_codec(codec), get_codec(codec).encode(values), weight, row=row)
    packed = torch.empty(FLOAT32.packed_bytes(n), dtype=torch.uint8)
    work.encode(FLOAT32, 1.0, torch.empty(n), packed)
    return FLOAT32.decode(packed, n)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 9)), min_size=1, max_size=9))
def test_a_trimmed_mean_is_that_of_the_middle_of_the_weight(values: list[tuple[int, int]]) -> None:
    quarters = sorted(value for value, weight in values for _ in range(4 * weight))
    cut = int(TRIMMED_SHARE * len(quarters))
    middle = quarters[cut : len(quarters) - cut]
    found = trimmed_mean([torch.tensor([float(value)]) for value, _ in values], [float(w) for _, w in values])
    assert float(found) == pytest.approx(sum(middle) / len(middle), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    honest=st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 20)), min_size=1, max_size=8),
    lies=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=3),
)
def test_less_than_a_quarter_of_the_weight_cannot_move_a_trimmed_mean_out_of_the_honest_values(
    honest: list[tuple[float, int]], lies: list[float]
) -> None:
    total = float(sum(weight for _, weight in honest))
    weights = [float(weight) for _, weight in honest] + [0.33 * total / len(lies)] * len(lies)
    values = [torch.tensor([one]) for one in [*(value for value, _ in honest), *lies]]
    found = float(trimmed_mean(values, weights))
    low, high = min(value for value, _ in honest), max(value for value, _ in honest)
    assert low - 1e-4 <= found <= high + 1e-4


@pytest.mark.parametrize(("groups", "attacked"), [(3, 1), (4, 1), (8, 2)])
def test_a_minority_of_groups_cannot_move_their_mean_out_of_the_values_of_the_others(
    groups: int, attacked: int
) -> None:
    """With values far above the others' norm as well as within it. These may be shortened, as far as norms differ."""
    honest = [drawn(one) for one in range(groups - attacked)]
    low, high = torch.stack(honest).amin(0), torch.stack(honest).amax(0)
    for lie in (torch.full((N,), 1e30), torch.full((N,), 1.1), -honest[0], torch.zeros(N)):
        found = mean_of_groups([*(one.clone() for one in honest), *(lie.clone() for _ in range(attacked))])
        assert ((low - 1e-5 <= found) & (found <= high + 1e-5)).all()


def test_more_attacked_groups_move_their_mean_by_the_usual_norm_alone() -> None:
    """Three of seven bring the same direction: more than are trimmed."""
    honest = [drawn(one) for one in range(4)]
    found = mean_of_groups([*(one.clone() for one in honest), *(torch.full((N,), 1e6) for _ in range(3))])
    assert float(found.norm()) < 1.6 * max(norms_of(torch.stack(honest)))


def test_the_mean_of_equal_groups_is_theirs() -> None:
    values = drawn(1)
    assert mean_of_groups([values.clone() for _ in range(3)]).tolist() == values.tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lie", [1e30, -10.0, float(torch.finfo(torch.float32).max)])
def test_two_of_eight_do_not_move_a_mean_far(method: Method, lie: float) -> None:
    shared = drawn(100)
    honest = [shared + 0.5 * drawn(seed) for seed in range(6)]
    target = sum(honest, torch.zeros(N)) / 6
    liars = [torch.full((N,), lie) if lie > 0 else lie * shared for _ in range(2)]
    found = mean_by(method)([*honest, *liars], [1.0] * 8, [1.0] * 8)
    plain = float(((sum(honest) + sum(liars)) / 8 - target).norm())
    assert float((found - target).norm()) < 0.6 * float(target.norm()) < plain


@pytest.mark.parametrize("method", METHODS)
def test_alike_contributions_of_any_weight_are_averaged(method: Method) -> None:
    values = drawn(1)
    assert torch.allclose(mean_by(method)([values] * 4, [1.0, 1.0, 4.0, 20.0], [1.0] * 4), values, atol=1e-6)


def test_longer_work_of_more_weight_is_not_clipped() -> None:
    """Five times as long at twenty times the weight, as ``usual_norm`` says, and in one direction."""
    values, weights = drawn(1), [1.0, 1.0, 4.0, 20.0]
    usual = [weight**0.6 for weight in weights]
    brought = [values * norm for norm in usual]
    expected = values * (sum(w * norm for w, norm in zip(weights, usual, strict=True)) / sum(weights))
    assert torch.allclose(clipped_mean(brought, weights, usual), expected, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=7),
    power=st.sampled_from([0, 1, 12]),
)
def test_no_mean_is_longer_than_its_bound(method: Method, seed: int, weights: list[int], power: int) -> None:
    sizes = random.Random(seed)
    values = [drawn(seed + i, 40) * sizes.random() ** power for i in range(len(weights))]
    usual = [sizes.random() + 0.01 for _ in weights]
    mean = mean_by(method)(values, [float(one) for one in weights], usual)
    triangle = sum(w * float(one.norm()) for w, one in zip(weights, values, strict=True)) / sum(weights)
    assert float(mean.norm()) <= LENGTHENING[method] * triangle * 1.001


@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_do_not_depend_on_threads_or_memory(method: Method) -> None:
    n, before, found = 2**17 + 5, torch.get_num_threads(), []
    values = [drawn(seed, n) for seed in range(5)]
    for threads, shift in [(1, 0), (2, 0), (3, 1), (1, 7)]:
        moved = [torch.cat([torch.zeros(shift), one])[shift:] for one in values]
        torch.set_num_threads(threads)
        found.append(mean_by(method)(moved, [3.0, 1.0, 7.0, 11.0, 2.0], [1.0] * 5))
    torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_norm_is_added_up_in_one_order() -> None:
    """In float64, by halves: the same sum by hand, term by term."""
    values = drawn(3, 1001)
    squares = [float(one) ** 2 for one in values]
    while len(squares) > 1:
        half = len(squares) // 2
        rest = squares[half : len(squares) - half]
        squares = [a + b for a, b in zip(squares[:half], squares[len(squares) - half :], strict=True)] + rest
    assert norms_of(torch.stack([values, drawn(4, 1001), values]))[::2] == [squares[0] ** 0.5] * 2


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 31, 128])
def test_members_are_sorted_value_by_value(rows: int) -> None:
    keys = torch.randint(-(2**50), 2**50, (rows, 40), generator=torch.Generator().manual_seed(rows))
    assert torch.equal(torch.stack(sorted_keys(list(keys.clone()))), keys.sort(dim=0).values)


def test_equal_values_are_in_the_members_order_and_there_is_one_zero() -> None:
    """Whose weight is on the edge then is no matter of the sort."""
    values = [torch.tensor([0.0, -1.5, 3.0]), torch.tensor([-0.0, -1.5, -3.0]), torch.tensor([0.0, -1.5, 0.5])]
    mean = trimmed_mean(values, [1.0, 2.0, 5.0])
    assert mean.tolist() == trimmed_mean([abs(values[0]) * values[0].sign(), *values[1:]], [1.0, 2.0, 5.0]).tolist()
    assert mean[0] == 0.0
    assert mean[1] == -1.5


@pytest.mark.parametrize("method", METHODS)
def test_a_row_counts_as_its_mean(method: Method) -> None:
    """The same mean whether a row comes member by member or as its mean, here without a loss."""
    values, weights = [drawn(seed) for seed in range(6)], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    direct = made(method, [(values[i], weights[i], i // 3) for i in range(6)])
    rows = [mean_by(method)(values[at : at + 3], weights[at : at + 3], [1.0] * 3) for at in (0, 3)]
    assert torch.equal(made(method, [(rows[0], 6.0, 0), (rows[1], 15.0, 1)]), direct)


@pytest.mark.parametrize("codec", ["int8", "sign", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_values_are_those_that_were_packed(method: Method, codec: str) -> None:
    values = [drawn(seed) for seed in range(5)]
    sent = [get_codec(codec).decode(get_codec(codec).encode(one), N) for one in values]
    expected = mean_by(method)(sent, [1.0] * 5, [1.0] * 5)
    assert torch.equal(made(method, [(one, 1.0, 0) for one in values], codec), expected)
