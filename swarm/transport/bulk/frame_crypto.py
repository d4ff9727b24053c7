"""Sealing of bulk frames: AEAD with a key for each link and direction, counter nonces, and replay protection.

The keys are derived (HKDF, RFC 5869) from two secrets that were exchanged inside the CURVE channel. The cipher is
AES-256-GCM (NIST SP 800-38D), or ChaCha20-Poly1305 (RFC 8439) where either side has no AES hardware. The header is sent
in the clear, as associated data.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from functools import cache
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.swarm.errors import WireError

Cipher = Literal["aes-256-gcm", "chacha20-poly1305"]
CHUNK, CREDIT, STREAM_CONTROL, HELLO = range(4)
"""Kinds of frames: a chunk of a stream; credit for as many chunks as the header's ``chunk`` says, without a body; a
stream control message; and, without a body, the first frame of a data connection, which attaches it to its link."""

TAG_BYTES = 16
_HEADER = struct.Struct("!8sQBHII")
HEADER_BYTES = _HEADER.size
_WINDOW = 2**16
"""Frames. Wide, as a frame may wait for its slow consumer while gigabytes of other streams of the link overtake it."""

_SEEN_MASK = (1 << _WINDOW) - 1


class Header(NamedTuple):
    """Header of a frame, authenticated but not encrypted. ``scope``: of the blob that the stream belongs to."""

    link: bytes
    counter: int
    kind: int
    scope: int
    stream: int
    chunk: int

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """Parse a header. Raises ``WireError`` for a wrong length."""
        if len(data) != HEADER_BYTES:
            raise WireError(f"a bulk frame's header has {HEADER_BYTES} bytes, this one {len(data)}")
        return cls(*_HEADER.unpack(data))


@cache
def preferred_cipher() -> Cipher:
    """The faster cipher on this machine, measured once on 256 KiB; without AES hardware ChaCha20 is clearly faster."""

    def seconds(cipher: AESGCM | ChaCha20Poly1305) -> float:
        data = bytes(2**18)
        cipher.encrypt(bytes(12), data, None)
        start = time.perf_counter()
        cipher.encrypt(bytes(12), data, None)
        return time.perf_counter() - start

    aes, chacha = seconds(AESGCM(bytes(32))), seconds(ChaCha20Poly1305(bytes(32)))
    return "aes-256-gcm" if aes <= chacha else "chacha20-poly1305"


class ReplayWindow:
    """Window that accepts every counter once and refuses counters older than itself (as in RFC 6479)."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit k: counter highest - k was accepted

    def is_fresh(self, counter: int) -> bool:
        age = self._highest - counter
        return age < 0 or (age < _WINDOW and not self._seen >> age & 1)

    def mark(self, counter: int) -> None:
        age = self._highest - counter
        if age < 0:
            self._seen = (self._seen << -age | 1) & _SEEN_MASK if -age < _WINDOW else 1
            self._highest = counter
        else:
            self._seen |= 1 << age


class SealedLink:
    """Ciphers of both directions of a link. ``seal`` and ``open`` may run in any thread and release the GIL."""

    def __init__(self, link: bytes, secrets: bytes, cipher: Cipher, *, opener: bool) -> None:
        """``secrets``: the opener's 32 bytes followed by the acceptor's."""
        keys = HKDF(hashes.SHA256(), 64, link, b"shoal bulk frames, version 4").derive(secrets)
        make = AESGCM if cipher == "aes-256-gcm" else ChaCha20Poly1305
        first, second = make(keys[:32]), make(keys[32:])
        self.link = link
        self._send, self._receive = (first, second) if opener else (second, first)
        self._counter = itertools.count()
        self._window = ReplayWindow()
        self._lock = threading.Lock()

    def next_header(self, stream: int, chunk: int, scope: int = 0, kind: int = CHUNK) -> bytes:
        return Header(self.link, next(self._counter), kind, scope, stream, chunk).pack()

    def seal(self, header: bytes, payload: memoryview, out: memoryview) -> None:
        """Write ciphertext and tag to ``out``, which is ``TAG_BYTES`` longer than ``payload``."""
        self._send.encrypt_into(bytes(4) + header[8:16], payload, header, out)

    def open(self, header: bytes, sealed: memoryview, out: memoryview) -> None:
        """Decrypt into ``out``, which is ``TAG_BYTES`` shorter. Raises ``WireError`` for a forgery or a replay."""
        counter = int.from_bytes(header[8:16], "big")
        with self._lock:
            if not self._window.is_fresh(counter):
                raise WireError("replayed bulk frame")
        try:
            self._receive.decrypt_into(bytes(4) + header[8:16], sealed, header, out)
        except (InvalidTag, ValueError) as error:
            raise WireError("forged bulk frame") from error
        with self._lock:  # only now the counter is known to be genuine; another thread may have opened the same frame
            if not self._window.is_fresh(counter):
                raise WireError("replayed bulk frame")
            self._window.mark(counter)
