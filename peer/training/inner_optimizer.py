"""Inner optimizers of recipes: those of torch, by the names and the settings of the run file's ``[inner]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from shoal.peer.training.parameters import MasterWeights
from shoal.swarm.errors import DeviceError
from shoal.swarm.protocol.run_file import InnerSection

_Groups = list[dict[str, Any]]


def make_inner(model: nn.Module, inner: InnerSection, masters: MasterWeights | None = None) -> Optimizer:
    """Make the inner optimizer, of the masters if given; weight decay spares vectors (norms, biases).

    Raises ``DeviceError`` for one that this machine's packages do not have."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = {one: one if masters is None else masters.of(one) for one in trainable}
    if inner.optimizer == "muon":
        matrices = muon_matrices(model)
        others = [weights[one] for one in trainable if one not in matrices]
        groups = _decaying(others, inner.weight_decay)
        return MuonWithAdamW([weights[one] for one in trainable if one in matrices], groups, inner)
    groups = _decaying(weights.values(), inner.weight_decay)
    match inner.optimizer:
        case "adamw":
            return _adamw(groups, inner) if inner.state == "float32" else _adamw_in_int8(groups, inner)
        case "sgd":
            return SGD(groups, lr=inner.lr, momentum=inner.momentum)
        case "adafactor":
            # Not all parameters in one operation: that would need a copy of all gradients.
            return Adafactor(groups, lr=inner.lr, foreach=False)


def _decaying(weights: Iterable[Tensor], weight_decay: float) -> _Groups:
    weights = list(weights)
    return [
        {"params": [one for one in weights if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in weights if one.dim() < 2], "weight_decay": 0.0},
    ]


def _adamw(groups: _Groups, inner: InnerSection) -> AdamW:
    on_gpus = all(one.device.type in ("cuda", "xpu") for group in groups for one in group["params"])
    return AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps, fused=True if on_gpus else None)


def _adamw_in_int8(groups: _Groups, inner: InnerSection) -> Optimizer:
    """Make AdamW with moments in int8 (Dettmers et al. 2021, arXiv:2110.02861). Raises ``DeviceError`` without its
    package."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"the run keeps AdamW's moments in int8 (inner.state), which needs a package: pip install 'shoal[lowmem]' "
            f"({error})"
        ) from error
    made: Optimizer = AdamW8bit(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps)
    return made


def muon_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the trainable parameters that Muon is for: matrices but embeddings, and those of an embedding's shape,
    which are heads."""
    tables = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)}
    shapes = {one.shape for one in tables}
    return {one for one in model.parameters() if one.requires_grad and one.dim() == 2 and one.shape not in shapes}


class MuonWithAdamW(Optimizer):
    """Muon (Jordan 2024; torch's) for matrices and AdamW for everything else, as one optimizer.

    Muon's learning rate is scaled so that its steps are as large as AdamW's (Liu et al. 2025, arXiv:2502.16982): one
    rate is for both. As the inner optimizer of DiLoCo: Thérien et al. 2025, arXiv:2505.23725. Both have their groups
    and their state here."""

    def __init__(self, matrices: Sequence[Tensor], others: _Groups, inner: InnerSection) -> None:
        """``others``: groups of AdamW. Raises ``DeviceError`` for a PyTorch without Muon."""
        made: Callable[..., Optimizer] | None = getattr(torch.optim, "Muon", None)
        if made is None:
            raise DeviceError(
                f"the run's inner optimizer is Muon, which PyTorch {torch.__version__} does not have: pip install "
                "'torch>=2.9'"
            )
        decay, momentum = inner.weight_decay, inner.momentum
        self._parts: list[Optimizer] = []
        if matrices:
            muon = made(matrices, lr=inner.lr, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        others = [group for group in others if group["params"]]
        if others:
            self._parts.append(_adamw(others, inner))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Have the parts use the groups and the state that are here."""
        at = 0
        for part in self._parts:
            count = len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[at : at + count]
            at += count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        for part in self._parts:
            part.step()
