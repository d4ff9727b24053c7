"""The protocol's messages without a network: what comes out, who may die when, and attackers played for real."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.secure_rounds import PATIENCE_S, Scene

from shoal.swarm.errors import SecureRefused, WireError
from shoal.swarm.protocol.messages import CoordinatorToPeerSecureBoard, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.secure import Consent, KeysStatement, Revealed, SecureStage, SetsStatement, UnopenedSecret
from shoal.swarm.protocol.statements import RoundName
from shoal.swarm.secure.groups import threshold
from shoal.swarm.secure.masks import add_masks
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.opening import Unopened, secrets_of
from shoal.swarm.secure.reveal_record import RevealRecord
from shoal.swarm.secure.shamir import SHARE_BYTES


@pytest.mark.parametrize("n", [4, 5, 9, 17])
def test_the_opened_sum_is_that_of_all(n: int) -> None:
    scene = Scene(n)
    scene.until(SecureStage.OPEN)
    for part in range(scene.parts):
        assert (scene.open(part) == scene.sum_of(part, range(n))).all()
    assert not scene.refused


def test_what_is_sent_is_masked_and_new_each_time() -> None:
    one, other = Scene(), Scene()
    for scene in (one, other):
        scene.until(SecureStage.OPEN)
    for key, lanes in one.sent.items():
        assert np.count_nonzero(lanes.view(np.int16) == one.codes[key]) <= 1
        assert (lanes != other.sent[key]).any()


# Who may die when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", list(SecureStage)[1:])
def test_one_of_five_dies_at_each_stage(stage: SecureStage) -> None:
    """Who has not sent is left out, who has stays in the sum; four of five are enough for either."""
    victim = 3
    scene = Scene(silent={victim: stage})
    scene.until(SecureStage.OPEN)
    within = [one for one in range(5) if one != victim or stage > SecureStage.MASKS]
    for part in range(scene.parts):
        assert scene.board.sets[part] == tuple(within)
        assert (scene.open(part) == scene.sum_of(part, within)).all()


def test_a_member_that_shows_no_keys_ends_the_round_before_anything_is_sent() -> None:
    """Or it would choose, knowing all other random numbers, whether the draw counts with its own."""
    scene = Scene(silent={3: SecureStage.KEYS})
    scene.turn()
    failure = scene.board.advance(PATIENCE_S + 1, scene.live(), 0.0)
    assert failure is not None
    assert failure.missing == (3,)
    assert not scene.sent


def test_too_few_at_a_stage_end_the_round() -> None:
    scene = Scene(silent={3: SecureStage.SHARES, 4: SecureStage.SHARES})
    scene.turn()
    scene.turn()
    failure = scene.board.advance(2 * PATIENCE_S, scene.live(), 0.0)
    assert failure is not None
    assert "shares" in failure.reason
    scene = Scene(silent={3: SecureStage.MASKS, 4: SecureStage.MASKS})
    for _ in range(3):
        scene.turn()
    for part in range(scene.parts):
        scene.arrive(part)
    scene.post(0)
    scene.post(1)
    failure = scene.board.advance(scene.now_s, scene.live(), scene.now_s)
    assert failure is not None
    assert "arrived" in failure.reason


def test_an_owner_that_dies_voids_its_part_alone() -> None:
    scene = Scene(silent={1: SecureStage.MASKS})
    scene.until(SecureStage.OPEN)
    assert scene.board.sets[1] == ()
    assert (scene.open(0) == scene.sum_of(0, [0, 2, 3, 4])).all()
    assert all(not one.is_spent(1) for one in scene.members if one.me in (0, 2, 3, 4)), "proven not to be opened"


def test_below_the_threshold_nothing_opens() -> None:
    scene = Scene(silent={3: SecureStage.UNMASK, 4: SecureStage.UNMASK})
    scene.until(SecureStage.UNMASK)
    scene.turn()
    scene.turn()
    scene.board.advance(scene.now_s + 3 * PATIENCE_S, scene.live(), 0.0)
    assert scene.board.stage == SecureStage.OPEN
    assert scene.open(0) is None


def test_a_board_that_starts_again_is_told_the_same() -> None:
    """A coordinator that is killed in the middle: the same sets follow from the same posts."""
    scene = Scene()
    scene.until(SecureStage.UNMASK)
    sets, names = scene.board.sets, scene.board.names
    scene.board = type(scene.board)(scene.plan, scene.about, PATIENCE_S, scene.now_s)
    scene.until(SecureStage.OPEN)
    assert not scene.refused
    assert (scene.board.sets, scene.board.names) == (sets, names) == (sets, scene.names(sets))
    assert (scene.open(0) == scene.sum_of(0, range(5))).all()


def test_a_board_that_starts_again_without_a_member_opens_nothing_else() -> None:
    scene = Scene()
    scene.until(SecureStage.SETS)
    scene.silent[4] = SecureStage.SHARES
    scene.board = type(scene.board)(scene.plan, scene.about, PATIENCE_S, scene.now_s)
    for _ in range(10):
        scene.turn()
    assert scene.board.stage < SecureStage.UNMASK
    assert scene.refused.keys() == {0, 1, 2, 3}
    assert all(one.is_spent(0) for one in scene.members), "somebody may know a sum: never offered again"


# Attackers ----------------------------------------------------------------------------------------------------


def sets_without(victim: int, scene: Scene) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one for one in each if one != victim) for each in scene.board.sets)


def test_an_owner_that_lies_about_silence_gets_one_kind_of_share_of_each() -> None:
    """It says that the victim did not deliver: its pairwise masks open, and its own mask stays on what it sent."""
    scene, victim = Scene(), 2
    scene.until(SecureStage.MASKS)
    scene.turn()
    for part in range(2):
        scene.arrive(part, {0, 1, 3, 4})
    scene.until(SecureStage.OPEN, arrive=False)
    assert (scene.open(0) == scene.sum_of(0, [0, 1, 3, 4])).all()
    shown = [one for one in scene.board.show(scene.peers[0], "revealed").revealed if one.part == 0]
    member, group = scene.members[0], scene.members[0].group
    # Everything that the shares give of the victim is taken off, and what is left is not its contribution.
    revealed = {one.member: one.shares for one in shown}
    assert isinstance(secrets_of(0, group, group.members, [victim], member.keys, revealed), Unopened)
    for one in scene.members:
        assert one.is_spent(0) == (one.me != victim), "the victim may bring its work again"


def test_two_kinds_of_shares_are_never_revealed_of_one_member() -> None:
    """What each member reveals of each sender, over everything that it ever posts, has one kind."""
    scene = Scene()
    scene.until(SecureStage.MASKS)
    scene.turn()
    scene.arrive(0, {0, 1, 2, 3})
    scene.arrive(1, {1, 2, 3, 4})
    scene.until(SecureStage.OPEN, arrive=False)
    kinds: dict[tuple[int, int, int], set[bytes]] = {}
    for index, step in scene.steps:
        for one in step.revealed:
            for place in range(5):
                share = one.shares[place * SHARE_BYTES : (place + 1) * SHARE_BYTES]
                kinds.setdefault((index, one.part, place), set()).add(share)
    assert len(kinds) == 5 * 2 * 5
    assert all(len(shares) == 1 for shares in kinds.values())


def test_different_sets_for_different_members_open_neither() -> None:
    """A coordinator shows two sets of the same part, hoping for the difference of two sums."""
    scene, victim = Scene(), 4
    for liar in (0, 1):
        scene.lies[liar] = lambda shown: shown.model_copy(
            update={"sets": (sets := sets_without(victim, scene)), "names": scene.names(sets)}
        )
    scene.until(SecureStage.SETS)
    for one in range(5):
        scene.post(one)
    with pytest.raises(WireError):  # an honest board would notice; the one of a liar does not look
        scene.post(0)
    consents = []
    for one in scene.members:
        step = one.step(SecureStage.SETS)
        assert step.consent is not None
        consents.append(Consent(member=one.me, signature=step.consent))
    for one in scene.members:
        sets = scene.board.sets if one.me > 1 else sets_without(victim, scene)
        shown = CoordinatorToPeerSecureBoard(
            round=3,
            stage=SecureStage.UNMASK,
            senders=(0, 1, 2, 3, 4),
            sets=sets,
            names=scene.names(sets),
            consents=tuple(consents),
        )
        one.take(shown)
        assert one.step(SecureStage.UNMASK).revealed == (), "three and two are both below four of five"


def test_a_second_set_is_refused() -> None:
    scene = Scene()
    scene.until(SecureStage.UNMASK)
    scene.lies = {one: lambda shown: shown.model_copy(update={"sets": sets_without(4, scene)}) for one in range(5)}
    scene.turn()
    assert scene.refused.keys() == set(range(5))
    assert all(isinstance(one, SecureRefused) for one in scene.refused.values())


@pytest.mark.parametrize("lie", ["names", "a root", "keys"])
def test_an_owner_refuses_names_of_other_roots_or_keys_than_it_has(lie: str) -> None:
    """With them the mean that it makes could be shown to be wrong, by whoever sent or showed others."""
    scene = Scene()
    scene.until(SecureStage.SETS)
    names = scene.board.names
    if lie == "names":
        names = names[::-1]
    elif lie == "a root":
        scene.codes[3, 0] = scene.codes[3, 1]
        names = scene.names(scene.board.sets)
    else:
        member = scene.members[0]
        others = [
            one.model_copy(update={"share_key": b"k" * 32}) if at == 3 else one for at, one in enumerate(member.keys)
        ]
        kept, member.keys = member.keys, tuple(others)
        names, member.keys = scene.names(scene.board.sets), kept
    scene.lies = {0: lambda shown: shown.model_copy(update={"names": names})}
    scene.post(0)
    assert "other roots or keys" in str(scene.refused[0])
    assert scene.members[0].step(SecureStage.SETS).consent is None
    scene.post(2)
    assert scene.members[2].step(SecureStage.SETS).consent is not None


def test_names_are_fixed_when_they_are_seen_first() -> None:
    scene = Scene()
    scene.until(SecureStage.UNMASK)
    scene.lies = {3: lambda shown: shown.model_copy(update={"names": shown.names[::-1]})}
    scene.turn()
    assert "two collections" in str(scene.refused[3])


@pytest.mark.parametrize(
    "sets", [((0,), (0, 1, 2, 3)), ((0, 1, 2), ()), ((), ()), ((0, 1, 2, 3),), ((3, 2, 1, 0), ()), ((0, 1, 2, 7), ())]
)
def test_sets_that_say_too_much_are_not_signed(sets: tuple[tuple[int, ...], ...]) -> None:
    scene = Scene(silent={4: SecureStage.SHARES})
    scene.until(SecureStage.MASKS)
    scene.turn()
    member = scene.members[0]
    senders = scene.board.senders
    names = (bytes(32),) * len(sets)
    shown = CoordinatorToPeerSecureBoard(round=3, stage=SecureStage.SETS, senders=senders, sets=sets, names=names)
    with pytest.raises(SecureRefused):
        member.take(shown)
    assert member.step(SecureStage.SETS).consent is None


def test_a_substituted_key_is_refused() -> None:
    """By an owner or coordinator that would like to share the victim's masks."""
    other = Scene()
    other.turn()
    stolen = other.board.show(other.peers[0], "keys").keys
    assert stolen, "all keys are there"
    for replace in ("share_key", "mask_keys", "nonce", "seed_digests"):
        scene = Scene()

        def forge(shown: CoordinatorToPeerSecureBoard, replace: str = replace) -> CoordinatorToPeerSecureBoard:
            keys = tuple(
                one.model_copy(update={replace: getattr(stolen[1], replace)}) if index == 1 else one
                for index, one in enumerate(shown.keys)
            )
            return shown.model_copy(update={"keys": keys})

        scene.turn()
        scene.post(0, forge)
        assert isinstance(scene.refused[0], SecureRefused)


