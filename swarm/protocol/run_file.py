"""The run file: everything a run does, validated, with a hash that every peer of the run shares.

The hash is over the validated content with its defaults filled in, so comments, order and spacing do not
matter, and a new default in a later version shows as another hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

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
from shoal.swarm.protocol.identity import parse_key
from shoal.swarm.protocol.pins import PinsSection
from shoal.swarm.protocol.run_sources import check_source
from shoal.swarm.protocol.start_section import StartSection
from shoal.swarm.protocol.types import Record

MAX_SETTINGS_DEPTH = 8


def make_format_map(setting: str | dict[str, Any], shapes: Shapes) -> FormatMap:
    """The formats that a setting names, for tensors of these ``shapes``. Raises ``CodecError``."""
    return named_format_map(*_name_and_options(setting), shapes)


def make_format(setting: str | dict[str, Any]) -> BlockFormat | TopKFormat:
    """The one format that a setting names, for tensors of any shape. Raises ``CodecError``."""
    return named_format(*_name_and_options(setting))


def _name_and_options(setting: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(setting, str):
        return setting, {}
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise CodecError('a table of a codec has its name, as in { name = "int8", block = 4096 }')
    return name, options


def check_plain(value: Any, where: str, depth: int = MAX_SETTINGS_DEPTH) -> None:
    """Settings have one JSON, the same on every machine, as the hash needs it."""
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


MAX_RUN_FILE_BYTES = 200_000

RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
"""Also a part of folders' names."""

_MAX_DOTS = 64
_PIECES = re.compile(r"[=\[\]{},]")

PositiveInt = Annotated[int, Field(gt=0, le=2**62)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
"""Arrays of TOML are lists."""


class RunSection(Record):
    """``[run]``. The run ends after ``tokens`` committed tokens, ``rounds`` committed rounds or ``max_s``
    seconds, whichever comes first; without any of them it goes on until the host stops it."""

    name: Annotated[
        RunName,
        Field(description="name of the run, in its invite and its folders"),
    ]
    seed: Annotated[
        int,
        Field(
            ge=0, lt=2**63, description="seed of the model, the order of the samples and the random numbers of training"
        ),
    ] = 0
    tokens: Annotated[
        PositiveInt | None,
        Field(description="the run ends after so many committed tokens"),
    ] = None
    rounds: Annotated[
        PositiveInt | None,
        Field(description="the run ends after so many committed rounds"),
    ] = None
    max_s: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Field(description="the run ends after this long; without any of the three it goes on until the host stops it"),
    ] = None


class RecipeSection(Record):
    """``[recipe]``: the entry point in ``shoal.recipes`` and its own settings, which the recipe validates.

    ``name = "own"`` is for people who bring model, loss and data themselves (``Session``)."""

    name: Annotated[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")],
        Field(
            description="installed code that makes model and data, such as `gpt`; `own`: members bring their own loop"
        ),
    ]
    settings: Annotated[
        dict[str, Any],
        Field(
            description=(
                "settings of the recipe; of `gpt`: `layers`, `heads`, `width`, `context`, `vocab`, `hidden`, "
                "`rope_theta`, `tie_embedding`, `qk_norm`"
            )
        ),
    ] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _plain(cls, settings: dict[str, Any]) -> dict[str, Any]:
        check_plain(settings, "")
        return settings


class DataSection(Record):
    """``[data]``. ``source``: ``stdlib``, ``text:GLOB``, ``tokens:FILE``, or ``own`` with an own loop. Files are named
    relative to the folders that each volunteer gives with ``--data`` (``run_sources.py``).

    ``tokens_per_sample`` is set for own loops that count something else than one unit a sample."""

    source: Annotated[
        Annotated[str, Field(min_length=1, max_length=500)],
        Field(
            description=(
                "`stdlib`: the `.py` files of the running Python; `text:GLOB`; `tokens:FILE` (`.u16`, `.u32`, "
                "`.npy`), relative to the folders that each member names with `--data`; `own`, with an own loop"
            )
        ),
    ] = "stdlib"
    tokens_per_sample: Annotated[
        PositiveInt | None,
        Field(description="for own loops that count in something else than samples"),
    ] = None
    held_out: Annotated[
        float,
        Field(gt=0, lt=0.5, description="share of the data that is never trained on"),
    ] = 0.02

    @field_validator("source")
    @classmethod
    def _harmless(cls, source: str) -> str:
        check_source(source)
        return source


