import json
import re
from pathlib import Path

import pytest

from shoal.swarm.errors import RunFileError
from shoal.swarm.protocol.identity import parse_key
from shoal.swarm.protocol.run_file import (
    RunFile,
    load_run_file,
    parse_run_file,
    unused_inner_settings,
)
from shoal.swarm.protocol.run_toml import MAX_RUN_FILE_BYTES

LEAST = """
[run]
name = "tiny"
[recipe]
name = "gpt"
[round]
tokens = 1000
"""
FULL = """
# A comment.
algorithm = "virtual_batch"
averaging = { codec = { name = "int8", block = 64 } }

[recipe]
name = "gpt"
[recipe.settings]
layers = 2
dropout = 0.0
names = ["a", "b"]
nested = { deep = true }

[run]
name = "tiny"
seed = 7
tokens = 1_000_000
[round]
tokens = 1000
max_s = 60
[data]
source = "text:*.md"
[inner]
betas = [0.8, 0.99]
lr = 1
"""


@pytest.mark.parametrize("robust", ["clip", "trimmed"])
def test_robust_means_are_refused_where_they_would_be_zero_or_too_large(robust: str) -> None:
    for codec in ('"topk"', '{ name = "topk", k = 8 }', '{ name = "auto", matrices = "topk" }'):
        assert "top-k" in refusal(LEAST + f'[averaging]\nrobust = "{robust}"\ncodec = {codec}\n')
    assert "top-k" in refusal(f'algorithm = "sparseloco"\naveraging.robust = "{robust}"\n' + LEAST)
    assert "128" in refusal(LEAST + f'[averaging]\nrobust = "{robust}"\ngroup_size = 129\n')
    assert parse_run_file(LEAST + f'[averaging]\nrobust = "{robust}"\n').averaging.robust == robust


def refusal(text: str) -> str:
    with pytest.raises(RunFileError) as refused:
        parse_run_file(text, "some.toml")
    message = str(refused.value)
    assert message.startswith("some.toml: ")
    return message.removeprefix("some.toml: ")


def with_line(section: str, line: str) -> str:
    """``LEAST`` with one more line in that section, or the line in place of the field's old one."""
    if not section:
        return line + "\n" + LEAST
    header = f"[{section}]\n"
    if header not in LEAST:
        return f"{LEAST}{header}{line}\n"
    field = line.split(" ")[0]
    before, after = LEAST.split(header)
    mine, _, rest = after.partition("[")
    mine = "".join(old for old in mine.splitlines(keepends=True) if not old.startswith(f"{field} "))
    return f"{before}{header}{mine}{line}\n" + (f"[{rest}" if rest else "")


def test_defaults_of_every_section() -> None:
    assert parse_run_file(LEAST).model_dump() == {
        "run": {"name": "tiny", "seed": 0, "tokens": None, "rounds": None, "max_s": None, "stop_when": None},
        "recipe": {"name": "gpt", "settings": {}, "package": None},
        "data": {
            "source": "stdlib",
            "manifest": None,
            "mirrors": (),
            "tokens_per_sample": None,
            "held_out": 0.02,
        },
        "algorithm": "diloco",
        "averaging": {
            "codec": "int8",
            "residual_decay": 1.0,
            "residual_precision": "float32",
            "group_size": 32,
            "streams": 1,
            "robust": "norm",
            "secure": False,
            "secure_group": 8,
            "overlap": False,
        },
        "audit": {"share": 0.02, "work_share": 0.02},
        "inner": {
            "optimizer": "adamw",
            "lr": 4e-4,
            "betas": (0.9, 0.95),
            "momentum": 0.0,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "state": "float32",
            "clip_norm": 1.0,
            "batch_samples": 8,
            "precision": "auto",
            "compile": False,
        },
        "access": {
            "admission": "token",
            "joins_per_minute": 600,
            "joins_per_minute_per_network": 60,
            "members_per_network": 128,
            "members_without_credit": None,
        },
        "schedule": {
            "kind": "constant",
            "warmup_tokens": 0,
            "final_factor": 0.1,
            "scaling": "none",
            "reference_tokens": None,
        },
        "outer": {
            "optimizer": "nesterov",
            "lr": 0.7,
            "momentum": 0.9,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "trust_coefficient": 0.001,
        },
        "round": {"tokens": 1000, "max_s": 600.0, "patience_s": 20.0},
        "checkpoints": {"transfer": "raw", "sealed": False, "readers": ()},
        "evaluation": {
            "every_rounds": 10,
            "samples": 256,
            "validators": 2,
            "prompts": ("",),
            "text_tokens": 80,
            "temperature": 0.0,
        },
        "pipeline": None,
        "card": {"title": "", "purpose": "", "licence": "", "homepage": "", "contact": ""},
        "cost": {"currency": "USD", "prices": {}, "provider": ""},
        "start": None,
        "collective": None,
        "pins": None,
    }


