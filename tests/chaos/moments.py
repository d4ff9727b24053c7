"""Predicates for the moment of an attack, over the step that is about to happen and the coordinator's last events."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.chaos.attack import ATTACKED, GLOBAL, Attack
from tests.fakes.memory_network import Step

from shoal.swarm.coordinator import events as ev

if TYPE_CHECKING:
    from tests.chaos.scene import Scene


def is_due(scene: "Scene", attack: Attack, step: Step) -> bool:
    """Whether this step of the exchange is the attack's moment."""
    kind = step.blob.kind
    mine = attack.role in GLOBAL or step.holder == scene.victim(attack)
    match attack.moment:
        case "before contributing":
            return kind == "contribution" and mine
        case "while contributing":
            return kind == "contribution" and mine and (kind, step.holder, step.to) in scene.sent
        case "while reducing":
            return _is_reducing(scene, attack, step)
        case "some have the result":
            return _some_have(scene, attack, step)
    return False


def _is_reducing(scene: "Scene", attack: Attack, step: Step) -> bool:
    """The victim has got some contributions and made nothing of them; a contributor has sent all that it was asked for,
    and waits; of all together, no result has been sent."""
    kind = step.blob.kind
    if attack.role == "contributor":
        begun, chunks = scene.begun.get((kind, step.holder), 0), -(-scene.run.elements // scene.planned.chunk_elements)
        return kind == "contribution" and step.holder == scene.victim(attack) and begun == chunks
    if attack.role in GLOBAL:
        return kind == "result"
    if attack.role == "stand-in" and not (_is_first_part(scene, step) and _is_of_owners_row(scene, step.holder)):
        return False
    return kind == "contribution" and step.to == scene.victim(attack) and (kind, step.holder, step.to) in scene.sent


def _is_first_part(scene: "Scene", step: Step) -> bool:
    return step.chunk * scene.planned.chunk_elements < scene.planned.parts[0].stop


def _is_of_owners_row(scene: "Scene", peer: str) -> bool:
    """Whose contributions the owner sums itself."""
    row_of = {member.peer: member.row for member in scene.planned.members}
    return row_of[peer] == row_of[scene.named("owner")]


def _some_have(scene: "Scene", attack: Attack, step: Step) -> bool:
    """Somebody has all of the first part, and this step's receiver does not."""
    if step.blob.kind != "result" or not _is_first_part(scene, step):
        return False
    if attack.role == "contributor" and step.to != scene.victim(attack):
        return False
    if attack.role in ("owner", "row reducer", "stand-in") and step.holder != scene.victim(attack):
        return False
    last = -(-scene.planned.parts[0].stop // scene.planned.chunk_elements) - 1
    return any(
        (one.blob, one.chunk) == (step.blob, last)
        and one.to != step.to
        and (one.holder == step.holder or attack.role == "contributor")
        for one in scene.run.network.log
    )


def is_due_now(scene: "Scene", attack: Attack, step: str, events: Sequence[ev.JournalEvent]) -> bool:
    """The same, at the coordinator: just before events are journaled ("decided") or told ("journaled")."""
    now = scene.run.coordinator.machine.scope.round
    ended = any(isinstance(one, ev.VerdictGiven) and one.verdict.round == ATTACKED for one in events)
    match attack.moment:
        case "after the report":
            anybody = attack.role in GLOBAL and now.reports
            return now.number == ATTACKED and bool(anybody or scene.victim(attack) in now.reports)
        case "before the verdict is journaled":
            return ended and step == "decided"
        case "before the verdict is announced":
            return ended and step == "journaled"
    return False
