"""The run file: all settings of a run, validated, with a hash that is the same for every peer of the run.

The hash covers the validated content with all defaults, so comments, order and spacing do not matter, and a changed
default in a later release results in a different hash.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from shoal.compression.formats import (
    BlockFormat,
    CodecError,
    FormatMap,
    Shapes,
    TopKFormat,
    named_format,
    named_format_map,
)
from shoal.swarm.errors import IdentityError, RunFileError
from shoal.swarm.protocol.evaluations import MAX_PROMPT, MAX_TEXTS, plain_text
from shoal.swarm.protocol.field_errors import field_errors
from shoal.swarm.protocol.identity import parse_key
from shoal.swarm.protocol.pins import PackageVersion, PinsSection
from shoal.swarm.protocol.rounds import leaf_elements
from shoal.swarm.protocol.run_sources import check_folder_url, check_source, check_url, shards_url
from shoal.swarm.protocol.run_toml import parse_run_toml, read_run_toml
from shoal.swarm.protocol.secure import FEWEST_GROUPS, FEWEST_MEMBERS, SecurePlan, fewest_members
from shoal.swarm.protocol.start_section import Sha256, StartSection
from shoal.swarm.protocol.types import MAX_MEMBERS, Price, Record

MAX_SETTINGS_DEPTH = 8


def make_format_map(setting: str | dict[str, Any], shapes: Shapes) -> FormatMap:
    """The codec formats that a setting names, for tensors of these ``shapes``. Raises ``CodecError``."""
    return named_format_map(*_name_and_options(setting), shapes)


def make_format(setting: str | dict[str, Any]) -> BlockFormat | TopKFormat:
    """The codec format that a setting names, for tensors of any shape. Raises ``CodecError``."""
    return named_format(*_name_and_options(setting))


def _name_and_options(setting: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(setting, str):
        return setting, {}
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise CodecError('the table of a codec needs a name, as in { name = "int8", block = 4096 }')
    return name, options


def check_plain(value: Any, where: str, depth: int = MAX_SETTINGS_DEPTH) -> None:
    """Check that settings have a unique JSON form, which the hash needs. Raises ``ValueError``."""
    if depth == 0:
        raise ValueError(f"{where[:80]}: expected at most {MAX_SETTINGS_DEPTH} levels")
    match value:
        case dict():
            for key, inner in value.items():
                check_plain(inner, f"{where}.{key}" if where else key, depth - 1)
        case list():
            for index, inner in enumerate(value):
                check_plain(inner, f"{where}.{index}", depth - 1)
        case bool() | str():
            pass
        case int() if -(2**63) <= value < 2**63:
            pass
        case float() if math.isfinite(value):
            pass
        case _:
            raise ValueError(f"{where}: expected a text, truth value, finite number, array or table")


RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
"""Also used in the names of folders."""

PositiveInt = Annotated[int, Field(gt=0, le=2**62)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
"""Not strict, as TOML arrays are read as lists."""


class StopSection(Record):
    """``[run.stop_when]``: ends the run by its held-out loss. Only figures that count are looked at (``[evaluation]
    validators``)."""

    held_out_loss: Annotated[
        Annotated[float, Field(gt=-1e30, lt=1e30)] | None,
        Field(description="the run ends once its held-out loss is this low, in nats a token"),
    ] = None
    patience: Annotated[
        Annotated[int, Field(ge=1, le=200)] | None,
        Field(description="the run ends once so many evaluations in a row have not improved on the best one"),
    ] = None
    min_improvement: Annotated[
        float, Field(ge=0, le=1e6, description="nats a token by which a loss has to be lower to count as better")
    ] = 0.0

    @model_validator(mode="after")
    def _says_something(self) -> StopSection:
        if self.held_out_loss is None and self.patience is None:
            raise ValueError("stop_when: expected held_out_loss, patience or both")
        return self


class RunSection(Record):
    """``[run]``: name, seed, and when the run ends: at the first of ``tokens``, ``rounds``, ``max_s`` and
    ``stop_when``."""

    name: Annotated[RunName, Field(description="name of the run, in its invite and its folders")]
    seed: Annotated[
        int,
        Field(
            ge=0, lt=2**63, description="seed of the model, the order of the samples and the random numbers of training"
        ),
    ] = 0
    tokens: Annotated[PositiveInt | None, Field(description="the run ends after this many committed tokens")] = None
    rounds: Annotated[PositiveInt | None, Field(description="the run ends after this many committed rounds")] = None
    max_s: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Field(
            description=(
                "the run ends after this long; without any of the three and `stop_when` it continues until the host "
                "stops it"
            )
        ),
    ] = None
    stop_when: StopSection | None = None


class RecipeSection(Record):
    """``[recipe]``: the entry point in ``shoal.recipes`` and its settings, which the recipe validates."""

    name: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$"),
        Field(
            description=(
                "installed code that builds model and data: `gpt`; `hf`, any causal language model of transformers; "
                "one of a package; `own`: members bring their own loop"
            )
        ),
    ]
    settings: Annotated[
        dict[str, Any],
        Field(
            description=(
                "settings of the recipe; of `gpt`: `layers`, `heads`, `width`, `context`, `vocab`, `hidden`, "
                "`rope_theta`, `tie_embedding`, `qk_norm`; of `hf`: `context`, and `config` with `model_type` and its "
                "fields as in the model's `config.json`"
            )
        ),
    ] = Field(default_factory=dict)

    package: Annotated[
        PackageVersion | None,
        Field(
            description=(
                "package that the recipe comes from, as `name==version`; members with another one are refused. For "
                "`hf` it may be transformers. `shoal prepare` and `shoal host` pin its files, too"
            )
        ),
    ] = None

    @field_validator("settings")
    @classmethod
    def _plain(cls, settings: dict[str, Any]) -> dict[str, Any]:
        check_plain(settings, "")
        return settings


class DataSection(Record):
    """``[data]``: the training data, which ``run_sources.py`` checks."""

    source: Annotated[
        str,
        Field(min_length=1, max_length=500),
        Field(
            description=(
                "`stdlib`: the `.py` files of the running Python; `text:GLOB`; `tokens:FILE` (`.u16`, `.u32`, "
                "`.npy`), relative to the folders that each member names with `--data`; `shards:URL`: token shards "
                "that `shoal data build` has made, in a folder at `https`, `s3`, `gs` or `hf`; `own`, with an own loop"
            )
        ),
    ] = "stdlib"
    manifest: Annotated[
        Sha256 | None,
        Field(description="BLAKE3 digest of the manifest of `shards:URL`, as `shoal data show` prints it"),
    ] = None
    mirrors: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=500)], ...],
        Field(strict=False, max_length=16, description="more URLs with the same shards as `shards:URL`"),
    ] = ()
    tokens_per_sample: Annotated[
        PositiveInt | None, Field(description="for own loops that count tokens instead of samples")
    ] = None
    held_out: Annotated[float, Field(gt=0, lt=0.5, description="share of the data that is not trained on")] = 0.02

    @field_validator("source")
    @classmethod
    def _harmless(cls, source: str) -> str:
        check_source(source)
        return source

    @field_validator("mirrors")
    @classmethod
    def _public(cls, mirrors: tuple[str, ...]) -> tuple[str, ...]:
        for url in mirrors:
            check_folder_url(url)
        return mirrors

    @model_validator(mode="after")
    def _pinned(self) -> DataSection:
        if (self.manifest is not None) != (shards_url(self.source) is not None):
            raise ValueError('manifest: expected with source = "shards:URL", and with no other source')
        if self.mirrors and self.manifest is None:
            raise ValueError('mirrors: expected with source = "shards:URL" only')
        return self


_MUON_MOMENTUM = 0.95

_INNER_SETTINGS = {
    "adamw": ("lr", "betas", "eps", "weight_decay", "state"),
    "sgd": ("lr", "momentum", "weight_decay"),
    "muon": ("lr", "momentum", "betas", "eps", "weight_decay"),
    "adafactor": ("lr", "weight_decay"),
}
"""Settings of each inner optimizer; the others of ``[inner]`` are for all."""


class InnerSection(Record):
    """``[inner]``: the local optimizer of ``diloco``; with ``virtual_batch`` only ``batch_samples`` is used."""

    optimizer: Annotated[
        Literal["adamw", "sgd", "muon", "adafactor"],
        Field(
            description=(
                "the local optimizer of `diloco`. `muon` is for matrices; embeddings, matrices of their shape and "
                "vectors are stepped by AdamW; members need PyTorch 2.9. `adafactor` keeps next to no state"
            )
        ),
    ] = "adamw"
    lr: Annotated[
        Rate, Field(description="its learning rate; that of `muon` is scaled to steps as large as AdamW's")
    ] = 4e-4
    betas: Annotated[Betas, Field(description="AdamW's decay rates of the moments, also beside `muon`")] = (0.9, 0.95)
    momentum: Annotated[Fraction, Field(description="momentum of `sgd`, and of `muon`, with 0.95 by default")] = 0.0
    eps: Annotated[float, Field(gt=0, description="AdamW's term against division by zero, also beside `muon`")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10, description="decoupled weight decay")] = 0.1
    state: Annotated[
        Literal["float32", "int8"],
        Field(
            description=(
                "moments of `adamw`; `int8`: in blocks of 256, a quarter of their memory; members need the extra "
                "`lowmem`"
            )
        ),
    ] = "float32"
    clip_norm: Annotated[
        Annotated[float, Field(gt=0)] | None, Field(description="norm to which gradients are clipped")
    ] = 1.0
    batch_samples: Annotated[int, Field(gt=0, le=2**20, description="samples of a local step")] = 8
    precision: Annotated[
        Literal["auto", "float32", "tf32", "bfloat16", "float16"],
        Field(
            description=(
                "precision of the computation; weights, sums and the optimizer stay in float32. `bfloat16` and "
                "`float16` are autocast, the latter with a scaled loss; `auto`: the first on GPUs that have it, the "
                "second on older ones of NVIDIA; `float32`: without TF32"
            )
        ),
    ] = "auto"
    compile: Annotated[
        bool,
        Field(description="compile the model by `torch.compile`; machines without a compiler train without"),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _usual_momentum(cls, content: Any) -> Any:
        is_muon = isinstance(content, dict) and content.get("optimizer") == "muon"
        return {"momentum": _MUON_MOMENTUM, **content} if is_muon else content

    @property
    def state_values(self) -> float:
        """Most float32 values that the inner optimizer's state takes for each parameter.

        Muon keeps one for a matrix, and AdamW beside it two; how many there are of each is the model's. Adafactor keeps
        one for a row and one for a column: so many where both are 128 long."""
        match self.optimizer:
            case "adamw":
                return {"float32": 2.0, "int8": 2 * (1 / 4 + 1 / 256)}[self.state]
            case "sgd":
                return float(self.momentum > 0)
            case "muon":
                return 2.0
            case "adafactor":
                return 2 / 128


class ScheduleSection(Record):
    """``[schedule]``: the learning-rate factor as a function of the run's committed tokens."""

    kind: Annotated[
        Literal["constant", "cosine", "linear"],
        Field(
            description=(
                "learning-rate factor over the run's tokens, of the inner optimizer for `diloco`, of the outer "
                "one for `virtual_batch`; `cosine` and `linear` need `run.tokens`"
            )
        ),
    ] = "constant"
    warmup_tokens: Annotated[int, Field(ge=0, le=2**62, description="tokens of a linear warm-up from 0")] = 0
    final_factor: Annotated[float, Field(ge=0, le=1, description="factor at the end of `cosine` and `linear`")] = 0.1
    scaling: Annotated[
        Literal["none", "linear", "sqrt"],
        Field(
            description=(
                "for `virtual_batch`: the learning rate of a round also grows with the tokens that it has committed, "
                "by their ratio to `reference_tokens` or its square root; for rounds that close early "
                "(`round.max_s`) or whose `round.tokens` is amended"
            )
        ),
    ] = "none"
    reference_tokens: Annotated[
        PositiveInt | None, Field(description="tokens of a round for which `outer.lr` is right; needed by `scaling`")
    ] = None

    @model_validator(mode="after")
    def _scaled_to_something(self) -> ScheduleSection:
        if (self.scaling == "none") != (self.reference_tokens is None):
            raise ValueError(
                'scaling and reference_tokens need each other: scaling = "sqrt" or "linear", and the tokens of a round '
                "for which outer.lr is right"
            )
        return self