def test_a_full_one() -> None:
    run = parse_run_file(FULL)
    assert run.recipe.settings == {"layers": 2, "dropout": 0.0, "names": ["a", "b"], "nested": {"deep": True}}
    assert (run.inner.betas, run.inner.lr, run.round.max_s) == ((0.8, 0.99), 1.0, 60.0)
    assert (run.algorithm, run.averaging.codec, run.data.source, run.run.tokens) == (
        "virtual_batch",
        {"name": "int8", "block": 64},
        "text:*.md",
        1_000_000,
    )


def test_sparseloco_is_diloco_with_other_defaults() -> None:
    run = parse_run_file('algorithm = "sparseloco"\n' + LEAST)
    assert (run.averaging.codec, run.averaging.residual_decay) == ("topk", 0.95)
    assert (run.outer.optimizer, run.outer.lr, run.outer.momentum) == ("sgd", 1.0, 0.0)
    assert run.inner == parse_run_file(LEAST).inner
    own = parse_run_file('algorithm = "sparseloco"\naveraging.residual_decay = 1.0\nouter.lr = 0.5\n' + LEAST)
    assert (own.averaging.codec, own.averaging.residual_decay, own.outer.optimizer) == ("topk", 1.0, "sgd")
    assert own.outer.lr == 0.5


@pytest.mark.parametrize("algorithm", ["diloco", "sparseloco"])
def test_overlap_is_for_algorithms_with_local_parameters(algorithm: str) -> None:
    run = parse_run_file(f'algorithm = "{algorithm}"\naveraging.overlap = true\n{LEAST}')
    assert run.averaging.overlap


def test_the_codec_is_made_for_the_models_tensors() -> None:
    shapes = [("weight", (100, 100)), ("norm", (100,))]
    run = parse_run_file('averaging.codec = { name = "auto", matrices = "sign" }\n' + LEAST)
    assert run.format_map(shapes).contribution(0, 10_100).name == "sign*10000+float16*100"
    run = parse_run_file('averaging.codec = { name = "topk", k = 5 }\n' + LEAST)
    assert run.format_map(shapes).contribution(0, 10_100).name == "topk(k=5)"
    assert run.format_map(shapes).result(0, 10_100, 3).name == "topk(k=15)"


# The pipeline -------------------------------------------------------------------------------------------

PIPELINE = """algorithm = "virtual_batch"
[pipeline]
micro_batch = 4
"""


def test_a_pipelines_defaults() -> None:
    pipeline = parse_run_file(PIPELINE + LEAST).pipeline
    assert pipeline is not None
    assert pipeline.model_dump() == {"stages": "auto", "micro_batch": 4, "activations": "int8", "max_in_flight": "auto"}
    assert pipeline.activation_format.name == "int8"
    assert pipeline.in_flight == 10


def test_in_flight_follows_from_the_stages_unless_it_is_said() -> None:
    def in_flight(more: str) -> int:
        pipeline = parse_run_file(PIPELINE + more + LEAST).pipeline
        assert pipeline is not None
        return pipeline.in_flight

    assert [in_flight(f"stages = {stages}\n") for stages in (2, 4)] == [8, 12]
    assert in_flight("stages = 4\nmax_in_flight = 3\n") == 3
    assert "auto" in refusal(f'{PIPELINE}max_in_flight = "all"\n{LEAST}')


