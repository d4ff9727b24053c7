from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.errors import WireError
from shoal.swarm.transport.bulk import frame_crypto as sealing
from shoal.swarm.transport.bulk.frame_crypto import (
    TAG_BYTES,
    Cipher,
    Header,
    ReplayWindow,
    SealedLink,
    preferred_cipher,
)

CIPHERS: tuple[Cipher, ...] = ("aes-256-gcm", "chacha20-poly1305")
NAME = b"linkname"
SECRETS = bytes(range(64))


def ends(cipher: Cipher) -> tuple[SealedLink, SealedLink]:
    return (
        SealedLink(NAME, SECRETS, cipher, opener=True),
        SealedLink(NAME, SECRETS, cipher, opener=False),
    )


def seal(end: SealedLink, payload: bytes, stream: int = 1, chunk: int = 2) -> tuple[bytes, bytearray]:
    header, out = end.next_header(stream, chunk), bytearray(len(payload) + TAG_BYTES)
    end.seal(header, memoryview(payload), memoryview(out))
    return header, out


def unseal(end: SealedLink, header: bytes, sealed: bytes | bytearray) -> bytes:
    out = bytearray(max(len(sealed) - TAG_BYTES, 0))
    end.open(header, memoryview(sealed), memoryview(out))
    return bytes(out)


@given(st.lists(st.integers(0, 60), max_size=200), st.integers(1, 20))
def test_window_against_a_model(counters: list[int], window: int) -> None:
    original, sealing._WINDOW = sealing._WINDOW, window
    try:
        tested, seen = ReplayWindow(), set[int]()
        for counter in counters:
            fresh = counter not in seen and counter > max(seen, default=-1) - window
            assert tested.is_fresh(counter) == fresh
            if fresh:
                tested.mark(counter)
                seen.add(counter)
    finally:
        sealing._WINDOW = original


def test_window_at_its_limits() -> None:
    window = ReplayWindow()
    window.mark(2**64 - 1)
    assert not window.is_fresh(2**64 - 1)
    assert window.is_fresh(2**64 - sealing._WINDOW)
    assert not window.is_fresh(2**64 - sealing._WINDOW - 1)
    assert not window.is_fresh(0)


@pytest.mark.parametrize("cipher", CIPHERS)
@given(st.binary(max_size=300))
def test_round_trip_both_ways(cipher: Cipher, payload: bytes) -> None:
    opener, acceptor = ends(cipher)
    header, sealed = seal(opener, payload)
    assert unseal(acceptor, header, sealed) == payload
    assert len(payload) < 8 or payload not in sealed
    header, sealed = seal(acceptor, payload)
    assert unseal(opener, header, sealed) == payload


@pytest.mark.parametrize("cipher", CIPHERS)
def test_refused(cipher: Cipher) -> None:
    opener, acceptor = ends(cipher)
    header, sealed = seal(opener, b"payload")

    for bit in range(8 * len(sealed)):
        forged = bytearray(sealed)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            unseal(acceptor, header, forged)
    for byte in range(len(header)):
        other = bytearray(header)
        other[byte] ^= 1
        with pytest.raises(WireError):
            unseal(acceptor, bytes(other), sealed)
    for length in range(len(sealed)):
        with pytest.raises(WireError):
            unseal(acceptor, header, sealed[:length])
    with pytest.raises(WireError):
        unseal(acceptor, header, sealed + b"\0")
    with pytest.raises(WireError):
        unseal(acceptor, header[:-1], sealed)
    with pytest.raises(WireError):  # reflected to its own sender
        unseal(opener, header, sealed)
    for stranger in (
        SealedLink(NAME, SECRETS[::-1], cipher, opener=False),
        SealedLink(b"another!", SECRETS, cipher, opener=False),
        SealedLink(NAME, SECRETS, CIPHERS[cipher == CIPHERS[0]], opener=False),
    ):
        with pytest.raises(WireError):
            unseal(stranger, header, sealed)

    # None of the forgeries has used up the genuine frame's counter.
    assert unseal(acceptor, header, sealed) == b"payload"
    with pytest.raises(WireError, match="replayed"):
        unseal(acceptor, header, sealed)


def test_a_replay_in_many_threads_is_accepted_once() -> None:
    opener, acceptor = ends("aes-256-gcm")
    header, sealed = seal(opener, bytes(100_000))

    def attempt(_: int) -> bool:
        try:
            unseal(acceptor, header, sealed)
        except WireError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(64))) == 1


def test_a_replay_while_the_first_is_being_decrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    opener, acceptor = ends("aes-256-gcm")
    header, sealed = seal(opener, b"payload")
    genuine = acceptor._receive

    class Overtaken:
        def decrypt_into(self, *args: Any) -> None:
            monkeypatch.setattr(acceptor, "_receive", genuine)
            assert unseal(acceptor, header, sealed) == b"payload"
            genuine.decrypt_into(*args)

    monkeypatch.setattr(acceptor, "_receive", Overtaken())
    with pytest.raises(WireError, match="replayed"):
        unseal(acceptor, header, sealed)


def test_counters_never_repeat() -> None:
    opener, _ = ends("aes-256-gcm")
    with ThreadPoolExecutor(4) as pool:
        headers = list(pool.map(lambda chunk: opener.next_header(0, chunk), range(500)))
    assert len({Header.unpack(header).counter for header in headers}) == 500


def test_header() -> None:
    header = Header(b"12345678", 2**64 - 1, 2**8 - 1, 2**16 - 1, 2**32 - 1, 7)
    assert Header.unpack(header.pack()) == header
    assert preferred_cipher() in CIPHERS
