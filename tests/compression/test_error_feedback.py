"""Error feedback: nothing that was offered is lost, it is in a mean or in the residual."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.codec_maps import get_codec_map
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CODEC_NAMES, CodecError
from shoal.compression.range_reader import TensorReader
from shoal.compression.registry import get_codec
from shoal.compression.weighted_mean import EncodingLoss

N, CHUNK = 700, 300
CHUNKS = [(0, 300), (300, 600), (600, 700)]
every_codec = pytest.mark.parametrize("codec", [get_codec(name) for name in CODEC_NAMES], ids=CODEC_NAMES)


def noise(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of values around one."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-21)


def after_a_round(codec: Codec) -> ErrorFeedback:
    feedback = ErrorFeedback(N)
    feedback.begin(TensorReader(noise(1)))
    for start, stop in CHUNKS:
        feedback.encode_chunk(codec, start, stop)
    feedback.commit()
    return feedback


@every_codec
@given(
    fates=st.lists(st.tuples(*[st.sampled_from(["sent", "kept", "sent and kept", "never"])] * 3), max_size=8),
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
        feedback.begin(TensorReader(contribution))
        if committed:
            offered += contribution.double()
        for (start, stop), fate in zip(CHUNKS, fate_of_chunks, strict=True):
            if fate.startswith("sent"):
                received = codec.decode(feedback.encode_chunk(codec, start, stop), stop - start)
            if committed and fate.endswith("kept"):
                feedback.keep_chunk(start, stop)
            elif committed and fate == "sent":
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
    feedback.begin(TensorReader(noise(2)))
    feedback.commit()
    assert torch.equal(feedback.residual, torch.cat(lost) + noise(2))


@every_codec
def test_what_nobody_asked_for_and_what_was_kept_is_carried_over(codec: Codec) -> None:
    feedback = ErrorFeedback(N)
    feedback.begin(TensorReader(noise(1)))
    feedback.encode_chunk(codec, 0, 300)
    feedback.encode_chunk(codec, 300, 600)
    feedback.keep_chunk(300, 600)
    feedback.commit()
    near(feedback.residual[300:600], noise(1)[300:600])
    assert torch.equal(feedback.residual[600:], noise(1)[600:])
    packed = codec.encode(noise(1)[:300])
    assert torch.equal(feedback.residual[:300], noise(1)[:300] - codec.decode(packed, 300))


def test_discard_gives_the_residual_of_before_back() -> None:
    feedback = after_a_round(get_codec("int8"))
    before = feedback.residual.clone()
    feedback.begin(TensorReader(noise(2)))
    for start, stop in CHUNKS:
        feedback.encode_chunk(get_codec("int8"), start, stop)
    feedback.discard()
    assert not feedback.in_round
    near(feedback.residual, before)
    feedback.discard()
    assert not feedback.in_round


def test_owner_error_is_added_where_it_belongs() -> None:
    feedback = ErrorFeedback(6)
    feedback.begin(TensorReader(torch.ones(6)))
    feedback.encode_chunk(get_codec("float32"), 0, 4)
    feedback.include_chunk(0, 4)
    feedback.keep_chunk(4, 5)
    feedback.add_mean_loss(2, EncodingLoss.of(torch.tensor([0.25, -0.5])), 2.0)
    feedback.add_mean_loss(4, EncodingLoss.of(torch.tensor([3.0])))
    feedback.commit()
    assert feedback.residual.tolist() == [0, 0, 0.5, -1.0, 4.0, 1.0]


def test_owner_error_that_is_not_finite_is_refused_and_not_added() -> None:
    feedback = ErrorFeedback(4)
    feedback.begin(TensorReader(torch.ones(4)))
    feedback.keep_chunk(0, 4)
    with pytest.raises(CodecError):
        feedback.add_mean_loss(0, EncodingLoss.of(torch.tensor([1.0, math.nan])))
    feedback.commit()
    assert feedback.residual.tolist() == [1.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_contribution_that_is_not_finite_begins_no_round(bad: float) -> None:
    feedback = after_a_round(get_codec("int8"))
    before = feedback.residual.clone()
    contribution = noise(2)
    contribution[3] = bad
    with pytest.raises(CodecError, match=r"at 3$"):
        feedback.begin(TensorReader(contribution))
    assert not feedback.in_round
    assert torch.equal(feedback.residual, before)


def test_what_is_known_of_a_contribution_is_believed_where_no_sum_can_overflow() -> None:
    feedback = ErrorFeedback(3)
    feedback.begin(TensorReader(torch.tensor([1.0, 2.0, -3e38])), 3e38)
    feedback.commit()
    with pytest.raises(CodecError, match=r"nan at 1$"):
        feedback.begin(TensorReader(torch.tensor([1.0, math.nan, 2.0])), math.nan)
    with pytest.raises(CodecError, match=r"inf at 2$"):
        feedback.begin(TensorReader(torch.tensor([1.0, 2.0, -3e38])), 3e38)
    feedback.begin(TensorReader(torch.tensor([1.0, 2.0, 3e38])), 3e38)


def alone(value: float) -> torch.Tensor:
    values = torch.zeros(N)
    values[7] = value
    return values


@pytest.mark.parametrize("how", ["loaded", "owner's error", "kept again and again"])
def test_a_sum_that_overflows_begins_no_round_wherever_the_residual_came_from(how: str) -> None:
    feedback = ErrorFeedback(N)
    if how == "loaded":
        feedback.load(lambda memory: memory.copy_(alone(3.39e38)))
    elif how == "owner's error":
        feedback.begin(TensorReader(torch.zeros(N)))
        feedback.encode_chunk(get_codec("float32"), 0, N)
        feedback.add_mean_loss(0, EncodingLoss.of(alone(3.39e38)))
        feedback.commit()
    else:
        for _ in range(17):
            feedback.begin(TensorReader(alone(1.99e37)))
            feedback.keep_chunk(0, N)
            feedback.commit()
    for _ in range(2):
        with pytest.raises(CodecError, match=r"inf at 7$"):
            feedback.begin(TensorReader(alone(2.1e37)))
    feedback.begin(TensorReader(-alone(2.1e37)))  # and what does add up to something finite is well
    feedback.encode_chunk(get_codec("float32"), 0, N)
    feedback.commit()


def test_a_round_leaves_the_contribution_as_it_was() -> None:
    feedback = after_a_round(get_codec("int8"))
    contribution = noise(2)
    feedback.begin(TensorReader(contribution))
    feedback.encode_chunk(get_codec("int8"), 0, 300)
    feedback.keep_chunk(300, 600)
    feedback.commit()
    assert torch.equal(contribution, noise(2))


def test_decay_is_of_what_encoding_lost_and_of_nothing_else() -> None:
    codec = get_codec("int4")
    feedback = ErrorFeedback(N, decay=0.5)
    feedback.begin(TensorReader(noise(1)))
    packed = feedback.encode_chunk(codec, 0, 300)
    feedback.keep_chunk(300, 600)
    feedback.encode_chunk(get_codec("float32"), 600, 650)
    feedback.include_chunk(600, 650)
    feedback.add_mean_loss(600, EncodingLoss.of(torch.full((50,), 4.0)))
    feedback.commit()
    lost = noise(1)[:300] - codec.decode(packed, 300)
    assert torch.equal(feedback.residual[:300], lost * 0.5)
    near(feedback.residual[300:600], noise(1)[300:600])
    assert feedback.residual[600:650].tolist() == [2.0] * 50
    assert torch.equal(feedback.residual[650:], noise(1)[650:])


def test_what_is_taken_back_leaves_the_residual_of_before() -> None:
    feedback = ErrorFeedback(N, decay=0.5)
    feedback.load(lambda memory: memory.copy_(noise(7)))
    feedback.begin(TensorReader(noise(1)))
    feedback.encode_chunk(get_codec("int4"), 0, 300)
    feedback.withdraw_chunk(0, 300)
    feedback.encode_chunk(get_codec("float32"), 300, N)
    feedback.commit()
    near(feedback.residual[:300], noise(7)[:300])  # whole: nothing of it was lost in encoding
    assert not feedback.residual[300:].any()


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(CodecError, match="decay"):
        ErrorFeedback(3, decay)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_chunks_encoded_in_one_call_are_those_encoded_one_by_one(name: str) -> None:
    n, codecs = 3 * 4096 + 1000, get_codec_map(name).by_leaf(4096)
    alone, together = ErrorFeedback(n), ErrorFeedback(n)
    bounds = [(start, min(start + 4096, n)) for start in range(0, n, 4096)]
    for feedback in (alone, together):
        feedback.load(lambda memory: memory.copy_(noise(6, n)))
        feedback.begin(TensorReader(noise(5, n)))
    expected = [alone.encode_chunk(codecs.contribution(*one), *one) for one in bounds]
    whole, chunks = codecs.contribution(0, n), [(codecs.contribution(*one), *one) for one in bounds]
    packed = together.encode_chunks(whole, chunks, torch.empty(whole.packed_bytes(n), dtype=torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(expected, packed, strict=True))
    assert together.encode_chunk(*chunks[1]) is packed[1]
    for feedback in (alone, together):
        feedback.keep_chunk(*bounds[1])
        feedback.include_chunk(*bounds[3], 0.5)
        feedback.commit()
    assert torch.equal(alone.residual, together.residual)


def test_threads_on_disjoint_chunks_give_the_same_as_one() -> None:
    n, chunk, codec = 64 * 1000, 1000, get_codec("int8")
    alone, together = ErrorFeedback(n), ErrorFeedback(n)
    starts = range(0, n, chunk)
    alone.begin(TensorReader(noise(5, n)))
    together.begin(TensorReader(noise(5, n)))
    expected = [alone.encode_chunk(codec, start, start + chunk) for start in starts]
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(lambda start: together.encode_chunk(codec, start, start + chunk), starts))
    assert all(torch.equal(a, b) for a, b in zip(expected, packed, strict=True))
    alone.commit()
    together.commit()
    assert torch.equal(alone.residual, together.residual)


def test_a_residual_is_loaded_into_the_memory_that_is_there() -> None:
    feedback, saved = ErrorFeedback(3), torch.tensor([1.0, 2.0, 3.0])
    place = feedback.residual.data_ptr()
    feedback.load(lambda memory: memory.copy_(saved))
    assert feedback.residual.tolist() == [1.0, 2.0, 3.0]
    assert feedback.residual.data_ptr() == place


def test_of_what_cannot_be_loaded_nothing_stays() -> None:
    feedback = ErrorFeedback(3)
    with pytest.raises(CodecError):
        feedback.load(lambda memory: memory.copy_(torch.tensor([1.0, math.nan, 2.0])))
    assert not feedback.residual.any()

    def fail(memory: Tensor) -> None:
        memory.fill_(1.0)
        raise OSError("for the test")

    with pytest.raises(OSError, match="for the test"):
        feedback.load(fail)
    assert not feedback.residual.any()


def test_a_residual_counts_with_another_weight() -> None:
    feedback = ErrorFeedback(4)
    feedback.load(lambda memory: memory.copy_(torch.tensor([1.0, -2.0, 0.0, 3e38])))
    with pytest.raises(CodecError):
        feedback.scale(2.0)
    feedback.scale(0.5)
    assert feedback.residual.tolist() == pytest.approx([0.5, -1.0, 0.0, 1.5e38])
    with pytest.raises(CodecError):
        feedback.begin(TensorReader(torch.tensor([0.0, 0.0, 0.0, 3e38])))


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_kept_until_the_verdict_and_nothing_of_a_model_is_copied(codec: Codec, dtype: torch.dtype) -> None:
    """Who asks twice gets the same bytes, whatever has become of the residual."""
    feedback = ErrorFeedback(N, dtype=dtype)
    place = feedback.residual.data_ptr()
    for seed in (1, 2, 3):
        feedback.begin(TensorReader(noise(seed)))
        before = feedback.residual.to(torch.float32, copy=True)
        for bounds in CHUNKS:
            packed = feedback.encode_chunk(codec, *bounds)
            assert torch.equal(packed, codec.encode(noise(seed)[slice(*bounds)] + before[slice(*bounds)]))
            assert feedback.encode_chunk(codec, *bounds) is packed
        feedback.commit()
    assert feedback.residual.data_ptr() == place


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fate", ["keep", "withdraw", "discard"])
def test_encoding_can_be_undone(codec: Codec, dtype: torch.dtype, fate: str) -> None:
    feedback = ErrorFeedback(N, decay=0.5, dtype=dtype)
    feedback.load(lambda memory: memory.copy_(0.3 * noise(7)))
    before = feedback.residual.to(torch.float32, copy=True)
    feedback.begin(TensorReader(noise(1)))
    corrected = noise(1) + before
    largest = float(corrected.abs().max())
    for start, stop in CHUNKS[:2]:
        feedback.encode_chunk(codec, start, stop)
    if fate == "discard":
        feedback.discard()
    else:
        for bounds in CHUNKS:
            (feedback.keep_chunk if fate == "keep" else feedback.withdraw_chunk)(*bounds)
        feedback.commit()
    expected = corrected if fate == "keep" else before
    precision = 2.0**-23 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(feedback.residual.float(), expected, rtol=0, atol=precision * largest)
    if fate != "keep":
        assert torch.equal(feedback.residual[600:].float(), before[600:]), "nobody asked for it"


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "topk"])
def test_a_residual_in_bfloat16_makes_up_for_losses_as_one_in_float32(name: str) -> None:
    """Small values reach the means, too, though they are far below the last bit of what is left of large ones."""
    n, rounds, codec = 4096, 600, get_codec(name)
    contribution = noise(3, n)
    contribution[1:] *= 1e-3 if name == "int8" else 1.0
    sums = {}
    for dtype in (torch.float32, torch.bfloat16):
        feedback, total = ErrorFeedback(n, dtype=dtype), torch.zeros(n)
        for _ in range(rounds):
            feedback.begin(TensorReader(contribution))
            codec.accumulate(feedback.encode_chunk(codec, 0, n), total, 1.0)
            feedback.commit()
        sums[dtype] = float((total / rounds - contribution).norm() / contribution[1:].norm())
    assert sums[torch.bfloat16] < 1.25 * sums[torch.float32] + 0.01


def test_of_a_chunk_that_cannot_be_encoded_no_residual_stays() -> None:
    feedback, contribution = ErrorFeedback(N), noise(1)
    feedback.load(lambda memory: memory.copy_(noise(7)))
    feedback.begin(TensorReader(contribution))
    contribution[3] = math.nan  # in spite of the promise
    with pytest.raises(CodecError):
        feedback.encode_chunk(get_codec("int8"), 0, 300)
    feedback.discard()
    assert not feedback.residual[:300].any()
    assert torch.equal(feedback.residual[300:], noise(7)[300:])


def test_a_part_that_is_cut_off_by_a_factor_is_not_carried() -> None:
    codec = get_codec("int4")
    feedback, expected = ErrorFeedback(N, decay=0.5), ErrorFeedback(N)
    for one in (feedback, expected):
        one.begin(TensorReader(noise(1)))
        one.encode_chunk(codec, 0, 300)
    feedback.include_chunk(0, 300, 0.25)
    feedback.include_chunk(300, 600, 0.25)  # nobody asked for it
    feedback.commit()
    expected.commit()
    assert torch.equal(feedback.residual[:300], 0.125 * expected.residual[:300])
    assert torch.equal(feedback.residual[300:], noise(1)[300:])