class InnerSection(Record):
    """``[inner]``: the local optimizer of ``diloco``; with ``virtual_batch`` only ``batch_samples`` counts.

    ``schedule`` scales the learning rate by global tokens: a linear warm-up, then ``constant``, or ``cosine``
    or ``linear`` down to ``final_lr_factor`` at the run's ``tokens``."""

    optimizer: Annotated[
        Literal["adamw", "sgd"],
        Field(description="the local optimizer of `diloco`"),
    ] = "adamw"
    lr: Annotated[
        Rate,
        Field(description="its learning rate"),
    ] = 4e-4
    betas: Annotated[
        Betas,
        Field(description="AdamW's decay rates of the moments"),
    ] = (0.9, 0.95)
    momentum: Annotated[
        Fraction,
        Field(description="momentum of `sgd`"),
    ] = 0.0
    eps: Annotated[
        float,
        Field(gt=0, description="AdamW's term against division by zero"),
    ] = 1e-8
    weight_decay: Annotated[
        float,
        Field(ge=0, le=10, description="decoupled weight decay"),
    ] = 0.1
    clip_norm: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Field(description="norm to which gradients are clipped"),
    ] = 1.0
    batch_samples: Annotated[
        int,
        Field(gt=0, le=2**20, description="samples of a local step"),
    ] = 8
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Field(description="precision of the computation; `auto`: bfloat16 autocast on GPUs that have it"),
    ] = "auto"


class ScheduleSection(Record):
    """``[schedule]``: the learning-rate factor on global tokens; applies to the inner optimizer of ``diloco``
    and to the outer one of ``virtual_batch``."""

    kind: Annotated[
        Literal["constant", "cosine", "linear"],
        Field(
            description=(
                "learning-rate factor over the run's tokens, of the inner optimizer for `diloco`, of the outer "
                "one for `virtual_batch`; `cosine` and `linear` need `run.tokens`"
            )
        ),
    ] = "constant"
    warmup_tokens: Annotated[
        int,
        Field(ge=0, le=2**62, description="tokens of a linear warm-up from 0"),
    ] = 0
    final_factor: Annotated[
        float,
        Field(ge=0, le=1, description="factor at the end of `cosine` and `linear`"),
    ] = 0.1


class OuterSection(Record):
    """``[outer]``: turns the mean contribution into the next anchor."""

    optimizer: Annotated[
        Literal["nesterov", "sgd", "adamw"],
        Field(description="turns the mean contribution into the next anchor"),
    ] = "nesterov"
    lr: Annotated[
        Rate,
        Field(description="its learning rate"),
    ] = 0.7
    momentum: Annotated[
        Fraction,
        Field(description="momentum of `nesterov` and `sgd`"),
    ] = 0.9
    betas: Annotated[
        Betas,
        Field(description="AdamW's decay rates of the moments"),
    ] = (0.9, 0.95)
    eps: Annotated[
        float,
        Field(gt=0, description="AdamW's term against division by zero"),
    ] = 1e-8
    weight_decay: Annotated[
        float,
        Field(ge=0, le=10, description="decoupled weight decay of `adamw`"),
    ] = 0.0

    @property
    def slots(self) -> int:
        """Float32 values that the outer optimizer keeps for each parameter."""
        return {"sgd": 0, "nesterov": 1, "adamw": 2}[self.optimizer]


