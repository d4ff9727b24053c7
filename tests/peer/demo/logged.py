"""Logs of two demos as their processes write them: one of whole models, one of a model in two stages."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.peer.demo.report import Report, StageMemory
from shoal.peer.demo.run_log import Death, PeerLog, RunLog
from shoal.swarm.protocol.run_file import RunSection

Event = dict[str, Any]
ONE, TWO, THREE, FOUR = "a" * 16, "b" * 16, "c" * 16, "d" * 16
FIRST, SECOND, OLD = "ab" * 32, "cd" * 32, "ef" * 32
TOGETHER = "0123456789abcdef" * 4
STARTED = 1000.0


def feed(log: RunLog, host: Sequence[Event], peers: Mapping[str, Sequence[Event]]) -> RunLog:
    """A log that has read these events, with the deaths that it has already; latecomers keep their moments."""
    for name, events in peers.items():
        peer = log.peers.setdefault(name, PeerLog())
        for event in events:
            peer.feed(event)
    for event in host:
        log.feed_host(event)
    for death in log.deaths:
        if death.back_at is None:
            log.peers.setdefault(death.peer, PeerLog()).state = "killed"
    return log


def member_joined(name: str, peer: str) -> Event:
    return {"event": "member_joined", "time": 1001.0, "peer": peer, "name": name, "role": "trainer", "device": "CPU"}


# Whole models: peer-2 is killed, peer-3 comes late ------------------------------------------------------------


def planned(time: float, number: int, tokens: dict[str, int]) -> Event:
    peers = {"members": list(tokens), "tokens": list(tokens.values()), "parts": len(tokens)}
    return {"event": "round_planned", "time": time, "round": number, **peers}


def verdict(time: float, number: int, total: int, loss: float | None) -> Event:
    outcome = {"committed": loss is not None, "reason": "" if loss else "why", "loss": loss}
    return {"event": "verdict", "time": time, "round": number, "tokens_total": total, "members": [], **outcome}


WHOLE_HOST = [
    member_joined("peer-1", ONE),
    member_joined("peer-2", TWO),
    planned(1009.0, 0, {ONE: 500, TWO: 300}),
    verdict(1010.0, 0, 800, 4.0),
    planned(1021.0, 1, {ONE: 500, TWO: 500}),
    verdict(1025.0, 1, 800, None),
    {"event": "member_lost", "time": 1026.0, "peer": TWO, "reason": "silent"},
    planned(1031.0, 2, {ONE: 700}),
    verdict(1032.0, 2, 1500, 3.0),
    planned(1041.0, 3, {ONE: 300, THREE: 200}),
    verdict(1042.0, 3, 2000, 2.0),
]


def peer_events(peer: str, began: float, ended: float, sent: int, digest: str, left: bool) -> list[Event]:
    about = {"digest": digest, "anchor_version": 3, "bytes_sent": sent, "bytes_received": 1}
    return [
        {"event": "joined", "time": began - 1, "run": "demo", "peer": peer},
        {"event": "synced", "time": began, "anchor_version": 0, "digest": "00"},
        {"event": "committed", "time": ended, "round": 3, "loss": 2.0, "members": 2, **about},
        *([{"event": "left", "time": ended, "tokens_trained": 5000, **about}] if left else []),
    ]


def whole_peers(last_digest: str = FIRST) -> dict[str, list[Event]]:
    return {
        "peer-1": peer_events(ONE, 1005.0, 1045.0, 1000, FIRST, left=True),
        "peer-2": peer_events(TWO, 1005.0, 1010.0, 300, SECOND, left=False),
        "peer-3": peer_events(THREE, 1035.0, 1045.0, 400, last_digest, left=True),
    }


def whole_report(
    peers: Mapping[str, Sequence[Event]] | None = None, host: Sequence[Event] = WHOLE_HOST, digest: str = FIRST
) -> Report:
    """``digest``: of the newest checkpoint."""
    log = RunLog(RunSection(name="demo", seed=0, max_s=60.0), STARTED)
    log.deaths.append(Death("peer-2", 1020.0))
    log.peers = {"peer-1": PeerLog(), "peer-2": PeerLog(), "peer-3": PeerLog(late_at=1030.0)}
    feed(log, host, peers or whole_peers())
    return Report(log, (5.5, 2.0), parameters=1000, peers=2, step_tokens=100, saved=[(3, digest)])


# Stages: of stage 0 there are peer-1 and peer-4, which moves to stage 1 when that has nobody -------------------

DEATHS = [
    Death("peer-3", 1015.0, stage=1, replicas=2),
    Death("peer-2", 1025.0, stage=1, replicas=1, back_at=1032.0),
]
MEMORY = StageMemory((38_000_000, 40_000_000), 115_000_000, 50_000_000)


def ends(time: float, number: int, loss: float | None, together: str = TOGETHER) -> list[Event]:
    """A round's end in both stages; aborted without a loss."""
    about = {"event": "verdict", "time": time, "round": number, "members": [ONE], "tokens_total": 100 * (number + 1)}
    about |= {"committed": loss is not None, "reason": "" if loss else "the run's time was over"}
    about |= {"together": together, "anchor_version": number + 1, "chain": "00" * 32}
    return [{**about, "stage": 0, "loss": None}, {**about, "stage": 1, "loss": loss}]


