"""Statuses and verdicts for tests of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import CriticalPath, RoundTiming
from shoal.swarm.protocol.types import Coverage, DeviceInfo, MemberStatus, RelayLoad, RelayStatus, StageStatus

DEVICE = DeviceInfo(kind="cpu", name="some CPU", memory_bytes=2**33)
RUN = RunFile.model_validate(
    {"run": {"name": "reef", "rounds": 8}, "recipe": {"name": "own"}, "round": {"tokens": 200}}
)


def member(number: int, **changes: Any) -> MemberStatus:
    values: dict[str, Any] = {
        "peer": f"{number:016d}".translate(str.maketrans("0123456789", "abcdefghij")),
        "name": f"member-{number}",
        "device": DEVICE,
        "activity": "training",
        "alive": True,
        "synced": True,
        "reachable": True,
        "tokens_per_s": 100.0,
        "tokens_committed": 1000,
        "share": 0.5,
        "credit": 0.5,
        "loss": 2.5,
        "bytes_sent": 10,
        "bytes_received": 20,
    }
    return MemberStatus(**(values | changes))


def status(members: Sequence[MemberStatus] = (), **changes: Any) -> CoordinatorToPeerStatus:
    values: dict[str, Any] = {
        "run": "reef",
        "run_hash": bytes(32),
        "round": 2,
        "phase": "training",
        "closes_in_s": None,
        "anchor_version": 2,
        "rounds_committed": 2,
        "rounds_aborted": 0,
        "tokens_committed": 400,
        "tokens_in_round": 50,
        "loss": 2.25,
        "chain": bytes(range(32)),
        "state_digest": bytes(32),
        "elapsed_s": 10.0,
        "members": tuple(members),
    }
    return CoordinatorToPeerStatus(**(values | changes))


def verdict(number: int, version: int, *, committed: bool = True, reason: str = "", tokens: int = 200) -> Verdict:
    peers = [member(one).peer for one in (1, 2)]
    plan = RoundPlan(
        round=number,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=10,
        members=tuple(PlanMember(peer=peer, weight_tokens=100 + index) for index, peer in enumerate(peers)),
        parts=(Part(owner=0, start=0, stop=10), Part(owner=1, start=10, stop=20)),
    )
    return Verdict(
        round=number,
        committed=committed,
        reason=reason,
        anchor_version=version,
        plan=plan if committed else None,
        digests=(bytes(32), None) if committed else (),
        tokens=tokens,
        tokens_total=tokens * version,
        loss=3.0 / (1 + number) if committed else None,
        ended_s=1.7e9 + 10 * number,
        sent_bytes=1000,
        previous_chain=bytes(32),
        chain=bytes(range(32)),
        signature=b"",
    )


def crowd(number: int) -> list[MemberStatus]:
    """Members of which each has committed more than the one before."""
    return [member(one, tokens_committed=1000 + one, share=1 / number) for one in range(number)]


def full_status(members: Sequence[MemberStatus]) -> CoordinatorToPeerStatus:
    """A status with all that there may be in one: stages, relays, epochs."""
    load = RelayLoad(busy=0.25, clients=2, links=3, carried_bytes=4000)
    stage = StageStatus(
        first_layer=0,
        stop_layer=2,
        parameters_bytes=100,
        replicas=(member(1).peer,),
        tokens_per_s=50.0,
        queue=4,
        is_bottleneck=False,
    )
    return status(
        members,
        relays=(
            RelayStatus(host="10.0.0.7", port=7708, load=load),
            RelayStatus(host="10.0.0.8", port=7708, peer=member(1).peer, load=None),
        ),
        coverage=(Coverage(epoch=3, samples=200, committed=50, leased=10, returned=0),),
        stages=(stage,),
    )


def timing(number: int, *, late: int | None = None, text: str = "") -> RoundTiming:
    """``late``: number of the member that the others waited for."""
    path = None
    if late is not None:
        peer = member(late).peer
        path = CriticalPath(peer=peer, phase="exchange", extra_s=12.0, cause="slow upload", bps=2e6, text=text)
    return RoundTiming(
        round=number, committed=True, wall_s=20.0, work_s=12.0, gather_s=1.0, exchange_s=7.0, members=2, path=path
    )
