"""Tests of trials/door: who is told of a trial, and what members do not believe."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.swarm.network import HOST, run

from shoal.peer.trials.door import OpenTrial, StudyDoor, find_trial
from shoal.peer.trials.study_file import StudyFile
from shoal.swarm.client.observer import look_up_run
from shoal.swarm.coordinator.front import CoordinatorFront
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.errors import InviteError, NotAdmitted, RunChanged, StudyError, UnknownRun
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import Address

BASE = '[run]\nname = "b"\nrounds = 3\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n'


def make(base: str = BASE) -> StudyFile:
    content = {
        "study": {"name": "rates", "trials": 3},
        "base": base,
        "space": {"inner.lr": {"low": 1e-4, "high": 1.0}},
    }
    return StudyFile.model_validate(content)


@asynccontextmanager
async def door(study: StudyFile) -> AsyncIterator[tuple[StudyDoor, CoordinatorFront, Identity, Invite]]:
    identity = Identity.generate()
    keys = identity.coordinator_keys()
    async with CoordinatorFront.open(keys, (HOST, 0), (study.study.name,)) as front:
        made = StudyDoor(study, study.check(), identity, front.node)
        where = [Address(host=HOST, control_port=front.node.control_port)]
        yield made, front, identity, made.invite(where)


def trial(front: CoordinatorFront, study: StudyFile, number: int, lr: float = 0.5) -> OpenTrial:
    _, file = study.trial(number, {"inner.lr": lr})
    elsewhere = (Address(host="192.0.2.1", control_port=9),)
    invite = Invite(elsewhere, file.run.name, front.node.control.keys.public, file.hash, b"t" * 93)
    return OpenTrial(number, {"inner.lr": lr}, invite)


@asynccontextmanager
async def served(front: CoordinatorFront, text: str, identity: Identity, folder: Path) -> AsyncIterator[None]:
    file = parse_run_file(text)
    journal = LocalJournal(folder / file.run.name, file.hash, text)
    try:
        async with front.serving(text, file, identity, journal, journal.lease()):
            yield
    finally:
        journal.close()


@run
async def test_members_are_shared_out_among_the_trials_that_run(tmp_path: Path) -> None:
    study = make()
    async with door(study) as (opened, front, identity, invite):
        found = await find_trial(invite)
        assert (found.invite, found.ended) == (None, False)
        async with (
            served(front, study.trial(0, {"inner.lr": 0.5})[0], identity, tmp_path),
            served(front, study.trial(1, {"inner.lr": 0.5})[0], identity, tmp_path),
        ):
            for number in (0, 1):
                opened.open(trial(front, study, number))
            invites = [(await find_trial(invite)).invite for _ in range(4)]
            assert sorted(one.run for one in invites if one) == ["rates-0", "rates-0", "rates-1", "rates-1"]
            assert all(one.addresses == invite.addresses and one.token for one in invites if one)
            opened.close(0)
            after = (await find_trial(invite)).invite
            assert after is not None
            assert after.run == "rates-1"
        opened.close(1)
        opened.has_ended = True
        assert (await find_trial(invite)).ended


@run
async def test_a_trial_is_told_of_to_nobody_without_the_study_s_invite() -> None:
    study = make()
    async with door(study) as (opened, front, _, invite):
        opened.open(trial(front, study, 0))
        for token in (b"", invite.token[:-1] + b"x"):
            with pytest.raises(NotAdmitted):
                await find_trial(replace(invite, token=token))
        with pytest.raises(UnknownRun):
            await find_trial(replace(invite, run="other"))


@run
async def test_a_study_of_an_open_run_is_open() -> None:
    async with door(make(BASE + '[access]\nadmission = "open"\n')) as (_, _, _, invite):
        assert invite.token == b""
        assert (await find_trial(invite)).invite is None


@run
async def test_what_is_not_of_the_study_is_not_joined(tmp_path: Path) -> None:
    study = make()
    async with door(study) as (opened, front, identity, invite):
        with pytest.raises(RunChanged, match="has changed the study"):
            await find_trial(replace(invite, run_hash=bytes(32)))
        # The values that are told are not those of the run, or not of the study.
        async with served(front, study.trial(0, {"inner.lr": 0.25})[0], identity, tmp_path):
            run_of = trial(front, study, 0, lr=0.25)
            opened.open(replace(run_of, values={"inner.lr": 0.5}))
            with pytest.raises(RunChanged, match="is not trial 0 of the study"):
                await find_trial(invite)
            opened.open(replace(run_of, values={"inner.lr": 5.0}))
            with pytest.raises(StudyError, match="search space"):
                await find_trial(invite)
            opened.open(run_of)
            assert (await find_trial(invite)).invite is not None


@run
async def test_an_invite_to_a_study_is_none_to_a_run() -> None:
    async with door(make()) as (_, _, _, invite):
        again = Invite.parse(str(invite))
        assert again == invite
        assert again.is_study
        with pytest.raises(InviteError, match="to the study 'rates'"):
            await look_up_run(invite)


@run
async def test_a_trial_of_a_pinned_run_file_has_its_pins(tmp_path: Path) -> None:
    pins = '[pins]\nlayout = "{}"\nelements = 5\ntokens_per_sample = 4\n'
    study = make(BASE + pins.format("0" * 64))
    text = study.trial(0, {"inner.lr": 0.5})[0]
    for number, told in enumerate((text.replace("0" * 64, "1" * 64), text)):
        file = parse_run_file(told)
        async with (
            door(study) as (opened, front, identity, invite),
            served(front, told, identity, tmp_path / str(number)),
        ):
            opened.open(replace(one := trial(front, study, 0), invite=replace(one.invite, run_hash=file.hash)))
            if told == text:
                assert (await find_trial(invite)).invite is not None
            else:
                with pytest.raises(RunChanged, match="is not trial 0 of the study"):
                    await find_trial(invite)
