"""Restore of a checkpoint from a URL: the newest undamaged one, resumed at every step, nothing overwritten."""

from pathlib import Path

import pytest
from tests.peer.checkpoints.making import RUN, contents
from tests.peer.checkpoints.remote.places import RUN_FOLDER, Killed, Place

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.manifest import read_manifest
from shoal.peer.checkpoints.remote import restore as restoring
from shoal.peer.checkpoints.remote.copies import find_copies
from shoal.peer.checkpoints.remote.restore import CheckpointRestorer
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.swarm.errors import RemoteStorageError, SealedForOthers, StateFileError, UserError
from shoal.swarm.protocol.identity import Identity

ME = Identity.generate()
FILES = ["manifest.json", "anchor-00001-of-00001.safetensors", "outer-00001-of-00001.safetensors", "verdicts.msgpack"]


class Machine:
    """An empty machine with an identity; ``said``: what the user reads."""

    def __init__(self, folder: Path, identity: Identity = ME) -> None:
        self.runs = folder / "runs"
        self.identity = identity
        self.said: list[str] = []
        self.slept_s = 0.0

    def restore(self, remote: RemoteStore, number: int | None = None) -> Path:
        restorer = CheckpointRestorer(remote, self.runs, self.identity, self.said.append, self._sleep)
        (folder,) = restorer.restore(find_copies(remote), number=number)
        return folder

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds

    @property
    def checkpoints(self) -> Path:
        return self.runs / RUN_FOLDER / self.identity.peer_id / "checkpoints"

    def rounds(self) -> list[int]:
        """Rounds of the checkpoints that a joining peer finds, all of them checked."""
        store = CheckpointStore(self.checkpoints, RUN.hash, self.identity, Retention())
        return [store.load(kept).manifest.round for kept in store.kept()]

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.runs.rglob("*") if path.is_file() and "round-" not in path.parent.name)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path / "there")
    for number in (1, 2, 3):
        place.copy_all(place.write(number))
    return place


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "here")


def at(place: Place, number: int, name: str) -> str:
    return f"/copies/{place.base}/round-{number:08}/{name}"


