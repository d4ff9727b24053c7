"""Door of a study: members ask at it, by the study's invite, which trial to join.

What a host answers is checked: the study is the one that the invite names, and the trial's run file is made from it."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.peer.trials.study_file import StudyFile, Values, parse_study
from shoal.swarm.client.coordinator_client import CoordinatorConnector
from shoal.swarm.client.observer import look_up_run, stranger
from shoal.swarm.errors import DeadlineExceeded, RunChanged, StudyError, UnknownRun, Unreachable, WireError
from shoal.swarm.protocol.identity import CurveKeys, Identity, verify_certificate
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.invite_token import check_signature, make_token, read_token
from shoal.swarm.protocol.messages import CoordinatorToPeerTrial, PeerToCoordinatorFindTrial
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address, InviteTerms, Message, id_text
from shoal.swarm.system import run_loop
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node

log = logging.getLogger(__name__)

_CONNECT_S, _ANSWER_S = 5.0, 10.0

_PAUSE_S = 1.0
"""Between two questions for a trial."""

_AWAY_S = 600.0
"""Time after which a member goes home that has heard nothing of the study."""


@dataclass(frozen=True)
class OpenTrial:
    """A trial that is running."""

    number: int
    values: Values
    invite: Invite


class StudyDoor:
    """Answers of the host. Members are sent to the trial to which fewest were sent."""

    def __init__(self, study: StudyFile, base: RunFile, identity: Identity, node: Node) -> None:
        self.has_ended = False
        self._study, self._identity = study, identity
        self._is_open = base.access.admission == "open"
        self._certificate = identity.certify(node.control.keys)
        self._key = node.control.keys.public
        self._text = study.as_json()
        self._trials: dict[int, OpenTrial] = {}
        self._sent = Counter[int]()
        node.control.handle(PeerToCoordinatorFindTrial, self._answer, run=study.study.name)

    def invite(self, addresses: Sequence[Address]) -> Invite:
        """Make the study's invite, the same each time."""
        digest = self._study.hash
        terms = InviteTerms(id=id_text(digest[:5]), role="trainer", note="study")
        token = b"" if self._is_open else make_token(terms, digest, self._identity.sign)
        return Invite(tuple(addresses), self._study.study.name, self._key, digest, token, is_study=True)

    def open(self, trial: OpenTrial) -> None:
        self._trials[trial.number] = trial

    def close(self, number: int) -> None:
        self._trials.pop(number, None)

    async def _answer(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorFindTrial)
        if not self._is_open:  # its answer lets in to the trials
            read_token(message.token)
            check_signature(message.token, self._study.hash, self._identity.public_key)
        answer = CoordinatorToPeerTrial(study=self._text, coordinator=self._certificate, has_ended=self.has_ended)
        if not self._trials:
            return answer
        chosen = min(self._trials.values(), key=lambda one: (self._sent[one.number], one.number))
        self._sent[chosen.number] += 1
        about = {"number": chosen.number, "values": json.dumps(chosen.values), "invite": str(chosen.invite)}
        return answer.model_copy(update=about)


@dataclass(frozen=True)
class FoundTrial:
    """A trial to join; ``invite`` None: there is none now, or, if the study has ``ended``, none any more."""

    ended: bool
    invite: Invite | None = None


async def find_trial(invite: Invite) -> FoundTrial:
    """Ask for a trial of the study that an invite names, and check it.

    Raises ``Unreachable``, ``NotAdmitted``, ``UnknownRun``, ``StudyError``, and ``RunChanged`` for another study or for
    a trial that is not of the study."""
    async with stranger(CurveKeys.fresh()) as node:
        connector = CoordinatorConnector(node.control, node.relays, invite)
        ask = PeerToCoordinatorFindTrial(token=invite.token)
        answer = await connector.request_anywhere(ask, CoordinatorToPeerTrial, _CONNECT_S, _ANSWER_S)
    verify_certificate(answer.coordinator)
    if answer.coordinator.curve_key != invite.key:
        raise WireError("the coordinator's certificate is not for the key that the invite names")
    study = parse_study(answer.study)
    if study.hash != invite.run_hash:
        raise RunChanged(
            f"the host has changed the study {invite.run!r} since this invite was made; ask what has changed, and for "
            "a new invite"
        )
    if answer.number is None:
        return FoundTrial(answer.has_ended)
    # The study's addresses are the ones that this machine has reached.
    trial = replace(Invite.parse(answer.invite), addresses=invite.addresses)
    values = _values(answer.values)
    _, expected = study.trial(answer.number, values)
    found = (await look_up_run(trial)).run_file
    if expected.pins is None:  # the host has made them
        found = found.model_copy(update={"pins": None})
    if found.hash != expected.hash:
        raise RunChanged(
            f"the host's run {trial.run!r} is not trial {answer.number} of the study that this invite names: it is not "
            "joined; ask the host why"
        )
    return FoundTrial(answer.has_ended, trial)


def _values(text: str) -> Values:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StudyError("the host's trial: its values are not JSON") from error
    if not isinstance(values, dict):
        raise StudyError("the host's trial: expected its values by name")
    return values


def trials_to_join(invite: Invite) -> Iterator[Invite]:
    """Yield the invites of trials, one whenever the one before is over, until the study ends.

    Waits while there is none, and while the study's host is away. Blocks, and raises as ``find_trial``."""
    away_since_s: float | None = None
    while True:
        try:
            found = run_loop(find_trial(invite))
        except (Unreachable, DeadlineExceeded, UnknownRun) as error:
            now_s = time.monotonic()
            if away_since_s is None:
                away_since_s = now_s
                log.info("the study's host does not answer: %s; waiting for it", error)
            if now_s - away_since_s > _AWAY_S:
                raise
        else:
            away_since_s = None
            if found.invite is not None:
                yield found.invite
            elif found.ended:
                return
        time.sleep(_PAUSE_S)
