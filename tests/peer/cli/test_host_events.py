"""Tests of host_events: journaled decisions as JSON and in words."""

import json

import pytest
from tests.peer.terminal.test_reporter import DEVICE, PEERS, PLAN, VERDICT

from shoal.peer.cli.host_events import describe_event
from shoal.peer.terminal.events import sentence
from shoal.peer.terminal.reporter import (
    plain_line,
)
from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.protocol.access_records import AccessRecord
from shoal.swarm.protocol.evaluations import ClaimedLoss, Evaluation, HeldOutFigure, SignedEvaluation
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.rounds import StateAgreement
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import (
    Address,
    Amendment,
    Capability,
    Certificate,
    InviteTerms,
    LayerSize,
    RosterEntry,
    SampleRange,
    TensorSpec,
)
from shoal.swarm.protocol.work_scores import SignedScore, WorkScore

ABORTED = VERDICT.model_copy(update={"committed": False, "reason": "1 of 2 parts arrived nowhere", "loss": None})


def entry(name: str = "dolphin") -> RosterEntry:
    return RosterEntry(
        peer=PEERS[0],
        certificate=Certificate(identity_key=bytes(32), curve_key=bytes(32), signature=bytes(64)),
        name=name,
        role="trainer",
        addresses=(Address(host="192.0.2.1", control_port=1, data_port=2),),
        reachable=True,
    )


TOML = '[run]\nname = "whale"\n[recipe]\nname = "own"\n[round]\ntokens = 100\n'
CAPABILITY = Capability(host_bytes=2**30, device_bytes=None, layer_s=(0.1,), bandwidth_bps=1e8, rtt_s=0.01)


def pipeline_snapshot() -> ev.PipelineSnapshot:
    taken = PipelineRun(parse_run_file(TOML), lambda data: data, 0.0, 0).snapshot()
    assert taken is not None
    return taken


EVENTS: dict[str, ev.JournalEvent] = {
    "AccessRecorded": ev.AccessRecorded(record=AccessRecord(number=0, at_s=1.0, kind="refused")),
    "MemberKicked": ev.MemberKicked(peer=PEERS[0], curve_key=bytes(32), note="too slow", at_s=1.0),
    "PeerBanned": ev.PeerBanned(peer=PEERS[0], network="10.0.0.0/24", at_s=1.0),
    "MemberExpelled": ev.MemberExpelled(peer=PEERS[0], evidence=b"e" * 32, accuser=PEERS[1], round=1, at_s=1.0),
    "MeanDisproved": ev.MeanDisproved(
        round=1, version=1, evidence=b"e" * 32, maker=PEERS[0], accuser=PEERS[1], excess=8.0, at_s=1.0
    ),
    "PeerAllowed": ev.PeerAllowed(peer=PEERS[0], round=1, at_s=1.0),
    "MemberMoved": ev.MemberMoved(
        peer=PEERS[0], addresses=(Address(host="10.0.0.1", control_port=1, data_port=2),), reachable=False
    ),
    "ProcessBanned": ev.ProcessBanned(curve_key=bytes(32)),
    "InviteMade": ev.InviteMade(terms=InviteTerms(id="abcdefgh", role="trainer", uses=1), at_s=1.0),
    "RunAmended": ev.RunAmended(amendments=(Amendment(at_round=4, key="outer.lr", value="0.5"),), round=2, at_s=1.0),
    "InviteRevoked": ev.InviteRevoked(id="abcdefgh", at_s=1.0),
    "ModelDescribed": ev.ModelDescribed(
        model=PeerToCoordinatorDescribeModel(
            layout=(TensorSpec(name="w", shape=(20,)),),
            corpus_digest=None,
            tokens_per_sample=1,
        )
    ),
    "StateAgreed": ev.StateAgreed(
        agreement=StateAgreement(anchor_version=0, digest=bytes(32), chain=bytes(32), signature=bytes(64))
    ),
    "MemberJoined": ev.MemberJoined(entry=entry(), device=DEVICE),
    "MemberLost": ev.MemberLost(peer=PEERS[0], reason="silent"),
    "LeaseGranted": ev.LeaseGranted(peer=PEERS[0], round=3, tokens_done=0, ranges=(SampleRange(start=0, stop=8),)),
    "CoordinatorStarted": ev.CoordinatorStarted(epoch=5),
    "RunSnapshot": RoundScope(parse_run_file(TOML), lambda data: data, EventLog(0.0, 0)).as_snapshot(),
    "RoundClosing": ev.RoundClosing(round=3),
    "RoundReopened": ev.RoundReopened(round=3),
    "RoundPlanned": ev.RoundPlanned(plan=PLAN, ranges=((), ()), loss=2.3456),
    "VerdictGiven": ev.VerdictGiven(verdict=VERDICT, elapsed_s=12.5, lost=()),
    "StagesCut": ev.StagesCut(boundaries=(0, 3, 5)),
    "SpanAssigned": ev.SpanAssigned(peer=PEERS[0], first=0, last=1),
    "SpanTaken": ev.SpanTaken(peer=PEERS[0]),
    "LayersDescribed": ev.LayersDescribed(layers=(LayerSize(parameters_bytes=1, activation_bytes=2, kept_bytes=3),)),
    "CapabilityShown": ev.CapabilityShown(peer=PEERS[0], capability=CAPABILITY),
    "SamplesDriven": ev.SamplesDriven(peer=PEERS[0], ranges=(SampleRange(start=0, stop=8),), done=()),
    "SamplesClaimed": ev.SamplesClaimed(peer=PEERS[0], ranges=(SampleRange(start=0, stop=8),)),
    "SamplesReleased": ev.SamplesReleased(peer=PEERS[0], ranges=(SampleRange(start=0, stop=8),)),
    "PipelineSnapshot": pipeline_snapshot(),
    "EpochsCovered": ev.EpochsCovered(first=3, stop=4, samples=51_200, lost=64, undone=0),
    "WorkScored": ev.WorkScored(
        by=PEERS[1],
        signed=SignedScore(
            score=WorkScore(round=3, chain=bytes(32), peer=PEERS[0], finding="harms"),
            validator_key=bytes(32),
            signature=bytes(64),
        ),
    ),
    "LossRose": ev.LossRose(round=3, loss=31_138.0, usual=3.0),
    "ModelEvaluated": ev.ModelEvaluated(
        by=PEERS[1],
        round=3,
        tokens=100,
        at_s=1.0,
        signed=SignedEvaluation(
            evaluation=Evaluation(version=3, state_digest=bytes(32), loss=2.5, samples=8),
            validator_key=bytes(32),
            signature=bytes(64),
        ),
    ),
    "FigureTaken": ev.FigureTaken(
        figure=HeldOutFigure(
            version=3,
            round=3,
            tokens=100,
            at_s=1.0,
            loss=2.5,
            standing="claim",
            counts=False,
            claims=(ClaimedLoss(validator=PEERS[1], loss=2.5),),
        )
    ),
    "StopDecided": ev.StopDecided(round=4, reason="the held-out loss is below 2.6", at_s=1.0),
    "TrendNoticed": ev.TrendNoticed(round=4, kind="rising", text="the training loss rises"),
}

