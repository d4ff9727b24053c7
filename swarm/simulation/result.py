"""Results of a simulation: its rounds, samples, bytes and times, as sums over the run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from shoal.swarm.simulation.costs import HostMeter
from shoal.swarm.simulation.process import PHASES, Attendance


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer that follow from the model alone. ``output_values``: of its output for one sample;
    ``kept_bytes``: that autograd keeps of one."""

    elements: int
    output_values: int
    kept_bytes: int


@dataclass(frozen=True)
class Model:
    """The trained model, as far as a simulation needs it. ``layers``: in order, for a run in stages."""

    elements: int
    tokens_per_sample: int
    layers: tuple[LayerShape, ...] = ()

    @classmethod
    def decoder(cls, elements: int, tokens_per_sample: int, layers: int) -> Model:
        """Return a transformer of so many equal blocks, and nothing else.

        A block of width d has 12 d^2 parameters (Kaplan et al. 2020, arXiv:2001.08361, table 1), and autograd keeps
        34 d bytes of a token in 16 bits, attention's scores not counted (Korthikanti et al. 2022, arXiv:2205.05198,
        section 4.1)."""
        width = math.sqrt(elements / (12 * layers))
        edges = [round(elements * one / layers) for one in range(layers + 1)]
        values, kept = round(tokens_per_sample * width), round(34 * tokens_per_sample * width)
        shapes = tuple(LayerShape(stop - start, values, kept) for start, stop in itertools.pairwise(edges))
        return cls(elements, tokens_per_sample, shapes)


@dataclass(frozen=True)
class SimulatedRound:
    """One verdict. Moments are seconds from the start of the run."""

    number: int
    committed: bool
    opened_s: float
    closes_s: float
    planned_s: float
    ended_s: float
    members: int
    rows: int
    tokens: int
    tokens_total: int
    exchange_s: float
    members_sent_bytes: float
    """That all members' links have carried up since the run began, headers and messages to the host included."""
    host_sent_bytes: float


@dataclass
class Samples:
    """Samples by what became of them. ``leased``: granted in all, those that were returned again; ``fresh``: leased at
    least once, which are committed, held or returned."""

    leased: int = 0
    fresh: int = 0
    committed: int = 0
    held: int = 0
    returned: int = 0
    lost: int = 0
    """Trained on in vain, as who had them died before its contribution was in a mean."""


@dataclass
class PipelineCourse:
    """Course of the stages. ``boundaries``: empty if nobody could hold the model; ``shortage``: why not, in the
    planner's words; ``replicas``: of each stage, at the end; ``moves``: spans that members were given instead of
    others; ``stalled_s``: time after the first plan in which some stage had nobody with its state.

    ``driven``: micro-batches that went through all stages and back; ``computed_samples``: samples whose gradients were
    made in a stage, summed over stages, those that did not get into a round included; ``activation_bytes`` and
    ``gradient_bytes``: by boundary between stages."""

    boundaries: tuple[int, ...] = ()
    shortage: str = ""
    replicas: tuple[int, ...] = ()
    planned_tokens_per_s: float = 0.0
    moves: int = 0
    stalled_s: float = 0.0
    driven: int = 0
    computed_samples: int = 0
    state_bytes: float = 0.0
    activation_bytes: dict[int, float] = field(default_factory=dict)
    gradient_bytes: dict[int, float] = field(default_factory=dict)


@dataclass
class Result:
    """Outcome of a simulation. Bytes and seconds are sums over the run; ``spent_s``: member-seconds by phase."""

    rounds: list[SimulatedRound] = field(default_factory=list)
    members: int = 0
    duration_s: float = 0.0
    tokens: int = 0
    possible_tokens: float = 0.0
    members_mean: float = 0.0
    members_most: int = 0
    refused_joins: int = 0
    never_admitted: int = 0
    member_sent_bytes: float = 0.0
    member_received_bytes: float = 0.0
    members_sent_bytes: float = 0.0
    """All that their links carry up: states and rounds, messages to the host, headers and acknowledgements."""
    served_bytes: float = 0.0
    """Of states and of results that somebody had missed."""
    relayed_bytes: float = 0.0
    host: HostMeter = field(default_factory=HostMeter)
    largest_view_bytes: int = 0
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    samples: Samples = field(default_factory=Samples)
    price: float = 0.0
    ended: bool = False
    calls: int = 0
    pipeline: PipelineCourse | None = None
    """Of a run in stages."""

    @property
    def committed(self) -> list[SimulatedRound]:
        return [one for one in self.rounds if one.committed]

    def take_attendance(self, attendance: Attendance) -> None:
        """Take over who was there; ``duration_s`` is known."""
        self.members_mean = attendance.member_s / max(self.duration_s, 1e-9)
        self.members_most = attendance.most
        self.possible_tokens, self.price = attendance.possible_tokens, attendance.price
