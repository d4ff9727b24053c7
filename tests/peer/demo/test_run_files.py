from shoal.peer.demo.run_files import averaging_toml, pipeline_toml
from shoal.swarm.protocol.run_file import parse_run_file


def test_the_run_file_of_whole_models_is_valid() -> None:
    run = parse_run_file(averaging_toml("diloco", 4, 3.0))
    assert (run.algorithm, run.averaging.codec, run.inner.lr, run.outer.lr) == ("diloco", "int8", 2e-3, 0.7)
    assert (run.run.max_s, run.round.tokens, run.schedule.warmup_tokens) == (180.0, 61_440, 81_920)


def test_the_sparseloco_preset_has_the_published_settings() -> None:
    run = parse_run_file(averaging_toml("sparseloco", 4, 3.0))
    assert (run.algorithm, run.averaging.residual_decay) == ("sparseloco", 0.95)
    assert run.averaging.codec == {"name": "topk", "k": 64, "values": "2bit", "chunk": 4096}
    assert (run.outer.optimizer, run.outer.lr) == ("sgd", 1.0)


def test_the_run_file_of_stages_is_valid() -> None:
    run = parse_run_file(pipeline_toml(3, 75))
    assert run.pipeline is not None
    assert (run.pipeline.stages, run.pipeline.micro_batch) == (3, 4)
    assert (run.algorithm, run.run.rounds, run.run.max_s) == ("virtual_batch", 75, 900.0)
    assert (run.round.tokens, run.schedule.warmup_tokens) == (4096, 40_960)