_OUTER_SETTINGS = {
    "nesterov": ("lr", "momentum"),
    "sgd": ("lr",),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "lamb": ("lr", "betas", "eps", "weight_decay"),
    "lars": ("lr", "momentum", "weight_decay", "trust_coefficient"),
}


class OuterSection(Record):
    """``[outer]``: the optimizer that computes the next anchor from the mean contribution."""

    optimizer: Annotated[
        Literal["nesterov", "sgd", "adamw", "lamb", "lars"],
        Field(
            description=(
                "computes the next anchor from the mean contribution. `lamb` and `lars`, for `virtual_batch` with "
                "large rounds, step each matrix by its own norm"
            )
        ),
    ] = "nesterov"
    lr: Annotated[Rate, Field(description="its learning rate")] = 0.7
    momentum: Annotated[Fraction, Field(description="momentum of `nesterov` and `lars`")] = 0.9
    betas: Annotated[Betas, Field(description="decay rates of the moments, of `adamw` and `lamb`")] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, description="term against division by zero, of `adamw` and `lamb`")] = 1e-8
    weight_decay: Annotated[
        float,
        Field(
            ge=0,
            le=10,
            description="decoupled weight decay of `adamw`, and of matrices with `lamb`; with `lars` in the gradient",
        ),
    ] = 0.0
    trust_coefficient: Annotated[
        float, Field(gt=0, le=1e6, description="factor of `lars` on the ratio of a matrix's norm to its gradient's")
    ] = 0.001

    @property
    def slots(self) -> int:
        """Number of float32 values that the outer optimizer keeps for each parameter."""
        return {"sgd": 0, "nesterov": 1, "lars": 1, "adamw": 2, "lamb": 2}[self.optimizer]


