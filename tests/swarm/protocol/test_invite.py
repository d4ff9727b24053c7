import base64
import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.errors import InviteError
from shoal.swarm.protocol.invite import TOKEN_BYTES, Invite, invite_text, parse_advertised
from shoal.swarm.protocol.types import Address

KEY = base64.urlsafe_b64encode(bytes(range(32))).decode().rstrip("=")
HASH = base64.urlsafe_b64encode(bytes(range(32, 64))).decode().rstrip("=")
TAIL = f"run?key={KEY}&run={HASH}"

hosts = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,8})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)


def addresses_of(*hosts_and_ports: tuple[str, int]) -> tuple[Address, ...]:
    return tuple(Address(host=host, control_port=port) for host, port in hosts_and_ports)


@given(
    st.lists(st.tuples(hosts, st.integers(1, 65_535)), min_size=1, max_size=8, unique=True),
    st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([b"", bytes(range(TOKEN_BYTES))]),
)
def test_round_trip(addresses: list[tuple[str, int]], run: str, key: bytes, run_hash: bytes, token: bytes) -> None:
    invite = Invite(addresses_of(*addresses), run, key, run_hash, token)
    assert Invite.parse(str(invite)) == invite
    assert Invite.parse(f"  {invite}\n") == invite


@pytest.mark.parametrize(
    "url",
    [
        "",
        "shoal://",
        f"http://host:1/{TAIL}",
        f"host:1/{TAIL}",
        f"shoal://host/run?key={KEY}&run={HASH}",
        f"shoal://:5/run?key={KEY}&run={HASH}",
        f"shoal://host:0/run?key={KEY}&run={HASH}",
        f"shoal://host:65536/run?key={KEY}&run={HASH}",
        f"shoal://host:-1/run?key={KEY}&run={HASH}",
        f"shoal://host:port/run?key={KEY}&run={HASH}",
        f"shoal://[::1/run?key={KEY}&run={HASH}",
        f"shoal://[::zz]:5/run?key={KEY}&run={HASH}",
        f"shoal://user@host:5/run?key={KEY}&run={HASH}",
        f"shoal://ho st:5/run?key={KEY}&run={HASH}",
        f"shoal://a;b:5/run?key={KEY}&run={HASH}",
        f"shoal://*:5/run?key={KEY}&run={HASH}",
        f"shoal://,/run?key={KEY}&run={HASH}",
        f"shoal://a:1,/run?key={KEY}&run={HASH}",
        f"shoal://,a:1/run?key={KEY}&run={HASH}",
        f"shoal://a:1,,b:2/run?key={KEY}&run={HASH}",
        f"shoal://a:1,b/run?key={KEY}&run={HASH}",
        f"shoal://a:1, b:2/run?key={KEY}&run={HASH}",
        f"shoal://a:1;b:2/run?key={KEY}&run={HASH}",
        f"shoal://[::1]:1,::2:2/run?key={KEY}&run={HASH}",
        f"shoal://{','.join(f'a:{port}' for port in range(1, 10))}/run?key={KEY}&run={HASH}",
        f"shoal://host:5?key={KEY}&run={HASH}",
        f"shoal://host:5/?key={KEY}&run={HASH}",
        f"shoal://host:5/Run?key={KEY}&run={HASH}",
        f"shoal://host:5/a/b?key={KEY}&run={HASH}",
        f"shoal://host:5/-run?key={KEY}&run={HASH}",
        f"shoal://host:5/{'r' * 64}?key={KEY}&run={HASH}",
        "shoal://host:5/run",
        "shoal://host:5/run?",
        "shoal://host:5/run?key=",
        "shoal://host:5/run?key",
        f"shoal://host:5/run?yek={KEY}",
        f"shoal://host:5/run?key={KEY[:-2]}&run={HASH}",
        f"shoal://host:5/run?key={KEY}AAAA&run={HASH}",
        f"shoal://host:5/run?key={KEY[:-1]}!&run={HASH}",
        f"shoal://host:5/run?key={KEY[:-1]}é&run={HASH}",
        f"shoal://host:5/run?key={KEY[:-1]}\ud800&run={HASH}",
        f"shoal://host:5/run?key={KEY}",
        f"shoal://host:5/run?run={HASH}",
        f"shoal://host:5/run?key={KEY}&run=",
        f"shoal://host:5/run?key={KEY}&run={HASH[:16]}",
        f"shoal://host:5/run?key={KEY}&run={HASH}AAAA",
        f"shoal://host:5/run?key={KEY}&run={HASH[:-1]}!",
    ],
)
def test_malformed(url: str) -> None:
    with pytest.raises(InviteError):
        Invite.parse(url)


