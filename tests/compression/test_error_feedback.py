"""Error feedback: nothing that was offered is lost, it is in a mean or in the residual."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import blockwise
from torch import Tensor

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CODEC_NAMES, CodecError
from shoal.compression.registry import get_codec
from shoal.compression.weighted_mean import EncodingLoss

N, CHUNK = 700, 300
CHUNKS = [(0, 300), (300, 600), (600, 700)]
every_codec = pytest.mark.parametrize("codec", [get_codec(name) for name in CODEC_NAMES], ids=CODEC_NAMES)


def noise(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def after_a_round(codec: Codec) -> ErrorFeedback:
    feedback = ErrorFeedback(N)
    feedback.begin(noise(1))
    for start, stop in CHUNKS:
        feedback.encode_chunk(codec, start, stop)
    feedback.commit()
    return feedback


@every_codec
@given(
    fates=st.lists(st.tuples(*[st.sampled_from(["sent", "kept", "exact", "never"])] * 3), max_size=8),
    data=st.data(),
)
@settings(deadline=None, max_examples=30)
def test_means_and_residual_add_up_to_what_was_offered(
    codec: Codec, fates: list[tuple[str, ...]], data: st.DataObject
) -> None:
    feedback = ErrorFeedback(N)
    offered, arrived = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for number, fate_of_chunks in enumerate(fates):
        contribution = noise(number)
        committed = data.draw(st.booleans())
        feedback.begin(contribution)
        if committed:
            offered += contribution.double()
        for (start, stop), fate in zip(CHUNKS, fate_of_chunks, strict=True):
            received = torch.zeros(stop - start)
            if fate in ("sent", "kept"):
                received = codec.decode(feedback.encode_chunk(codec, start, stop), stop - start)
            if fate == "kept":
                feedback.keep_chunk(start, stop)
            if fate == "exact":
                feedback.include_exactly(start, stop)
                received = torch.add(*feedback.summands(start, stop))
            if committed and fate in ("sent", "exact"):
                arrived[start:stop] += received.double()
        if committed:
            feedback.commit()
        else:
            feedback.discard()
    torch.testing.assert_close(arrived + feedback.residual.double(), offered, rtol=0, atol=1e-5)


def test_float32_leaves_no_residual() -> None:
    assert not after_a_round(get_codec("float32")).residual.any()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8"])
def test_residual_is_what_the_codec_lost(name: str) -> None:
    codec = get_codec(name)
    feedback = after_a_round(codec)
    lost = [noise(1)[a:b] - codec.decode(codec.encode(noise(1)[a:b]), b - a) for a, b in CHUNKS]
    assert torch.equal(feedback.residual, torch.cat(lost))
    assert feedback.residual.any()
    feedback.begin(noise(2))
    assert torch.equal(torch.add(*feedback.summands(0, N)), noise(2) + torch.cat(lost))


@every_codec
def test_what_nobody_asked_for_and_what_was_kept_is_carried_over(codec: Codec) -> None:
    feedback = ErrorFeedback(N)
    feedback.begin(noise(1))
    feedback.encode_chunk(codec, 0, 300)
    feedback.encode_chunk(codec, 300, 600)
    feedback.keep_chunk(300, 600)
    feedback.commit()
    assert torch.equal(feedback.residual[300:], noise(1)[300:])
    packed = codec.encode(noise(1)[:300])
    assert torch.equal(feedback.residual[:300], noise(1)[:300] - codec.decode(packed, 300))


def test_discard_leaves_the_residual_as_it_was() -> None:
    feedback = after_a_round(get_codec("int8"))
    before = feedback.residual.clone()
    feedback.begin(noise(2))
    for start, stop in CHUNKS:
        feedback.encode_chunk(get_codec("int8"), start, stop)
    feedback.add_owner_error(0, EncodingLoss.of(torch.ones(5)))
    feedback.discard()
    assert not feedback.in_round
    assert torch.equal(feedback.residual, before)
    feedback.discard()
    feedback.begin(noise(2))
    assert torch.equal(torch.add(*feedback.summands(0, N)), noise(2) + before)


def test_owner_error_is_added_where_it_belongs() -> None:
    feedback = ErrorFeedback(6)
    feedback.begin(torch.ones(6))
    feedback.include_exactly(0, 4)
    feedback.keep_chunk(4, 5)
    feedback.add_owner_error(2, EncodingLoss.of(torch.tensor([0.25, -0.5, 3.0])))
    feedback.commit()
    assert feedback.residual.tolist() == [0, 0, 0.25, -0.5, 4.0, 1.0]


def test_what_goes_in_exactly_leaves_only_its_share_of_the_error() -> None:
    feedback = ErrorFeedback(6)
    feedback.begin(torch.ones(6))
    feedback.include_exactly(0, 3, EncodingLoss.of(torch.tensor([0.25, -0.5, 3.0])), 2.0)
    with pytest.raises(CodecError):
        feedback.include_exactly(3, 5, EncodingLoss.of(torch.tensor([1.0, math.nan])))
    feedback.commit()
    assert feedback.residual.tolist() == [0.5, -1.0, 6.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("encoded_first", "reserved_first"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_what_is_encoded_where_an_owner_has_room_is_pending_only_if_it_counts(
    encoded_first: bool, reserved_first: bool, decay: float
) -> None:
    codec = get_codec("int8")
    feedback, expected = ErrorFeedback(N, decay), ErrorFeedback(N, decay)
    for one in (feedback, expected):
        one.begin(noise(1))
    if reserved_first:
        feedback.reserve(0, 600)
    fates = {"written": (0, 200), "encoded": (200, 400), "not asked for": (400, 500), "kept": (500, 600)}
    if not encoded_first:
        for start, stop in fates.values():
            feedback.error_buffer(start, stop)[0].fill_(7.0)
    for fate, bounds in {**fates, "another's": (600, N)}.items():
        if fate != "not asked for":
            assert torch.equal(feedback.encode_chunk(codec, *bounds), expected.encode_chunk(codec, *bounds))
    if not reserved_first:
        feedback.reserve(0, 600)
    if encoded_first:
        for start, stop in fates.values():
            feedback.error_buffer(start, stop)[0].fill_(7.0)
    assert feedback.error_buffer(0, 200)[1] == decay
    feedback.include_with_written_error(*fates["written"], 7.0)
    for fate in ("encoded", "not asked for"):
        feedback.include_encoded(*fates[fate])
    feedback.keep_chunk(*fates["kept"])
    feedback.include_encoded(600, N)
    feedback.commit()
    expected.commit()
    assert bool((feedback.residual[:200] == 7.0).all())
    assert torch.equal(feedback.residual[200:400], expected.residual[200:400])
    assert torch.equal(feedback.residual[400:600], noise(1)[400:600])
    assert torch.equal(feedback.residual[600:], expected.residual[600:])
    feedback.begin(noise(2))
    feedback.encode_chunk(codec, 0, N)
    feedback.commit()
    assert float(feedback.residual.abs().max()) < 0.5, "what was reserved is no more"


def test_what_is_pending_already_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a round as much as encoding did; only what a reserved range lost was nowhere kept."""
    encoded: list[int] = []
    encode = Blockwise.encode_residual

    def counting(codec: Blockwise, values: Tensor, *others: Tensor | None) -> Tensor:
        encoded.append(values.numel())
        return encode(codec, values, *others)

    monkeypatch.setattr(Blockwise, "encode_residual", counting)
    feedback = ErrorFeedback(N)
    feedback.begin(noise(1))
    feedback.reserve(600, N)
    for bounds in CHUNKS:
        feedback.encode_chunk(blockwise(8), *bounds)
    encoded.clear()
    for bounds in CHUNKS:
        feedback.include_encoded(*bounds)
    assert encoded == [N - 600]