_MAX_ROBUST_GROUP = 128
"""Members of a group with a robust mean: a leaf of each, up to 1 MiB, is decoded at once."""


class AveragingSection(Record):
    """``[averaging]``: how contributions are encoded, bounded (``coordinator/influence.py``) and averaged."""

    codec: Annotated[
        str | dict[str, Any],
        Field(
            description=(
                "encoding of contributions and means: `float32`, `bfloat16`, `float16`, `float8_e4m3`, `int8`, "
                '`int4`, `int2`, `sign`, `topk`, `auto`; with options as a table, `{ name = "int8", block = 4096'
                " }`. Which one when: [docs/codecs.md](codecs.md)"
            )
        ),
    ] = "int8"
    residual_decay: Annotated[
        float, Field(ge=0, le=1, description="share of the encoding error that a peer carries over to the next round")
    ] = 1.0
    residual_precision: Annotated[
        Literal["float32", "bfloat16"],
        Field(
            description=(
                "number format in which a peer keeps what no mean has included yet, one value for each parameter; "
                "`bfloat16` takes half the memory, rounds stochastically and costs some speed"
            )
        ),
    ] = "float32"
    group_size: Annotated[
        int,
        Field(ge=2, le=1024),
        Field(
            description=(
                "up to this many peers average in one group, each with each; more form a grid, with the same mean, the "
                "same bytes for each peer and fewer connections"
            )
        ),
    ] = 32
    streams: Annotated[
        int,
        Field(ge=1, le=16),
        Field(
            description=(
                "TCP connections between two peers, over which chunks are spread; more fill fast links over long "
                "distances"
            )
        ),
    ] = 1
    robust: Annotated[
        Literal["norm", "clip", "trimmed", "none"],
        Field(
            description=(
                "`norm` limits how far one member may move a round's mean, to 1.5 times what is usual for its work (of "
                "gradients: four times). `clip` (centered clipping) and `trimmed` (without the lowest and the highest "
                "quarter of the weight, value by value) also withstand several who act together; not with `topk`, and "
                "`group_size` is up to 128. `none`: no limit. With `secure = true`, `trimmed` is about the sums of "
                "masking groups and `none` the only other one. Which one when: "
                "[security.md](security.md#means-that-attackers-cannot-move)"
            )
        ),
    ] = "norm"
    secure: Annotated[
        bool,
        Field(
            description=(
                "contributions are masked, so that nobody, part owners and host included, is sent more of them than "
                "the sum of a group; what it hides, and what not: [security.md](security.md#secure-averaging). Needs "
                '`algorithm = "diloco"`, `codec = "int8"` or `"int4"`, and in each round four members with '
                '`robust = "none"`, or three groups of `secure_group` with `"trimmed"`. All members send to all '
                "owners, up to 128, so `group_size` is left out"
            )
        ),
    ] = False
    secure_group: Annotated[
        int,
        Field(
            ge=FEWEST_MEMBERS,
            le=16,
            description=(
                "members whose contributions are summed before anybody sees them, if there are so many: up to twice as "
                "many less one. Larger groups hide more and cost more bits and masks"
            ),
        ),
    ] = 8
    overlap: Annotated[
        bool,
        Field(
            description=(
                "members train for the next round while one is averaged, and its mean is applied one round late; for "
                "slow links. Needs one more copy of the parameters in host memory, and of the inner "
                "optimizer where checkpoints are kept; not with `virtual_batch`"
            )
        ),
    ] = False

    @field_validator("codec")
    @classmethod
    def _known(cls, codec: str | dict[str, Any]) -> str | dict[str, Any]:
        try:
            make_format_map(codec, ())
        except CodecError as error:
            raise ValueError(str(error)) from error
        return codec

    @property
    def code_bits(self) -> Literal[4, 8]:
        """Bits of a code under secure averaging."""
        return 4 if self.codec == "int4" else 8

    @property
    def fewest_members(self) -> int:
        """The fewest members of a round under secure averaging."""
        return fewest_members(self.secure_group, is_trimmed=self.robust == "trimmed")

    def fits_secure(self, planned: SecurePlan | None, mean: str) -> bool:
        """Whether a plan masks contributions as this section says, and combines them by this ``mean``; its other fields
        follow (``RoundPlan``)."""
        if planned is None or not self.secure:
            return planned is None and not self.secure
        wanted = "trimmed" if self.robust == "trimmed" else "weighted"
        return (planned.bits, planned.group, mean) == (self.code_bits, self.secure_group, wanted)

    @model_validator(mode="after")
    def _secure(self) -> AveragingSection:
        if not self.secure:
            return self
        if self.codec not in ("int8", "int4"):
            raise ValueError(
                f'secure = true adds up codes in units that all members share: codec = "int8" or "int4", not '
                f"{self.codec!r}. What top-k keeps differs from member to member, and other codecs have no such units"
            )
        if self.robust not in ("none", "trimmed"):
            raise ValueError(
                "secure = true hides each single contribution, so none can be bounded or compared: robust is "
                f'"trimmed", which compares the sums of {FEWEST_GROUPS} groups or more, or "none", not {self.robust!r}'
            )
        if self.overlap:
            raise ValueError(
                "secure = true cannot be had with overlap = true: a contribution whose sum may be known must not be in "
                "the next one again"
            )
        if (
            "group_size" in self.model_fields_set
            and self.group_size != AveragingSection.model_fields["group_size"].default
        ):
            raise ValueError(
                "secure = true has no use for group_size, as all members send to all owners: leave it out, or set "
                "secure_group"
            )
        return self

    @model_validator(mode="after")
    def _robust(self) -> AveragingSection:
        if self.robust not in ("clip", "trimmed"):
            return self
        names = [self.codec] if isinstance(self.codec, str) else [str(one) for one in self.codec.values()]
        if any("topk" in name for name in names):
            raise ValueError(
                f'robust = "{self.robust}" cannot be had with top-k, where most values of most contributions are zero '
                'and so would be their mean: use robust = "norm" or another codec'
            )
        if self.group_size > _MAX_ROBUST_GROUP:
            raise ValueError(
                f'robust = "{self.robust}" holds the values of a whole group at once: group_size is up to '
                f"{_MAX_ROBUST_GROUP} with it, not {self.group_size}"
            )
        return self


