"""Audits of owners in secure rounds: lies are found, honest owners are never, and evidence cannot be made up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.fakes.audited_member import Audited
from tests.fakes.memory_network import Step
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual, until
from torch import Tensor

from shoal.swarm.averaging.auditor import Auditor, _CommittedPart
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.chunk_judge import RunFacts, Shown, Subject, judge, make_evidence, masked_round
from shoal.swarm.averaging.masked_chunks import checked_lanes, write_proofs
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.secure_exchange import SecureExchange
from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.errors import BlobUnavailable, WireError
from shoal.swarm.protocol.evidence import unpack_evidence
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.secure import (
    Consent,
    KeysStatement,
    MaskedPartStatement,
    SecureKeys,
    SecureStage,
    SetsStatement,
)
from shoal.swarm.protocol.statements import PlanStatement, RoundName, name_of, plan_digest
from shoal.swarm.protocol.verdict_chain import chain_hash, signed_bytes
from shoal.swarm.secure.groups import MaskingGroup
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.round_keys import RoundKeys, seed_digest
from shoal.swarm.secure.shown_opening import ShownOpening
from shoal.swarm.secure.sum_names import keys_digest, name_of_part, names_of_sums

ELEMENTS = 14 * 4096 + 17
"""Three chunks a part, or so, for five members."""


def toml(tokens: int, codec: str = "int8", group: int = 8, robust: str = "none") -> str:
    secure = f"[averaging]\nsecure = true\nsecure_group = {group}\n"
    return run_toml(tokens, codec, robust=robust).replace("[averaging]\n", secure) + "[audit]\nshare = 1.0\n"


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 0.003


def stage(run: Swarm) -> int:
    board = run.coordinator.machine.scope.round.board
    return -1 if board is None else int(board.stage)


def auditor_of(member: SimMember) -> Auditor:
    assert member.averager.auditor is not None
    return member.averager.auditor


async def play_rounds(run: Swarm, rounds: int = 2) -> list[Verdict]:
    """Play rounds with time for audits after each; return their verdicts."""
    verdicts = []
    for number in range(rounds):
        brought = [contribution(100 * number + index) for index in range(len(run.members))]
        outcomes = await together(*[run[index].play(brought[index], 10 + index) for index in range(len(run.members))])
        assert all(isinstance(one, Committed) for one in outcomes)
        await asyncio.sleep(5.0)
        verdicts += [one.verdict for one in outcomes[:1] if isinstance(one, Committed)]
    return verdicts


def found(run: Swarm) -> set[tuple[str, str]]:
    return {(one.word, one.maker) for member in run.members for one in member.found}  # type: ignore[attr-defined]


SHAPES = pytest.mark.parametrize(
    ("members", "group", "robust", "codec"),
    [(5, 8, "none", "int8"), (9, 4, "none", "int4"), (12, 4, "trimmed", "int8")],
)


@SHAPES
def test_honest_owners_are_accused_of_nothing(members: int, group: int, robust: str, codec: str) -> None:
    async def main() -> None:
        tokens = sum(10 + index for index in range(members))
        async with swarm(members, toml(tokens, codec, group, robust), ELEMENTS, make=Audited) as run:
            await play_rounds(run)
            assert all(auditor_of(one).audited >= 2 for one in run.members)
            assert not any(auditor_of(one).accused(2) for one in run.members)
            assert not found(run)

    run_virtual(main())


@pytest.mark.parametrize("moment", [SecureStage.MASKS, SecureStage.UNMASK])
def test_means_without_a_member_that_died_are_right(moment: SecureStage) -> None:
    """Before it sent anything, so its pairwise masks are opened; or after the sets, so its seed is."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS, make=Audited) as run, asyncio.TaskGroup() as tasks:
            victim = run[2]
            doomed = tasks.create_task(victim.play(contribution(9), 10))

            async def kill() -> None:
                await until(lambda: stage(run) >= moment, 0.005)
                victim.die()
                doomed.cancel()

            tasks.create_task(kill())
            alive = [one for one in run.members if one is not victim]
            outcomes = await together(*[one.play(contribution(run.index(one)), 10) for one in alive])
            first = outcomes[0]
            assert isinstance(first, Committed)
            signed = first.verdict.signed_sets
            assert signed is not None
            assert (2 in max(signed.sets)) == (moment == SecureStage.UNMASK)
            await asyncio.sleep(5.0)
            assert all(auditor_of(one).audited for one in alive)
            assert not found(run)

    run_virtual(main())