def stages_planned(time: float, number: int, members: list[dict[str, int]]) -> list[Event]:
    return [{**planned(time, number, tokens), "stage": stage} for stage, tokens in enumerate(members)]


STAGES_HOST: list[Event] = [
    *(member_joined(name, peer)
      for name, peer in (("peer-1", ONE), ("peer-2", TWO), ("peer-3", THREE), ("peer-4", FOUR))),
    {"event": "stages_cut", "time": 1002.0, "boundaries": [0, 3, 6]},
    {"event": "span_assigned", "time": 1002.0, "peer": ONE, "first": 0, "last": 0},
    *stages_planned(1009.0, 0, [{ONE: 60, FOUR: 40}, {TWO: 50, THREE: 50}]),
    *ends(1010.0, 0, 4.0),
    {"event": "member_lost", "time": 1018.0, "peer": THREE, "reason": "silent"},
    {"event": "member_lost", "time": 1018.0, "peer": THREE, "reason": "silent", "stage": 1},
    *stages_planned(1019.0, 1, [{ONE: 50, FOUR: 50}, {TWO: 100}]),
    *ends(1020.0, 1, 3.0),
    *ends(1022.0, 2, 2.5),
    *stages_planned(1039.0, 3, [{ONE: 100}, {TWO: 30, FOUR: 70}]),
    *ends(1040.0, 3, 2.0),
    *ends(1045.0, 4, None),
]  # fmt: skip


def joined(time: float, peer: str) -> list[Event]:
    return [{"event": "joined", "time": time, "run": "demo", "peer": peer}]


def holds(time: float, stage: int, version: int, digest: str, sent: int = 0) -> list[Event]:
    """It comes to a stage, and ends there with this."""
    return [
        {"event": "span", "time": time, "first": stage, "last": stage, "stages": 2},
        {"event": "synced", "time": time + 1, "anchor_version": 0, "digest": OLD, "stage": stage},
        {"event": "committed", "time": time + 5, "round": 3, "loss": None, "anchor_version": version, "digest": digest,
         "bytes_sent": sent, "stage": stage},
    ]  # fmt: skip


def stages_peers(last_digest: str = SECOND) -> dict[str, list[Event]]:
    return {
        "peer-1": [*joined(1001.0, ONE), *holds(1003.0, 0, 3, FIRST, 1000), {"event": "left", "time": 1046.0}],
        "peer-2": [
            *joined(1001.0, TWO),
            *holds(1003.0, 1, 2, OLD, 300),
            *joined(1033.0, TWO),
            *holds(1034.0, 1, 3, SECOND, 200),
        ],
        "peer-3": [*joined(1001.0, THREE), *holds(1003.0, 1, 1, OLD, 50)],
        "peer-4": [*joined(1001.0, FOUR), *holds(1003.0, 0, 2, OLD), *holds(1027.0, 1, 3, last_digest, 700)],
    }


def stages_log() -> RunLog:
    """A log of a run of 50 rounds that has read nothing."""
    return RunLog(RunSection(name="demo", seed=0, rounds=50, max_s=600.0), STARTED)


def stages_report(
    peers: Mapping[str, Sequence[Event]] | None = None,
    host: Sequence[Event] = STAGES_HOST,
    deaths: Sequence[Death] = DEATHS,
) -> Report:
    log = stages_log()
    log.deaths += deaths
    feed(log, host, stages_peers() if peers is None else peers)
    saved = [(3, FIRST), (3, SECOND)]
    return Report(log, (5.5, 2.1), parameters=1_990_000, peers=4, step_tokens=512, saved=saved, memory=MEMORY)