def flip(place: Place, number: int, name: str) -> None:
    data = bytearray(place.files.inner.cat_file(at(place, number, name)))
    data[len(data) // 2] ^= 1
    place.files.inner.pipe_file(at(place, number, name), bytes(data))


def test_the_newest_comes_to_where_join_finds_it(place: Place, machine: Machine) -> None:
    folder = machine.restore(place.remote)
    assert folder == machine.checkpoints / "round-00000003"
    assert machine.rounds() == [3]
    assert machine.leftovers() == []
    assert place.identity.peer_id in machine.said[0], "it says whose it is"


def test_a_round_that_is_asked_for_comes_beside_what_is_here(place: Place, machine: Machine) -> None:
    machine.restore(place.remote)
    assert machine.restore(place.remote, 2).name == "round-00000002"
    assert machine.rounds() == [3, 2]
    with pytest.raises(StateFileError, match=r"no copy of round 7: 3, 2, 1$"):
        machine.restore(place.remote, 7)
    flip(place, 1, FILES[1])
    with pytest.raises(StateFileError, match="none of the 1 copies there can be used"):
        machine.restore(place.remote, 1)


def test_from_the_url_of_the_run_or_of_the_peer(place: Place, machine: Machine) -> None:
    for path in (RUN_FOLDER, place.base):
        remote = RemoteStore(place.files, f"/copies/{path}", f"memory://copies/{path}")
        found = find_copies(remote)
        assert {(copy.run, copy.peer) for copy in found} == {(RUN_FOLDER, place.identity.peer_id)}
        assert machine.restore(remote).name == "round-00000003"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_one_is_named_and_the_next_older_one_taken(
    place: Place, machine: Machine, name: str, damage: str
) -> None:
    match damage:
        case "flipped":
            flip(place, 3, name)
        case "cut":
            place.files.inner.pipe_file(at(place, 3, name), place.files.inner.cat_file(at(place, 3, name))[:-1])
        case _:
            place.files.inner.rm(at(place, 3, name))
    assert machine.restore(place.remote).name == "round-00000002"
    assert any("round-00000003: cannot be used" in line and name in line for line in machine.said)
    assert machine.rounds() == [2]
    assert machine.leftovers() == []


@pytest.mark.parametrize("run", ["../../../outside", "/proc/outside", "a/b", "..", "reef\n"])
def test_a_copy_whose_run_would_lead_out_of_the_folder_is_refused(place: Place, machine: Machine, run: str) -> None:
    # A signature is no protection: whoever may write there has an identity, too.
    manifest = read_manifest(FolderSource(place.folder / "checkpoints" / "round-00000003"))
    evil = manifest.model_copy(update={"run": run})
    evil = evil.model_copy(update={"signature": place.identity.sign(evil.signed_bytes).hex()})
    place.files.inner.pipe_file(at(place, 3, "manifest.json"), evil.file_bytes)
    assert machine.restore(place.remote) == machine.checkpoints / "round-00000002"
    assert any("round-00000003: cannot be used" in line and "field run" in line for line in machine.said)
    assert not list(machine.runs.parent.rglob("*outside*"))


def test_without_a_whole_one_it_is_refused(place: Place, machine: Machine) -> None:
    for number in (1, 2, 3):
        flip(place, number, "verdicts.msgpack")
    with pytest.raises(StateFileError, match="none of the 3 copies"):
        machine.restore(place.remote)
    with pytest.raises(StateFileError, match="there is no copy"):
        machine.restore(RemoteStore(place.files, "/nowhere", "memory://nowhere"))
    assert machine.rounds() == []


def test_a_folder_with_another_rounds_name_is_refused(place: Place, machine: Machine) -> None:
    for name in FILES:
        place.files.inner.pipe_file(at(place, 9, name), place.files.inner.cat_file(at(place, 1, name)))
    assert machine.restore(place.remote).name == "round-00000003"
    assert "expected 9, not 1" in machine.said[0]


def test_what_is_here_stays(place: Place, machine: Machine) -> None:
    mine = CheckpointStore(machine.checkpoints, RUN.hash, ME, Retention()).write(contents(4))
    assert machine.restore(place.remote) == mine.folder
    assert machine.rounds() == [4]
    assert "it stays" in machine.said[0]


def test_a_damaged_one_here_is_not_overwritten(place: Place, machine: Machine) -> None:
    mine = CheckpointStore(machine.checkpoints, RUN.hash, ME, Retention()).write(contents(3))
    (mine.folder / FILES[1]).write_bytes(b"mine")
    assert machine.restore(place.remote).name == "round-00000002"
    assert "is there and is no undamaged checkpoint" in " ".join(machine.said)
    assert (mine.folder / FILES[1]).read_bytes() == b"mine"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("block", [1, 3])
def test_killed_at_every_file_it_goes_on(
    place: Place, machine: Machine, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "_BLOCK_BYTES", 100)
    left = block

    def die(step: str, path: str) -> None:
        nonlocal left
        if step == "read" and path.endswith(name):
            left -= 1
            if not left:
                raise Killed

    place.files.fails = die
    with pytest.raises(Killed):
        machine.restore(place.remote)
    assert not machine.checkpoints.exists()
    place.files.fails = lambda step, path: None
    place.files.calls.clear()
    machine.restore(place.remote)
    assert machine.rounds() == [3]
    read = [path for step, path in place.files.calls if step == "read"]
    for done in FILES[1 : FILES.index(name)]:
        assert done not in read, "whole files are not brought again"
    if name in FILES[1:]:
        size = place.files.inner.size(at(place, 3, name))
        assert read.count(name) == -(-(size - 100 * (block - 1)) // 100), "nor is the beginning of one"


def test_killed_before_the_last_step_it_goes_on(
    place: Place, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("_check", "_install"):
        with monkeypatch.context() as patch:

            def die(*_: object) -> None:
                raise Killed

            patch.setattr(CheckpointRestorer, step, die)
            with pytest.raises(Killed):
                machine.restore(place.remote)
        assert machine.rounds() == []
    assert machine.restore(place.remote).name == "round-00000003"


def test_a_half_of_another_checkpoint_is_not_kept(
    place: Place, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "_BLOCK_BYTES", 100)
    incoming = machine.runs / "restoring" / f"{RUN_FOLDER}-{place.identity.peer_id}-00000003"
    incoming.mkdir(parents=True)
    (incoming / f"{FILES[1]}.part").write_bytes(b"x" * 150)
    (incoming / FILES[2]).write_bytes(b"x" * 150)
    assert machine.restore(place.remote).name == "round-00000003"
    assert machine.rounds() == [3]


def test_short_failures_are_waited_for_and_long_ones_are_told(place: Place, machine: Machine) -> None:
    left = 3

    def fail(step: str, path: str) -> None:
        nonlocal left
        if step == "read" and left:
            left -= 1
            raise ConnectionResetError("the cable")

    place.files.fails = fail
    assert machine.restore(place.remote).name == "round-00000003"
    assert machine.slept_s == 2 + 4 + 8
    left = 1000
    other = Machine(machine.runs / "other")
    with pytest.raises(RemoteStorageError, match="the cable"):
        other.restore(place.remote)


def test_of_several_peers_the_newest_and_of_as_new_ones_ones_own(tmp_path: Path, place: Place) -> None:
    other = Place(tmp_path / "other", files=place.files, identity=ME)
    other.copy_all(other.write(2))
    machine = Machine(tmp_path / "here")
    assert machine.restore(place.remote).name == "round-00000003"
    other.copy_all(other.write(3))
    folder = Machine(tmp_path / "there").restore(place.remote)
    assert read_checkpoint(FolderSource(folder)).manifest.peer == ME.peer_id


def test_of_several_runs_one_has_to_be_named(place: Place, machine: Machine) -> None:
    place.files.inner.pipe_file("/copies/atoll-12345678/peer/round-00000007/manifest.json", b"{}")
    with pytest.raises(UserError, match="several runs"):
        machine.restore(place.remote)
    assert not machine.runs.exists()


# Sealed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> Place:
    place = Place(tmp_path / "there", readers=[ME.public_key])
    for number in (1, 2):
        place.copy_all(place.write(number))
    return place


def test_sealed_ones_come_for_their_readers(sealed: Place, tmp_path: Path) -> None:
    for identity in (ME, sealed.identity):
        machine = Machine(tmp_path / identity.peer_id, identity)
        folder = machine.restore(sealed.remote)
        assert machine.rounds() == [2]
        is_own = identity is sealed.identity
        assert (folder / "peer.safetensors.sealed").exists() == is_own, "what is the peer's own comes for it alone"


def test_sealed_ones_do_not_come_for_others(sealed: Place, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "here", Identity.generate())
    with pytest.raises(SealedForOthers, match="is none"):
        machine.restore(sealed.remote)
    assert machine.leftovers() == []
    assert not machine.checkpoints.exists()


@pytest.mark.parametrize("name", ["sealed.json", "manifest.json.sealed", f"{FILES[1]}.sealed"])
def test_a_damaged_sealed_one_is_named(sealed: Place, machine: Machine, name: str) -> None:
    flip(sealed, 2, name)
    assert machine.restore(sealed.remote).name == "round-00000001"
    assert "round-00000002" in " ".join(machine.said)


def test_an_old_list_with_new_files_is_refused(sealed: Place, machine: Machine) -> None:
    files = sealed.files.inner
    for name in (f"{FILES[1]}.sealed", "verdicts.msgpack.sealed"):
        files.pipe_file(at(sealed, 1, name), files.cat_file(at(sealed, 2, name)))
    files.rm(at(sealed, 2, "sealed.json"))
    with pytest.raises(StateFileError, match="none of the 2 copies"):
        machine.restore(sealed.remote)
    assert "unfinished" in machine.said[0]


# Other file systems -----------------------------------------------------------------------------------------


class FilePlace(Place):
    @property
    def remote(self) -> RemoteStore:
        return RemoteStore.open(f"file://{self.folder}/copies with spaces")


def test_copies_in_a_folder(tmp_path: Path, machine: Machine) -> None:
    place = FilePlace(tmp_path)
    place.copy_all(place.write(1, 2), keep=1)
    place.copy_all(place.write(3), keep=1)
    assert [copy.round for copy in find_copies(place.remote)] == [3]
    assert machine.restore(place.remote).name == "round-00000003"
    assert machine.rounds() == [3]
