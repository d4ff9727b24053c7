"""A session without a network: it has leases of its own, and its replica takes no steps."""

from types import SimpleNamespace
from typing import Any

import torch

from shoal.peer.member.member import Progress
from shoal.peer.session import Session, StepTimer
from shoal.peer.training.data import LeasedSamples
from shoal.peer.training.device_streams import Pacer, streams_of
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.protocol.run_file import parse_run_file

NOTHING_AMENDED = SimpleNamespace(look_at_amendments=lambda: None)


class Loop:
    """A session whose replica takes no steps and which always has leases. ``stepped``: (samples, factor) of steps."""

    def __init__(self, toml: str = "", recipe: dict[str, Any] | None = None) -> None:
        self.run = parse_run_file(f"{toml}\n[run]\nname = 'r'\n[recipe]\nname = 'own'\n[round]\ntokens = 64\n")
        self.samples = LeasedSamples(1)
        self.steps: list[tuple[int, float]] = []
        self.asked: list[int] = []
        self.resyncs = 0
        replica = SimpleNamespace(samples=self.samples, tokens_per_sample=1, recipe_config=recipe)
        replica.verdict_is_known, replica.exchanging, replica.round = False, False, 0
        replica.step, replica.describe = (lambda *step: self.steps.append(step)), lambda data: None
        session: Any = Session.__new__(Session)
        session._connection = NOTHING_AMENDED
        network = SimpleNamespace(failure=None, interrupt=lambda: None)
        session._network, session._stopping = network, False
        session._timer, session._schedule_is_watched = StepTimer(), False
        session._pacer = Pacer(streams_of(torch.device("cpu")))
        session._replica_or_none, session.run_file = replica, self.run
        self.view = SimpleNamespace(round=0, phase="training", must_resync=False, tokens_committed=0, tokens_in_round=0)
        deadlines = SimpleNamespace(lease_s=1.0, first_step_s=1.0)
        client = SimpleNamespace(view=self.view, closes_at_s=None, deadlines=deadlines, coordinator_is_away=False)
        client.run_now = self.run
        session._member = SimpleNamespace(client=client, rejoined=False, progress=Progress(), clock=PhaseClock())
        session.fetch_lease = session._lease = self._lease
        session.options = SimpleNamespace(role="trainer")
        self.session: Session = session
        self.leases = 8

    def _lease(self, samples: int) -> None:
        self.asked.append(samples)
        start = 16 * (len(self.asked) - 1)
        if len(self.asked) <= self.leases:
            self.samples.add_lease(start, start + 16)


class Exchanges:
    """Rounds that a loop offers its work to in an evaluation. ``did``: what happened, in order."""

    def __init__(self, loop: Loop) -> None:
        self.did: list[str] = []
        session: Any = loop.session
        self._replica: Any = session._replica
        session.offer_if_due, self._replica.conclude_round = self._offer, self._conclude

    def _offer(self) -> None:
        self.did.append("offer")
        self._replica.exchanging = True

    def _conclude(self) -> None:
        self.did.append("conclude")
        self._replica.exchanging = False