def test_what_an_owner_wrote_is_zero_where_it_is_not_finite() -> None:
    feedback = ErrorFeedback(4)
    feedback.begin(torch.ones(4))
    feedback.reserve(0, 4)
    for (start, stop), value in (((0, 2), 3e38), ((2, 4), math.inf)):
        feedback.error_buffer(start, stop)[0].fill_(value)
    feedback.include_with_written_error(0, 2, 3e38)
    with pytest.raises(CodecError):
        feedback.include_with_written_error(2, 4, math.inf)
    feedback.commit()
    assert torch.equal(feedback.residual, torch.tensor([3e38, 3e38, 0.0, 0.0]))
    with pytest.raises(CodecError):
        feedback.begin(torch.full((4,), 3e38))


def test_owner_error_that_is_not_finite_is_refused_and_not_added() -> None:
    feedback = ErrorFeedback(4)
    feedback.begin(torch.ones(4))
    feedback.keep_chunk(0, 4)
    with pytest.raises(CodecError):
        feedback.add_owner_error(0, EncodingLoss.of(torch.tensor([1.0, math.nan])))
    feedback.commit()
    assert feedback.residual.tolist() == [1.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_contribution_that_is_not_finite_begins_no_round(bad: float) -> None:
    feedback = after_a_round(get_codec("int8"))
    before = feedback.residual.clone()
    contribution = noise(2)
    contribution[3] = bad
    with pytest.raises(CodecError, match=r"at 3$"):
        feedback.begin(contribution)
    assert not feedback.in_round
    assert torch.equal(feedback.residual, before)


def test_what_is_known_of_a_contribution_is_believed_where_no_sum_can_overflow() -> None:
    feedback = ErrorFeedback(3)
    feedback.begin(torch.tensor([1.0, 2.0, -3e38]), 3e38)
    feedback.commit()
    with pytest.raises(CodecError, match=r"nan at 1$"):
        feedback.begin(torch.tensor([1.0, math.nan, 2.0]), math.nan)
    with pytest.raises(CodecError, match=r"inf at 2$"):
        feedback.begin(torch.tensor([1.0, 2.0, -3e38]), 3e38)
    feedback.begin(torch.tensor([1.0, 2.0, 3e38]), 3e38)


def alone(value: float) -> torch.Tensor:
    values = torch.zeros(N)
    values[7] = value
    return values


@pytest.mark.parametrize("how", ["loaded", "owner's error", "kept again and again"])
def test_a_sum_that_overflows_begins_no_round_wherever_the_residual_came_from(how: str) -> None:
    feedback = ErrorFeedback(N)
    if how == "loaded":
        feedback.load(alone(3.39e38))
    elif how == "owner's error":
        feedback.begin(torch.zeros(N))
        feedback.include_exactly(0, N)
        feedback.add_owner_error(0, EncodingLoss.of(alone(3.39e38)))
        feedback.commit()
    else:
        for _ in range(17):
            feedback.begin(alone(1.99e37))
            feedback.keep_chunk(0, N)
            feedback.commit()
    for _ in range(2):
        with pytest.raises(CodecError, match=r"inf at 7$"):
            feedback.begin(alone(2.1e37))
    feedback.begin(-alone(2.1e37))  # and what does add up to something finite is well
    feedback.include_exactly(0, N)
    feedback.commit()


def test_a_round_leaves_the_contribution_as_it_was() -> None:
    feedback = after_a_round(get_codec("int8"))
    contribution = noise(2)
    feedback.begin(contribution)
    feedback.encode_chunk(get_codec("int8"), 0, 300)
    feedback.keep_chunk(300, 600)
    feedback.commit()
    assert torch.equal(contribution, noise(2))


def test_decay_is_of_what_encoding_lost_and_of_nothing_else() -> None:
    codec = get_codec("int4")
    feedback = ErrorFeedback(N, decay=0.5)
    feedback.begin(noise(1))
    packed = feedback.encode_chunk(codec, 0, 300)
    feedback.keep_chunk(300, 600)
    feedback.include_exactly(600, 650)
    feedback.add_owner_error(600, EncodingLoss.of(torch.full((50,), 4.0)))
    feedback.commit()
    lost = noise(1)[:300] - codec.decode(packed, 300)
    assert torch.equal(feedback.residual[:300], lost * 0.5)
    assert torch.equal(feedback.residual[300:600], noise(1)[300:600])
    assert feedback.residual[600:650].tolist() == [2.0] * 50
    assert torch.equal(feedback.residual[650:], noise(1)[650:])


def test_what_is_taken_back_leaves_the_residual_of_before() -> None:
    feedback = ErrorFeedback(N, decay=0.5)
    feedback.load(noise(7))
    feedback.begin(noise(1))
    feedback.encode_chunk(get_codec("int4"), 0, 300)
    feedback.withdraw_chunk(0, 300)
    feedback.include_exactly(300, N)
    feedback.commit()
    assert torch.equal(feedback.residual[:300], noise(7)[:300]), "whole: nothing of it was lost in encoding"
    assert not feedback.residual[300:].any()


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(CodecError, match="decay"):
        ErrorFeedback(3, decay)


def test_threads_on_disjoint_chunks_give_the_same_as_one() -> None:
    n, chunk, codec = 64 * 1000, 1000, get_codec("int8")
    alone, together = ErrorFeedback(n), ErrorFeedback(n)
    starts = range(0, n, chunk)
    alone.begin(noise(5, n))
    together.begin(noise(5, n))
    expected = [alone.encode_chunk(codec, start, start + chunk) for start in starts]
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(lambda start: together.encode_chunk(codec, start, start + chunk), starts))
    assert all(torch.equal(a, b) for a, b in zip(expected, packed, strict=True))
    alone.commit()
    together.commit()
    assert torch.equal(alone.residual, together.residual)


def test_load_copies() -> None:
    feedback, saved = ErrorFeedback(3), torch.tensor([1.0, 2.0, 3.0])
    feedback.load(saved)
    saved.zero_()
    assert feedback.residual.tolist() == [1.0, 2.0, 3.0]


def test_a_residual_counts_with_another_weight() -> None:
    feedback = ErrorFeedback(4)
    feedback.load(torch.tensor([1.0, -2.0, 0.0, 3e38]))
    with pytest.raises(CodecError):
        feedback.scale(2.0)
    feedback.scale(0.5)
    assert feedback.residual.tolist() == pytest.approx([0.5, -1.0, 0.0, 1.5e38])
    with pytest.raises(CodecError):
        feedback.begin(torch.tensor([0.0, 0.0, 0.0, 3e38]))