class AveragingSection(Record):
    """``[averaging]``. ``codec``: a name, or a table of its ``name`` and options, as in
    ``codec = { name = "int8", block = 4096 }``. ``residual_decay``: what is kept, from round to round, of what
    encoding lost; 1 keeps all of it. ``group_size``: up to so many members average in one flat group, more in a
    grid. ``streams``: TCP connections that a link's chunks are spread over. ``robust``: ``norm`` bounds how far one
    member may move a round's mean (``coordinator/influence.py``), ``none`` does not. ``overlap``: the exchange of a
    round runs under the local work of the next one, and its result is applied one round late; not for
    ``virtual_batch``, whose gradients are all of one anchor."""

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
        float,
        Field(ge=0, le=1, description="share that a peer keeps, from round to round, of what encoding lost"),
    ] = 1.0
    group_size: Annotated[
        Annotated[int, Field(ge=2, le=1024)],
        Field(
            description=(
                "up to so many peers average as one group, each with each; more form a grid, with the same mean,"
                " the same bytes a peer and fewer connections"
            )
        ),
    ] = 32
    streams: Annotated[
        Annotated[int, Field(ge=1, le=16)],
        Field(
            description=(
                "TCP connections that the chunks between two peers are spread over; more fill fast links over "
                "long distances"
            )
        ),
    ] = 1
    robust: Annotated[
        Literal["norm", "none"],
        Field(
            description=(
                "`norm` bounds how far one member may move a round's mean: four times what is usual for its "
                "work; `none` does not"
            )
        ),
    ] = "norm"
    overlap: Annotated[
        bool,
        Field(
            description=(
                "members train on for the next round while one is averaged, whose mean is applied one round "
                "late; for slow links. Costs one more copy of the parameters in host memory; not with "
                "`virtual_batch`"
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


class RoundSection(Record):
    """``[round]``: a round closes at ``tokens`` or after ``max_s``. ``patience_s`` is how long anybody waits
    for a silent machine; every deadline is derived from it (``deadlines.py``)."""

    tokens: Annotated[
        PositiveInt,
        Field(description="a round closes when all members together have done so many"),
    ]
    max_s: Annotated[
        float,
        Field(gt=0, le=86_400, description="a round closes after this long at the latest"),
    ] = 600.0
    patience_s: Annotated[
        float,
        Field(
            ge=1, le=600, description="how long anybody waits for a silent machine; every deadline is derived from it"
        ),
    ] = 20.0


class CheckpointsSection(Record):
    """``[checkpoints]``. ``transfer``: how joiners get the state: ``raw``, or ``lossless``, fewer bytes for some of the
    processors' time, for slow links. ``sealed``: each peer encrypts what it saves, for itself and for ``readers``:
    other peers' public keys, as ``shoal identity`` prints them."""

    transfer: Annotated[
        Literal["raw", "lossless"],
        Field(
            description=(
                "how joiners get the state; `lossless` packs it, to 0.84 of the bytes for a trained model, at "
                "3.2 CPU-seconds a GB for the donors and 1.2 for the joiner: for links up to some 100 Mbit/s"
            )
        ),
    ] = "raw"
    sealed: Annotated[
        bool,
        Field(description="each peer encrypts its checkpoints, for itself and for `readers`"),
    ] = False
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
            raise ValueError("names a public key twice")
        return readers

    @model_validator(mode="after")
    def _of_use(self) -> CheckpointsSection:
        if self.readers and not self.sealed:
            raise ValueError("readers are of use with sealed = true only")
        return self

    @property
    def sealed_for(self) -> tuple[bytes, ...] | None:
        """The readers' raw Ed25519 public keys, 32 bytes each; None where checkpoints are not sealed."""
        return tuple(parse_key(reader) for reader in self.readers) if self.sealed else None


class AccessSection(Record):
    """``[access]``: how many may come. A network is an IPv4 /24 or an IPv6 /48; all machines behind one router are of
    one. ``joins_per_minute`` newcomers are let in, in all, and ``joins_per_minute_per_network``; as many may come at
    once. Who has a record of committed work, or is a member already, comes back beside these.
    ``members_per_network``: without a record. ``members_without_record``: in all; without it 128, or twice the members
    with a record if that is more."""

    joins_per_minute: Annotated[
        int,
        Field(gt=0, le=10**6, description="newcomers that are let in, in all; known members come back beside these"),
    ] = 600
    joins_per_minute_per_network: Annotated[
        int,
        Field(gt=0, le=10**6, description="newcomers from one network (IPv4 /24, IPv6 /48)"),
    ] = 60
    members_per_network: Annotated[
        int,
        Field(gt=0, le=4096, description="members without a record of committed work, from one network"),
    ] = 128
    members_without_record: Annotated[
        Annotated[int, Field(gt=0, le=4096)] | None,
        Field(
            description=(
                "members without a record, in all; by default 128, or twice the members with one if that is more"
            )
        ),
    ] = None

    def newcomers(self, with_record: int) -> int:
        """How many members without a record may be here, beside so many with one."""
        return self.members_without_record or max(_FEWEST_NEWCOMERS, 2 * with_record)


_FEWEST_NEWCOMERS = 128
_USUAL_STAGES, _SPARE_IN_FLIGHT = 3, 4


class PipelineSection(Record):
    """``[pipeline]``: the model is cut into stages, each held by some peers. ``stages``: how many, or ``auto``: by what
    the first peers can hold. ``micro_batch``: samples that go through the stages together. ``activations``: the codec
    of activations and their gradients, a name or a table as in ``averaging.codec``. ``max_in_flight``: up to so many
    micro-batches wait at a peer for their gradients; ``auto``: ``in_flight``."""

    stages: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=2, le=1024)],
        Field(
            description=(
                "number of stages that the model is cut into; `auto`: by what the first peers can hold. Needs "
                "`virtual_batch`, and a recipe that gives its layers: [docs/pipeline.md](pipeline.md)"
            )
        ),
    ] = "auto"
    micro_batch: Annotated[
        Annotated[int, Field(gt=0, le=2**20)],
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
                "up to so many micro-batches wait at a peer for their gradients; `auto`: 4 and two a stage, or "
                "10 where `stages` is `auto`, too"
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
        """Micro-batches that may wait at a peer. For ``auto`` two for each stage of a chain, one at work and one on its
        way, and some more, as replicas of a stage do not take turns exactly (docs/decisions/028-micro-batches.md)."""
        if self.max_in_flight != "auto":
            return self.max_in_flight
        stages = _USUAL_STAGES if self.stages == "auto" else self.stages
        return _SPARE_IN_FLIGHT + 2 * stages

    @property
    def activation_format(self) -> BlockFormat | TopKFormat:
        """The format that activations and their gradients are packed in."""
        return make_format(self.activations)


_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "sparseloco": {
        "averaging": {"codec": "topk", "residual_decay": 0.95},
        "outer": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
    }
}
"""What an algorithm sets where the run file does not, by section. sparseloco: Sarfi et al. 2025, arXiv:2508.15706."""


