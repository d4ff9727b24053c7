import hashlib
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shoal.swarm.errors import IdentityError, NotAdmitted
from shoal.swarm.protocol.identity import (
    SEALED_BYTES,
    CurveKeys,
    Identity,
    agreement_key,
    key_text,
    parse_key,
    peer_id,
    seal_to,
    verify_certificate,
    verify_signature,
)


def test_created_private_and_stable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = Identity.load_or_create(path)
    assert first.peer_id == second.peer_id
    assert first.coordinator_keys() == second.coordinator_keys()
    assert [entry.name for entry in path.parent.iterdir()] == ["identity"]


def test_peer_id_never_changes_its_meaning() -> None:
    assert peer_id(bytes(32)) == "mzuhvlpymk6xo3ep"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o666])
def test_refused_when_others_have_access(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 1000, b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_garbage_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="identity"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_another_kind_of_key_and_an_encrypted_one(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    none, secret = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"secret")
    for encryption in (none, secret):
        path.write_bytes(
            X25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        path.chmod(0o600)
        with pytest.raises(IdentityError):
            Identity.load_or_create(path)


def test_a_folder_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path / "file" / "identity")


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    source = Path(__file__).parents[3] / ".src"
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "from pathlib import Path\nfrom shoal.swarm.protocol.identity import Identity\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        f"print(Identity.load_or_create(Path({str(path)!r})).peer_id)"
    )
    command = [sys.executable, "-c", code]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    ids = {child.communicate(timeout=60)[0].strip() for child in children}
    assert ids == {Identity.load_or_create(path).peer_id}
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity"]


def test_the_one_that_comes_second_takes_the_first_ones_key(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = Identity.load_or_create(path)
    assert Identity._create(path).peer_id == first.peer_id


def test_certificates() -> None:
    identity, other, keys = Identity.generate(), Identity.generate(), CurveKeys.fresh()
    certificate = identity.certify(keys)
    assert verify_certificate(certificate) == identity.peer_id
    forged = [
        {"curve_key": CurveKeys.fresh().public},
        {"identity_key": other.public_key},
        {"identity_key": b"\xff" * 32},
        {"signature": bytes(64)},
        {"signature": identity.sign(keys.public)},  # a signature, but not under this as a certificate
    ]
    for change in forged:
        with pytest.raises(NotAdmitted):
            verify_certificate(certificate.model_copy(update=change))
    assert not verify_signature(b"short", bytes(64), b"")


def test_curve_keys_from_secret() -> None:
    keys = CurveKeys.fresh()
    assert CurveKeys.from_secret(keys.secret) == keys


def test_a_public_key_travels_as_text() -> None:
    key = Identity.generate().public_key
    assert parse_key(key_text(key)) == key
    assert len(key_text(key)) == 52


@pytest.mark.parametrize("text", ["", "a" * 52, "A" * 52, "a" * 51, "ä" * 52, "1" * 52, key_text(bytes(32))])
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(IdentityError, match="public key"):
        parse_key(text)


# The points of small order (RFC 7748, section 6.1 has their u), a y beyond the field, and one that is off the curve.
@pytest.mark.parametrize("y", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18, 2])
def test_points_that_nobody_owns_are_refused(y: int) -> None:
    with pytest.raises(IdentityError, match="not a valid Ed25519 public key"):
        agreement_key(y.to_bytes(32, "little"))


def test_what_is_sealed_to_an_identity_is_for_it_and_its_context_alone() -> None:
    for _ in range(20):
        identity, other = Identity.generate(), Identity.generate()
        sealed = seal_to(identity.public_key, b"secret", b"context")
        assert len(sealed) == len(b"secret") + SEALED_BYTES
        assert identity.unseal(sealed, b"context") == b"secret"
        for reader, data, context in (
            (other, sealed, b"context"),
            (identity, sealed, b"another"),
            (identity, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"context"),
            (identity, sealed[:40], b"context"),
            (identity, bytes(len(sealed)), b"context"),
        ):
            with pytest.raises(ValueError, match="not sealed for this identity"):
                reader.unseal(data, context)


def test_the_mapped_key_is_that_of_the_mapped_secret() -> None:
    identity = Identity.generate()
    secret = X25519PrivateKey.from_private_bytes(hashlib.sha512(identity._private.private_bytes_raw()).digest()[:32])
    assert agreement_key(identity.public_key) == secret.public_key()
