"""The account of memory: what is counted where, and at which moment most is there."""

from typing import Any

import pytest

from shoal.swarm.memory_account import MemoryAccount, MemoryItem, account_of
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

INT8 = (1024 + 4) / 4096
"""Of float32 values: codes of blocks of 1024, each with a scale."""


def run_file(top: str = "", sections: str = "") -> RunFile:
    return parse_run_file(f'{top}\n[run]\nname = "x"\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n{sections}')


def values(run: RunFile, **options: Any) -> dict[str, float]:
    return {item.name: item.values for item in account_of(run, **options).items}


def test_the_moment_with_most_counts() -> None:
    account = MemoryAccount(
        [
            MemoryItem("always", "device", 1.0),
            MemoryItem("in local work", "device", 2.0, ("work",)),
            MemoryItem("in a round", "host", 5.0, ("exchange",)),
            MemoryItem("at a join", "host", 3.0, ("join",)),
        ]
    )
    demand = account.demand()
    assert (demand.device, demand.host) == (3.0, 5.0)
    assert demand.shared == 6.0, "what is in different moments is not added up"
    assert account.values("work", "device", "host") == 3.0


def test_a_member_keeps_one_state_and_one_residual() -> None:
    account = account_of(run_file())
    assert account.values("work", "device") == 1 + 1 + 2
    at_rest = 2 + 1
    assert account.values("work", "host") == pytest.approx(at_rest + INT8)
    assert account.values("exchange", "device") == 1 + 2, "gradients are gone before a round"
    assert account.values("exchange", "host") == pytest.approx(at_rest + 1 / 2 + 3 * INT8)


def test_a_residual_may_take_half() -> None:
    found = values(run_file('averaging.residual_precision = "bfloat16"'))
    assert (found["residual"], values(run_file())["residual"]) == (0.5, 1.0)


def test_more_peers_have_smaller_parts() -> None:
    assert values(run_file(), peers=4)["loss of encoding the means of our part"] == 0.25


@pytest.mark.parametrize(("optimizer", "slots"), [("sgd", 0), ("nesterov", 1), ("adamw", 2), ("lars", 1), ("lamb", 2)])
def test_outer_optimizers_keep_what_they_keep(optimizer: str, slots: int) -> None:
    found = values(run_file(sections=f'[outer]\noptimizer = "{optimizer}"'))
    assert found["outer optimizer"] == slots


@pytest.mark.parametrize(
    ("inner", "slots"),
    [
        ('optimizer = "adamw"', 2),
        ('state = "int8"', 65 / 128),
        ('optimizer = "sgd"', 0),
        ('optimizer = "sgd"\nmomentum = 0.9', 1),
        ('optimizer = "muon"', 2),
        ('optimizer = "adafactor"', 1 / 64),
    ],
)
def test_inner_optimizers_keep_what_they_keep(inner: str, slots: int) -> None:
    assert values(run_file(sections=f"[inner]\n{inner}"))["inner optimizer"] == slots


def test_with_overlap_training_goes_on_in_a_round() -> None:
    plain, overlap = account_of(run_file()), account_of(run_file("averaging.overlap = true"))
    # Gradients, and the parameters that were contributed.
    assert overlap.values("exchange", "device") == plain.values("exchange", "device") + 1 + 1
    copied = 2  # checkpoints have a copy of the inner optimizer, which steps on while they are written
    assert overlap.values("work", "host") == plain.values("work", "host") + copied
    assert overlap.values("exchange", "host") == plain.values("exchange", "host") + copied


def test_accumulated_gradients_need_no_inner_optimizer() -> None:
    for sections in ("", "[pipeline]\nmicro_batch = 1"):
        account = account_of(run_file('algorithm = "virtual_batch"', sections))
        assert account.values("work", "device") == 3
        assert account.values("exchange", "device") == 2


def test_low_precision_is_trained_on_float32_copies() -> None:
    found = values(run_file(), value_bytes=2)
    assert (found["parameters"], found["gradients"], found["inner optimizer"]) == (0.5, 1, 2)
    assert found["float32 masters"] == 1
    assert "float32 masters" not in values(run_file())
    found = values(run_file('algorithm = "virtual_batch"'), value_bytes=2)
    assert (found["parameters"], found["gradients"], found["sum of gradients"]) == (0.5, 0.5, 1)
    assert "float32 masters" not in found


@pytest.mark.parametrize(("codec", "share"), [('"float32"', 1.0), ('"int8"', INT8), ('"auto"', 1 / 8)])
def test_encoded_bytes_are_those_of_the_codec(codec: str, share: float) -> None:
    found = values(run_file(f"averaging.codec = {codec}"))
    assert found["results of the last round"] == found["results of this round"]
    assert found["results of this round"] == pytest.approx(share, rel=0.05)


def test_means_of_sparse_contributions_are_larger() -> None:
    few, many = (values(run_file('averaging.codec = "topk"'), peers=peers) for peers in (2, 8))
    assert few["results of this round"] < many["results of this round"] < 0.5