class AuditSection(Record):
    """``[audit]``: members reduce chunks of others' means again and have another replica compute micro-batches again,
    and validators score contributions, all chosen by private randomness."""

    share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description=(
                "share of the bytes of its rounds that each member spends on checking means that others have made, and "
                "about the same share of work, at first up to six times as much; of a pipeline's micro-batches the "
                "share that another replica computes again. 0: none are checked, and what is wrong within the bounds "
                "is never found"
            ),
        ),
    ] = 0.02
    work_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description=(
                "share of all contributions that each validator scores. Members with bad scores are scored in every "
                "round beside that, and of each member the first three. Nothing is scored while no validator is here"
            ),
        ),
    ] = 0.02


class RoundSection(Record):
    """``[round]``: when a round closes, and the patience from which all deadlines follow (``deadlines.py``)."""

    tokens: Annotated[
        PositiveInt, Field(description="a round closes when all members together have trained on this many")
    ]
    max_s: Annotated[float, Field(gt=0, le=86_400, description="a round closes after this time at the latest")] = 600.0
    patience_s: Annotated[
        float,
        Field(
            ge=1, le=600, description="how long members wait for a silent machine; all deadlines are derived from it"
        ),
    ] = 20.0


class CheckpointsSection(Record):
    """``[checkpoints]``: the transfer of states to joiners, and the encryption of checkpoints."""

    transfer: Annotated[
        Literal["raw", "lossless"],
        Field(
            description=(
                "how joiners get the state; `lossless` packs it to 0.84 of the bytes, for a trained model, at 3.2 "
                "CPU-seconds per GB for the donors and 1.2 for the joiner: for links up to some 100 Mbit/s"
            )
        ),
    ] = "raw"
    sealed: Annotated[bool, Field(description="each peer encrypts its checkpoints, for itself and for `readers`")] = (
        False
    )
    readers: Annotated[
        tuple[str, ...],
        Field(
            strict=False,
            max_length=256,
            description="public keys of other peers that may open them, as `shoal identity` prints them",
        ),
    ] = ()

    @field_validator("readers")
    @classmethod
    def _keys(cls, readers: tuple[str, ...]) -> tuple[str, ...]:
        for reader in readers:
            try:
                parse_key(reader)
            except IdentityError as error:
                raise ValueError(str(error)) from error
        if len(set(readers)) != len(readers):
            raise ValueError("names a public key twice; expected each one once")
        return readers

    @model_validator(mode="after")
    def _of_use(self) -> CheckpointsSection:
        if self.readers and not self.sealed:
            raise ValueError("readers: expected with sealed = true only")
        return self

    @property
    def sealed_for(self) -> tuple[bytes, ...] | None:
        """The readers' raw Ed25519 public keys, 32 bytes each; None if checkpoints are not sealed."""
        return tuple(parse_key(reader) for reader in self.readers) if self.sealed else None


