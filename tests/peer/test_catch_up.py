"""States after committed rounds: rolled forward from records or caught up from other members, with the same bits."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.fakes.grids import plan_of
from tests.fakes.memory_network import changed, stalled
from tests.fakes.rounds import signed
from tests.fakes.stateful import StatefulMember, play_rounds, stateful_swarm
from tests.fakes.swarm import Swarm, run_toml
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor

from shoal.peer.history.catch_up import roll_forward, rounds_after
from shoal.peer.state_transfer.acquire import LocalCandidates
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.averaging.results import RoundMean
from shoal.swarm.errors import LinkError, StateFileError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import KeptState

ELEMENTS = 3 * 4096 + 17
SAMPLES = 10


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


# Cut off ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "codec"), [(1, "int8"), (2, "int8"), (10, "int4")])
def test_a_member_that_was_cut_off_catches_up(tmp_path: Path, rounds: int, codec: str) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, codec), ELEMENTS) as (run, members):
            *others, late = members
            for member in members:
                member.keeper.needed_since = lambda: -1
            await play_rounds(members, 1, SAMPLES, contribution)
            late.cut_off()
            await play_rounds(others, rounds, SAMPLES, contribution)
            await late.come_back()
            run.network.log.clear()
            found = await late.missed(late.state.copy())
            assert (found.version, found.digest) == (others[0].version, others[0].digest)
            assert late.missed.rounds == rounds
            assert {step.blob.kind for step in run.network.log} == {"result"}
            late.hold_state(found)
            await play_rounds(members, 1, SAMPLES, contribution)
            # What it fetched it has itself now, and offers it as the others do.
            assert late.keeper.records.numbers() == others[0].keeper.records.numbers() == list(range(rounds + 2))
            assert results_offered(late) == results_offered(others[0]) == set(range(rounds + 2))

    run_virtual(main())


async def cut_off_for(rounds: int, run: Swarm, members: list[StatefulMember]) -> StatefulMember:
    """The last member, which lacks these rounds; the others have records of them, and no results in memory."""
    *others, late = members
    for member in members:
        member.keeper.needed_since = lambda: -1
    late.cut_off()
    await play_rounds(others, rounds, SAMPLES, contribution)
    await others[0].averager._stores.drop(*others[0].averager._stores)
    await others[1].averager._stores.drop(*others[1].averager._stores)
    await late.come_back()
    run.network.log.clear()
    return late


@pytest.mark.parametrize("outer", ["lamb", "lars"])
def test_steps_by_layers_are_the_same_for_members_and_for_who_catches_up(tmp_path: Path, outer: str) -> None:
    async def main() -> None:
        toml = run_toml(2 * SAMPLES, "int8") + f'[outer]\noptimizer = "{outer}"\nweight_decay = 0.1\n'
        async with stateful_swarm(tmp_path, 3, toml, ELEMENTS) as (run, members):
            late = await cut_off_for(2, run, members)
            assert (await late.missed(late.state.copy())).digest == members[0].digest
            assert late.missed.rounds == 2
            changed_by = members[0].state.anchor - late.initial.anchor
            assert bool(torch.isfinite(changed_by).all())
            assert float(changed_by.norm()) > 0

    run_virtual(main())


def test_caught_up_rounds_are_recorded_and_lead_from_the_start_to_the_same_state(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(1, run, members)
            await play_rounds(members[:2], 1, SAMPLES, contribution)
            assert (await late.missed(late.state.copy())).digest == members[0].digest
            assert late.missed.rounds == 2
            await asyncio.sleep(0.01)  # what is written beside
            late.keeper.needed_since = lambda: -1
            assert late.keeper.records.numbers() == [0, 1]
            found = roll_forward(late.initial.copy(), late.keeper.records, late.steps, 9)
            assert (found.version, found.digest) == (2, members[0].digest)

    run_virtual(main())


def test_rounds_that_are_more_bytes_than_a_state_are_not_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(8, run, members)
            with pytest.raises(LinkError, match="no fewer bytes than a state"):
                await late.missed(late.state.copy())
            assert run.network.log == []

    run_virtual(main())


def test_a_donor_with_other_bytes_is_named_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(2, run, members)
            liar = members[0].peer
            run.network.faults.append(changed("result", liar, lambda data: data[:-1] + bytes([data[-1] ^ 1])))
            found = await late.missed(late.state.copy())
            assert found.digest == members[0].digest
            assert f"{liar} has other bytes of round 0 than the committed ones" in caplog.text

    run_virtual(main())


def test_a_donor_that_stalls_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(2, run, members)
            run.network.faults.append(stalled("result", members[0].peer, 0))
            assert (await late.missed(late.state.copy())).digest == members[0].digest

    run_virtual(main())


def test_a_damaged_record_is_named_and_the_next_donor_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(2, run, members)
            damage(members[0].keeper.records.path(1))
            assert (await late.missed(late.state.copy())).digest == members[0].digest
            assert "00000001.safetensors" in caplog.text
            assert 1 not in results_offered(members[0]), "nobody is made to wait for it again"
            damage(members[1].keeper.records.path(0))
            damage(members[0].keeper.records.path(0))
            late.keeper.records.remove([0])
            with pytest.raises(LinkError, match=r"round 0|sent no chunk"):
                await late.missed(late.initial.copy())

    run_virtual(main())


def test_records_that_are_gone_everywhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (_, members):
            *others, late = members
            late.cut_off()
            await play_rounds(others, 5, SAMPLES, contribution)  # nothing was saved: three are kept
            assert others[0].keeper.records.numbers() == [2, 3, 4]
            await late.come_back()
            with pytest.raises(LinkError):
                await late.missed(late.state.copy())

    run_virtual(main())


def test_a_state_that_is_not_the_runs_is_not_caught_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(1, run, members)
            other = type(late.state).make(torch.ones(ELEMENTS), torch.zeros(1, ELEMENTS), 0)
            with pytest.raises(LinkError, match="was averaged on version 0"):
                await late.missed(other)

    run_virtual(main())


def test_a_record_of_another_history_is_not_taken_for_the_run_s(tmp_path: Path) -> None:
    """As after a host that lost its journal: the same run and key, but other rounds of the same numbers."""
    toml = run_toml(2 * SAMPLES, "int8")

    async def another_history() -> None:
        async with stateful_swarm(tmp_path / "other", 2, toml, ELEMENTS) as (_, members):
            await play_rounds(members, 2, SAMPLES, lambda seed: contribution(seed + 1))
            records.extend(members[0].keeper.records.path(number) for number in (0, 1))

    async def main() -> None:
        async with stateful_swarm(tmp_path / "this", 3, toml, ELEMENTS) as (run, members):
            late = await cut_off_for(2, run, members)
            late.keeper.records.folder.mkdir(parents=True)
            for record in records:
                shutil.copy(record, late.keeper.records.folder)
                late.keeper.records.open(int(record.stem))  # nothing is wrong with it by itself
            found = await late.missed(late.state.copy())
            assert (found.version, found.digest) == (members[0].version, members[0].digest)

    records: list[Path] = []
    run_virtual(another_history())
    run_virtual(main())


def damage(record: Path) -> None:
    whole = bytearray(record.read_bytes())
    whole[-5] ^= 1
    record.write_bytes(whole)


def results_offered(member: StatefulMember) -> set[int]:
    return {blob.number for blob in member.endpoint.blobs if blob.kind == "result"}


# From one's own records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_restart_rolls_forward_from_an_earlier_state(tmp_path: Path, behind: int) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 2, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (_, members):
            one = members[0]
            one.keeper.needed_since = lambda: 1
            await play_rounds(members, 6, SAMPLES, contribution)
            assert one.keeper.records.numbers() == [2, 3, 4, 5]
            before = one.states[6 - behind].copy()
            found = roll_forward(before, one.keeper.records, one.steps, 9)
            assert (found.version, found.digest) == (6, one.digest)
            assert found.digest == AnchorState.of(found.values, 6).digest
            assert before.is_current == (behind == 0), "it was overwritten"
            upto = roll_forward(one.states[3].copy(), one.keeper.records, one.steps, 4)
            assert upto.digest == one.states[4].digest, "no further than the run is"

    run_virtual(main())


def test_it_rolls_forward_up_to_the_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 2, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (_, members):
            one = members[0]
            one.keeper.needed_since = lambda: -1
            await play_rounds(members, 4, SAMPLES, contribution)
            damage(one.keeper.records.path(2))
            assert roll_forward(one.initial.copy(), one.keeper.records, one.steps, 9).digest == one.states[2].digest
            assert "00000002.safetensors" in caplog.text
            one.keeper.records.remove([1])
            assert roll_forward(one.initial.copy(), one.keeper.records, one.steps, 9).digest == one.states[1].digest
            one.keeper.records.path(0).write_bytes(b"nothing")
            before = one.initial.copy()
            assert roll_forward(before, one.keeper.records, one.steps, 9) is before
            assert torch.equal(before.values, one.initial.values)

    run_virtual(main())


def test_a_round_that_fails_midway_leaves_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the anchor is of the next version then, which must not pass for either."""

    async def main() -> None:
        async with stateful_swarm(tmp_path, 2, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (_, members):
            one = members[0]
            one.keeper.needed_since = lambda: -1
            await play_rounds(members, 3, SAMPLES, contribution)
            state = one.initial.copy()
            real, rounds = RoundMean.pieces, 0

            def pieces(self: RoundMean) -> Iterator[tuple[int, int, Tensor]]:
                nonlocal rounds
                rounds += 1
                for start, stop, values in real(self):
                    half = (start + stop) // 2
                    yield start, half, values[: half - start]
                    if rounds == 2:
                        raise StateFileError("the disk is gone")
                    yield half, stop, values[half - start :]

            monkeypatch.setattr(RoundMean, "pieces", pieces)
            with pytest.raises(StateFileError, match="the disk is gone"):
                roll_forward(state, one.keeper.records, one.steps, 9)
            assert rounds == 2
            assert not state.is_current
            assert state.current is None
            assert state.read(0, 1) is None
            own = LocalCandidates(
                None,
                one.initial.copy,
                lambda state, newest: roll_forward(state, one.keeper.records, one.steps, newest),
                is_first=True,
            )
            rounds = 0
            assert own.find(3, one.digest) is None
            assert own.newest is None
            assert own.kept_states() == (KeptState(anchor_version=0, digest=one.initial.digest),)
            rounds = 2
            found = own.find(3, one.digest)
            assert found is not None, "from the beginning again"
            assert torch.equal(found.values, one.state.values)

    run_virtual(main())


def test_rounds_that_were_caught_up_before_an_error_count(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            late = await cut_off_for(2, run, members)
            state = late.state.copy()
            damage(members[0].keeper.records.path(1))
            damage(members[1].keeper.records.path(1))
            with pytest.raises(LinkError):
                await late.missed(state)
            assert not state.is_current
            found = state.current
            assert found is not None
            assert (found.version, found.digest) == (1, members[0].states[1].digest)

    run_virtual(main())


ALGORITHMS = {
    "diloco": run_toml(4 * SAMPLES, "auto"),
    "adamw": run_toml(4 * SAMPLES, "int8") + '[outer]\noptimizer = "adamw"\nlr = 0.01\n',
    "virtual_batch": run_toml(4 * SAMPLES, "float16", "virtual_batch")
    + '[outer]\noptimizer = "adamw"\nlr = 0.01\n[schedule]\nkind = "cosine"\nwarmup_tokens = 60\n',
    "sparseloco": run_toml(4 * SAMPLES, "topk", "sparseloco"),
    "overlap": run_toml(4 * SAMPLES, "int8", overlap=True),
    "grid": run_toml(4 * SAMPLES, "int8", group_size=2),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_round_of_a_run_can_be_replayed(tmp_path: Path, algorithm: str) -> None:
    toml = ALGORITHMS[algorithm].replace("seed = 0", "seed = 0\ntokens = 400")

    async def main() -> None:
        async with stateful_swarm(tmp_path, 4, toml, ELEMENTS) as (_, members):
            for member in members:
                member.keeper.needed_since = lambda: -1
            await play_rounds(members, 4, SAMPLES, contribution)
            if algorithm == "grid":
                plan = members[0].keeper.records.open(0).verdict.plan
                assert plan is not None
                assert plan.columns
            for member in members:
                digests = [state.digest for state in member.states]
                assert len(set(digests)) == 5
                for number, state in enumerate(member.states[:-1]):
                    record = member.keeper.records.open(number)
                    assert record.verdict.plan is not None
                    assert record.verdict.plan.state_digest == state.digest
                    mean = RoundMean(member.steps.recorded(member.keeper.records, record.verdict))
                    after = member.steps.apply(state.copy(), record.verdict, mean)
                    assert after.digest == digests[number + 1]
                assert (
                    roll_forward(member.initial.copy(), member.keeper.records, member.steps, 9).digest == member.digest
                )

    run_virtual(main())


def test_void_parts_are_replayed(tmp_path: Path) -> None:
    async def main() -> None:
        async with stateful_swarm(tmp_path, 3, run_toml(3 * SAMPLES, "int8"), ELEMENTS) as (run, members):
            for step in (members[1].peer, members[2].peer):
                run.network.faults += [stalled("result", step, 2), stalled("held", step, 2)]
            run.network.faults += [stalled("contribution", one.peer, 2) for one in members]
            await play_rounds(members, 1, SAMPLES, contribution)
            for member in members:
                verdict = member.keeper.records.open(0).verdict
                assert None in verdict.digests
                assert any(verdict.digests)
                assert (
                    roll_forward(member.initial.copy(), member.keeper.records, member.steps, 9).digest == member.digest
                )

    run_virtual(main())


# The way from a state -------------------------------------------------------------------------------------------


def round_on(number: int, version: int, digest: bytes = b"") -> Verdict:
    """A committed round on a state of that version, whose digest follows from the version unless one is given."""
    plan = plan_of([1, 1], [[0, 1]], ELEMENTS)
    digest = digest or digest_of(version)
    plan = plan.model_copy(update={"round": number, "anchor_version": version, "state_digest": digest})
    return signed(
        round=number, committed=True, anchor_version=version + 1, plan=plan, digests=(None,) * len(plan.parts)
    )


def back_to(number: int, version: int) -> Verdict:
    return signed(round=number, committed=False, anchor_version=version)


def digest_of(version: int, branch: int = 0) -> bytes:
    return bytes([version, branch]) * 16


def rounds_of(verdicts: list[Verdict]) -> list[int]:
    return [verdict.round for verdict in verdicts]


def test_the_way_leads_over_committed_rounds_only() -> None:
    chain = [round_on(0, 0), back_to(1, 1), round_on(2, 1), round_on(3, 2), back_to(4, 3)]
    assert rounds_of(rounds_after(chain, 0, digest_of(0))) == [0, 2, 3]
    assert rounds_of(rounds_after(reversed(chain), 1, digest_of(1))) == [2, 3]
    assert rounds_after(chain, 3, digest_of(3)) == []
    assert rounds_after(chain, 1, digest_of(1, 1)) == [], "another state than the run's"
    assert rounds_of(rounds_after(chain[:2] + chain[3:], 0, digest_of(0))) == [0], "one is missing"


def test_the_way_leaves_out_what_the_run_has_undone() -> None:
    other = [round_on(6, 2), round_on(7, 3, digest_of(3, 1))]
    chain = [round_on(0, 0), round_on(1, 1), round_on(2, 2), round_on(3, 3), back_to(4, 2), back_to(5, 2)]
    assert rounds_of(rounds_after(chain, 0, digest_of(0))) == [0, 1]
    assert rounds_of(rounds_after(chain + other, 0, digest_of(0))) == [0, 1, 6, 7]
    assert rounds_of(rounds_after(chain + other, 2, digest_of(2))) == [6, 7]
    assert rounds_after(chain + other, 3, digest_of(3)) == [], "made by a round that was undone"
    assert rounds_of(rounds_after(chain + other, 3, digest_of(3, 1))) == [7]
    # The same where nobody saw the verdicts that went back.
    assert rounds_of(rounds_after(chain[:4] + other, 0, digest_of(0))) == [0, 1, 6, 7]
