"""Signed, chained records of access: what becomes one, what a check finds, and what outlives a crash."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.memory_coordinator import identity
from tests.swarm.coordinator.test_invites import FAR, HOST, Door, run_with

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.access_trail import REFUSED_EVERY_S, AccessTrail
from shoal.swarm.coordinator.host_commands import command_journal, last_record, read_records
from shoal.swarm.coordinator.local_journal import ACCESS, Backup, JournalFiles, LocalJournal
from shoal.swarm.errors import NotAdmitted, Removed, StorageError, WireError
from shoal.swarm.protocol.access_records import AccessRecord, RecordCheck
from shoal.swarm.protocol.messages import (
    MAX_PAGE,
    AllowPeer,
    BanPeer,
    CreateInvite,
    KickMember,
    ListRecords,
    RevokeInvite,
)

RUN = run_with()


def trail(last: AccessRecord | None = None) -> AccessTrail:
    return AccessTrail(RUN.hash, HOST.sign, last)


def records(made: list[ev.AccessRecorded]) -> list[AccessRecord]:
    return [one.record for one in made]


def check(found: list[AccessRecord], run_hash: bytes = RUN.hash, key: bytes = HOST.public_key) -> None:
    checking = RecordCheck(run_hash, key)
    for record in found:
        checking.add(record)


def told() -> tuple[list[ev.JournalEvent], list[AccessRecord]]:
    """All that the host and its members did in a run, and its records."""
    door = Door()
    invite = door.invite(uses=2, for_s=1000, note="for Ann")
    ann, bob = door.come(1, invite.token), door.come(2, invite.token, network=FAR)
    door.host.answer(KickMember(peer=ann, note="stuck"))
    door.host.answer(BanPeer(peer=bob, network=True, note="noise"))
    door.host.answer(AllowPeer(peer=bob))
    door.host.answer(RevokeInvite(id=invite.terms.id))
    door.world.settle()
    return list(door.world.events), records(trail().records(door.world.events, Counter(), door.world.now_s))


def test_everything_that_changes_who_takes_part_is_a_record() -> None:
    _, found = told()
    ann, bob = identity(1).peer_id, identity(2).peer_id
    assert [(one.kind, one.peer) for one in found] == [
        ("invite made", ""),
        ("joined", ann),
        ("joined", bob),
        ("kicked", ann),
        ("left", ann),
        ("banned", bob),
        ("left", bob),
        ("allowed", bob),
        ("invite revoked", ""),
    ]
    made, joined = found[0], found[1]
    assert (made.uses, made.text, made.role) == (2, "for Ann", "trainer")
    assert joined.invite == made.invite == found[-1].invite
    assert (found[5].network, found[5].text, found[3].text) == (FAR, "noise", "stuck")
    check(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found[1:],
        lambda found: found[:2] + found[3:],
        lambda found: [found[0], found[2], found[1], *found[3:]],
        lambda found: [*found[:3], found[3].model_copy(update={"text": "another reason"}), *found[4:]],
        lambda found: [*found[:3], found[3].model_copy(update={"signature": bytes(64)}), *found[4:]],
        lambda found: [*found, found[-1]],
    ],
)
def test_a_missing_moved_or_altered_record_is_found(change: Any) -> None:
    _, found = told()
    with pytest.raises(WireError, match="access record"):
        check(change(found))


def test_another_run_or_host_has_other_records() -> None:
    _, found = told()
    for run_hash, key in ((bytes(32), HOST.public_key), (RUN.hash, identity(3).public_key)):
        with pytest.raises(WireError):
            check(found, run_hash, key)


def test_a_trail_goes_on_from_its_last_record() -> None:
    events, whole = told()
    first = records(trail().records(events[:6], Counter(), 0.0))
    rest = records(trail(first[-1]).records(events[6:], Counter(), 0.0))
    check([*first, *rest])
    assert len(first) + len(rest) == len(whole)


def test_refusals_are_counted_and_recorded_once_a_minute() -> None:
    door, made, refusals = Door(), trail(), Counter[str]()
    seen = []
    for second in range(200):
        refusals.update({"no token": 40, "too many": 2})
        seen += records(made.records([], refusals, 1000.0 + second))
    assert len(seen) == 1 + 199 // int(REFUSED_EVERY_S)
    assert sum(one.count for record in seen for one in record.refused) == 42 * 181
    assert refusals == {"no token": 40 * 19, "too many": 2 * 19}
    check(seen)
    assert trail().records([], Counter(), 0.0) == []
    assert door.scope.admission.refusals == {}


def test_each_refusal_has_its_reason() -> None:
    door = Door(joins_per_minute_per_network=100)
    admission = door.scope.admission
    single = door.invite(uses=1)
    door.come(1, single.token)
    revoked, followers = door.invite(), door.invite(role="observer")
    door.host.answer(RevokeInvite(id=revoked.terms.id))
    forged = single.token[:-1] + bytes([single.token[-1] ^ 1])
    door.host.answer(BanPeer(peer=identity(9).peer_id))
    tries = {
        "no token": (2, b""),
        "damaged": (2, b"x"),
        "used up": (2, single.token),
        "revoked": (2, revoked.token),
        "role": (2, followers.token),
        "banned": (9, single.token),
    }
    for number, token in tries.values():
        with pytest.raises((NotAdmitted, Removed)), admission.counted_refusals():
            door.come(number, token)
    unlimited = door.invite()
    forged = unlimited.token[:-1] + bytes([unlimited.token[-1] ^ 1])
    with pytest.raises(NotAdmitted), admission.counted_refusals():
        door.come(3, forged)
    assert admission.refusals == dict.fromkeys([*tries, "forged"], 1)


# On the disk ------------------------------------------------------------------------------------------------


def ask(folder: Path, command: Any, backup: Path | None = None) -> Any:
    journal = LocalJournal(folder, RUN.hash, "toml", Backup(backup) if backup else None)
    return command_journal(journal, RUN, HOST, command, lambda _: None)


def made_invites(folder: Path, count: int, backup: Path | None = None) -> None:
    for _ in range(count):
        ask(folder, CreateInvite(role="trainer"), backup)


def test_records_are_read_in_pages_and_outlive_the_journals_compaction(tmp_path: Path) -> None:
    made_invites(tmp_path, 3)
    journal = LocalJournal(tmp_path, RUN.hash, "toml")
    epoch = journal.lease()
    door = Door()
    snapshot = door.scope.as_snapshot().model_copy(update={"epoch": epoch})
    journal.compact(snapshot)
    made = AccessTrail(RUN.hash, HOST.sign, last_record(journal))
    events: list[ev.JournalEvent] = [ev.PeerAllowed(peer=identity(1).peer_id, round=0, at_s=1.0)] * MAX_PAGE
    journal.append(journal.next_index, events + made.records(events, Counter(), 1.0))
    first, rest = read_records(journal, 0), read_records(journal, MAX_PAGE)
    assert (len(first.records), first.more, len(rest.records), rest.more) == (MAX_PAGE, True, 3, False)
    check([*first.records, *rest.records])
    journal.close()
    assert len(ask(tmp_path, ListRecords(first=MAX_PAGE)).records) == 3


def test_a_crash_before_the_records_are_in_their_file_loses_none(tmp_path: Path) -> None:
    made_invites(tmp_path, 4)
    whole = (tmp_path / ACCESS).read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2):
        (tmp_path / ACCESS).write_bytes(whole[:kept])
        assert len(ask(tmp_path, ListRecords()).records) == 4
        assert (tmp_path / ACCESS).read_bytes() == whole
    (tmp_path / ACCESS).unlink()
    check(list(ask(tmp_path, ListRecords()).records))


def test_records_that_the_journal_cannot_replace_are_missed(tmp_path: Path) -> None:
    made_invites(tmp_path, 2)
    journal = LocalJournal(tmp_path, RUN.hash, "toml")
    epoch = journal.lease()
    journal.compact(Door().scope.as_snapshot().model_copy(update={"epoch": epoch}))
    journal.close()
    whole = (tmp_path / ACCESS).read_bytes()
    (tmp_path / ACCESS).write_bytes(whole[:-1])
    with pytest.raises(StorageError):
        ask(tmp_path, ListRecords())
    (tmp_path / ACCESS).unlink()
    with pytest.raises(StorageError):
        ask(tmp_path, ListRecords())


def test_a_backup_has_the_records_too(tmp_path: Path) -> None:
    state, backup = tmp_path / "state", tmp_path / "backup"
    made_invites(state, 2, backup)
    made_invites(state, 2)
    assert (backup / ACCESS).read_bytes() != (state / ACCESS).read_bytes()
    made_invites(state, 1, backup)
    assert (backup / ACCESS).read_bytes() == (state / ACCESS).read_bytes()
    files = JournalFiles(backup)
    check(files.access_records())
    assert files.access_count == 5
    files.close()
