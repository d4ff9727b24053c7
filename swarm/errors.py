"""Every error Shoal raises, in one tree; each leaf says what to do and has a stable exit code.

::

    ShoalError                  1
    ├── UserError (ValueError)        what somebody gave us
    │   ├── RunFileError        10    the run file: names file, field and expected value
    │   ├── InviteError         11    the invite URL
    │   ├── IdentityError       12    the identity file
    │   ├── RecipeError         13    the run's recipe is missing or refuses its settings
    │   ├── CorpusError         14    the data is missing or differs from the run's
    │   ├── ModelMismatch       15    the model differs from the run's; names the first difference
    │   ├── DeviceError         16    the device is missing or too small
    │   ├── StateFileError      17    a checkpoint or model is missing, damaged or of another run
    │   │   └── SealedForOthers 18    it is sealed, and not for this identity
    │   ├── Diverged            19    training has become infinite or not a number
    │   └── NotAccepted         50    this machine's owner has not agreed to the run
    ├── LinkError                     somebody else's machine, or the way to it
    │   ├── Unreachable         20    nothing answers at that address
    │   │   └── MemberGone      20    it is not a member of the run any more
    │   ├── WrongKey            21    whoever answers does not hold the pinned key
    │   ├── ProtocolMismatch    22    the other side speaks another version
    │   ├── UnknownRun          23    the coordinator does not host that run
    │   │   └── RunChanged      51    its run file is another one than the invite's
    │   ├── NotAdmitted         24    the other side does not know us (any more)
    │   ├── TryLater            35    there is no place for us at the moment; says why and when to try again
    │   ├── Superseded          25    the same identity joined from another process
    │   ├── RunEnded            26    the run is over
    │   ├── DeadlineExceeded    27    an answer did not come in time
    │   ├── BlobUnavailable     28    the other side does not have (or no longer has) those bytes
    │   ├── Busy                32    the other side has them, and something more urgent to do; ask again
    │   ├── StaleWork           29    the work offered was given to somebody else meanwhile
    │   ├── LinkClosed          31    the bulk link was given up; a new one can be opened
    │   └── WireError           30    bytes that are no valid message; the sender is dropped
    │       └── AboveBound      30    a mean that is larger than the round's plan allows
    ├── HostCrashed             52    signals ended the host's process again and again
    └── StorageError            40    the disk refused (full, read-only, damaged journal)
        └── RemoteStorageError  41    a remote store refused, cannot be reached, or its driver is missing
"""

from __future__ import annotations


class ShoalError(Exception):
    """Root of the tree. ``exit_code`` is what ``shoal`` exits with; it never changes for a class."""

    exit_code = 1


class UserError(ShoalError, ValueError):
    """Something that a person gave us cannot be used."""


class RunFileError(UserError):
    """The run file is missing, malformed, or has a field out of range."""

    exit_code = 10


class InviteError(UserError):
    """The invite is not a valid ``shoal://HOST:PORT/RUN?key=…&run=…`` URL."""

    exit_code = 11


class IdentityError(UserError):
    """The identity file is unreadable, malformed, or readable by others."""

    exit_code = 12


class RecipeError(UserError):
    """The recipe is not installed or does not accept its settings."""

    exit_code = 13


class CorpusError(UserError):
    """The data is missing, too small, or is not the data that the run trains on."""

    exit_code = 14


class ModelMismatch(UserError):
    """The model's names, shapes or dtypes differ from those of the run."""

    exit_code = 15


class DeviceError(UserError):
    """The asked-for device does not exist here, or the model does not fit on it."""

    exit_code = 16


class StateFileError(UserError):
    """A checkpoint's or model's file is missing, damaged, or belongs to another run."""

    exit_code = 17


class SealedForOthers(StateFileError):
    """The checkpoint is encrypted, and this identity is not among its readers."""

    exit_code = 18


class Diverged(UserError):
    """Local work is infinite or not a number, however often it is begun again from the run's state."""

    exit_code = 19


class NotAccepted(UserError):
    """The run wants something of this machine that its owner has not agreed to."""

    exit_code = 50


class LinkError(ShoalError):
    """The other machine, or the way to it, failed us. ``code`` is the name that travels in replies."""


class Unreachable(LinkError):
    """Nothing answers at that address."""

    exit_code = 20


class MemberGone(Unreachable):
    """That peer is not on the roster (any more): waiting for it is pointless."""


class WrongKey(LinkError):
    """Whoever answers at that address does not hold the pinned key."""

    exit_code = 21


class ProtocolMismatch(LinkError):
    """The other side speaks another protocol version."""

    exit_code = 22


class UnknownRun(LinkError):
    """The coordinator does not host that run."""

    exit_code = 23


class RunChanged(UnknownRun):
    """The coordinator's run file is not the one whose hash the invite names."""

    exit_code = 51


class NotAdmitted(LinkError):
    """The other side does not know this key, or not any more."""

    exit_code = 24


class TryLater(LinkError):
    """The run takes nobody (from here) at the moment: too many have come, or there is no place left."""

    exit_code = 35


class Superseded(LinkError):
    """The same identity has joined again from another process; this one has to go."""

    exit_code = 25

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "the same identity joined this run from another process, which goes on in our place; "
            "to run two on one machine, give one of them its own --identity FILE"
        )


class RunEnded(LinkError):
    """The run is over; there is nothing left to train."""

    exit_code = 26


class DeadlineExceeded(LinkError):
    """No answer within the deadline."""

    exit_code = 27


class BlobUnavailable(LinkError):
    """The other side does not have those bytes, or no longer."""

    exit_code = 28


class Busy(LinkError):
    """The other side has those bytes and lives, but something else goes first: ask again soon."""

    exit_code = 32


class LinkClosed(LinkError):
    """The other side does not know this bulk link (any more)."""

    exit_code = 31


class StaleWork(LinkError):
    """The samples that a contribution covers were given to somebody else in the meantime."""

    exit_code = 29


class WireError(LinkError):
    """Bytes that are no valid message of this protocol."""

    exit_code = 30


class AboveBound(WireError):
    """A mean that somebody sent is larger than what the plan's claims and factors allow; it is not applied."""


class HostCrashed(ShoalError):
    """The host's process was ended by signals so often that its supervisor does not start it again."""

    exit_code = 52


class StorageError(ShoalError):
    """The disk refused: full, read-only, or a damaged journal."""

    exit_code = 40


class RemoteStorageError(StorageError):
    """A remote store refused or cannot be reached, or the package that can talk to it is not installed."""

    exit_code = 41


REMOTE_ERRORS: dict[str, type[ShoalError]] = {
    error.__name__: error
    for error in (
        ProtocolMismatch,
        UnknownRun,
        NotAdmitted,
        TryLater,
        Superseded,
        RunEnded,
        DeadlineExceeded,
        BlobUnavailable,
        Busy,
        LinkClosed,
        StaleWork,
        WireError,
        ModelMismatch,
        CorpusError,
        StorageError,
    )
}
"""The errors that may travel in a ``RequestFailed`` reply, by class name."""


def remote_error(code: str, message: str) -> ShoalError:
    """The other side's error, by its class name. Its words end up on a terminal: no control characters."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in message)
    return REMOTE_ERRORS.get(code, LinkError)(printable)


def words_for_others(error: ShoalError) -> str:
    """What may be told to another machine: the words of an error about this one name its files and their paths."""
    if isinstance(error, LinkError | ModelMismatch | CorpusError):
        return str(error)
    return "the other side cannot; what was logged there says why"
