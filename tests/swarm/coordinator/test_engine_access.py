"""Engines that ask who one is: etcd by TLS with users, Postgres with passwords; what is wrong is said without them."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.fakes.engines import ETCD, EtcdCluster, PostgresServer, postgres_server
from tests.swarm.coordinator.stories import RUN, story

from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.coordinator.stores.etcd import EtcdStore, _encode
from shoal.swarm.coordinator.stores.place import open_store
from shoal.swarm.errors import JournalUnavailable, ShoalError, UserError

pytestmark = [pytest.mark.integration, pytest.mark.matrix]

PASSWORD = "geheim/?:@"
IN_URL = "geheim%2F%3F%3A%40"


class Authority:
    """A certificate authority in a folder; ``issue`` writes a certificate and its key."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        made = self._certificate(self._name, self._key.public_key(), is_authority=True)
        self.file.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, about: x509.ObjectIdentifier = NameOID.COMMON_NAME) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(about, name)])
        made = self._certificate(subject, key.public_key(), is_authority=False)
        paths = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return paths

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(key)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(own, critical=False).add_extension(issuer, critical=False)
        if is_authority:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        return builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())


def write_and_read(url: str, folder: Path) -> None:
    """The whole story, by one host after the other."""
    folder.mkdir()
    for half in (slice(0, 4), slice(4, None)):
        with closing(SharedJournal(open_store(url, "reef"), "one", 10.0, folder)) as journal:
            journal.open()
            assert journal.begin(SharedRun(RUN.hash, "toml", bytes(32))) is not None
            for events, snapshot in story()[half]:
                journal.append(journal.next_index, events)
                if snapshot is not None:
                    journal.compact(snapshot)
            journal.renew()
    assert journal.next_index == len(story())


def refused(url: str, error: type[Exception] = UserError) -> str:
    with pytest.raises(error) as found:
        open_store(url, "reef").open()
    said = str(found.value)
    assert "geheim" not in said
    return said


# etcd -------------------------------------------------------------------------------------------------------


class SafeEtcd:
    """A cluster of one with TLS both ways, and a user who may write below ``shoal/`` only."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority(folder, "authority"), Authority(folder, "other")
        certificate, key = self.authority.issue("etcd")
        self.cert, self.key = self.authority.issue("host", NameOID.ORGANIZATION_NAME)
        self.named = self.authority.issue("named")
        files = ("--cert-file", str(certificate), "--key-file", str(key), "--trusted-ca-file", str(self.authority.file))
        self.cluster = EtcdCluster(folder, 1, (*files, "--client-cert-auth"), client_scheme="https")
        self.port = self.cluster.ports[0]

    def url(self, user: str = f"host:{IN_URL}@", files: str = "ca,cert,key", host: str = "127.0.0.1") -> str:
        named = {"ca": self.authority.file, "other": self.other.file, "cert": self.cert, "key": self.key}
        query = "&".join(f"{'ca' if one == 'other' else one}={named[one]}" for one in files.split(",") if one)
        return f"etcds://{user}{host}:{self.port}/shoal{'?' * bool(query)}{query}"

    def make_users(self) -> None:
        store = open_store(self.url(user=""), "reef")
        assert isinstance(store, EtcdStore)
        for name, password, role in (("root", "geheim", "root"), ("host", PASSWORD, "host")):
            if role != "root":
                store._call("auth/role/add", {"name": role})
                area = {"key": _encode(b"shoal/"), "range_end": _encode(b"shoal0"), "permType": "READWRITE"}
                store._call("auth/role/grant", {"name": role, "perm": area})
            else:
                store._call("auth/role/add", {"name": role})
            store._call("auth/user/add", {"name": name, "password": password})
            store._call("auth/user/grant", {"user": name, "role": role})
        store._call("auth/enable", {})
        store.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SafeEtcd]:
    if ETCD is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    safe = SafeEtcd(tmp_path_factory.mktemp("etcd"))
    try:
        safe.make_users()
        yield safe
    finally:
        safe.cluster.close()


def test_etcd_by_tls_with_a_user_who_may_write_there_only(etcd: SafeEtcd, tmp_path: Path) -> None:
    write_and_read(etcd.url(), tmp_path / "host")


def test_a_token_that_etcd_has_forgotten_is_asked_for_again(etcd: SafeEtcd) -> None:
    store = open_store(etcd.url(), "forgotten")
    store.open()
    store.put("about/x", b"1")
    etcd.cluster.processes[0].kill()
    etcd.cluster.processes[0].wait()
    etcd.cluster.restart(0)
    store.put("about/x", b"2")
    found = store.read("about/x")
    assert found is not None
    assert found.value == b"2"
    store.close()


def test_what_is_wrong_with_etcd_is_said(etcd: SafeEtcd) -> None:
    assert "user, password and rights" in refused(etcd.url(user="host:geheim@"))
    assert "user, password and rights" in refused(etcd.url(user="nobody:geheim@"))
    assert "user, password and rights" in refused(etcd.url(user=""))
    assert "name the authority that signed it" in refused(etcd.url(files="cert,key"))
    assert "name the authority that signed it" in refused(etcd.url(files="other,cert,key"))
    assert "a name that the certificate has" in refused(etcd.url(host="localhost"))
    assert "?cert=FILE" in refused(etcd.url(files="ca"), ShoalError)
    named = etcd.url().replace(str(etcd.cert), str(etcd.named[0])).replace(str(etcd.key), str(etcd.named[1]))
    assert "without a common name" in refused(named)
    assert "etcd does not answer" in refused(etcd.url().partition("?")[0].replace("etcds", "etcd"), JournalUnavailable)


def test_etcd_without_tls(tmp_path: Path) -> None:
    if ETCD is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    cluster = EtcdCluster(tmp_path, 1)
    try:
        assert "speak TLS there" in refused(cluster.url().replace("etcd:", "etcds:"), JournalUnavailable)
    finally:
        cluster.close()


# Postgres ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            quoted = PASSWORD.replace("'", "''")
            connection.execute(f"create user host password '{quoted}'")
            connection.execute("create user reader password 'geheim'")
            connection.execute("grant create, usage on schema public to host")
            rules = connection.execute("show hba_file").fetchone()
            assert rules is not None
            Path(rules[0]).write_text("host all all 127.0.0.1/32 scram-sha-256\n")
            connection.execute("select pg_reload_conf()")
        yield server


def at(server: PostgresServer, user: str, more: str = "") -> str:
    return f"postgres://{user}@127.0.0.1:{server.port}/postgres{more}"


def test_postgres_with_a_password(postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_and_read(at(postgres, f"host:{IN_URL}", "?application_name=shoal"), tmp_path / "host")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    open_store(at(postgres, "host"), "reef").open()


def test_what_is_wrong_with_postgres_is_said(postgres: PostgresServer) -> None:
    open_store(at(postgres, f"host:{IN_URL}"), "reef").open()  # who comes first makes the tables
    assert "user and password" in refused(at(postgres, "host:geheim"))
    assert "user and password" in refused(at(postgres, "host"))
    assert "user, password and rights" in refused(at(postgres, "reader:geheim"))
    assert "SSL" in refused(at(postgres, f"host:{IN_URL}", "?sslmode=require"), JournalUnavailable)
    assert "nowhere" in refused(at(postgres, f"host:{IN_URL}").replace("/postgres", "/nowhere"), JournalUnavailable)