def test_means_without_a_group_that_could_not_be_opened_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dealer's wrong shares close its group; of that nothing is shown but the name of its sum."""

    async def main() -> None:
        deal = RoundKeys.deal

        def dealt(self: RoundKeys, group: MaskingGroup) -> dict[int, bytes]:
            shares = deal(self, group)
            if self.member == 5:
                return {one: (bytes(1) + bytes(range(32))) * (len(each) // 33) for one, each in shares.items()}
            return shares

        monkeypatch.setattr(RoundKeys, "deal", dealt)
        async with swarm(8, toml(108, group=4), ELEMENTS, make=Audited) as run:
            (verdict,) = await play_rounds(run, 1)
            assert verdict.signed_sets is not None
            assert set(verdict.signed_sets.sets) == {tuple(range(8))}
            assert len(run[0].averager._stores[0].header(0).included) == 4
            assert all(auditor_of(one).audited and not auditor_of(one).accused(1) for one in run.members)
            assert not found(run)

    run_virtual(main())


@SHAPES
def test_an_owner_that_makes_a_mean_up_is_found(
    members: int, group: int, robust: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By less than its own contribution could do, and well within the range of the lanes; it is right about its
    members and signs all as usual."""

    async def main() -> None:
        real, tokens = SecureExchange._encoded, sum(10 + index for index in range(members))

        def encoded(self: SecureExchange, chunk: int, mean: Tensor, header: ChunkHeader) -> ReducedChunk:
            return real(self, chunk, mean + 1e-4 if self.signer.peer == liar.peer else mean, header)

        monkeypatch.setattr(SecureExchange, "_encoded", encoded)
        async with swarm(members, toml(tokens, codec, group, robust), ELEMENTS, make=Audited) as run:
            liar = run[1]
            await play_rounds(run)
            assert found(run) == {("guilty", liar.peer)}
            judged = [one for member in run.members for one in member.found]  # type: ignore[attr-defined]
            assert all(0 < one.excess < 1 for one in judged)

    run_virtual(main())


def test_an_owner_that_makes_up_more_than_it_could_bring_is_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the run goes back behind its mean."""

    async def main() -> None:
        real = SecureExchange._encoded

        def encoded(self: SecureExchange, chunk: int, mean: Tensor, header: ChunkHeader) -> ReducedChunk:
            return real(self, chunk, mean + 0.01 if self.signer.peer == liar.peer else mean, header)

        monkeypatch.setattr(SecureExchange, "_encoded", encoded)
        async with swarm(5, toml(60), ELEMENTS, make=Audited) as run:
            liar = run[1]
            await play_rounds(run, 1)
            judged = [one for member in run.members for one in member.found]  # type: ignore[attr-defined]
            assert {one.maker for one in judged} == {liar.peer}
            assert all(2 < one.excess < 20 for one in judged)

    run_virtual(main())


def test_an_owner_that_leaves_a_chunk_of_a_member_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that the member is in the mean, and sums without what it has brought to one chunk: it knows the sum of
    the others, as it is a member itself."""

    async def main() -> None:
        real = SecureExchange._encoded

        def encoded(self: SecureExchange, chunk: int, mean: Tensor, header: ChunkHeader) -> ReducedChunk:
            if self.signer.peer == liar.peer:
                start, stop = self.store.bounds(chunk)
                mean = mean - contribution(4)[start:stop] / 5
            return real(self, chunk, mean, header)

        monkeypatch.setattr(SecureExchange, "_encoded", encoded)
        async with swarm(5, toml(60), ELEMENTS, make=Audited) as run:
            liar = run[1]
            await play_rounds(run, 1)
            assert found(run) == {("guilty", liar.peer)}

    run_virtual(main())


def test_an_owner_that_shows_nothing_is_accused_and_not_convicted() -> None:
    async def main() -> None:
        async with swarm(5, toml(60), ELEMENTS, make=Audited) as run:
            hiding = run[1]

            async def hide(step: Step, payload: bytes) -> bytes:
                return b"" if step.blob.kind == "included" and step.holder == hiding.peer else payload

            run.network.faults.append(hide)
            await play_rounds(run, 1)
            assert not found(run)
            accusing = [one for one in run.members if one is not hiding]
            assert all(auditor_of(one).accused(1) == {hiding.peer} for one in accusing)

    run_virtual(main())


def test_who_does_not_train_is_shown_nothing() -> None:
    """Sums of groups are for the members, whom the run has let in to train."""

    async def main() -> None:
        async with swarm(5, toml(60), ELEMENTS, make=Audited) as run:
            await play_rounds(run, 1)
            kept = run[0].averager._inclusions[0]
            kept.begin_reading(run[1].endpoint.key)
            with pytest.raises(BlobUnavailable):
                kept.begin_reading(b"g" * 32)
            run[0].client._roster[run[2].peer] = (
                run[0].client._roster[run[2].peer].model_copy(update={"role": "observer"})
            )
            with pytest.raises(BlobUnavailable):
                kept.begin_reading(run[2].endpoint.key)

    run_virtual(main())


def test_a_mean_of_other_sums_than_were_signed_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is what auditors compare with, so without it nobody could show anything."""

    async def main() -> None:
        real = SecureExchange._encoded

        def encoded(self: SecureExchange, chunk: int, mean: Tensor, header: ChunkHeader) -> ReducedChunk:
            return real(self, chunk, mean, replace(header, seal=b"n" * 32) if self.signer.peer == liar.peer else header)

        monkeypatch.setattr(SecureExchange, "_encoded", encoded)
        async with swarm(5, toml(60), ELEMENTS, make=Audited) as run:
            liar = run[1]
            (verdict,) = await play_rounds(run, 1)
            assert verdict.plan is not None
            void = {part.owner for part, digest in zip(verdict.plan.parts, verdict.digests, strict=True) if not digest}
            assert void == {1}
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert given.failed == (liar.peer,)

    run_virtual(main())


@pytest.mark.parametrize("lie", ["another plan", "another part", "nobody", "two roots", "other bytes"])
def test_what_its_member_has_not_signed_for_this_part_is_in_no_sum(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """A member that sends such chunks is left out, as if it had sent nothing: nobody could show them afterwards."""

    async def main() -> None:
        real = SecureExchange._masked

        def masked(self: SecureExchange, index: int) -> list[memoryview]:
            if self.me != 3:
                return real(self, index)
            about = self.signer.plan
            other = PlanStatement(about.name, b"p" * 32) if lie == "another plan" else about

            def sign(member: SecureMember, part: int, root: bytes) -> bytes:
                said = MaskedPartStatement(other, part + (lie == "another part"), member.me, root)
                return self.signer.sign(said) if lie != "nobody" else bytes(64)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SecureMember, "sign_masked", sign)
                chunks = real(self, index)
            if lie == "two roots":
                change_lanes(self, index, chunks)
            if lie == "other bytes":
                chunks[-1][0] ^= 1
            return chunks

        def change_lanes(self: SecureExchange, index: int, chunks: list[memoryview]) -> None:
            """Make the last chunk one of other lanes, signed as a whole part of others."""
            sizes = [self._layout.packed_bytes(one, 5) for one in self.store.chunks_of(self._plan.parts[index])]
            others = [memoryview(bytearray(one)) for one in chunks]
            others[-1][0] ^= 1
            write_proofs(others, sizes, lambda root: self.member.sign_masked(index, root))
            chunks[-1][:] = others[-1]

        monkeypatch.setattr(SecureExchange, "_masked", masked)
        async with swarm(5, toml(60), ELEMENTS, make=Audited) as run:
            (verdict,) = await play_rounds(run, 1)
            assert verdict.plan is not None
            assert verdict.signed_sets is not None
            whole = [max(1, (part.stop - part.start) // verdict.plan.chunk_elements) for part in verdict.plan.parts]
            assert max(whole) > 1
            left_out = [3 not in one for one in verdict.signed_sets.sets]
            if lie == "two roots":
                assert left_out == [many > 1 for many in whole]
            else:
                assert all(left_out)
            assert not found(run)

    run_virtual(main())


# Evidence that is made up ---------------------------------------------------------------------------------------


@dataclass
class Scene:
    """An honest round of 12 members in three groups, one of which died before it sent anything, and what the owner of a
    part shows of one chunk."""

    facts: RunFacts
    store: ResultStore
    verdict: Verdict
    subject: Subject
    shown: Shown
    maker: int
    host: Any
    identities: list[Any]

    def evidence(self, shown: Shown | None = None, verdict: Verdict | None = None) -> bytes:
        assert self.verdict.plan is not None
        results = self.store.bytes_of(self.verdict.plan.parts[self.subject.part])
        return make_evidence(verdict or self.verdict, self.subject, results, shown or self.shown)

    @property
    def about(self) -> PlanStatement:
        assert self.verdict.plan is not None
        return PlanStatement(name_of(self.verdict), plan_digest(self.verdict.plan))

    def opening(self) -> ShownOpening:
        assert self.verdict.plan is not None
        assert self.verdict.signed_sets is not None
        masked = masked_round(self.store, self.about, self.verdict)
        assert masked is not None
        senders = [one for group in masked.groups for one in group.among(self.verdict.signed_sets.senders)]
        return ShownOpening.unpack(self.shown.opening, 3, senders, len(self.verdict.plan.parts))

    def opened_by(self, opening: ShownOpening) -> Shown:
        return replace(self.shown, opening=memoryview(opening.pack()))

    def with_contribution(self, member: int, data: bytes | bytearray) -> Shown:
        return replace(self.shown, contributions={**self.shown.contributions, member: memoryview(data)})


@pytest.fixture(scope="module")
def scene() -> Scene:
    made: list[Scene] = []

    async def main() -> None:
        async with swarm(12, toml(120, group=4, robust="trimmed"), ELEMENTS, make=Audited) as run:
            async with asyncio.TaskGroup() as tasks:
                victim, alive = run[7], [one for one in run.members if one is not run[7]]
                doomed = tasks.create_task(victim.play(contribution(9), 10))

                async def kill() -> None:
                    await until(lambda: stage(run) >= SecureStage.MASKS, 0.005)
                    victim.die()
                    doomed.cancel()

                tasks.create_task(kill())
                outcomes = await together(*[one.play(contribution(run.index(one)), 10) for one in alive])
            first, auditor = outcomes[0], alive[0]
            assert isinstance(first, Committed)
            verdict, store = first.verdict, auditor.averager._stores[0]
            assert verdict.plan is not None
            about = PlanStatement(name_of(verdict), plan_digest(verdict.plan))
            masked = masked_round(store, about, verdict)
            assert masked is not None
            small = next(group.members for group in masked.groups if 7 in group.members)  # it needs all that are left
            part = next(one for one, of in enumerate(verdict.plan.parts) if of.owner not in (0, *small))
            chunk = store.chunks_of(verdict.plan.parts[part])[-1]
            subject, results = Subject(part, chunk, None, store[chunk]), store.bytes_of(verdict.plan.parts[part])
            committed = _CommittedPart(store, verdict, about, results, masked)
            maker = verdict.plan.parts[part].owner
            for kept in (one.averager._inclusions[0] for one in alive):
                kept._streams.clear()
            shown = await auditor_of(auditor)._shown(committed, subject, verdict.plan.members[maker].peer)
            identities = [run[index].identity for index in range(12)]
            facts = auditor.facts  # type: ignore[attr-defined]
            made.append(Scene(facts, store, verdict, subject, shown, maker, run.coordinator.identity, identities))

    run_virtual(main())
    return made[0]


def test_honest_evidence_is_of_no_fault(scene: Scene) -> None:
    data = scene.evidence()
    assert unpack_evidence(data).opening == bytes(scene.shown.opening)
    found = judge(data, scene.facts)
    assert (found.word, found.maker) == ("innocent", scene.identities[scene.maker].peer_id)


def test_of_each_sender_one_secret_is_shown(scene: Scene) -> None:
    """As to the owner: the seed of who is in the sum, the mask key of who is not. With both, what it has sent, had it
    come late, would be open."""
    signed = scene.verdict.signed_sets
    assert signed is not None
    opening, part = scene.opening(), scene.subject.part
    assert sorted(opening.secrets) == list(signed.senders)
    assert 7 in opening.secrets
    assert 7 not in signed.sets[part]
    for sender, secret in opening.secrets.items():
        is_seed = seed_digest(secret) == opening.keys[sender].seed_digests[part]
        assert is_seed == (sender in signed.sets[part])
        assert not any(
            seed_digest(secret) == one for at, one in enumerate(opening.keys[sender].seed_digests) if at != part
        )
    assert sorted(scene.shown.contributions) == list(signed.sets[part])


def masked_lanes_are_unlike_codes(scene: Scene, member: int) -> bool:
    return len(set(bytes(scene.shown.contributions[member][:256]))) > 100


def test_what_is_shown_of_a_member_is_masked(scene: Scene) -> None:
    assert all(masked_lanes_are_unlike_codes(scene, one) for one in scene.shown.contributions)


def chunk_sizes(scene: Scene) -> tuple[int, int, int]:
    """Return the size of the packed lanes, the place of the chunk in its part, and the part's chunks."""
    assert scene.verdict.plan is not None
    masked = masked_round(scene.store, scene.about, scene.verdict)
    assert masked is not None
    chunks = scene.store.chunks_of(scene.verdict.plan.parts[scene.subject.part])
    size = masked._layout.packed_bytes(scene.subject.chunk, 4)
    return size, scene.subject.chunk - chunks.start, len(chunks)


def signed_again(scene: Scene, member: int, about: PlanStatement | None = None, part: int | None = None) -> bytearray:
    """Return a member's chunk with other lanes, which it signs: one of a part of a single chunk, or the last one."""
    size, place, chunks = chunk_sizes(scene)
    data = bytearray(scene.shown.contributions[member])
    data[0] ^= 1
    others = [memoryview(bytearray(data)) for _ in range(chunks)]
    statement = about or scene.about
    write_proofs(
        others,
        [size] * chunks,
        lambda root: scene.identities[member].sign(
            MaskedPartStatement(statement, scene.subject.part if part is None else part, member, root).bytes_to_sign()
        ),
    )
    lanes, shown = checked_lanes(others[place], size, place, chunks)
    assert bytes(lanes[:1]) == bytes(data[:1])
    assert shown.root
    return bytearray(others[place])


def flipped(data: memoryview, at: int) -> bytearray:
    changed = bytearray(data)
    changed[at] ^= 1
    return changed


def keys_again(scene: Scene, member: int) -> ShownOpening:
    """Return the opening with other keys and another seed of a member, which it signs for this plan as well."""
    opening, secret = scene.opening(), b"s" * 32
    digests = list(opening.keys[member].seed_digests)
    digests[scene.subject.part] = seed_digest(secret)
    keys = opening.keys[member].model_copy(update={"seed_digests": tuple(digests)})
    signature = scene.identities[member].sign(KeysStatement(scene.about, member, keys).bytes_to_sign())
    keys = keys.model_copy(update={"signature": signature})
    return ShownOpening(opening.names, {**opening.keys, member: keys}, {**opening.secrets, member: secret})


def other_secret(scene: Scene, member: int, secret: bytes) -> ShownOpening:
    opening = scene.opening()
    return ShownOpening(opening.names, opening.keys, {**opening.secrets, member: secret})


def other_names(scene: Scene) -> ShownOpening:
    opening = scene.opening()
    return ShownOpening([opening.names[0], *opening.names[:0:-1]], opening.keys, opening.secrets)


FORGED: dict[str, tuple[Callable[[Scene], Shown], str]] = {
    "other lanes": (lambda one: one.with_contribution(2, flipped(one.shown.contributions[2], 0)), "not of those"),
    "another root": (lambda one: one.with_contribution(2, flipped(one.shown.contributions[2], -70)), "not of those"),
    "no signature": (lambda one: one.with_contribution(2, flipped(one.shown.contributions[2], -1)), "not signed"),
    "another member's": (lambda one: one.with_contribution(2, bytes(one.shown.contributions[3])), "not signed|fit"),
    "signed for another plan": (
        lambda one: one.with_contribution(2, signed_again(one, 2, PlanStatement(one.about.name, b"p" * 32))),
        "not signed",
    ),
    "signed for another round": (
        lambda one: one.with_contribution(
            2, signed_again(one, 2, PlanStatement(RoundName(one.facts.run_hash, None, 1), one.about.plan))
        ),
        "not signed",
    ),
    "signed for another part": (
        lambda one: one.with_contribution(2, signed_again(one, 2, part=one.subject.part + 1)),
        "not signed",
    ),
    "a second signed root": (lambda one: one.with_contribution(2, signed_again(one, 2)), "other roots or keys"),
    "second signed keys": (lambda one: one.opened_by(keys_again(one, 2)), "other roots or keys"),
    "another seed": (lambda one: one.opened_by(other_secret(one, 2, b"s" * 32)), "not that of its keys"),
    "another mask key": (lambda one: one.opened_by(other_secret(one, 7, b"s" * 32)), "not that of its keys"),
    "other names": (lambda one: one.opened_by(other_names(one)), "other names"),
    "one member less": (
        lambda one: replace(one.shown, contributions={k: v for k, v in one.shown.contributions.items() if k != 2}),
        "not all the masked contributions",
    ),
    "no opening": (lambda one: replace(one.shown, opening=memoryview(b"")), "does not fit"),
    "a longer opening": (lambda one: replace(one.shown, opening=memoryview(bytes(one.shown.opening) + b"x")), "fit"),
    "unsigned keys": (lambda one: one.opened_by(unsigned_keys(one)), "not signed by it for this plan"),
}


def unsigned_keys(scene: Scene) -> ShownOpening:
    opening = scene.opening()
    keys: SecureKeys = opening.keys[2].model_copy(update={"signature": bytes(64)})
    return ShownOpening(opening.names, {**opening.keys, 2: keys}, opening.secrets)


@pytest.mark.parametrize("forged", FORGED)
def test_forged_evidence_proves_nothing(scene: Scene, forged: str) -> None:
    """The colluding member signs with its own key whatever helps; the owner was honest."""
    change, reason = FORGED[forged]
    found = judge(scene.evidence(change(scene)), scene.facts)
    assert found.word == "void", found
    assert any(one in found.reason for one in reason.split("|")), found.reason


def signed_verdict(scene: Scene, **signed: Any) -> Verdict:
    """Return the verdict with other sets, signed by a host that lies."""
    sets = scene.verdict.signed_sets
    assert sets is not None
    verdict = scene.verdict.model_copy(update={"signed_sets": sets.model_copy(update=signed) if signed else None})
    chain = chain_hash(verdict)
    return verdict.model_copy(update={"chain": chain, "signature": scene.host.sign(signed_bytes(chain))})


@pytest.mark.parametrize("lie", ["names", "sets", "consents", "none"])
def test_a_host_that_lies_about_sets_convicts_nobody(scene: Scene, lie: str) -> None:
    """Not even where it gives each sum the name of the roots that a colluding member has signed afterwards."""
    sets = scene.verdict.signed_sets
    assert sets is not None
    changes: dict[str, dict[str, Any]] = {
        "names": {"names": (b"n" * 32,) * len(sets.names)},
        "sets": {"sets": tuple(tuple(one for one in each if one != 2) for each in sets.sets)},
        "consents": {"consents": sets.consents[:3]},
        "none": {},
    }
    found = judge(scene.evidence(verdict=signed_verdict(scene, **changes[lie])), scene.facts)
    assert found.word == "void", found


def test_a_host_that_has_all_others_sign_a_second_root_convicts_nobody(scene: Scene) -> None:
    """It shows the owner the root that the owner was sent, and the others one that a colluding member signs beside it.
    All is in order then but for the name that the owner has written into its mean."""
    sets, part, plan = scene.verdict.signed_sets, scene.subject.part, scene.verdict.plan
    assert sets is not None
    assert plan is not None
    shown, opening, about = scene.with_contribution(2, signed_again(scene, 2)), scene.opening(), scene.about
    size, place, chunks = chunk_sizes(scene)
    roots = {one: checked_lanes(data, size, place, chunks)[1].root for one, data in sorted(shown.contributions.items())}
    masked = masked_round(scene.store, about, scene.verdict)
    assert masked is not None
    keys = {one: keys_digest(about, one, opening.keys[one]) for one in sets.senders}
    others = names_of_sums(about, part, masked.groups, sets.senders, roots, keys)
    names = tuple(name_of_part(others) if at == part else one for at, one in enumerate(sets.names))
    data = SetsStatement(about, sets.senders, sets.sets, names).bytes_to_sign()
    signing = [one.member for one in sets.consents if one.member != scene.maker]
    consents = tuple(Consent(member=one, signature=scene.identities[one].sign(data)) for one in signing)
    verdict = signed_verdict(scene, names=names, consents=consents)
    shown = replace(shown, opening=memoryview(ShownOpening(others, opening.keys, opening.secrets).pack()))
    found = judge(scene.evidence(shown, verdict), scene.facts)
    assert (found.word, "names other masked sums" in found.reason) == ("void", True), found


def test_openings_have_one_encoding(scene: Scene) -> None:
    assert scene.verdict.plan is not None
    opening, parts = scene.opening(), len(scene.verdict.plan.parts)
    senders = list(opening.secrets)
    assert ShownOpening.unpack(opening.pack(), 3, senders, parts).pack() == bytes(scene.shown.opening)
    odd = bytearray(opening.pack())
    odd[3 * 32] = 2
    with pytest.raises(WireError):
        ShownOpening.unpack(odd, 3, senders, parts)
