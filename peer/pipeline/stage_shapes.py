"""What travels between the stages of a run: the shapes of activations and targets, for what others offer to be checked
before it is fetched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.peer.pipeline.activations import TensorForm
from shoal.peer.training.layered import Layered, LayeredRecipe
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.messages import PeerToPeerOfferTensor


@dataclass(frozen=True)
class StageShapes:
    """Of one sample. ``recipe``: whose targets they are; ``inputs``: by stage, the shape of its input, ``inputs[0]``
    the model's; ``micro_batch``: the most samples that travel together."""

    recipe: LayeredRecipe
    inputs: tuple[tuple[int, ...], ...]
    targets: TensorForm
    micro_batch: int

    @classmethod
    def of(
        cls, recipe: LayeredRecipe, layered: Layered, boundaries: tuple[int, ...], batch: Tensor, micro_batch: int
    ) -> StageShapes:
        """``batch``: any samples of the run's data, collated."""
        given, targets = recipe.input_of(batch), TensorForm.of(recipe.targets_of(batch))
        outputs = [tuple(given.shape), *layered.activation_shapes(given)]
        inputs = tuple(outputs[first][1:] for first in boundaries[:-1])
        return cls(recipe, inputs, TensorForm(targets.shape[1:], targets.dtype), micro_batch)

    def expected(self, offer: PeerToPeerOfferTensor, stage: int) -> tuple[tuple[int, ...], TensorForm | None]:
        """The shape of what is offered to a stage, and the form of the targets with it. Raises ``WireError`` for
        something that no stage sends."""
        samples = offer.stop - offer.start
        if not 0 < samples <= self.micro_batch:
            raise WireError(f"a micro-batch of {samples} samples; expected 1 to {self.micro_batch}")
        at = stage if offer.kind == "activation" else stage + 1
        if not 0 < at < len(self.inputs):
            raise WireError(f"stage {stage} takes no {offer.kind} from others")
        shape = (samples, *self.inputs[at])
        if offer.kind == "gradient":
            return shape, None
        return shape, TensorForm((samples, *self.targets.shape), self.targets.dtype)

    def check_targets(self, targets: Tensor | None, samples: int) -> None:
        """Before they reach a device. Raises ``WireError`` unless they could be those of so many samples."""
        if targets is None:
            raise WireError("an activation without targets")
        try:
            self.recipe.check_targets(targets, samples)
        except ValueError as error:
            raise WireError(f"targets that no sample has: {error}") from error