class AccessSection(Record):
    """``[access]``: who may join, and limits on newcomers. A network is an IPv4 /24 or IPv6 /48, like all machines
    behind one router.

    A minute's newcomers may also come all at once. Peers with credit, and current members, are not
    counted."""

    admission: Annotated[
        Literal["open", "token", "list"],
        Field(
            description=(
                "who may join: `token`: who has an invite with a token that the host has made (`shoal host` prints "
                "one, `shoal invite` makes others); `list`: identities that the host has allowed (`shoal allow`); "
                "others only look, with a token; `open`: everybody who has the address and the key; a pipeline then "
                "has each stage held by two members, where there is room, before it spreads further"
            )
        ),
    ] = "token"
    joins_per_minute: Annotated[
        int,
        Field(gt=0, le=10**6, description="newcomers that are admitted, in total; returning members are not counted"),
    ] = 600
    joins_per_minute_per_network: Annotated[
        int, Field(gt=0, le=10**6, description="newcomers from one network (IPv4 /24, IPv6 /48)")
    ] = 60
    members_per_network: Annotated[
        int, Field(gt=0, le=MAX_MEMBERS, description="members without credit, from one network")
    ] = 128
    members_without_credit: Annotated[
        Annotated[int, Field(gt=0, le=MAX_MEMBERS)] | None,
        Field(
            description=(
                "members without credit, in total; by default 128, or twice the members with credit if that is more"
            )
        ),
    ] = None

    def newcomers(self, with_credit: int) -> int:
        """Most members without credit, given the number of members with credit."""
        return self.members_without_credit or max(_FEWEST_NEWCOMERS, 2 * with_credit)


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected one line without control characters")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]
"""Text that is shown to people; letters that could move a terminal's cursor are refused."""


class CardSection(Record):
    """``[card]``: what the run's card says for people who look for a run (``shoal host --publish``)."""

    title: Annotated[OneLine, Field(max_length=100, description="what is trained, in a few words")] = ""
    purpose: Annotated[OneLine, Field(max_length=1000, description="why, for whom, and what becomes of the model")] = ""
    licence: Annotated[
        OneLine, Field(max_length=100, description="licence of the model, such as an SPDX identifier: `Apache-2.0`")
    ] = ""
    homepage: Annotated[OneLine, Field(max_length=300, description="page with more about the run, `https://…`")] = ""
    contact: Annotated[
        OneLine, Field(max_length=200, description="whom to ask for an invite, where `access.admission` is not `open`")
    ] = ""

    @field_validator("homepage")
    @classmethod
    def _page(cls, homepage: str) -> str:
        if homepage:
            check_url(homepage)
            if not homepage.startswith("https://"):
                raise ValueError(f"{homepage!r}: expected an address that begins with https://")
        return homepage


class CostSection(Record):
    """``[cost]``: prices of devices, to say what the run costs (``costs.py``). They decide nothing."""

    currency: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z]{1,8}$"),
        Field(description="currency of all prices of the run, also of those that members name: a label, not converted"),
    ] = "USD"
    prices: Annotated[
        dict[Annotated[str, AfterValidator(_one_line), Field(min_length=1, max_length=100)], Price],
        Field(
            max_length=64,
            description=(
                "price of a device for an hour, by its name in `shoal status`, as in "
                '`prices = { "NVIDIA H100 80GB HBM3" = 2.5 }`; for members that name none, and for `provider`'
            ),
        ),
    ] = Field(default_factory=dict)
    provider: Annotated[
        OneLine,
        Field(
            max_length=100,
            description="whose prices these are: the status says what the members' time would have cost there",
        ),
    ] = ""

    @model_validator(mode="after")
    def _of_use(self) -> CostSection:
        if self.provider and not self.prices:
            raise ValueError("provider: expected with its prices")
        return self


_FEWEST_NEWCOMERS = 128
_USUAL_STAGES, _SPARE_IN_FLIGHT = 3, 4


