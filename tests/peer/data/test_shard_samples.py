"""Samples of shards: from a folder, from mirrors that may lie, and from the cache on disk."""

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.peer.data.making import BLOCK, make_shards, section, serving, tokens_at

from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.data import block_store, mirrors
from shoal.peer.data.manifest import MANIFEST, Manifest, TokenizerAbout
from shoal.peer.data.mirrors import Mirror, Mirrors
from shoal.peer.data.shard_samples import ShardCorpus, ShardSamples, cache_of, open_shards, split_blocks
from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training.data import OrderedDataset, prefetch
from shoal.swarm.errors import CorpusError
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

CONTEXT = 15
PER_BLOCK = (BLOCK // 2 - 1) // CONTEXT


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirrors.__init__, "__defaults__", (None, *Mirrors.__init__.__defaults__[1:2], lambda s: None))


def places(tmp_path: Path, *named: str | Path, **more: Any) -> DataPlaces:
    return DataPlaces.of(named, cache=str(tmp_path / "cache"), **more)


def opened(manifest: Manifest, at: DataPlaces, vocab: int = 256, **changes: Any) -> ShardCorpus:
    return open_shards(section(manifest, **changes), vocab, CONTEXT, at)


def all_samples(samples: ShardSamples) -> torch.Tensor:
    return samples.batch(np.arange(len(samples)))


def test_samples_are_windows_within_blocks(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000, 3000)
    corpus = opened(manifest, places(tmp_path, tmp_path / "shards"))
    blocks = np.concatenate([np.arange(0, 9000), np.arange(9000, 12_000)])
    starts = [0, 2048, 4096, 6144, 8192, 9000, 9000 + 2048]
    train, held_out = split_blocks(manifest, 0.1, CONTEXT)
    assert len(held_out) == 1
    assert sorted([*train, *held_out]) == list(range(7))
    expected = []
    for block in train:
        stop = min(starts[block] + 2048, 9000 if block < 5 else 12_000)
        expected += [tokens_at(blocks[at : at + CONTEXT + 1]) for at in range(starts[block], stop - CONTEXT, CONTEXT)]
    assert all_samples(corpus.train).tolist() == np.stack(expected).tolist()
    assert corpus.train[3].tolist() == expected[3].tolist()
    assert len(corpus.held_out) > 0
    assert "12,000 tokens" in corpus.about
    with pytest.raises(IndexError, match="expected 0 to"):
        corpus.train.batch([len(corpus.train)])


def test_what_is_downloaded_is_the_same_and_stays(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000, 3000)
    local = opened(manifest, places(tmp_path, tmp_path / "shards"))
    with serving(tmp_path / "shards") as server:
        remote = opened(manifest, places(tmp_path, server.url))
        assert remote.digest == local.digest
        assert torch.equal(all_samples(remote.train), all_samples(local.train))
        assert server.blocks_asked == 6
    again = opened(manifest, places(tmp_path, server.url))  # the server is gone
    assert torch.equal(all_samples(again.train), all_samples(local.train))


def test_a_mirror_that_lies_is_left_for_another_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = make_shards(tmp_path / "shards", 9000, 3000)
    local = opened(manifest, places(tmp_path, tmp_path / "shards"))
    with serving(tmp_path / "shards", lies=True) as liar, serving(tmp_path / "shards") as server:
        corpus = opened(manifest, places(tmp_path, liar.url, server.url))
        assert torch.equal(all_samples(corpus.train), all_samples(local.train))
    assert liar.blocks_asked == 1
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 1
    assert f"{liar.url} is not used any more" in said[0]