def test_a_whole_pipeline() -> None:
    more = 'stages = 3\nactivations = { name = "int8", block = 64 }\nmax_in_flight = 2\n'
    pipeline = parse_run_file(PIPELINE + more + LEAST).pipeline
    assert pipeline is not None
    assert (pipeline.stages, pipeline.max_in_flight, pipeline.activation_format.name) == (3, 2, "int8(block=64)")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stages = 1", r"pipeline\.stages.*greater than or equal to 2"),
        ('stages = "many"', r"pipeline\.stages.*'auto'"),
        ("max_in_flight = 0", r"pipeline\.max_in_flight.*greater than 0"),
        ('activations = "gzip"', r"pipeline\.activations: expected one of float32, .*'gzip'"),
        ('activations = "auto"', r"pipeline\.activations: expected one of float32, .*'auto'"),
        ("activations = { block = 64 }", r"pipeline\.activations: the table of a codec needs a name"),
        ("depth = 2", r"pipeline\.depth: no such field"),
    ],
)
def test_a_bad_pipeline_is_refused(line: str, expected: str) -> None:
    assert re.search(expected, refusal(f"{PIPELINE}{line}\n{LEAST}"))


@pytest.mark.parametrize("algorithm", ["diloco", "sparseloco"])
def test_a_pipeline_takes_one_global_batch(algorithm: str) -> None:
    assert re.search(
        f"needs algorithm = \"virtual_batch\", not '{algorithm}'",
        refusal(PIPELINE.replace("virtual_batch", algorithm) + LEAST),
    )
    assert "pipeline.micro_batch: is missing" in refusal('algorithm = "virtual_batch"\n[pipeline]\n' + LEAST)


def test_a_pipelines_round_is_a_whole_number_of_micro_batches() -> None:
    fits = parse_run_file(f"{PIPELINE}[data]\ntokens_per_sample = 10\n{LEAST}")
    fits.check_micro_batches(10)
    with pytest.raises(RunFileError, match=r"run tiny: round\.tokens: .* of 4 samples of 16 .* such as 960, not 1000"):
        fits.check_micro_batches(16)
    assert "such as 990, not 1000" in refusal(
        f"{PIPELINE}[data]\ntokens_per_sample = 11\n{LEAST}".replace("= 4", "= 9")
    )
    assert "such as 2000, not 1000" in refusal(f"{PIPELINE}[data]\ntokens_per_sample = 500\n{LEAST}")
    parse_run_file(LEAST).check_micro_batches(16)


def test_runs_with_a_pipeline_have_another_hash() -> None:
    without = parse_run_file('algorithm = "virtual_batch"\n' + LEAST)
    run = parse_run_file(PIPELINE + LEAST)
    more = parse_run_file(PIPELINE + "max_in_flight = 5\n" + LEAST)
    assert len({without.hash, run.hash, more.hash}) == 3
    assert run.hash == parse_run_file(PIPELINE + 'max_in_flight = "auto"\n' + LEAST).hash


# The hash -----------------------------------------------------------------------------------------------


def test_the_hash_is_of_the_content() -> None:
    shuffled = """
round = { patience_s = 20, tokens = 1000 }   # the default, written out
recipe = { name = 'gpt' }
averaging.codec = "int8"
[run]
seed = 0
name = "tiny"
"""
    assert parse_run_file(shuffled).hash == parse_run_file(LEAST).hash
    assert parse_run_file(LEAST.replace("\n", "\r\n")).hash == parse_run_file(LEAST).hash
    assert len(parse_run_file(LEAST).hash) == 32


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("", 'averaging.codec = "float32"'),
        ("averaging", "streams = 2"),
        ("run", 'name = "other"'),
        ("run", "seed = 1"),
        ("round", "tokens = 1001"),
        ("round", "patience_s = 20.5"),
        ("inner", "lr = 1e-3"),
        ("outer", "momentum = 0.8"),
        ("schedule", "final_factor = 0.2"),
        ("data", "held_out = 0.03"),
        ("averaging", "overlap = true"),
        ("averaging", 'secure = true\nrobust = "none"'),
        ("averaging", "secure_group = 16"),
        ("recipe.settings", "width = 5"),
        ("access", "joins_per_minute = 5"),
        ("access", 'admission = "open"'),
        ("access", 'admission = "list"'),
        ("access", "members_without_credit = 128"),
    ],
)
def test_every_setting_is_in_the_hash(section: str, line: str) -> None:
    assert parse_run_file(with_line(section, line)).hash != parse_run_file(LEAST).hash


