"""The tree of all errors that Shoal raises. Each leaf has a stable exit code, and each message says what to do.

::

    ShoalError                  1
    ├── UserError (ValueError)        something that a person has provided cannot be used
    │   ├── RunFileError        10    the run file; names the file, the field and the expected value
    │   ├── InviteError         11    the invite URL
    │   ├── IdentityError       12    the identity file
    │   ├── RecipeError         13    the run's recipe is not installed or refuses its settings
    │   ├── CorpusError         14    the data is missing or differs from the run's data
    │   ├── ModelMismatch       15    the model differs from the run's model; names the first difference
    │   ├── DeviceError         16    the device is missing or too small
    │   ├── StateFileError      17    a checkpoint or model file is missing, damaged or of another run
    │   │   └── SealedForOthers 18    the checkpoint is encrypted, but not for this identity
    │   ├── WrongEvidence       57    evidence for an expulsion is missing, damaged, or does not prove it
    │   ├── TermsError          56    a term under which this machine is lent to runs
    │   ├── Diverged            19    training produces infinite values or NaN
    │   ├── StudyError          64    a study of trials, or its folder
    │   ├── DirectoryError      58    a directory of runs, a run's card, or a run of that name in them
    │   └── NotAccepted         50    the owner of this machine has not agreed to the run
    │       └── RunAmended      59    ... and not to what its host has changed since
    ├── LinkError                     another machine, or the connection to it, failed
    │   ├── Unreachable         20    nothing answers at the address
    │   │   └── MemberGone      20    the peer is not a member of the run any more
    │   ├── WrongKey            21    the server does not hold the key that the invite or roster names
    │   ├── ProtocolMismatch    22    the other side speaks another version of the protocol
    │   ├── UnknownRun          23    the coordinator does not host the run
    │   │   └── RunChanged      51    the coordinator's run file is not the one that the invite names
    │   ├── NotAdmitted         24    the other side does not, or no longer, admit this peer
    │   ├── TryLater            35    the run has no place for a newcomer now; says why and when to try again
    │   ├── Removed             54    the host has removed this peer from the run, or has banned it
    │   ├── Superseded          25    another process has joined with the same identity
    │   ├── RunEnded            26    the run has ended
    │   ├── CommandRefused      55    a command of the run's host cannot be carried out
    │   ├── DeadlineExceeded    27    no answer arrived within the deadline
    │   ├── BlobUnavailable     28    the other side does not, or no longer, offer the bytes
    │   ├── Busy                32    the other side has more urgent work; ask again soon
    │   ├── StaleWork           29    the samples of this work were leased to another member meanwhile
    │   ├── LinkClosed          31    the link was closed; a new one can be opened
    │   ├── SecureRefused       65    what is shown of a secure round contradicts itself: nothing more is said in it
    │   └── WireError           30    malformed bytes; the connection is closed
    │       └── AboveBound      30    a mean is larger than the round's plan allows
    ├── HostCrashed             52    signals have ended the host's process too often
    ├── IslandBroken            60    a rank of this island has ended, and the membership with it
    ├── CoordinatorForked       53    the coordinator has signed two verdicts of one round
    └── StorageError            40    a file cannot be written or read: disk full, read-only, or damage
        ├── FolderInUse         40    another process is using the folder
        ├── DamagedRecords      40    records are damaged, incomplete or outdated: only a person can restore them
        ├── RemoteStorageError  41    a remote store refuses, cannot be reached, or has no driver here
        ├── JournalUnavailable  61    the engine of a shared journal does not answer, or takes no writes
        └── LeaseLost           62    another host leads the run, or may lead it by now
"""

from __future__ import annotations


class ShoalError(Exception):
    """Root of the tree. ``exit_code`` is the exit code of the ``shoal`` command; a class never changes its code."""

    exit_code = 1


class UserError(ShoalError, ValueError):
    """Something that a person has provided cannot be used."""


class RunFileError(UserError):
    """The run file is missing or malformed, or one of its fields is out of range."""

    exit_code = 10