@pytest.mark.parametrize("how", ["is_away", "cuts"])
def test_a_mirror_that_fails_is_left_for_a_while(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    manifest = make_shards(tmp_path / "shards", 9000, 3000)
    with serving(tmp_path / "shards", **{how: True}) as bad, serving(tmp_path / "shards") as server:
        corpus = opened(manifest, places(tmp_path, bad.url, server.url))
        all_samples(corpus.train)
        assert bad.blocks_asked <= 1
        assert server.blocks_asked == 6
    assert sum(f"{bad.url} is left for a while" in one.getMessage() for one in caplog.records) <= 2


def test_a_mirror_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_BLOCK_S", 0.2)
    manifest = make_shards(tmp_path / "shards", 9000)
    with serving(tmp_path / "shards", hangs=threading.Event()) as bad, serving(tmp_path / "shards") as server:
        all_samples(opened(manifest, places(tmp_path, bad.url, server.url)).train)
        assert server.blocks_asked > 0


def test_without_a_mirror_that_can_be_used(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with serving(tmp_path / "shards", is_away=True) as server:
        with pytest.raises(CorpusError, match=f"{MANIFEST} of the run's shards cannot be had .*503.*--data"):
            opened(manifest, places(tmp_path, server.url))
        server.is_away = False
        corpus = opened(manifest, places(tmp_path, server.url))
        server.lies = True
        with pytest.raises(CorpusError, match="other bytes than the run's"):
            corpus.train[0]


def test_a_server_without_ranges(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with serving(tmp_path / "shards", has_ranges=False) as server:
        corpus = opened(manifest, places(tmp_path, server.url))
        with pytest.raises(CorpusError, match="the server sends no parts of files"):
            all_samples(corpus.train)


def test_the_models_vocabulary_is_checked(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with pytest.raises(CorpusError, match=r"vocabulary 200: set recipe\.settings\.vocab to 256"):
        opened(manifest, places(tmp_path, tmp_path / "shards"), vocab=200)


def test_a_runs_own_url_must_be_public(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with serving(tmp_path / "shards") as server:
        asked = Mirrors([Mirror(server.url), Mirror("file:///etc"), Mirror("https://localhost:1/")])
        with pytest.raises(CorpusError, match=r"127\.0\.0\.1.*scheme must be one of.*not file.*not a public host"):
            asked.block("0.u16", 0, 10, lambda data: True)
        assert server.asked == []
        assert Mirrors([Mirror(server.url, by_owner=True)]).manifest(lambda data: data == manifest.data)


def test_names_that_lead_to_this_network_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("93.184.216.34", 443)), (2, 1, 6, "", ("10.0.0.1", 443))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **more: found)
    with pytest.raises(CorpusError, match="lies in a private network"):
        Mirrors([Mirror("https://data.example.org/x")]).block("0.u16", 0, 10, lambda data: True)


@pytest.mark.parametrize("by_owner", [False, True])
def test_a_runs_own_url_is_asked_without_credentials(by_owner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    tokens = list[object]()

    def read(store: RemoteStore, path: str, start: int, stop: int) -> bytes:
        tokens.append(store._files.token)
        return b"1234"

    monkeypatch.setattr(RemoteStore, "read", read)
    Mirrors([Mirror("hf://datasets/org/shards", by_owner=by_owner)]).block("0.u16", 0, 4, lambda data: True)
    assert tokens == [None if by_owner else False]


def test_a_damaged_block_in_the_cache_is_downloaded_again(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with serving(tmp_path / "shards") as server:
        here = places(tmp_path, server.url)
        expected = all_samples(opened(manifest, here).train)
        asked = server.blocks_asked
        cache = cache_of(here)
        kept = [cache.path(manifest.block_digest(block)) for block in range(manifest.blocks)]
        whole = [path for path in kept if path.exists()]
        whole[0].write_bytes(bytes(whole[0].stat().st_size))
        whole[1].write_bytes(b"short")
        assert torch.equal(all_samples(opened(manifest, here).train), expected)
        assert server.blocks_asked == asked + 2


def test_the_cache_keeps_to_its_limit_and_drops_the_oldest(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 2048 * 40)
    with serving(tmp_path / "shards") as server:
        here = places(tmp_path, server.url, cache_bytes=10 * BLOCK)
        store = opened(manifest, here).train._store
        for block in range(40):
            store.tokens(block)
        kept = list((tmp_path / "cache").glob("*/*.block"))
        assert sum(path.stat().st_size for path in kept) <= 10 * BLOCK
        assert cache_of(here).find(manifest.block_digest(39), BLOCK) is not None
        assert cache_of(here).find(manifest.block_digest(0), BLOCK) is None
        assert store.tokens(0)[:3].tolist() == [0, 1, 2]  # still open
        # What a killed process has left is no block.
        assert not list((tmp_path / "cache").glob("*/*.part"))


def test_a_disk_that_is_full_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)

    def full(*args: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    with serving(tmp_path / "shards") as server:
        corpus = opened(manifest, places(tmp_path, server.url))
        monkeypatch.setattr("tempfile.mkstemp", full)
        local = opened(manifest, places(tmp_path, tmp_path / "shards"))
        assert torch.equal(all_samples(corpus.train), all_samples(local.train))
    assert sum("No space left on device" in one.getMessage() for one in caplog.records) == 1


def test_the_next_lease_is_fetched_ahead(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 2048 * 40)
    with serving(tmp_path / "shards") as server:
        train = opened(manifest, places(tmp_path, server.url)).train
        assert isinstance(train, OrderedDataset)
        order = train.sample_order(3, 0)
        prefetch(train, order, [(0, 8 * PER_BLOCK)])
        store = train._store
        wanted = {int(train._blocks[index // PER_BLOCK]) for index in order.indices(0, 16 * PER_BLOCK)}
        for _ in range(500):
            if wanted <= set(store._opened):
                break
            threading.Event().wait(0.01)
        assert set(store._opened) == wanted
        asked = server.blocks_asked
        train.batch(order.indices(0, 8 * PER_BLOCK))
        assert server.blocks_asked == asked


def test_wrong_files_of_a_folder(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    other = make_shards(tmp_path / "other", 9001)
    at = places(tmp_path, tmp_path / "shards")
    with pytest.raises(CorpusError, match=f"--data .*: has no {MANIFEST} with the digest"):
        opened(other, at)
    path = tmp_path / "shards" / "0.u16"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(CorpusError, match=r"0\.u16: 17,998 bytes, but its manifest says 18,000: the file was cut off"):
        opened(manifest, at)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(CorpusError, match=r"0\.u16: bytes .* are not those of the run's shards: copy the file again"):
        opened(manifest, at).train[0]
    path.unlink()
    (tmp_path / "secret").write_bytes(whole)
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(CorpusError, match="this link leads out of"):
        opened(manifest, at)


def test_tokens_beyond_the_tokenizer_are_refused(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000, tokenizer=TokenizerAbout("reef", b"", 300, None))
    lying = Manifest("u16", BLOCK, TokenizerAbout("reef", b"", 200, None), manifest.files, manifest.digests)
    (tmp_path / "shards" / MANIFEST).write_bytes(lying.data)
    with pytest.raises(CorpusError, match="the tokenizer of the shards has 200 tokens"):
        all_samples(opened(lying, places(tmp_path, tmp_path / "shards")).train)


def test_a_block_has_to_hold_a_sample(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with pytest.raises(CorpusError, match="0 blocks that hold a sample of 3001 tokens"):
        open_shards(section(manifest), 256, 3000, places(tmp_path, tmp_path / "shards"))


def test_workers_of_data_loaders_get_a_copy(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    with serving(tmp_path / "shards") as server:
        train = opened(manifest, places(tmp_path, server.url)).train
        assert torch.equal(all_samples(copy.deepcopy(train)), all_samples(train))
        order = copy.deepcopy(train.sample_order(1, 0))
        assert (order.indices(0, 50) == train.sample_order(1, 0).indices(0, 50)).all()


def test_downloads_count_and_keep_to_the_owners_limit(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000)
    limits, slept = TrafficLimits(), list[float]()
    with serving(tmp_path / "shards") as server:
        asked = Mirrors([Mirror(server.url, by_owner=True)], limits, lambda: 0.0, slept.append)
        asked.block("0.u16", 0, 8192, lambda data: True)
        assert limits.download.total_bytes >= 8192
        assert not slept
        limits.download.bps = 8192.0
        for until_s in (8.0, 16.0):  # as two threads do: the second waits for what the first has taken, too
            asked.block("0.u16", 0, 8192, lambda data: True)
            assert max(slept) == pytest.approx(until_s)
    assert manifest.blocks == 5


def test_few_blocks_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "OPEN_BLOCKS", 3)
    manifest = make_shards(tmp_path / "shards", 2048 * 10)
    train = opened(manifest, places(tmp_path, tmp_path / "shards")).train
    all_samples(train)
    assert len(train._store._opened) == 3


def test_the_recipe_trains_on_them(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", 9000, dtype="u8")
    settings = {"layers": 1, "heads": 2, "width": 16, "context": CONTEXT}
    recipe = GptRecipe(settings, section(manifest), places(tmp_path, tmp_path / "shards"))
    assert len(recipe.corpus_digest) == 32
    model = recipe.build_model(1)
    assert torch.isfinite(recipe.loss(model, recipe.training_data().batch([0, 5])))
    assert recipe.held_out_loss(model, "cpu", 4) > 0


def test_mirrors_that_are_much_faster_come_first() -> None:
    asked = Mirrors([Mirror("https://a.example.org/"), Mirror("https://b.example.org/")])
    assert asked._in_order(last_chance=False) == [0, 1]
    asked._standing[0].rate, asked._standing[1].rate = 1e5, 1e6
    assert asked._in_order(last_chance=False) == [1, 0]
    asked._standing[1].failures, asked._standing[1].rests_until_s = 1, 1e18
    assert asked._in_order(last_chance=False) == [0]
    assert asked._in_order(last_chance=True) == [0, 1]
    asked._standing[0].lied = True
    assert asked._in_order(last_chance=False) == [1]