def test_keys_of_another_plan_are_refused() -> None:
    """The same members, signed by themselves, for another plan of the same round."""
    one, other = Scene(), Scene()
    for scene in (one, other):
        scene.turn()
    one.post(0, lambda shown: shown.model_copy(update={"keys": other.board.show(other.peers[0], "keys").keys}))
    assert isinstance(one.refused[0], SecureRefused)


def test_a_replayed_share_does_not_open() -> None:
    """Shares of another round, of another receiver, or of the one who sent them sent back."""
    one, other = Scene(), Scene()
    for scene in (one, other):
        scene.until(SecureStage.MASKS)
    receiver = one.members[0]
    for sealed in (
        other.board.show(other.peers[0], "sealed").sealed,
        tuple(
            shares.model_copy(update={"member": 1 + turn})
            for turn, shares in enumerate(one.board.show(one.peers[1], "sealed").sealed)
        ),
    ):
        shown = one.board.show(one.peers[0], "sealed").model_copy(update={"sealed": sealed})
        with pytest.raises(SecureRefused, match="do not open"):
            receiver.take(shown)
        assert not receiver.can_mask or len(receiver._shares) >= threshold(5)
        receiver._shares = {0: receiver._shares[0]}


def test_shares_that_were_not_delivered_are_noticed_before_anything_is_sent() -> None:
    scene = Scene()
    scene.lies[0] = lambda shown: shown.model_copy(update={"sealed": shown.sealed[1:]})
    scene.until(SecureStage.MASKS)
    scene.turn()
    scene.turn()
    assert isinstance(scene.refused[0], SecureRefused)
    assert (0, 0) not in scene.sent