class RunFile(Record):
    """A whole run file. ``algorithm = "sparseloco"`` is ``diloco`` with other defaults (``_PRESETS``)."""

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
    inner: InnerSection = InnerSection()
    schedule: ScheduleSection = ScheduleSection()
    outer: OuterSection = OuterSection()
    round: RoundSection
    checkpoints: CheckpointsSection = CheckpointsSection()
    access: AccessSection = AccessSection()
    pipeline: PipelineSection | None = None
    start: Annotated[
        StartSection | None,
        Field(
            description=(
                "the checkpoint that the run starts from; `shoal host --from` writes it. `start.tokens`: how far"
                " schedule and samples have come (`run.tokens` counts from there)"
            )
        ),
    ] = None
    pins: Annotated[
        PinsSection | None,
        Field(description="what members have to bring; `shoal host` and `shoal prepare` write it"),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, content: Any) -> Any:
        """Fill in what the algorithm sets and the file does not."""
        if not isinstance(content, dict):
            return content
        filled = dict(content)
        for section, settings in _PRESETS.get(str(content.get("algorithm")), {}).items():
            own = filled.get(section, {})
            if isinstance(own, dict):
                filled[section] = {**settings, **own}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> RunFile:
        if self.averaging.overlap and self.algorithm == "virtual_batch":
            raise ValueError(
                'averaging.overlap = true needs algorithm = "diloco" or "sparseloco", whose members train on without '
                'the mean; "virtual_batch" has nothing to train on before it'
            )
        if self.schedule.kind != "constant" and self.run.tokens is None:
            raise ValueError(f"schedule.kind = {self.schedule.kind!r} needs run.tokens, to know where it ends")
        if self.pipeline is not None and self.algorithm != "virtual_batch":
            raise ValueError(
                f'[pipeline] needs algorithm = "virtual_batch", not {self.algorithm!r}: with local optimizers the '
                f"stages that a micro-batch goes through would hold weights of different moments"
            )
        if self.data.tokens_per_sample is not None:
            self._check_micro_batches(self.data.tokens_per_sample)
        self._check_pins()
        return self

    def _check_pins(self) -> None:
        pins = self.pins
        if pins is None:
            return
        if self.start is not None and pins.state is not None:
            raise ValueError("pins.state: the run starts from a checkpoint, and [start] says which state that is")
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
        """Raises ``RunFileError`` unless a pipeline's round is a whole number of micro-batches; for callers who know
        from the recipe what a sample is."""
        try:
            self._check_micro_batches(tokens_per_sample)
        except ValueError as error:
            raise RunFileError(f"run {self.run.name}: {error}") from error

    @property
    def max_chunk_values(self) -> int:
        """Values: as many as packed are no larger than 4 MiB of float32, which a frame can hold."""
        return self.format_map(()).max_chunk_values

    def format_map(self, shapes: Shapes) -> FormatMap:
        """The formats that contributions and results are packed in, for a model of these tensors."""
        return make_format_map(self.averaging.codec, shapes)

    @property
    def hash(self) -> bytes:
        """SHA-256 of the canonical JSON of the validated content."""
        content = self.model_dump(mode="json")
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()


def parse_run_file(text: str, where: str = "run file") -> RunFile:
    """Validate TOML text. Raises ``RunFileError`` that names the file, the field and what was expected."""
    if len(text.encode()) > MAX_RUN_FILE_BYTES:
        raise RunFileError(f"{where}: larger than {MAX_RUN_FILE_BYTES} bytes; that is no run file")
    for line in text.splitlines():
        # The parser takes memory quadratic in the dots of one key; run files come from other machines too.
        if not line.lstrip().startswith("#") and any(piece.count(".") > _MAX_DOTS for piece in _PIECES.split(line)):
            raise RunFileError(f"{where}: a key with more than {_MAX_DOTS} dots: {line[:40]!r}…")
    try:
        return RunFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RunFileError(f"{where}: not valid TOML: {error}") from error
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            field = ".".join(str(step) for step in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{field}: {message}" if field else message)
        raise RunFileError(f"{where}: " + "; ".join(lines)) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, arrays of thousands of levels
        raise RunFileError(f"{where}: not valid TOML: {error}") from error


def load_run_file(path: Path) -> tuple[str, RunFile]:
    """Read and validate; returns the text as written and the validated run file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RUN_FILE_BYTES + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path}: cannot be read: {error}") from error
    return text, parse_run_file(text, str(path))
