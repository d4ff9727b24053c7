"""Arrays of a call as a vector and back, bit for bit; and what other members may send instead."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from shoal.peer.array_packing import HEADER_VALUES, CallPart, PackedCall, call_digest, label_of, pack, unpack
from shoal.peer.array_trees import ArrayKind, NumpyArray, as_numpy, as_tensor, named_arrays, replaced
from shoal.peer.collectives import _reducer, chosen_call
from shoal.swarm.errors import UserError

ROOM = 5000


def call_of(arrays: Sequence[Any], part: CallPart = CallPart.EQUAL) -> PackedCall:
    kinds = {str(at): ArrayKind.of(one) for at, one in enumerate(arrays)}
    return PackedCall(call_digest("some call", kinds), list(kinds.values()), part)


def there_and_back(arrays: Sequence[Any], part: CallPart = CallPart.EQUAL) -> list[NumpyArray]:
    call = call_of(arrays, part)
    vector = pack(call, [as_numpy(one) for one in arrays], ROOM)
    assert vector.shape == (HEADER_VALUES + ROOM,)
    assert bool(torch.isfinite(vector).all())
    assert label_of(vector) == (call.digest, part)
    found = unpack(call, vector)
    assert found is not None
    return found


TYPES = ["bool", "int8", "uint8", "int16", "int64", "uint64", "float16", "float32", "float64", "complex64"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(TYPES).flatmap(lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0))),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(CallPart),
)
def test_all_types_come_back_bit_for_bit(arrays: list[NumpyArray], part: CallPart) -> None:
    for found, given_one in zip(there_and_back(arrays, part), arrays, strict=True):
        small = given_one.dtype in (np.float16, np.float32)
        expected = given_one.astype(np.float32) if small else given_one
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">f4", "<u8"])
def test_arrays_of_either_byte_order_come_back(dtype: str) -> None:
    odd = np.array([1, 2, 300], dtype)
    assert there_and_back([odd])[0].tolist() == [1, 2, 300]
    assert as_tensor(odd.astype(odd.dtype.newbyteorder("S"))).tolist() == [1, 2, 300]


def test_infinity_and_nan_come_back() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 1.5], np.float32)
    assert there_and_back([np.float32(2), odd])[1].tobytes() == odd.tobytes()


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"collective\.values = 5000"):
        there_and_back([np.zeros(5001, np.float32)])
    assert len(there_and_back([np.zeros(5000, np.float32)])) == 1
    with pytest.raises(UserError, match="do not fit"):
        there_and_back([np.zeros(1251)])
    with pytest.raises(UserError, match="up to 16112 arrays"):
        there_and_back([np.zeros(0, np.float32)] * 16113)


def test_calls_differ_by_what_they_do_and_by_names_shapes_and_types() -> None:
    kinds = [ArrayKind.of(one) for one in (np.zeros(3), np.zeros((3, 1)), np.zeros(3, np.float32))]
    digests = [call_digest("sum", {"a": kind}) for kind in kinds]
    digests += [call_digest("max", {"a": kinds[0]}), call_digest("sum", {"b": kinds[0]}), call_digest("sum", {})]
    assert len(set(digests)) == len(digests)
    alike = [np.zeros(2, np.float32), torch.zeros(2)]
    assert len({call_digest("sum", {"a": ArrayKind.of(one)}) for one in alike}) == 1, "whatever the framework"


def spoiled() -> Iterator[tuple[str, int, float]]:
    yield "flags that are no whole number", 17, 0.5
    yield "truth values that stand as float32", 17, 2.0
    yield "flags below zero", 17, -1.0
    yield "halves that are none", HEADER_VALUES + 2, 65536.0
    yield "truth values that are none", HEADER_VALUES + 2 + 4, 2.0


@pytest.mark.parametrize(("what", "place", "value"), [pytest.param(*one, id=one[0]) for one in spoiled()])
def test_what_no_member_would_pack_counts_for_nothing(what: str, place: int, value: float) -> None:
    arrays = [np.ones(2, np.float32), np.ones(1), np.array([True, False])]
    call = call_of(arrays)
    vector = pack(call, arrays, ROOM)
    assert unpack(call, vector) is not None
    vector[place] = value
    assert unpack(call, vector) is None


def test_a_vector_that_is_too_short_for_its_flags_counts_for_nothing() -> None:
    arrays = [np.ones(ROOM, np.float32)]
    call = call_of(arrays)
    vector = pack(call, arrays, ROOM)
    vector[17] = 1.0
    assert unpack(call, vector) is None


def test_a_vector_without_a_label_is_in_no_call() -> None:
    arrays = [np.ones(1, np.float32)]
    vector = pack(call_of(arrays), arrays, ROOM)
    for place, value in ((0, 0.25), (15, -1.0), (16, 3.0)):
        spoilt = vector.clone()
        spoilt[place] = value
        assert label_of(spoilt) is None


# Trees ----------------------------------------------------------------------------------------------------------


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"layers": [{"w": np.ones(2)}, (np.zeros(1), None)], "b": 2.0, "empty": []}
    found = list(named_arrays(tree))
    assert [name for name, _ in found] == ["b", "layers/0/w", "layers/1/0"]
    again = replaced(tree, iter(range(3)))
    assert again == {"layers": [{"w": 1}, (2, None)], "b": 0, "empty": []}
    assert list(again) == list(tree)
    assert next(named_arrays(np.ones(1)))[0] == "array"


def test_kinds_make_what_they_are_of() -> None:
    values = np.arange(4, dtype=np.float32)
    half = ArrayKind.of(torch.zeros(4, dtype=torch.bfloat16)).make(values)
    assert half.dtype == torch.bfloat16
    assert half.tolist() == values.tolist()
    assert ArrayKind.of(np.zeros(4, np.int16)).make(values).dtype == np.int16
    assert ArrayKind.of(3).make(np.asarray(7.0)) == 7
    assert isinstance(ArrayKind.of(3).make(np.asarray(7.0)), int)
    assert ArrayKind.of([[1.0]]).make(np.ones((1, 1))).shape == (1, 1)
    backwards = np.arange(3.0)[::-1]
    assert as_tensor(backwards).tolist() == [2.0, 1.0, 0.0]
    with pytest.raises(UserError, match="expected arrays of numbers"):
        as_numpy(np.array(["words"]))


def test_jax_arrays_come_back_as_such() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.arange(3, dtype=jax.numpy.bfloat16)
    kind = ArrayKind.of(array)
    assert as_tensor(array).dtype == torch.bfloat16
    found = kind.make(there_and_back([array])[0])
    assert (found.dtype, found.sharding) == (array.dtype, array.sharding)
    assert isinstance(found, jax.Array)
    assert found.tolist() == [0.0, 1.0, 2.0]


# Calls ------------------------------------------------------------------------------------------------------------


def test_a_round_completes_what_most_of_its_members_call() -> None:
    a, b, c = (bytes([number]) * 32 for number in range(3))
    equal, receives, source = CallPart
    assert chosen_call([]) is None
    assert chosen_call([(a, equal), (b, equal), (b, equal)]) == b
    assert chosen_call([(b, equal), (a, equal)]) == b, "of equals that of the lowest peer id"
    assert chosen_call([(a, receives), (a, receives), (b, equal)]) == b, "one without a source would never end"
    assert chosen_call([(b, equal), (a, receives), (a, source)]) == a
    assert chosen_call([(a, receives), (c, receives)]) is None


# Reductions -----------------------------------------------------------------------------------------------------


def test_reductions_round_once_an_operation_in_the_order_of_ranks() -> None:
    large = np.float32(2**24)
    one = np.float32(1)
    assert _reducer("sum")([np.array(large), np.array(one), np.array(one)]) == large
    assert _reducer("sum")([np.array(one), np.array(one), np.array(large)]) == large + 2
    mean = _reducer("mean")([np.array([1], np.int32), np.array([2], np.int32)])
    assert (mean.dtype, mean.tolist()) == (np.dtype(np.float64), [1.5])
    truths = [np.array([True, False]), np.array([True, True])]
    assert _reducer("sum")(truths).tolist() == [2, 1]
    assert _reducer("max")([np.array(-0.0), np.array(0.0)]).tobytes() == np.float64(0).tobytes()
    assert _reducer("min")([np.array(np.nan), np.array(0.0)]).tobytes() == np.float64(np.nan).tobytes()
    with pytest.raises(UserError, match="expected one of sum, mean, max, min"):
        _reducer("prod")  # type: ignore[arg-type]
