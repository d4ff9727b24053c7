"""Store in etcd (v3), by its JSON gateway: a transaction compares the head's revision and the lease's key.

The gateway is served on the client port since etcd 3.4. It is used with the standard library's HTTP client, as the
clients in gRPC bring megabytes of compiled packages for a dozen small requests.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import math
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP, HEAD, Entry, StoreLimits
from shoal.swarm.errors import JournalUnavailable, LeaseLost, UserError

log = logging.getLogger(__name__)

_LEADER, _EPOCH = "leader", "epoch"
_CONNECT_S = 1.0
_ANSWER_S = 3.0
_MOST_ANSWER_BYTES = 2**27
_LIMITS = StoreLimits(commit_bytes=2**20, commit_keys=96)
"""etcd takes requests of 1.5 MiB and transactions of 128 operations, unless it is told otherwise."""

_UNAVAILABLE, _UNAUTHENTICATED, _FULL, _INVALID, _DENIED = 14, 16, 8, 3, 7
"""Codes of gRPC that the gateway passes on."""


@dataclass(frozen=True)
class EtcdPlace:
    """Where a run's part of an etcd cluster is. ``endpoints``: host and port of each member; ``prefix``: of all runs
    there."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    run: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


class EtcdStore:
    """One run's keys in an etcd cluster (``fenced_store.FencedStore``)."""

    limits = _LIMITS

    def __init__(self, place: EtcdPlace) -> None:
        names = ",".join(f"{host}:{port}" for host, port in place.endpoints)
        self.location = f"etcd{'s' if place.tls else ''}://{names}/{place.prefix}/{place.run}"
        self._place = place
        self._prefix = f"{place.prefix}/{place.run}/"
        self._at = 0
        self._token = ""
        self._lease, self._leader_revision, self._ttl_s = 0, 0, 0.0
        self._revision = 0
        """The newest revision of the whole store that is known here."""
        self._has_said_why = False
        self._lock = threading.Lock()
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._closed = False

    def open(self) -> None:
        self._authenticate()
        self.read(HEAD)

    # Reading ----------------------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None:
        found = self._call("kv/range", {"key": self._key(key)}).get("kvs", [])
        if not found:
            return None
        return Entry(_decode(found[0].get("value", "")), int(found[0]["mod_revision"]))

    def scan(self, first: str, stop: str, limit: int) -> list[tuple[str, bytes]]:
        # Sorted by key, as ranges of etcd are.
        asked = {"key": self._key(first), "range_end": self._key(stop), "limit": str(limit)}
        found = self._call("kv/range", asked).get("kvs", [])
        lead = len(self._prefix)
        return [(_decode(one["key"]).decode()[lead:], _decode(one.get("value", ""))) for one in found]

    # The lease --------------------------------------------------------------------------------------------

    def acquire(self, holder: str, ttl_s: float, epoch: int) -> int | None:
        if self.holder():
            return None
        before = self.read(_EPOCH)
        if before is not None:
            epoch = max(epoch, int(before.value) + EPOCH_STEP)
        lease = int(self._call("lease/grant", {"TTL": str(math.ceil(ttl_s))})["ID"])
        compare = [
            {"key": self._key(_LEADER), "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
            self._is_at(_EPOCH, before.revision if before else 0),
        ]
        puts = [
            _put(self._key(_LEADER), holder.encode(), lease),
            _put(self._key(_EPOCH), str(epoch).encode()),
        ]
        try:
            answer = self._call("kv/txn", {"compare": compare, "success": puts})
        except JournalUnavailable:
            self._revoke(lease)  # it may have been made: without an answer nobody knows its revision
            raise
        if not answer.get("succeeded"):
            self._revoke(lease)
            return None
        self._lease, self._leader_revision = lease, int(answer["header"]["revision"])
        self._ttl_s = ttl_s
        return epoch

    def renew(self) -> None:
        # Of three members one may hang, and the next one has to be asked before the lease ends.
        within_s = min(_ANSWER_S, self._ttl_s / 4)
        answer = self._call("lease/keepalive", {"ID": str(self._lease)}, within_s=within_s).get("result", {})
        if int(answer.get("TTL", 0)) <= 0:
            raise LeaseLost(f"{self.location}: the lease has ended")

    def holder(self) -> str:
        found = self.read(_LEADER)
        return "" if found is None else found.value.decode(errors="replace")

    def release(self) -> None:
        if self._lease:
            self._revoke(self._lease)
            self._lease = 0

    def _revoke(self, lease: int) -> None:
        with suppress(JournalUnavailable):
            self._call("lease/revoke", {"ID": str(lease)})

    # Writing ----------------------------------------------------------------------------------------------

    def commit(self, head_revision: int, puts: Mapping[str, bytes], deletes: Sequence[tuple[str, str]]) -> int:
        compare = [
            {
                "key": self._key(_LEADER),
                "target": "CREATE",
                "result": "EQUAL",
                "create_revision": str(self._leader_revision),
            },
            self._is_at(HEAD, head_revision),
        ]
        done: list[dict[str, Any]] = [_put(self._key(key), value) for key, value in puts.items()]
        done += [
            {"request_delete_range": {"key": self._key(first), "range_end": self._key(stop)}} for first, stop in deletes
        ]
        answer = self._call("kv/txn", {"compare": compare, "success": done})
        if not answer.get("succeeded"):
            raise LeaseLost(f"{self.location}: another host has the lease, or has written")
        self._revision = int(answer["header"]["revision"])
        return self._revision if HEAD in puts else head_revision

    def put(self, key: str, value: bytes) -> None:
        self._call("kv/put", {"key": self._key(key), "value": _encode(value)})

    def compact(self) -> None:
        """Have etcd forget old revisions, unless others use the cluster, too: it forgets theirs with ours."""
        try:
            ours = self._count(f"{self._place.prefix}/", f"{self._place.prefix}0")  # "0" comes after "/"
            if self._count("\0", "\0") == ours:
                self._call("kv/compaction", {"revision": str(self._revision)})
                return
            why = "others use the cluster, too"
        except (JournalUnavailable, UserError) as error:
            why = str(error)
        if not self._has_said_why:
            self._has_said_why = True
            log.warning(
                "%s: old revisions are left to etcd's --auto-compaction-retention, without which it fills up: %s",
                self.location,
                why,
            )

    def _count(self, first: str, stop: str) -> int:
        """Count keys of the whole cluster; from "\\0" to "\\0" are all."""
        asked = {"key": _encode(first.encode()), "range_end": _encode(stop.encode()), "count_only": True}
        return int(self._call("kv/range", asked).get("count", 0))

    def _is_at(self, key: str, revision: int) -> dict[str, Any]:
        return {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}

    def _key(self, key: str) -> str:
        return _encode((self._prefix + key).encode())

    # Requests ---------------------------------------------------------------------------------------------

    def _authenticate(self) -> None:
        if self._place.user:
            named = {"name": self._place.user, "password": self._place.password}
            self._token = str(self._call("auth/authenticate", named, renewing=True).get("token", ""))

    def _call(
        self, what: str, message: Mapping[str, Any], *, renewing: bool = False, within_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        """Ask one endpoint after the other until one answers, each for ``within_s``. Raises ``JournalUnavailable`` when
        none does."""
        body = json.dumps(message).encode()
        troubles: list[str] = []
        give_up_s = time.monotonic() + _ANSWER_S
        for number in range(len(self._place.endpoints)):
            at = (self._at + number) % len(self._place.endpoints)
            if number and time.monotonic() > give_up_s:
                break
            try:
                status, answer = self._send(at, what, body, within_s)
            except ssl.SSLError as error:
                if why := _tls_trouble(error):
                    raise UserError(f"{self.location}: {why} ({error.reason or error})") from error
                host, port = self._place.endpoints[at]
                troubles.append(
                    f"{host}:{port}: {error.reason or error}: does etcd speak TLS there, and want no ?cert=FILE?"
                )
                continue
            except (OSError, http.client.HTTPException, ValueError) as error:
                host, port = self._place.endpoints[at]
                troubles.append(f"{host}:{port}: {str(error) or type(error).__name__}")
                continue
            if status == 200:
                self._at = at
                return answer
            code = answer.get("code")
            said = str(answer.get("message") or answer.get("error") or f"status {status}")[:300]
            if code == _UNAUTHENTICATED and self._place.user and not renewing:  # tokens end after some minutes
                self._authenticate()
                return self._call(what, message, renewing=True)
            if "CommonName of client" in said:
                raise UserError(
                    f"{self.location}: beside users etcd takes no client certificate with a common name: "
                    "make one without a common name for this machine"
                )
            if code in (_INVALID, _DENIED, _UNAUTHENTICATED):
                raise UserError(f"{self.location}: etcd refuses: {said}. Look at the URL's user, password and rights")
            if code == _FULL or "space exceeded" in said:
                raise JournalUnavailable(
                    f"{self.location}: etcd is full ({said}): compact and defragment it, or raise "
                    "--quota-backend-bytes, then `etcdctl alarm disarm`"
                )
            troubles.append(said)
        raise JournalUnavailable(f"{self.location}: etcd does not answer ({'; '.join(troubles)})")

    def _send(self, at: int, what: str, body: bytes, within_s: float) -> tuple[int, dict[str, Any]]:
        """Ask one endpoint, over an idle connection if there is one; etcd may have ended that, as when it restarts."""
        idle = self._take_idle(at)
        if idle is not None:
            try:
                return self._ask(at, idle, what, body, within_s)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                pass
        return self._ask(at, self._connect(at, min(_CONNECT_S, within_s)), what, body, within_s)

    def _ask(
        self, at: int, connection: http.client.HTTPConnection, what: str, body: bytes, within_s: float
    ) -> tuple[int, dict[str, Any]]:
        try:
            connection.sock.settimeout(within_s)
            headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
            connection.request("POST", f"/v3/{what}", body, headers)
            response = connection.getresponse()
            data = response.read(_MOST_ANSWER_BYTES)
            answer = _unpacked(data, response.status)
            if isinstance(error := answer.get("error"), dict):  # as streams end with
                answer = {"code": error.get("grpc_code"), "message": error.get("message")}
                return 500, answer
        except BaseException:
            connection.close()
            raise
        self._give_back(at, connection)
        return response.status, answer

    def _take_idle(self, at: int) -> http.client.HTTPConnection | None:
        """Take an idle connection; each is used by one thread at a time."""
        with self._lock:
            for number, (where, connection) in enumerate(self._idle):
                if where == at:
                    del self._idle[number]
                    return connection
        return None

    def _connect(self, at: int, within_s: float) -> http.client.HTTPConnection:
        host, port = self._place.endpoints[at]
        tls = self._place.tls
        made = (
            http.client.HTTPConnection(host, port, timeout=within_s)
            if tls is None
            else http.client.HTTPSConnection(host, port, timeout=within_s, context=tls)
        )
        made.connect()
        return made

    def _give_back(self, at: int, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and connection.sock is not None:
                self._idle.append((at, connection))
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


def _unpacked(data: bytes, status: int) -> dict[str, Any]:
    """Unpack an answer; a refusal may be plain text of the gateway. Raises ``ValueError``.

    Text that claims success is of something else than etcd, and must not look like a journal in which nothing is."""
    if data[:1].isalpha() and status != 200:
        return {"message": data[:300].decode(errors="replace").strip()}
    answer = json.loads(data) if data else {}
    if not isinstance(answer, dict):
        raise ValueError("the answer is no object")
    return answer


def _tls_trouble(error: ssl.SSLError) -> str:
    """Say what a person has to put right; empty for a connection that broke."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"etcd's certificate is not trusted here, {error.verify_message}: name the authority that signed it with "
            "?ca=FILE, and etcd by a name that the certificate has"
        )
    reason = (error.reason or "").upper()
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
        return "etcd speaks no TLS there: etcd://, or start it with certificates"
    if "ALERT" in reason:
        return "etcd refuses this machine's certificate, or wants one: ?cert=FILE&key=FILE"
    return ""


def _put(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    leased = {"lease": str(lease)} if lease else {}
    return {"request_put": {"key": key, "value": _encode(value)} | leased}


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)