def test_the_hash_of_this_release() -> None:
    """Another default is another run: members of two releases must not meet without noticing."""
    assert parse_run_file(LEAST).hash.hex()[:16] == "7a76dfa901ea9f4e"


# Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "line", "expected"),
    [
        ("run", 'name = "Big Name"', r"run\.name: .*pattern"),
        ("run", 'name = ""', r"run\.name: .*pattern"),
        ("run", "seed = -1", r"run\.seed: .*greater than or equal to 0"),
        ("run", "tokens = 0", r"run\.tokens: .*greater than 0"),
        ("run", "rounds = 0", r"run\.rounds: .*greater than 0"),
        ("run", "rounds = true", r"run\.rounds: .*valid integer"),
        ("run", "max_s = 0", r"run\.max_s: .*greater than 0"),
        ("run", "max_s = inf", r"run\.max_s: .*finite"),
        ("run", "max_s = nan", r"run\.max_s: "),
        ("averaging", "streams = 0", r"averaging\.streams: .*greater than or equal to 1"),
        ("averaging", "streams = 17", r"averaging\.streams: .*less than or equal to 16"),
        ("averaging", "streams = 4.0", r"averaging\.streams: .*valid integer"),
        ("run", "until = 5", r"run\.until: no such field"),
        ("recipe", "name = 5", r"recipe\.name: .*valid string"),
        ("recipe", 'name = "a/b"', r"recipe\.name: .*pattern"),
        ("recipe", "settings = 5", r"recipe\.settings: .*dictionary"),
        ("recipe.settings", "when = 1979-05-27", r"recipe\.settings: when: expected a text"),
        ("recipe.settings", "rate = nan", r"recipe\.settings: rate: expected .*finite number"),
        ("recipe.settings", "many = [1, inf]", r"recipe\.settings: many\.1: expected"),
        ("recipe.settings", "big = 9223372036854775808", r"recipe\.settings: big: expected"),
        ("recipe.settings", "a.b.c.d.e.f.g.h = 1", r"recipe\.settings: a\.b.*at most 8 levels"),
        ("data", 'source = ""', r"data\.source: .*at least 1"),
        ("data", "tokens_per_sample = 0", r"data\.tokens_per_sample: .*greater than 0"),
        ("data", "held_out = 0.5", r"data\.held_out: .*less than 0\.5"),
        ("", 'algorithm = "adam"', r"algorithm: .*'diloco', 'sparseloco' or 'virtual_batch'"),
        ("averaging", 'codec = "zip"', r"averaging\.codec: .*expected one of float32, .*int8.*, not 'zip'"),
        ("averaging", 'codec = { name = "int8", blok = 64 }', r"averaging\.codec: .*'blok'.*int8 has block, seed"),
        ("averaging", 'codec = { name = "float32", block = 64 }', r"averaging\.codec: .*float32 has none"),
        ("averaging", 'codec = { name = "int8", block = "64" }', r"averaging\.codec: .*block.*expected int"),
        ("averaging", 'codec = { name = "int8", block = true }', r"averaging\.codec: .*block.*expected int"),
        ("averaging", 'codec = { name = "int8", block = 3 }', r"averaging\.codec: .*block"),
        ("averaging", 'codec = { name = "auto", matrices = "zip" }', r"averaging\.codec: .*expected one of float32"),
        ("averaging", 'codec = { name = "auto", matrix = "int8" }', r"averaging\.codec: .*auto has matrices, tables"),
        ("averaging", "residual_decay = 1.5", r"averaging\.residual_decay: .*less than or equal to 1"),
        ("averaging", "group_size = 1", r"averaging\.group_size: .*greater than or equal to 2"),
        ("averaging", "group_size = 1025", r"averaging\.group_size: .*less than or equal to 1024"),
        ("averaging", "codec = { block = 64 }", r"averaging\.codec: .*needs a name"),
        (
            "",
            'algorithm = "sparseloco"\naveraging.secure = true\naveraging.robust = "none"',
            r".*secure = true adds up codes.*top-k",
        ),
        ("", "averaging.secure = true", r'.*"trimmed", which compares the sums of 3 groups or more, .*not .norm.'),
        *(
            ("", f'averaging.secure = true\naveraging.robust = "none"\n{line}', expected)
            for line, expected in [
                ('averaging.codec = "topk"', r".*not .topk.\. What top-k keeps"),
                ("averaging.overlap = true", r".*secure = true cannot be had with overlap = true"),
                ("averaging.group_size = 16", r".*no use for group_size.*secure_group"),
                ("averaging.secure_group = 3", r".*greater than or equal to 4"),
                ('algorithm = "virtual_batch"', r".*secure = true needs algorithm = .diloco., not .virtual_batch."),
                ("audit.work_share = 0.1", r"audit\.work_share: expected 0"),
            ]
        ),
        ("", 'averaging.secure = true\naveraging.robust = "clip"', r'.*"trimmed", .*or "none", not .clip.'),
        (
            "",
            'algorithm = "virtual_batch"\naveraging.overlap = true',
            r"averaging\.overlap = true needs algorithm = .diloco. or .sparseloco.",
        ),
        ("", "speed = 5", r"speed: no such field"),
        ("inner", 'optimizer = "lion"', r"inner\.optimizer: .*'adamw', 'sgd', 'muon' or 'adafactor'"),
        ("inner", "lr = 0", r"inner\.lr: .*greater than 0"),
        ("inner", 'lr = "fast"', r"inner\.lr: .*valid number"),
        ("inner", "betas = [0.9]", r"inner\.betas\.1: is missing"),
        ("inner", "betas = [0.9, 1.0]", r"inner\.betas\.1: .*less than 1"),
        ("inner", "momentum = 1", r"inner\.momentum: .*less than 1"),
        ("inner", "eps = 0", r"inner\.eps: .*greater than 0"),
        ("inner", "weight_decay = -1", r"inner\.weight_decay: .*greater than or equal to 0"),
        ("inner", "clip_norm = 0", r"inner\.clip_norm: .*greater than 0"),
        ("inner", "batch_samples = 0", r"inner\.batch_samples: .*greater than 0"),
        ("inner", "batch_samples = 2.5", r"inner\.batch_samples: .*integer"),
        ("inner", 'precision = "fp16"', r"inner\.precision: .*'auto', 'float32', 'tf32', 'bfloat16' or 'float16'"),
        ("schedule", 'kind = "step"', r"schedule\.kind: .*'constant', 'cosine' or 'linear'"),
        ("schedule", 'kind = "cosine"', r"schedule\.kind = 'cosine' needs run\.tokens"),
        ("schedule", "warmup_tokens = -1", r"schedule\.warmup_tokens: .*greater than or equal to 0"),
        ("schedule", "final_factor = 2", r"schedule\.final_factor: .*less than or equal to 1"),
        ("outer", 'optimizer = "lion"', r"outer\.optimizer: .*'nesterov', 'sgd', 'adamw', 'lamb' or 'lars'"),
        ("outer", "lr = 1e7", r"outer\.lr: .*less than or equal to 1000000"),
        ("outer", "betas = 0.9", r"outer\.betas: .*tuple"),
        ("round", "tokens = 0", r"round\.tokens: .*greater than 0"),
        ("round", 'tokens = "many"', r"round\.tokens: .*valid integer"),
        ("round", "max_s = 100_000", r"round\.max_s: .*less than or equal to 86400"),
        ("round", "patience_s = 0.5", r"round\.patience_s: .*greater than or equal to 1"),
        ("round", 'patience_s = "20"', r"round\.patience_s: .*valid number"),
    ],
)
def test_a_refusal_names_the_field_and_what_is_expected(section: str, line: str, expected: str) -> None:
    assert re.match(expected, refusal(with_line(section, line)))


