"""Identities: Ed25519 key pairs, the peer ids derived from them, and certificates for CURVE keys."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, hpke, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from shoal.swarm import durable
from shoal.swarm.errors import IdentityError, NotAdmitted, StorageError
from shoal.swarm.protocol.types import Certificate
from shoal.swarm.system import is_private

_CERTIFICATE_CONTEXT = b"shoal curve key, version 1\0"
_COORDINATOR_CONTEXT = b"shoal coordinator curve key, version 1"
_POSSESSION_CONTEXT = b"shoal curve key possession, version 1\0"
_MAX_FILE_BYTES = 65_536
_FIELD = 2**255 - 19
_HPKE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
SEALED_BYTES = 48
"""Length that sealing adds: an ephemeral public key of 32 bytes and a tag of 16."""

_CURVE_D = -121665 * pow(121666, -1, _FIELD)


def peer_id(identity_key: bytes) -> str:
    """The peer id of a raw Ed25519 public key: 16 base32 characters, 80 bits of its SHA-256."""
    return base64.b32encode(hashlib.sha256(identity_key).digest()[:10]).decode().lower()


def key_text(identity_key: bytes) -> str:
    """A raw Ed25519 public key as run files name it: 52 base32 characters."""
    return base64.b32encode(identity_key).decode().rstrip("=").lower()


def parse_key(text: str) -> bytes:
    """The raw Ed25519 public key that ``key_text`` wrote. Raises ``IdentityError`` for anything else."""
    try:
        key = base64.b32decode(text.upper() + "====")
    except (ValueError, binascii.Error) as error:
        raise IdentityError(
            f"{text[:60]!r} is not a public key; expected the 52 characters that `shoal identity` prints"
        ) from error
    if len(key) != 32 or key_text(key) != text:
        raise IdentityError(
            f"{text[:60]!r} is not a public key; expected the 52 characters that `shoal identity` prints"
        )
    agreement_key(key)
    return key


def agreement_key(identity_key: bytes) -> X25519PublicKey:
    """The X25519 public key with the same secret as an Ed25519 public key.

    By the birational map u = (1 + y) / (1 - y) (RFC 7748, section 4.1). Raises ``IdentityError`` for bytes that are not
    a point of the curve, or a point of small order."""
    y = int.from_bytes(identity_key, "little") & (1 << 255) - 1
    # On the curve, x² = (y² - 1) / (d y² + 1) is a square (Euler's criterion).
    x_squared = (y * y - 1) * pow(_CURVE_D * y * y + 1, -1, _FIELD) % _FIELD
    if len(identity_key) == 32 and 1 < y < _FIELD - 1 and pow(x_squared, (_FIELD - 1) // 2, _FIELD) == 1:
        u = (1 + y) * pow(1 - y, -1, _FIELD) % _FIELD
        public = X25519PublicKey.from_public_bytes(u.to_bytes(32, "little"))
        with suppress(ValueError):  # raised for a shared secret of zeros, which results from a point of small order
            X25519PrivateKey.generate().exchange(public)
            return public
    raise IdentityError(f"{identity_key.hex()} is not a valid Ed25519 public key")


def seal_to(identity_key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt ``content`` for an Ed25519 identity with HPKE (RFC 9180); the result is ``SEALED_BYTES`` longer.

    ``context`` names the purpose; ``Identity.unseal`` needs the same one."""
    return _HPKE.encrypt(content, agreement_key(identity_key), info=context)


@dataclass(frozen=True)
class CurveKeys:
    """One process's X25519 transport key pair, raw 32 bytes each."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def from_secret(cls, secret: bytes) -> CurveKeys:
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)

    def prove(self, challenge: bytes, said: bytes) -> bytes:
        """Prove possession of the secret key to who holds the secret key of ``challenge``: an authentication code of
        ``said`` under the key that both agree on by Diffie-Hellman. The other side computes the same.

        Raises ``NotAdmitted`` for a public key with which nothing can be agreed on."""
        try:
            shared = X25519PrivateKey.from_private_bytes(self.secret).exchange(
                X25519PublicKey.from_public_bytes(challenge)
            )
        except ValueError:
            raise NotAdmitted("the transport key is no key", "no proof") from None
        return hmac.digest(shared, _POSSESSION_CONTEXT + said, "sha256")


class Identity:
    """An Ed25519 key pair. The private key never leaves this machine."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_key = private.public_key().public_bytes_raw()
        self.peer_id = peer_id(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the identity file, or create one with mode 0600.

        Raises ``IdentityError`` when other users may read it, or it is not an unencrypted PKCS#8 Ed25519 key."""
        try:
            if not path.exists():
                return cls._create(path)
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise IdentityError(f"{path}: cannot read the identity file: {error}") from error
        if not is_private(mode):
            raise IdentityError(
                f"{path}: other users may read this identity (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
            )
        try:
            key = serialization.load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(f"{path}: not an identity file; move it away to create a new identity") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(f"{path}: holds a key of another type; expected Ed25519")
        return cls(key)

    @classmethod
    def _create(cls, path: Path) -> Identity:
        identity = cls.generate()
        pem = identity._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A temporary name and link(2): of two processes that start together, the second uses the first's key.
        # The name is random, as process ids repeat in containers and a killed process leaves its file behind.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            durable.write_whole(temporary, pem, 0o600)
            os.link(temporary, path)
        except FileExistsError:
            return cls.load_or_create(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot write the identity file: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return identity

    def sign(self, data: bytes) -> bytes:
        """64-byte Ed25519 signature (RFC 8032)."""
        return self._private.sign(data)

    def unseal(self, sealed: bytes, context: bytes) -> bytes:
        """Decrypt content that ``seal_to`` has sealed for this identity and context.

        Raises ``ValueError`` for content of another identity or context, and for damaged content."""
        # The secret that RFC 8032, section 5.1.5, derives from the seed is that of the key that ``agreement_key`` maps.
        secret = hashlib.sha512(self._private.private_bytes_raw()).digest()[:32]
        try:
            return _HPKE.decrypt(sealed, X25519PrivateKey.from_private_bytes(secret), info=context)
        except InvalidTag as error:
            raise ValueError("not sealed for this identity in this context, or damaged") from error

    def certify(self, keys: CurveKeys) -> Certificate:
        """Sign a transport key."""
        return Certificate(
            identity_key=self.public_key,
            curve_key=keys.public,
            signature=self.sign(_CERTIFICATE_CONTEXT + keys.public),
        )

    def coordinator_keys(self) -> CurveKeys:
        """The CURVE keys of a coordinator with this identity; always the same, so that invites stay valid."""
        seed = self._private.private_bytes_raw()
        return CurveKeys.from_secret(HKDF(hashes.SHA256(), 32, None, _COORDINATOR_CONTEXT).derive(seed))


def verify_signature(identity_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether ``identity_key`` has signed ``data``."""
    try:
        Ed25519PublicKey.from_public_bytes(identity_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def verify_certificate(certificate: Certificate) -> str:
    """The peer id that a certificate proves. Raises ``NotAdmitted`` for a wrong signature."""
    data = _CERTIFICATE_CONTEXT + certificate.curve_key
    if not verify_signature(certificate.identity_key, certificate.signature, data):
        raise NotAdmitted("the certificate's signature does not match its keys")
    return peer_id(certificate.identity_key)