QUIET = (
    "AccessRecorded",
    "ModelEvaluated",
    "MemberMoved",
    "ProcessBanned",
    "LeaseGranted",
    "RunSnapshot",
    "PipelineSnapshot",
    "CoordinatorStarted",
    "LayersDescribed",
    "CapabilityShown",
    "SamplesDriven",
    "SamplesClaimed",
    "SamplesReleased",
)
"""What nobody wants to read."""


def test_what_happens_in_a_stage_names_it() -> None:
    event = describe_event(ev.InScope(scope=3, event=EVENTS["RoundPlanned"]))
    assert event is not None
    assert event["stage"] == 2
    assert sentence(event).startswith("stage 2: ")
    assert describe_event(ev.InScope(scope=3, event=EVENTS["LeaseGranted"])) is None


def test_every_kind_of_event_is_tried() -> None:
    assert set(EVENTS) == set(ev.EVENTS)


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_events_become_json_and_one_line(name: str) -> None:
    event = describe_event(EVENTS[name])
    if event is None:
        assert name in ("ModelDescribed", "StateAgreed", *QUIET)
        return
    assert json.loads(json.dumps(event)) == event
    line = plain_line(event)
    assert "\n" not in line
    assert "None" not in line


def test_verdicts_say_what_happened() -> None:
    committed = describe_event(EVENTS["VerdictGiven"])
    assert committed is not None
    assert committed | {"time": 0} == {
        "time": 0,
        "event": "verdict",
        "round": 3,
        "committed": True,
        "reason": "",
        "tokens": 201,
        "tokens_total": 1_234_567,
        "loss": 2.3456,
        "anchor_version": 4,
        "members": list(PEERS),
        "elapsed_s": 12.5,
        "chain": bytes(range(32)).hex(),
    }
    assert sentence(committed) == "round 3 committed · loss 2.346 · 2 peers · 1.2M tokens · chain 00010203"
    aborted = describe_event(ev.VerdictGiven(verdict=ABORTED, elapsed_s=1.0, lost=()))
    assert aborted is not None
    assert sentence(aborted) == "round 3 aborted for all: 1 of 2 parts arrived nowhere"


def test_a_return_says_which_version_and_why() -> None:
    reason = "nobody holds anchor version 7 any more: back to version 5 (00010203)"
    verdict = ABORTED.model_copy(update={"reason": reason, "anchor_version": 5, "plan": None})
    back = ev.WentBack(from_version=7, digest=bytes(32), vouched_round=8, keepers=PEERS)
    event = describe_event(ev.VerdictGiven(verdict=verdict, elapsed_s=1.0, lost=(), went_back=back))
    assert event is not None
    json.dumps(event)
    assert (event["event"], event["from_version"], event["anchor_version"], event["vouched_round"]) == (
        "went_back",
        7,
        5,
        8,
    )
    assert plain_line(event).endswith(f"round 3 ends here: {reason}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"lost": 64},
            "epoch 3: all 51,200 samples committed once; 64 trained on again because their first contributor died",
        ),
        ({}, "epoch 3: all 51,200 samples committed once"),
        (
            {"stop": 6, "undone": 1000},
            "epochs 3 to 5: all 51,200 samples of each committed once; "
            "1,000 trained on again because their round was undone",
        ),
    ],
)
def test_the_end_of_an_epoch_says_what_was_done_twice(fields: dict[str, int], words: str) -> None:
    covered = ev.EpochsCovered(**{"first": 3, "stop": 4, "samples": 51_200, "lost": 0, "undone": 0, **fields})
    event = describe_event(covered)
    assert event is not None
    assert plain_line(event).endswith(f"  {words}")


def test_a_plan_carries_the_tokens_of_its_members() -> None:
    planned = describe_event(EVENTS["RoundPlanned"])
    assert planned is not None
    assert (planned["members"], planned["tokens"], planned["parts"]) == (list(PEERS), [100, 101], 2)


def test_names_cannot_move_the_cursor() -> None:
    event = describe_event(ev.MemberJoined(entry=entry(name="\x1b[2J\nevil[/]"), device=DEVICE))
    assert event is not None
    line = plain_line(event)
    assert line.isprintable()
    assert "evil[/]" in line