def test_all_that_is_wrong_is_told_at_once() -> None:
    message = refusal(LEAST.replace("1000", "0").replace('"tiny"', '"T"'))
    assert "run.name: " in message
    assert "round.tokens: " in message
    assert refusal("") == "run: is missing; recipe: is missing; round: is missing"


@pytest.mark.parametrize(
    "text",
    [
        "run = ",
        "[run",
        'a = "\ud7ff',
        "a = 1\na = 2",
        "x = " + "[" * 50_000,
        "x = " + "9" * 5000,
        LEAST + "\0",
    ],
)
def test_what_is_not_toml(text: str) -> None:
    assert refusal(text).startswith("not valid TOML: ")


def test_keys_that_would_eat_the_memory() -> None:
    assert refusal(".".join("a" * 90_000) + " = 1").startswith("a key with more than 64 dots")
    assert refusal("[" + ".".join("a" * 90_000) + "]").startswith("a key with more than 64 dots")
    assert refusal("x = {" + ".".join("a" * 90_000) + " = 1}").startswith("a key with more than 64 dots")
    parse_run_file("# " + "." * 100 + LEAST)


# Files --------------------------------------------------------------------------------------------------


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FULL)
    text, run = load_run_file(path)
    assert text == FULL
    assert run == parse_run_file(FULL)
    path.write_bytes(b"\xef\xbb\xbf" + FULL.encode())
    assert load_run_file(path) == (text, run)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(RunFileError, match=re.escape(f"{path}: cannot be read: ")):
            load_run_file(path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(LEAST.encode() + b"# caf\xe9")
    with pytest.raises(RunFileError, match=r"latin\.toml: cannot be read: .*utf-8"):
        load_run_file(latin)


def test_huge_files(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RunFileError, match=rf"huge\.toml: larger than {MAX_RUN_FILE_BYTES} bytes"):
        load_run_file(path)
    largest = LEAST + "#" * (MAX_RUN_FILE_BYTES - len(LEAST))
    assert parse_run_file(largest) == parse_run_file(LEAST)
    assert "larger than" in refusal(largest + "#")


def test_a_run_file_never_changes() -> None:
    run = parse_run_file(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        run.algorithm = "virtual_batch"
    assert RunFile.model_validate(run.model_dump()) == run


READER = "aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a"


def test_readers_of_sealed_checkpoints() -> None:
    assert parse_run_file(LEAST).checkpoints.sealed_for is None
    assert parse_run_file(LEAST + "[checkpoints]\nsealed = true\n").checkpoints.sealed_for == ()
    run = parse_run_file(f'{LEAST}[checkpoints]\nsealed = true\nreaders = ["{READER}"]\n')
    assert run.checkpoints.sealed_for == (parse_key(READER),)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (f'sealed = true\nreaders = ["{READER[:-1]}"]', "public key"),
        ('sealed = true\nreaders = ["xyz"]', "public key"),
        (f'sealed = true\nreaders = ["{READER}", "{READER}"]', "twice"),
        (f'readers = ["{READER}"]', "sealed = true"),
        ("sealed = 1", "checkpoints.sealed"),
    ],
)
def test_readers_that_cannot_be_used(lines: str, reason: str) -> None:
    message = refusal(f"{LEAST}[checkpoints]\n{lines}\n")
    assert "checkpoints" in message
    assert reason in message