def test_senders_are_told_once() -> None:
    scene = Scene()
    scene.until(SecureStage.MASKS)
    scene.turn()
    scene.lies[0] = lambda shown: shown.model_copy(update={"senders": (0, 1, 2, 3)})
    scene.turn()
    assert isinstance(scene.refused[0], SecureRefused)


def garbled(step: PeerToCoordinatorSecureStep) -> PeerToCoordinatorSecureStep:
    wrong = tuple(one.model_copy(update={"shares": bytes(len(one.shares))}) for one in step.revealed)
    return step.model_copy(update={"revealed": wrong})


@pytest.mark.parametrize("n", [5, 9, 15])
def test_who_reveals_wrong_shares_is_named_and_others_shares_do(n: int) -> None:
    scene, liars = Scene(n), list(range(0, (n - 1) // 3, 1))
    scene.forged = dict.fromkeys(liars, garbled)
    scene.until(SecureStage.OPEN)
    for part in range(scene.parts):
        assert (scene.open(part) == scene.sum_of(part, range(n))).all()
    assert scene.board.to_blame == {one for one in liars if one in scene.board._revealed}
    assert scene.board.to_blame


def test_too_many_wrong_shares_open_nothing_and_name_their_members_alone() -> None:
    scene = Scene()
    scene.forged = {2: garbled, 3: garbled}
    scene.until(SecureStage.OPEN)
    assert scene.open(0) is None
    assert scene.board.to_blame == {2, 3}


def test_a_dealer_whose_shares_give_no_secret_is_named() -> None:
    """They seal, open, and fit their digests, but are no points of a polynomial: no part of its group can be opened."""
    scene, dealer = Scene(), 3
    member = scene.members[dealer]
    deal = member._secrets.deal
    member._secrets.deal = lambda group: {
        one: b"".join(bytes([0]) + bytes([one + 1] * 32) for _ in range(2 * scene.parts)) for one in deal(group)
    }
    scene.until(SecureStage.OPEN)
    assert scene.open(0) is None
    assert not scene.board.to_blame, "nobody has looked yet"
    owner = scene.members[0]
    owner.unopened.append(UnopenedSecret(part=0, dealer=dealer))
    owner.unopened.append(UnopenedSecret(part=0, dealer=1))
    scene.post(0)
    scene.members[2].unopened.append(UnopenedSecret(part=0, dealer=4))
    with pytest.raises(WireError):
        scene.post(2)
    assert scene.board.to_blame == {dealer}, "and not those that an owner accuses wrongly"


def test_a_dealer_of_what_are_no_shares_is_named() -> None:
    """They seal, open, and fit their digests, but are no elements of the field: nobody can do anything with them."""
    scene, dealer = Scene(), 3
    member = scene.members[dealer]
    deal = member._secrets.deal
    member._secrets.deal = lambda group: dict.fromkeys(deal(group), (b"\xff" * 32 + b"\xfe") * (2 * scene.parts))
    scene.until(SecureStage.OPEN)
    assert scene.open(0) is None
    assert scene.board.to_blame == {dealer}


@pytest.mark.parametrize("victims", [1, 3])
def test_a_dealer_whose_shares_do_not_open_is_named_by_more_than_could_lie(victims: int) -> None:
    scene, dealer = Scene(), 4
    seal = scene.members[dealer]._secrets.seal
    scene.members[dealer]._secrets.seal = lambda shares, to, key: b"x" * 60 if to < victims else seal(shares, to, key)
    scene.until(SecureStage.OPEN)
    assert not scene.refused
    assert scene.board.to_blame == ({dealer} if victims > 1 else set())
    if victims == 1:
        assert (scene.open(0) == scene.sum_of(0, range(5))).all()


def test_a_member_reveals_shares_for_all_parts_or_counts_as_silent() -> None:
    """Else one could keep single parts closed, and owners could keep back the others, without any blame."""
    scene = Scene()
    scene.until(SecureStage.UNMASK)
    scene.forged[3] = lambda step: step.model_copy(update={"revealed": step.revealed[:1]})
    scene.post(3)  # asks for the others' signatures
    with pytest.raises(WireError):
        scene.post(3)
    scene.board.stage = SecureStage.OPEN
    assert 3 in scene.board.closed
    assert 3 in scene.board.to_blame


def test_a_member_reveals_and_posts_for_itself_alone() -> None:
    scene = Scene()
    scene.until(SecureStage.UNMASK)
    scene.turn()
    scene.turn()
    step = scene.members[0].step(SecureStage.UNMASK)
    forged = step.model_copy(update={"revealed": (Revealed(part=0, member=1, shares=b""),)})
    del scene.board._revealed[1], scene.board._revealed[2]
    with pytest.raises(WireError):
        scene.board.take(scene.peers[2], forged)
    with pytest.raises(WireError):
        scene.board.check(scene.peers[1], scene.members[0].step(SecureStage.KEYS))


def with_keys(member: SecureMember, **update: object) -> PeerToCoordinatorSecureStep:
    """Return a post of a member's keys with other ones, signed by it."""
    keys = member._public.model_copy(update=update)
    signed = keys.model_copy(update={"signature": member._sign(KeysStatement(member.about, member.me, keys))})
    return member.step(SecureStage.KEYS).model_copy(update={"keys": signed})


def test_bad_keys_are_their_members_fault_alone() -> None:
    """Of small order, twice the same, or another one's: refused when they are posted, so that it is the one missing."""
    scene, low = Scene(), bytes(32)
    attacker = scene.members[4]
    mine, others = attacker._public, scene.members[0]._public
    scene.post(0)
    for step in (
        with_keys(attacker, share_key=low),
        with_keys(attacker, mask_keys=(low, mine.mask_keys[1])),
        with_keys(attacker, mask_keys=(mine.share_key, mine.mask_keys[1])),
        with_keys(attacker, seed_digests=(mine.seed_digests[0],) * 2),
        with_keys(attacker, mask_keys=mine.mask_keys[:1]),
        with_keys(attacker, share_key=others.share_key),
        with_keys(attacker, has_scales=True),
    ):
        with pytest.raises(WireError):
            scene.receive(4, step)
    for one in (1, 2, 3):
        scene.post(one)
    failure = scene.board.advance(PATIENCE_S + 1, scene.live(), 0.0)
    assert failure is not None
    assert failure.missing == (4,)
    assert not any(one.has_masked for one in scene.members)


def test_a_draw_counts_from_the_moment_that_ones_random_number_leaves() -> None:
    """Whoever collects the keys of all knows the groups, also where it shows them to nobody."""
    member = Scene().members[0]
    assert not member.has_shown_keys
    member.step(SecureStage.KEYS)
    assert member.has_shown_keys
    assert not member.keys


# Company and scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strangers", "is_refused"), [(1, False), (2, True)])
def test_a_group_with_a_third_of_strangers_is_refused_before_shares_leave(strangers: int, is_refused: bool) -> None:
    """A host cannot put members that have long taken part among peers that it has just made up."""
    scene = Scene()
    scene.known = scene.peers[strangers:]
    scene.members = [scene.member(one, nonce) for one, nonce in enumerate(scene.nonces)]
    scene.turn()
    for one in range(5):
        scene.post(one)
    assert scene.refused.keys() == (set(range(strangers, 5)) if is_refused else set()), (
        "one's own name is no stranger's"
    )
    assert not any(scene.members[one].step(SecureStage.SHARES).sealed for one in scene.refused)


def test_members_that_know_nobody_yet_take_part() -> None:
    scene = Scene()
    scene.known = scene.peers[:2]
    scene.members = [scene.member(one, nonce) for one, nonce in enumerate(scene.nonces)]
    scene.until(SecureStage.OPEN)
    assert not scene.refused


@pytest.mark.parametrize(("holders", "is_refused"), [(0, True), (1, True), (2, False), (5, False)])
def test_scales_that_nobody_can_vouch_for_are_refused(holders: int, is_refused: bool) -> None:
    """With the units in its hand a host would round all contributions but one to nothing."""
    scales = bytes([7, 9])
    scene = Scene(scales=scales, holders=holders)
    scene.turn()
    for one in range(5):
        scene.post(one)
    assert scene.refused.keys() == (set(range(holders, 5)) if is_refused else set())


def test_a_member_that_has_scales_believes_in_no_others() -> None:
    scene = Scene()
    with pytest.raises(SecureRefused, match="other scales"):
        scene.member(0, scene.nonces[0], scales=bytes(2))


def test_weights_are_the_plans_by_rule() -> None:
    """Whose weight the host could lower, or whose could be many times the others', would be alone in the sum."""
    plan = Scene().plan

    def with_tokens(*weights: tuple[int, int]) -> RoundPlan:
        members = [
            one.model_copy(update={"weight_tokens": tokens, "uncounted": uncounted})
            for one, (tokens, uncounted) in zip(plan.members, weights, strict=True)
        ]
        return RoundPlan.model_validate(plan.model_copy(update={"members": tuple(members)}).model_dump())

    fair = with_tokens((1000, 980), (10, 0), (20, 0), (21, 1), (10, 0))
    assert [one.weight for one in fair.members] == [20, 10, 20, 20, 10]
    for weights in ((1000, 0), (1000, 999), (1000, 950)):
        with pytest.raises(ValueError, match="weights of a secure round"):
            with_tokens(weights, (10, 0), (20, 0), (21, 1), (10, 0))
    with pytest.raises(ValueError, match="weights of a secure round"):
        with_tokens((10, 9), (10, 9), (10, 9), (10, 9), (10, 0))


# Crashes ------------------------------------------------------------------------------------------------------


def test_a_crash_between_record_and_send_never_signs_other_sets(tmp_path: Path) -> None:
    """The record is on the disk before the signature leaves; the next process takes no part in that round."""
    scene, path = Scene(), tmp_path / "record"
    scene.records[0] = RevealRecord(path)
    scene.members[0]._record = scene.records[0]
    scene.until(SecureStage.SETS)
    signed: list[bool] = []
    sign, scene.members[0]._sign = scene.members[0]._sign, lambda statement: signed.append(path.exists()) or b"s" * 64
    scene.post(0)
    assert signed == [True], "recorded first"
    scene.records[0] = RevealRecord(path)
    with pytest.raises(SecureRefused, match="planned again"):
        scene.member(0, b"n" * 32)
    assert sign is not scene.members[0]._sign


def test_the_record_is_one_of_sets_by_round(tmp_path: Path) -> None:
    name, path = RoundName(b"r" * 32, None, 7), tmp_path / "record"
    record = RevealRecord(path)
    record.write(name, b"one")
    record.write(name, b"one")
    with pytest.raises(SecureRefused):
        record.write(name, b"other")
    record.write(RoundName(b"r" * 32, 2, 7), b"other")
    with path.open("ab") as file:
        file.write(b"cut off")
    again = RevealRecord(path)
    assert again.has(name)
    assert path.stat().st_size == 2 * 64
    with pytest.raises(SecureRefused):
        again.write(name, b"other")
    assert not again.has(RoundName(b"r" * 32, None, 8))


def test_two_processes_with_one_identity_never_mask_work_on_the_same_samples(tmp_path: Path) -> None:
    """Neither overwrites what the other has recorded, and who comes second is refused before anything leaves."""
    one, two = RevealRecord(tmp_path / "record"), RevealRecord(tmp_path / "record")
    one.spend(b"a" * 32, [(0, 10)])
    two.spend(b"b" * 32, [(20, 30)])
    with pytest.raises(SecureRefused, match="has left masked before"):
        two.spend(b"b" * 32, [(9, 11)])
    with pytest.raises(SecureRefused):
        one.spend(b"c" * 32, [(25, 26), (40, 50)])
    again = RevealRecord(tmp_path / "record")
    assert again.has_spent(b"a" * 32)
    assert again.is_spent([(0, 1)])
    assert again.is_spent([(29, 40)])
    assert not again.is_spent([(10, 20), (40, 50)]), "what was refused has not left"


# What a coalition sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 5, 7])
@pytest.mark.parametrize("seed", range(6))
def test_a_coalition_with_the_host_never_holds_both_secrets_of_anybody(n: int, seed: int) -> None:
    """Fewer than a third of the members, with host and owners, which show each other member sets as they please, and
    sign all of them. Of what they hold in the end, their own shares and all that was revealed, they may put together of
    each honest sender and part either the seed of its own mask or the key of its pairwise ones. Without the other one
    what it has sent is uniform: its mask is a keystream that they do not know, by the argument of Shamir 1979 from
    fewer than ``threshold`` shares."""
    rng, scene = np.random.default_rng(seed), Scene(n)
    coalition = set(rng.choice(n, (n - 1) // 3, replace=False).tolist())
    honest = [one for one in range(n) if one not in coalition]
    victim, least = honest[0], threshold(n)
    scene.until(SecureStage.MASKS)
    scene.turn()
    scene.turn()
    full = tuple(range(n))
    choices = [tuple(full if rng.random() < 0.5 else tuple(one for one in full if one != victim) for _ in range(2))]
    choices.append(tuple(tuple(one for one in full if one != victim) if each == full else full for each in choices[0]))
    shown = {one: choices[int(rng.random() < (0.2 if seed % 2 else 0.5))] for one in honest}
    consents: dict[object, list[Consent]] = {sets: [] for sets in choices}
    for one in honest:
        sets = shown[one]
        scene.members[one].take(
            CoordinatorToPeerSecureBoard(
                round=3, stage=SecureStage.SETS, senders=full, sets=sets, names=scene.names(sets)
            )
        )
        signature = scene.members[one].step(SecureStage.SETS).consent
        assert signature is not None
        consents[sets].append(Consent(member=one, signature=signature))
    for one, sets in itertools.product(coalition, choices):
        signature = scene.members[one]._sign(SetsStatement(scene.about, full, sets, scene.names(sets)))
        consents[sets].append(Consent(member=one, signature=signature))
    held: dict[tuple[int, int, int], set[int]] = {}
    for one in range(n):
        if one in coalition:  # all that it was dealt
            pieces = [(part, dealer, kind) for part in range(2) for dealer in honest for kind in range(2)]
        else:
            scene.members[one].take(
                CoordinatorToPeerSecureBoard(
                    round=3,
                    stage=SecureStage.UNMASK,
                    senders=full,
                    sets=shown[one],
                    names=scene.names(shown[one]),
                    consents=tuple(consents[shown[one]]),
                )
            )
            pieces = []
            for revealed in scene.members[one].step(SecureStage.UNMASK).revealed:
                for dealer in honest:
                    share = revealed.shares[dealer * SHARE_BYTES : (dealer + 1) * SHARE_BYTES]
                    dealt = scene.members[one]._shares[dealer]
                    at = 2 * revealed.part * SHARE_BYTES
                    both = [dealt[at : at + SHARE_BYTES], dealt[at + SHARE_BYTES : at + 2 * SHARE_BYTES]]
                    pieces.append((revealed.part, dealer, both.index(share)))
        for piece in pieces:
            held.setdefault(piece, set()).add(one)
    opened = 0
    for part, dealer in itertools.product(range(2), honest):
        known = [len(held.get((part, dealer, kind), ())) >= least for kind in range(2)]
        assert not all(known), "both secrets of one sender"
        opened += any(known)
    agreeing = max(len(one) for one in consents.values())
    assert bool(opened) == (agreeing >= least), "and it is not that nothing ever opens"


def test_the_statement_of_sets_covers_everything() -> None:
    scene, names = Scene(), [b"a" * 32, b"b" * 32]
    base = SetsStatement(scene.about, [0, 1, 2, 3], [[0, 1, 2], [1, 2, 3]], names).bytes_to_sign()
    others = [
        SetsStatement(scene.about, [0, 1, 2], [[0, 1, 2], [1, 2, 3]], names),
        SetsStatement(scene.about, [0, 1, 2, 3], [[1, 2, 3], [0, 1, 2]], names),
        SetsStatement(scene.about, [0, 1, 2, 3], [[0, 1, 2, 1, 2, 3], []], names),
        SetsStatement(scene.about, [0, 1, 2, 3], [[0, 1, 2], [1, 2, 3]], names[::-1]),
        SetsStatement(Scene().about, [0, 1, 2, 3], [[0, 1, 2], [1, 2, 3]], names),
    ]
    assert all(one.bytes_to_sign() != base for one in others)


def test_masks_alone_are_uniform_in_each_lane() -> None:
    lanes = np.zeros(2**15, "<u2")
    add_masks(lanes, [(b"k" * 32, 1)])
    counts = np.bincount(lanes & 127, minlength=128)
    assert abs(counts - 256).max() < 100, "seven bits of a lane, each of 128 values 256 times"
