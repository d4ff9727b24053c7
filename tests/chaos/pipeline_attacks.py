"""Faults of a pipeline's peers: whom they hit, what they are, and at which step of a micro-batch or of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.pipeline_scene import PATIENCE_S, STAGES, Peer, Scene, until_over

ATTACKED = 1
"""The round that faults fall into; one before, so that there is something to lose."""

SPANS = {"first": (0, 0), "middle": (1, 1), "last": (2, 2), "whole": (0, STAGES - 1)}

MOMENTS = {
    "holding an input": "before_forward",
    "holding an output": "after_forward",
    "claimed": "heard CoordinatorToPeerClaimed",
    "holding a gradient": "before_backward",
    "having counted a gradient": "after_backward",
    "ready": "said PeerToCoordinatorRoundReady",
    "contributing": "sends contribution",
    "reducing": "gets contribution",
    "sending results": "sends result",
    "reported": "said PeerToCoordinatorRoundReport",
    "applying": "applying",
}
"""The last five are only in rounds with more than one replica of the stage."""

STOPS = {"SIGSTOP": 0.5 * PATIENCE_S, "SIGSTOP, long": 2.5 * PATIENCE_S}
"""For so many seconds: the short ones are over before anybody's patience is, the long ones are not."""

COMEBACKS = {"SIGKILL, back at once": 0.3, "SIGKILL, back late": 0.7 * PATIENCE_S}
"""After so many seconds: before anybody has missed it, and before it is given up."""

FAULTS = ("SIGKILL", *COMEBACKS, *STOPS)


@dataclass
class Attack:
    """``role``: a key of ``SPANS``; ``times``: at which occasion; ``everybody``: all replicas of the stage at once.
    ``victims``: who was hit."""

    role: str
    fault: str
    moment: str
    times: int = 1
    everybody: bool = False
    victims: list[Peer] = field(default_factory=list)

    def at(self, scene: Scene, peer: Peer, step: str, number: int) -> None:
        """A peer comes to a step of a round."""
        if self.victims or (step, number) != (MOMENTS[self.moment], ATTACKED) or peer.span != SPANS[self.role]:
            return
        self.times -= 1
        if self.times:
            return
        self.victims += [one for one in scene.alive if one.span == peer.span] if self.everybody else [peer]
        for victim in self.victims:
            self._inflict(scene, victim)

    def _inflict(self, scene: Scene, victim: Peer) -> None:
        if self.fault in STOPS:
            scene.stop(victim, STOPS[self.fault])
            return
        scene.kill(victim)
        if self.fault in COMEBACKS:
            scene.later(COMEBACKS[self.fault], lambda: scene.start(victim.number, victim.layers))


async def under(scene: Scene, attacks: Sequence[Attack], layers: Sequence[int]) -> None:
    """A whole run of peers that can hold so many layers each. All attacks happen."""

    def on_step(peer: Peer, step: str, number: int) -> None:
        for attack in attacks:
            attack.at(scene, peer, step, number)

    scene.on_step = on_step
    for number, one in enumerate(layers):
        scene.start(number, one)
    await until_over(scene)
    assert all(attack.victims for attack in attacks), [attack for attack in attacks if not attack.victims]