# Settings without effect ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ('optimizer = "sgd"\nmomentum = 0.9', "outer.momentum"),
        ('optimizer = "sgd"\nmomentum = 0.5\neps = 1e-8', "outer.momentum, outer.eps"),
        ("weight_decay = 0.1", "outer.weight_decay"),
        ('optimizer = "adamw"\nmomentum = 0.9', "outer.momentum"),
        ("betas = [0.9, 0.95]", "outer.betas"),
        ('optimizer = "lamb"\nmomentum = 0.9', "outer.momentum"),
        ('optimizer = "lars"\nbetas = [0.9, 0.95]', "outer.betas"),
        ('optimizer = "lamb"\ntrust_coefficient = 0.1', "outer.trust_coefficient"),
    ],
)
def test_settings_of_another_outer_optimizer_are_refused_by_name(settings: str, unused: str) -> None:
    with pytest.raises(RunFileError, match=rf"f\.toml: {unused}: no setting of the outer optimizer"):
        parse_run_file(LEAST + f"[outer]\n{settings}\n", "f.toml")


@pytest.mark.parametrize(
    "settings",
    [
        'optimizer = "sgd"\nlr = 1.0\nmomentum = 0.0',
        "momentum = 0.5",
        'optimizer = "adamw"\nbetas = [0.9, 0.95]\neps = 1e-8\nweight_decay = 0.1',
        'optimizer = "lamb"\nbetas = [0.9, 0.95]\neps = 1e-6\nweight_decay = 0.1',
        'optimizer = "lars"\nmomentum = 0.9\nweight_decay = 0.1\ntrust_coefficient = 0.002',
    ],
)
def test_settings_of_the_named_outer_optimizer_are_taken(settings: str) -> None:
    run = parse_run_file(LEAST + f"[outer]\n{settings}\n")
    again = RunFile.model_validate_json(json.dumps(run.model_dump(mode="json")))
    assert again.hash == run.hash


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ("momentum = 0.9", "inner.momentum"),
        ('optimizer = "sgd"\neps = 1e-8\nmomentum = 0.9', "inner.eps"),
        ('optimizer = "sgd"\nstate = "int8"', "inner.state"),
        ('optimizer = "muon"\nstate = "int8"', "inner.state"),
        ('optimizer = "adafactor"\nbetas = [0.9, 0.95]\neps = 1e-8', "inner.betas, inner.eps"),
    ],
)
def test_settings_of_another_inner_optimizer_are_refused_by_name(settings: str, unused: str) -> None:
    with pytest.raises(RunFileError, match=rf"f\.toml: {unused}: no setting of the inner optimizer"):
        parse_run_file(f"{LEAST}[inner]\n{settings}\n", "f.toml")


