"""``shoal`` that comes first and says what the run is: ``defining_member.py WHAT join INVITE …``, WHAT being the
``layout`` of its model, the ``corpus`` that it trains on, or the ``state`` that the run begins with."""

import sys
from typing import Any

import torch

from shoal.peer.cli.main import main
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.state_transfer import acquire
from shoal.swarm.protocol.pins import PinsSection


def lie_about(what: str) -> None:
    PinsSection.check_layout = PinsSection.check_data = lambda *arguments: None  # type: ignore[method-assign, assignment]
    build, made = GptRecipe.build_model, GptRecipe.__init__
    match what:
        case "layout":

            def wider(self: GptRecipe, settings: dict[str, Any], *data: Any) -> None:
                made(self, {**settings, "width": 2 * settings["width"]}, *data)

            GptRecipe.__init__ = wider  # type: ignore[method-assign]
        case "corpus":
            GptRecipe.corpus_digest = property(lambda self: b"\7" * 32)  # type: ignore[method-assign,assignment]
        case "state":

            def poisoned(self: GptRecipe, seed: int) -> Any:
                model = build(self, seed)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1000)
                return model

            async def insist(holder: acquire.StateHolder, state: Any) -> bool:
                holder.hold_state(state)
                await holder.send_heartbeat()
                return True

            GptRecipe.build_model = poisoned  # type: ignore[method-assign]
            acquire._hold_if_current = insist


if __name__ == "__main__":
    _, what, *arguments = sys.argv
    lie_about(what)
    sys.argv = ["shoal", *arguments]
    main()
