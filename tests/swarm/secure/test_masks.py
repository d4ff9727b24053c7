import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import needs_numba, use

from shoal.swarm.errors import WireError
from shoal.swarm.secure.groups import draw_groups, lane_bits
from shoal.swarm.secure.masks import add_masks, add_packed, pack, packed_bytes, padded, unpack


@pytest.fixture(autouse=True, scope="module", params=["numpy", pytest.param("numba", marks=needs_numba)])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with and without compiled kernels."""
    with use(request.param):
        yield request.param


def test_a_mask_is_the_keystream_of_aes_in_counter_mode() -> None:
    """NIST's AESAVS, GFSbox and VarKey of 256 bits: the first block encrypts a counter of zeros."""
    for key, block in [
        (bytes(32), "dc95c078a2408989ad48a21492842087"),
        (bytes.fromhex("80" + 31 * "00"), "e35a6dcb19b201a01ebcfa8aa22b5759"),
    ]:
        lanes = np.zeros(8, "<u2")
        add_masks(lanes, [(key, 1)])
        assert lanes.tobytes().hex() == block


@pytest.mark.parametrize("n", [8, 2**15 - 8, 2**15, 2**15 + 8, 3 * 2**15 + 24])
def test_masks_are_taken_off_again_across_tiles(n: int) -> None:
    lanes = np.arange(n, dtype="<u2")
    keys = [(hashlib.sha256(bytes([one])).digest(), 1 if one % 2 else -1) for one in range(3)]
    masked = lanes.copy()
    add_masks(masked, keys)
    assert np.count_nonzero(masked == lanes) < 8 + n // 1000
    tail = np.zeros(n, "<u2")
    add_masks(tail, keys[:1])
    assert len({tail[at : at + 8].tobytes() for at in range(0, n, 8)}) == n // 8, "no part of the stream comes twice"
    add_masks(masked, [(key, -sign) for key, sign in keys])
    assert (masked == lanes).all()


def test_a_keystream_begins_at_any_block_of_its_counter() -> None:
    """NIST SP 800-38A, F.5.5: another first block than zero. A block of the keystream is its counter, encrypted."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    first = int.from_bytes(bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"), "big")
    lanes = np.zeros(8, "<u2")
    add_masks(lanes, [(key, 1)], 8 * first)
    assert lanes.tobytes().hex() == "0bdf7df1591716335e9a8b15c860c502"


@pytest.mark.parametrize("start", [0, 8, 2**15 - 8, 2**15, 3 * 2**15 + 8])
def test_masks_from_a_lane_on_are_those_of_the_whole_part(start: int) -> None:
    keys = [(hashlib.sha256(bytes([one])).digest(), 1 if one % 2 else -1) for one in range(3)]
    whole, rest = np.zeros(4 * 2**15, "<u2"), np.zeros(2**15 - 8, "<u2")
    add_masks(whole, keys)
    add_masks(rest, keys, start)
    assert (rest == whole[start : start + rest.size]).all()


@given(st.integers(1, 16), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_packing_keeps_the_lowest_bits(bits: int, groups: int, random: object) -> None:
    n = 8 * groups
    lanes = np.random.default_rng(bits * 100 + groups).integers(0, 2**16, n).astype("<u2")
    out = np.empty(packed_bytes(n, bits), np.uint8)
    pack(lanes, bits, out)
    assert out.size * 8 == n * bits
    assert (unpack(out.data, n, bits) == lanes & ((1 << bits) - 1)).all()


@pytest.mark.parametrize("bits", [7, 11])
def test_packing_goes_tile_by_tile(bits: int) -> None:
    n = 2 * 2**15 + 16
    lanes = np.random.default_rng(0).integers(0, 2**bits, n).astype("<u2")
    out = np.empty(packed_bytes(n, bits), np.uint8)
    pack(lanes, bits, out)
    assert (unpack(out.data, n, bits) == lanes).all()
    with pytest.raises(WireError):
        unpack(out.data[1:], n, bits)


def test_lanes_hold_the_sum_of_a_group() -> None:
    """As in the facts on secure averaging: 11 to 13 bits of int8, 7 to 9 of int4."""
    assert [lane_bits(n, 8) for n in (8, 16, 32)] == [11, 12, 13]
    assert [lane_bits(n, 4) for n in (8, 16, 32)] == [7, 8, 9]
    assert padded(1) == 8
    for members in range(4, 33):
        for bits in (4, 8):
            assert members * (2 ** (bits - 1) - 1) < 2 ** (lane_bits(members, bits) - 1)


# Groups -------------------------------------------------------------------------------------------------------


def nonces(n: int, salt: int = 0) -> list[bytes]:
    return [hashlib.sha256(bytes([salt, one])).digest() for one in range(n)]


@pytest.mark.parametrize("n", [4, 5, 7, 8, 9, 15, 16, 17, 33, 128])
def test_everybody_is_in_one_group_of_a_fair_size(n: int) -> None:
    groups = draw_groups(nonces(n), b"plan", 8)
    assert sorted(member for group in groups for member in group.members) == list(range(n))
    assert all(min(n, 8) <= len(group.members) <= 15 for group in groups)
    assert all(3 * group.threshold > 2 * len(group.members) for group in groups)


def test_any_nonce_and_the_plan_change_the_draw() -> None:
    drawn = {str(draw_groups(nonces(32), b"plan", 4)), str(draw_groups(nonces(32), b"other", 4))}
    for one in range(8):
        other = nonces(32)
        other[one] = bytes(32)
        drawn.add(str(draw_groups(other, b"plan", 4)))
    assert len(drawn) == 10


@needs_numba
@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("n", [8, 24, 2**15 + 8, 2 * 2**15])
def test_kernels_give_the_same_bytes(bits: int, n: int) -> None:
    lanes = np.random.default_rng(n).integers(0, 2**16, n).astype("<u2")
    keys = [(bytes([one]) * 32, one % 3 - 1 or 1) for one in range(4)]
    seen = []
    for path in ("numpy", "numba"):
        with use(path):
            out, masked = np.empty(packed_bytes(n, bits), np.uint8), lanes.copy()
            pack(lanes, bits, out)
            add_masks(masked, keys)
            add_packed(memoryview(out.tobytes()), bits, masked)
            seen.append((out.tobytes(), masked.tobytes()))
            with pytest.raises(WireError):
                add_packed(out.data[1:], bits, masked)
    assert seen[0] == seen[1]