@pytest.mark.parametrize(
    "settings",
    [
        "betas = [0.9, 0.95]\neps = 1e-8\nweight_decay = 0.1\nstate = 'int8'\nmomentum = 0.0",
        'optimizer = "sgd"\nmomentum = 0.9\nweight_decay = 0.1',
        'optimizer = "muon"\nmomentum = 0.9\nbetas = [0.9, 0.95]\nweight_decay = 0.1',
        'optimizer = "adafactor"\nlr = 1e-2\nweight_decay = 0.1\nclip_norm = 1.0\nprecision = "float32"',
    ],
)
def test_settings_of_the_named_inner_optimizer_are_taken(settings: str) -> None:
    run = parse_run_file(f"{LEAST}[inner]\n{settings}\n")
    assert RunFile.model_validate_json(json.dumps(run.model_dump(mode="json"))).hash == run.hash


def test_muon_has_a_momentum_of_its_own() -> None:
    assert parse_run_file(f'{LEAST}[inner]\noptimizer = "muon"\n').inner.momentum == 0.95
    assert parse_run_file(f'{LEAST}[inner]\noptimizer = "muon"\nmomentum = 0.5\n').inner.momentum == 0.5
    assert parse_run_file(f'{LEAST}[inner]\noptimizer = "sgd"\n').inner.momentum == 0.0


def test_a_batch_is_scaled_by_what_the_learning_rate_is_right_for() -> None:
    batch = 'algorithm = "virtual_batch"\n' + LEAST
    run = parse_run_file(batch + '[schedule]\nscaling = "sqrt"\nreference_tokens = 500\n')
    assert (run.schedule.scaling, run.schedule.reference_tokens) == ("sqrt", 500)
    for lines in ('scaling = "linear"', "reference_tokens = 500"):
        with pytest.raises(RunFileError, match="scaling and reference_tokens need each other"):
            parse_run_file(f"{batch}[schedule]\n{lines}\n")
    with pytest.raises(RunFileError, match=r'schedule\.scaling = "linear" needs algorithm = "virtual_batch"'):
        parse_run_file(f'{LEAST}[schedule]\nscaling = "linear"\nreference_tokens = 5\n')