class PipelineSection(Record):
    """``[pipeline]``: the model is cut into stages, each held by some of the peers."""

    stages: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=2, le=1024)],
        Field(
            description=(
                "number of stages that the model is cut into; `auto`: chosen by what the first peers can hold. Needs "
                "`virtual_batch` and a recipe that provides layers: [docs/pipeline.md](pipeline.md)"
            )
        ),
    ] = "auto"
    micro_batch: Annotated[
        int,
        Field(gt=0, le=2**20),
        Field(
            description=(
                "samples that go through the stages together; `round.tokens` is a whole number of micro-batches"
            )
        ),
    ]
    activations: Annotated[
        str | dict[str, Any],
        Field(
            description=(
                "codec of activations and their gradients between stages, as in `averaging.codec`; `float32` is exact"
            )
        ),
    ] = "int8"
    max_in_flight: Annotated[
        Literal["auto"] | Annotated[int, Field(gt=0, le=1024)],
        Field(
            description=(
                "most micro-batches that wait at a peer for their gradients; `auto`: 4 plus two for each stage, or 10 "
                "if `stages` is `auto`, too"
            )
        ),
    ] = "auto"

    @field_validator("activations")
    @classmethod
    def _known(cls, activations: str | dict[str, Any]) -> str | dict[str, Any]:
        try:
            make_format(activations)
        except CodecError as error:
            raise ValueError(str(error)) from error
        return activations

    @property
    def in_flight(self) -> int:
        """Most micro-batches that wait at a peer. ``auto``: two for each stage, one being computed and one in transit,
        and some more, as replicas of a stage do not take turns exactly (docs/decisions/028-micro-batches.md)."""
        if self.max_in_flight != "auto":
            return self.max_in_flight
        stages = _USUAL_STAGES if self.stages == "auto" else self.stages
        return _SPARE_IN_FLIGHT + 2 * stages

    @property
    def activation_format(self) -> BlockFormat | TopKFormat:
        """The codec format of activations and their gradients."""
        return make_format(self.activations)


class EvaluationSection(Record):
    """``[evaluation]``: what validators measure beside the training, on the data that nobody trains on."""

    every_rounds: Annotated[
        int,
        Field(
            ge=1,
            le=10**6,
            description=(
                "validators (`shoal join --role validator`) evaluate each version of the model whose number is a "
                "multiple of this, on the samples that `data.held_out` keeps from the training"
            ),
        ),
    ] = 10
    samples: Annotated[
        int,
        Field(ge=1, le=2**20, description="held-out samples of an evaluation, the same ones each time"),
    ] = 256
    validators: Annotated[
        int,
        Field(
            ge=1,
            le=8,
            description=(
                "validators with invites of their own that have to measure the same loss before it can end the run "
                "(`run.stop_when`); 1: you trust each one that you have invited"
            ),
        ),
    ] = 2
    prompts: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=MAX_PROMPT)], ...],
        Field(
            strict=False,
            max_length=MAX_TEXTS,
            description=(
                "beginnings of texts that the model goes on with in each evaluation, an empty one for the beginning of "
                "a document; for recipes and data whose tokens are the bytes of text"
            ),
        ),
    ] = ("",)
    text_tokens: Annotated[int, Field(ge=1, le=250, description="tokens that it writes after each")] = 80
    temperature: Annotated[
        float,
        Field(ge=0, le=10, description="0: the likeliest token each time; else drawn, from `run.seed`"),
    ] = 0.0

    @field_validator("prompts")
    @classmethod
    def _plain(cls, prompts: tuple[str, ...]) -> tuple[str, ...]:
        for prompt in prompts:
            if prompt != plain_text(prompt, len(prompt)):
                raise ValueError("expected plain text without control characters")
        return prompts


HEADER_VALUES = 1024
"""Values of a call before its arrays (``peer/array_packing.py``)."""

_GATHERED_CHUNK = 2**20
"""Values of a result chunk, which holds one leaf of each member at least: 4 MiB, which fit into a frame."""


class CollectiveSection(Record):
    """``[collective]``: rounds gather the members' arrays instead of averaging them, for ``shoal.peer.collectives``.

    Contributions are float32 and unbounded in norm, as each stands for itself, and the anchor stays zero. Each member
    holds the arrays of all of a call in memory."""

    values: Annotated[
        int,
        Field(
            ge=64,
            le=2**28,
            description=(
                "room for the arrays of one member in one call: an element of float32, bfloat16 or float16 takes a "
                "value, and two bytes of other types do. Each call moves all of it, so take no more than is needed"
            ),
        ),
    ]
    members: Annotated[
        int,
        Field(
            ge=2,
            le=256,
            description=(
                "most members at a time; others are told that the run is full. A member's memory for a call is up to "
                "about `values` times `members` times 12 bytes: as received, by member, and as arrays"
            ),
        ),
    ] = 16

    @model_validator(mode="after")
    def _fits(self) -> CollectiveSection:
        if self.members * leaf_elements(self.elements) > _GATHERED_CHUNK:
            raise ValueError(
                f"{self.values} values of {self.members} members are too many: one call holds up to about 2**28 values "
                "of all of them; take fewer members or values"
            )
        return self

    @property
    def elements(self) -> int:
        """Number of elements of the run's vector: a call's header and arrays."""
        return HEADER_VALUES + self.values

    @property
    def max_chunk_values(self) -> int:
        """Most elements of a chunk, of which a result has one value for each member."""
        return _GATHERED_CHUNK // self.members