class InviteError(UserError):
    """The invite is not a valid URL of the form ``shoal://HOST:PORT/RUN?key=…&run=…&t=…``."""

    exit_code = 11


class IdentityError(UserError):
    """The identity file cannot be read, is malformed, or can be read by other users."""

    exit_code = 12


class RecipeError(UserError):
    """The recipe is not installed or does not accept its settings."""

    exit_code = 13


class CorpusError(UserError):
    """The data is missing, too small, or not the data that the run trains on."""

    exit_code = 14


class ModelMismatch(UserError):
    """The model's names or shapes differ from those of the run."""

    exit_code = 15


class DeviceError(UserError):
    """The requested device does not exist on this machine, or the model does not fit on it."""

    exit_code = 16


class StateFileError(UserError):
    """A file of a checkpoint or model is missing, damaged, or of another run."""

    exit_code = 17


class SealedForOthers(StateFileError):
    """The checkpoint is encrypted, and this identity is not among its readers."""

    exit_code = 18


class WrongEvidence(UserError):
    """The evidence for an expulsion is missing, damaged, or does not prove what the host has recorded."""

    exit_code = 57


class TermsError(UserError):
    """A term under which this machine is lent to runs cannot be understood."""

    exit_code = 56


class Diverged(UserError):
    """Local work keeps producing infinite values or NaN, even after restarts from the run's state."""

    exit_code = 19


class DirectoryError(UserError):
    """A directory of runs or a run's card cannot be read or is forged, or no single run there has that name."""

    exit_code = 58


class StudyError(UserError):
    """A study's file or folder cannot be used; names the file, the field and what was expected."""

    exit_code = 64


class NotAccepted(UserError):
    """The run requires something of this machine to which its owner has not agreed."""

    exit_code = 50


class RunAmended(NotAccepted):
    """The host has changed the run in a way to which the owner of this machine has not agreed. ``ends``: the run's
    ends as they are now, by name, in JSON."""

    exit_code = 59

    def __init__(self, message: str = "", ends: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.ends = ends


class LinkError(ShoalError):
    """Another machine, or the connection to it, failed."""


class Unreachable(LinkError):
    """Nothing answers at the address."""

    exit_code = 20


class MemberGone(Unreachable):
    """The peer is not, or no longer, on the roster, so it makes no sense to wait for it."""


class WrongKey(LinkError):
    """The server at the address does not hold the key that the invite or the roster names."""

    exit_code = 21


class ProtocolMismatch(LinkError):
    """The other side speaks another version of the protocol."""

    exit_code = 22


class UnknownRun(LinkError):
    """The coordinator does not host the run."""

    exit_code = 23


class RunChanged(UnknownRun):
    """The coordinator's run file does not have the hash that the invite names."""

    exit_code = 51


class NotAdmitted(LinkError):
    """The other side does not, or no longer, admit the holder of this key. ``reason``: in a word or two, for counts."""

    exit_code = 24

    def __init__(self, message: str = "", reason: str = "other") -> None:
        super().__init__(message)
        self.reason = reason


class TryLater(LinkError):
    """The run admits no newcomers at the moment, or none from this network."""

    exit_code = 35


class Superseded(LinkError):
    """Another process has joined with the same identity and takes the place of this one."""

    exit_code = 25

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "another process has joined this run with the same identity and takes the place of this one; to run two "
            "peers on one machine, give one of them its own --identity FILE"
        )


class Removed(LinkError):
    """The host has removed this peer from the run, or has banned it."""

    exit_code = 54


class RunEnded(LinkError):
    """The run has ended; there is nothing left to train."""

    exit_code = 26


class CommandRefused(LinkError):
    """A command of the run's host cannot be carried out: what it names does not exist, or a limit is reached."""

    exit_code = 55


class DeadlineExceeded(LinkError):
    """No answer arrived within the deadline."""

    exit_code = 27