def test_several_addresses() -> None:
    invite = Invite.parse(f"shoal://First.example:1,10.0.0.2:2,[2001:DB8::3]:3/run?key={KEY}&run={HASH}")
    assert invite.addresses == addresses_of(("first.example", 1), ("10.0.0.2", 2), ("2001:db8::3", 3))
    assert str(invite) == f"shoal://first.example:1,10.0.0.2:2,[2001:db8::3]:3/run?key={KEY}&run={HASH}"
    twice = Invite.parse(f"shoal://a:1,b:2,a:1/run?key={KEY}&run={HASH}")
    assert twice.addresses == addresses_of(("a", 1), ("b", 2))


@given(st.text(max_size=60), st.sampled_from(["", "shoal://", "shoal://host:1/run?key=", "shoal://["]))
def test_arbitrary_text(text: str, prefix: str) -> None:
    with contextlib.suppress(InviteError):
        Invite.parse(prefix + text)


@pytest.mark.parametrize("cut", range(len(f"shoal://host:5/{TAIL}")))
def test_cut_off_anywhere(cut: int) -> None:
    with pytest.raises(InviteError):
        Invite.parse(f"shoal://host:5/{TAIL}"[:cut])


def test_advertised_addresses() -> None:
    assert parse_advertised("") == ()
    assert parse_advertised("a") == (("a", 0),)
    assert parse_advertised("a:1, [::1]:2,c", 7) == (("a", 1), ("::1", 2), ("c", 7))
    for text in ["a:1,", ",", "a,:2", "a b,c"]:
        with pytest.raises(InviteError):
            parse_advertised(text)


SECRET = base64.urlsafe_b64encode(bytes(range(100, 100 + TOKEN_BYTES))).decode()
TOLD = f"shoal://a:1/{TAIL}&t={SECRET}"


@pytest.mark.parametrize(
    "url",
    [TOLD[:-1], TOLD + "AAAA", TOLD.replace("&t=", "&t"), TOLD + "&x", TOLD.replace("shoal:", "coal:"), TOLD + "*"],
)
def test_errors_never_repeat_the_token(url: str) -> None:
    with pytest.raises(InviteError) as refused:
        Invite.parse(url)
    assert SECRET[:12] not in str(refused.value)
    assert SECRET[:12] not in str(refused.value.__cause__)


def test_a_token_is_not_in_the_invites_representation() -> None:
    invite = Invite.parse(TOLD)
    assert "token" not in repr(invite)
    assert SECRET in str(invite)


def test_an_invite_may_be_in_a_file(tmp_path: Path) -> None:
    path, other = tmp_path / "invite.txt", tmp_path / "other.txt"
    path.write_text(f"{TOLD}\nand more\n")
    other.write_text("no invite")
    for text in (f"@{path}", str(path), TOLD, f" {TOLD}\n"):
        assert Invite.read(text) == Invite.parse(TOLD)
    assert invite_text(str(other)) == str(other), "perhaps a history, or another file that a command can use"
    assert invite_text(str(tmp_path)) == str(tmp_path)
    for wrong, said in ((f"@{other}", "begins with shoal"), (f"@{path}x", "cannot be read"), ("", "invite is empty")):
        with pytest.raises(InviteError, match=said):
            Invite.read(wrong)