_COLLECTIVE: dict[str, dict[str, Any]] = {
    "averaging": {"codec": "float32", "robust": "none"},
    "outer": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
}
"""Settings of a run with ``[collective]``: the only ones with which it does what it says."""

_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "sparseloco": {
        "averaging": {"codec": "topk", "residual_decay": 0.95},
        "outer": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
    }
}
"""Defaults of an algorithm that differ from the general ones, by section. sparseloco: Sarfi et al. 2025,
arXiv:2508.15706."""


class RunFile(Record):
    """A run file. ``algorithm = "sparseloco"`` is ``diloco`` with other defaults (``_PRESETS``)."""

    run: RunSection
    recipe: RecipeSection
    data: DataSection = DataSection()
    algorithm: Annotated[
        Literal["diloco", "sparseloco", "virtual_batch"],
        Field(
            description=(
                "`virtual_batch`: one optimizer step a round on exactly `round.tokens` tokens; `sparseloco`: "
                '`diloco` with other defaults: `averaging.codec = "topk"`, `averaging.residual_decay = 0.95`, '
                '`outer.optimizer = "sgd"`, `outer.lr = 1.0`'
            )
        ),
    ] = "diloco"
    averaging: AveragingSection = AveragingSection()
    audit: AuditSection = AuditSection()
    inner: InnerSection = InnerSection()
    schedule: ScheduleSection = ScheduleSection()
    outer: OuterSection = OuterSection()
    round: RoundSection
    checkpoints: CheckpointsSection = CheckpointsSection()
    access: AccessSection = AccessSection()
    card: CardSection = CardSection()
    evaluation: EvaluationSection = EvaluationSection()
    cost: CostSection = CostSection()
    pipeline: PipelineSection | None = None
    collective: CollectiveSection | None = None
    start: Annotated[
        StartSection | None,
        Field(
            description=(
                "the checkpoint that the run starts from; `shoal host --from` writes it. `start.tokens`: position in "
                "the schedule and in the samples (`run.tokens` counts from there)"
            )
        ),
    ] = None
    pins: Annotated[
        PinsSection | None,
        Field(description="the model, data and first state of members; `shoal host` and `shoal prepare` write it"),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, content: Any) -> Any:
        """Fill in the defaults of the algorithm, or of a run of collectives."""
        if not isinstance(content, dict):
            return content
        filled = dict(content)
        presets = _PRESETS.get(str(content.get("algorithm")), {})
        if content.get("collective") is not None:
            presets = _COLLECTIVE
        averaging = filled.get("averaging")
        if isinstance(averaging, dict) and averaging.get("secure") is True:
            presets = {**presets, "audit": {"work_share": 0.0}}
        for section, settings in presets.items():
            own = filled.get(section, {})
            if isinstance(own, dict):
                filled[section] = {**settings, **own}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> RunFile:
        if self.averaging.overlap and self.algorithm == "virtual_batch":
            raise ValueError(
                'averaging.overlap = true needs algorithm = "diloco" or "sparseloco", whose members continue to train '
                'without the mean; "virtual_batch" needs it before it can continue'
            )
        if self.schedule.kind != "constant" and self.run.tokens is None:
            raise ValueError(f"schedule.kind = {self.schedule.kind!r} needs run.tokens, at which it ends")
        if self.schedule.scaling != "none" and self.algorithm != "virtual_batch":
            raise ValueError(
                f'schedule.scaling = "{self.schedule.scaling}" needs algorithm = "virtual_batch", whose rounds are the '
                "batches that a learning rate is scaled by"
            )
        if self.pipeline is not None and self.algorithm != "virtual_batch":
            raise ValueError(
                f'[pipeline] needs algorithm = "virtual_batch", not {self.algorithm!r}: with local optimizers, the '
                "stages that a micro-batch passes through would hold weights of different steps"
            )
        if self.pipeline is not None and self.inner.precision == "float16":
            raise ValueError(
                'inner.precision = "float16" needs a loss scale, on which all stages of a [pipeline] would have to '
                'agree: take "auto", "bfloat16" or "float32"'
            )
        if self.data.tokens_per_sample is not None:
            self._check_micro_batches(self.data.tokens_per_sample)
        self._check_collective()
        self._check_secure()
        self._check_pins()
        if self.run.stop_when is not None and (self.pipeline is not None or self.recipe.name == "own"):
            raise ValueError(
                "run.stop_when needs validators, who evaluate whole models of recipes: leave it out in runs with a "
                '[pipeline] or recipe.name = "own"'
            )
        return self

    def _check_collective(self) -> None:
        if self.collective is None:
            return
        if self.recipe.name != "own" or self.data.source != "own" or self.algorithm != "diloco":
            raise ValueError(
                '[collective] is for arrays that members bring: it needs recipe.name = "own" and data.source = "own", '
                "and no algorithm"
            )
        for section, settings in _COLLECTIVE.items():
            for name, value in settings.items():
                if getattr(getattr(self, section), name) != value:
                    raise ValueError(
                        f"{section}.{name}: leave it out in a run with [collective], where it is {value!r}"
                    )
        if self.round.tokens != 1:
            raise ValueError("round.tokens: expected 1 in a run with [collective], where each member counts one a call")
        if self.averaging.overlap or self.pipeline is not None or self.start is not None:
            raise ValueError("[collective] trains no model: leave out averaging.overlap, [pipeline] and [start]")
        if self.collective.members > self.averaging.group_size:
            raise ValueError(
                f"collective.members: expected at most averaging.group_size, {self.averaging.group_size}, as all "
                "members exchange their arrays with each other"
            )

    def _check_secure(self) -> None:
        if not self.averaging.secure:
            return
        if self.algorithm != "diloco":
            raise ValueError(
                f'averaging.secure = true needs algorithm = "diloco", not {self.algorithm!r}: top-k differs from '
                "member to member, and a whole batch would be lost with each part that is"
            )
        if self.collective is not None or self.pipeline is not None:
            raise ValueError(
                "averaging.secure = true is for whole models: leave out [collective], which shows all arrays to all, "
                "and [pipeline], whose stages may have fewer than four replicas"
            )
        if self.audit.work_share:
            raise ValueError(
                "audit.work_share: expected 0 with averaging.secure = true, as validators score single contributions"
            )

    def _check_pins(self) -> None:
        pins = self.pins
        if pins is None:
            return
        if self.start is not None and pins.state is not None:
            raise ValueError("pins.state: expected only without [start], which pins the state of its checkpoint")
        if (pins.layers is None) == (self.pipeline is not None):
            raise ValueError("pins.layers: expected in a run with a [pipeline], and in no other")

    def _check_micro_batches(self, tokens_per_sample: int) -> None:
        if self.pipeline is None:
            return
        micro_batch_tokens = self.pipeline.micro_batch * tokens_per_sample
        if self.round.tokens % micro_batch_tokens:
            fewer = self.round.tokens // micro_batch_tokens * micro_batch_tokens
            raise ValueError(
                f"round.tokens: expected a whole number of micro-batches, of {self.pipeline.micro_batch} samples of "
                f"{tokens_per_sample} tokens each, such as {fewer or micro_batch_tokens}, not {self.round.tokens}"
            )

    def check_micro_batches(self, tokens_per_sample: int) -> None:
        """Check that a pipeline's round is a whole number of micro-batches, for callers that know a sample's tokens.

        Raises ``RunFileError``."""
        try:
            self._check_micro_batches(tokens_per_sample)
        except ValueError as error:
            raise RunFileError(f"run {self.run.name}: {error}") from error

    @property
    def max_chunk_values(self) -> int:
        """Most elements of a chunk: packed, its result is no larger than 4 MiB of float32, which fits into a frame."""
        if self.collective is not None:
            return self.collective.max_chunk_values
        return self.format_map(()).max_chunk_values

    def format_map(self, shapes: Shapes) -> FormatMap:
        """The codec formats of contributions and results, for a model of tensors of these shapes."""
        return make_format_map(self.averaging.codec, shapes)

    _name: bytes | None = PrivateAttr(None)

    def named_by(self, original: RunFile) -> RunFile:
        """Give an amended run file the hash of the original, by which everybody knows the run (``amendments.py``)."""
        self._name = original.hash
        return self

    @property
    def hash(self) -> bytes:
        """SHA-256 of the canonical JSON of the validated content, as it was when the run began."""
        if self._name is not None:
            return self._name
        content = self.model_dump(mode="json")
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()