class BlobUnavailable(LinkError):
    """The other side does not, or no longer, offer the bytes."""

    exit_code = 28


class Busy(LinkError):
    """The other side offers the bytes but has more urgent work; ask again soon, or after ``retry_s``."""

    exit_code = 32

    def __init__(self, message: str = "", retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class LinkClosed(LinkError):
    """The link was closed, or the other side does not know it; open a new one."""

    exit_code = 31


class StaleWork(LinkError):
    """The samples that a contribution covers were leased to another member in the meantime."""

    exit_code = 29


class SecureRefused(LinkError):
    """What this member was shown of a secure round contradicts itself or what it was shown before. It masks, signs and
    reveals nothing more in that round: somebody may be after its contribution."""

    exit_code = 65


class WireError(LinkError):
    """Bytes that are not a valid message of the protocol."""

    exit_code = 30


class AboveBound(WireError):
    """A received mean is larger than the plan's norm claims and factors allow; it is not applied."""


class HostCrashed(ShoalError):
    """Signals have ended the host's process so often that its supervisor does not restart it."""

    exit_code = 52


class IslandBroken(ShoalError):
    """A rank of this island has ended, and the island's membership with it."""

    exit_code = 60


class CoordinatorForked(ShoalError):
    """The coordinator has signed two different verdicts of one round, as their signatures prove."""

    exit_code = 53


class StorageError(ShoalError):
    """A file cannot be written or read: the disk is full or read-only, or the file is damaged."""

    exit_code = 40


class FolderInUse(StorageError):
    """Another process is using the folder."""


class DamagedRecords(StorageError):
    """A journal or one of its files is damaged, incomplete, an outdated copy, or of another run or release. That
    does not pass by itself: somebody has to restore it."""


class RemoteStorageError(StorageError):
    """A remote store refuses or cannot be reached, or the package that provides access is not installed."""

    exit_code = 41


class JournalUnavailable(StorageError):
    """The engine of a shared journal (etcd, Postgres) does not answer, is full or read-only. It passes by itself."""

    exit_code = 61


class LeaseLost(StorageError):
    """This host's lease on a shared journal has ended: another one leads the run, or may lead it by now."""

    exit_code = 62


FINAL_ERRORS = (Superseded, Removed, RunEnded)
"""Errors of the coordinator after which a process has to stop: asking again does not help."""

NEEDS_A_PERSON = (UserError, DamagedRecords)
"""Errors that beginning again does not mend: somebody has to change a file first."""

_LINK_ERRORS = (ProtocolMismatch, UnknownRun, NotAdmitted, TryLater, *FINAL_ERRORS, CommandRefused, DeadlineExceeded)
_STREAM_ERRORS = (BlobUnavailable, Busy, LinkClosed, StaleWork, WireError)
REMOTE_ERRORS: dict[str, type[ShoalError]] = {
    error.__name__: error for error in (*_LINK_ERRORS, *_STREAM_ERRORS, ModelMismatch, CorpusError, StorageError)
}
"""The errors that a ``RequestFailed`` or ``PeerToPeerStreamEnded`` message may name, by class name."""


def remote_error(code: str, message: str, retry_s: float = 0.0) -> ShoalError:
    """The other side's error, by its class name; without control characters, as its message may reach a terminal."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in message)
    error = REMOTE_ERRORS.get(code, LinkError)(printable)
    if isinstance(error, Busy):
        error.retry_s = retry_s
    return error


def member_error(error: ShoalError) -> LinkError:
    """Another member's error, which ends nothing here: a member cannot say that our disk is full or the run over."""
    if isinstance(error, LinkError) and not isinstance(error, FINAL_ERRORS):
        return error
    return LinkError(f"it answered with {type(error).__name__}: {error}")


def words_for_others(error: ShoalError) -> str:
    """The message of an error as another machine may see it: messages about this machine name its files and paths."""
    if isinstance(error, LinkError | ModelMismatch | CorpusError):
        return str(error)
    return "the other side could not do this; its log says why"