@pytest.mark.parametrize(
    ("algorithm", "own_loop", "settings", "unused"),
    [
        ("diloco", False, "lr = 1e-3\nclip_norm = 1.0\nbetas = [0.9, 0.95]", []),
        ("diloco", True, "lr = 4e-4\nclip_norm = 1.0\nbatch_samples = 4", ["inner.lr", "inner.clip_norm"]),
        ("diloco", True, 'precision = "float32"\noptimizer = "sgd"', ["inner.optimizer", "inner.precision"]),
        ("virtual_batch", False, 'lr = 1e-3\nprecision = "float32"\nbatch_samples = 4', ["inner.lr"]),
        ("sparseloco", True, "batch_samples = 4", []),
    ],
)
def test_inner_settings_without_effect_are_found(
    algorithm: str, own_loop: bool, settings: str, unused: list[str]
) -> None:
    run = parse_run_file(f'algorithm = "{algorithm}"\n{LEAST}[inner]\n{settings}\n')
    assert unused_inner_settings(run, own_loop=own_loop) == unused


@pytest.mark.parametrize(
    ("card", "field"),
    [
        ('homepage = "http://example.org"', "card.homepage"),
        ('homepage = "https://192.168.1.1/"', "card.homepage"),
        ('title = "a\\u001b[2J"', "card.title"),
        (f'licence = "{"x" * 101}"', "card.licence"),
    ],
)
def test_what_a_card_may_say(card: str, field: str) -> None:
    with pytest.raises(RunFileError, match=field):
        parse_run_file(f"{LEAST}\n[card]\n{card}\n")


def test_stages_have_no_loss_scale() -> None:
    message = 'inner.precision = "float16" needs a loss scale'
    toml = "[run]\nname = 'r'\n[recipe]\nname = 'gpt'\n[round]\ntokens = 64\n[inner]\nprecision = \"float16\"\n"
    assert parse_run_file(toml).pipeline is None
    with pytest.raises(RunFileError, match=message):
        parse_run_file(f"algorithm = 'virtual_batch'\n{toml}[pipeline]\nmicro_batch = 1\n")


# Collectives --------------------------------------------------------------------------------------------------

CALLS = """
[run]
name = "calls"
[recipe]
name = "own"
[data]
source = "own"
[round]
tokens = 1
[collective]
values = 100_000
members = 8
"""


def test_a_run_of_collectives_has_the_settings_with_which_it_does_what_it_says() -> None:
    run = parse_run_file(CALLS)
    assert (run.averaging.codec, run.averaging.robust, run.outer.optimizer, run.outer.lr) == (
        "float32",
        "none",
        "sgd",
        1.0,
    )
    assert run.max_chunk_values == 2**20 // 8


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("members = 8", "members = 64", r"collective\.members: expected at most averaging\.group_size, 32"),
        ("values = 100_000", "values = 200_000_000", "are too many"),
        # With a call's header, a leaf of each of 16 members is more than a frame holds.
        ("values = 100_000\nmembers = 8", "values = 16_777_216\nmembers = 16", "are too many"),
        ("tokens = 1", "tokens = 2", r"round\.tokens: expected 1"),
        ('name = "own"', 'name = "gpt"', r"needs recipe\.name"),
        ("[round]", '[averaging]\ncodec = "int8"\n[round]', r"averaging\.codec: leave it out"),
        ("[round]", "[outer]\nlr = 0.5\n[round]", r"outer\.lr: leave it out"),
        ("[round]", "[averaging]\noverlap = true\n[round]", r"leave out averaging\.overlap"),
        ("values = 100_000\n", "", r"collective\.values"),
    ],
)
def test_a_bad_run_of_collectives_is_refused(old: str, new: str, expected: str) -> None:
    assert re.search(expected, refusal(CALLS.replace(old, new)))