def unused_inner_settings(run: RunFile, *, own_loop: bool) -> list[str]:
    """Return the settings of ``[inner]`` that the run file has and that do nothing in this run.

    ``own_loop``: members bring a training loop of their own, with its optimizer, clipping and precision."""
    if not own_loop and run.algorithm != "virtual_batch":
        return []
    unused = run.inner.model_fields_set - {"batch_samples"}
    if not own_loop:
        unused -= {"precision", "compile"}
    return [f"inner.{name}" for name in InnerSection.model_fields if name in unused]


def _check_optimizer(section: InnerSection | OuterSection, which: str, where: str) -> None:
    """Refuse settings of another optimizer than the named one. Raises ``RunFileError``."""
    settings: dict[str, tuple[str, ...]] = _INNER_SETTINGS if which == "inner" else _OUTER_SETTINGS
    used, others = settings[section.optimizer], {one for names in settings.values() for one in names}
    has = section.model_fields_set & others
    unused = [name for name in type(section).model_fields if name in has - set(used)]
    if "momentum" in unused and section.momentum == 0:
        unused.remove("momentum")  # as the optimizer does
    if unused:
        raise RunFileError(
            f"{where}: {', '.join(f'{which}.{name}' for name in unused)}: no setting of the {which} optimizer "
            f"{section.optimizer!r}, which has {' and '.join(used)}: leave it out or name another {which}.optimizer"
        )


def parse_run_file(text: str, where: str = "run file") -> RunFile:
    """Validate TOML text. Raises ``RunFileError`` that names the file, the field and the expected value."""
    return _validate(parse_run_toml(text, where), where)


def load_run_file(path: Path) -> tuple[str, RunFile]:
    """Read and validate a run file; returns its text and its validated content. Raises ``RunFileError``."""
    text, values = read_run_toml(path)
    return text, _validate(values, str(path))


def _validate(values: dict[str, Any], where: str) -> RunFile:
    try:
        run = RunFile.model_validate(values)
    except ValidationError as error:
        raise RunFileError(f"{where}: " + "; ".join(field_errors(error, RunFile))) from error
    except (ValueError, RecursionError) as error:  # arrays with thousands of levels
        raise RunFileError(f"{where}: {error}") from error
    _check_optimizer(run.outer, "outer", where)
    if run.algorithm != "virtual_batch":  # which has no inner optimizer
        _check_optimizer(run.inner, "inner", where)
    return run
