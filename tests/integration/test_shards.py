"""Members train on token shards from two mirrors, of which one lies; one member is killed and comes back."""

import sysconfig
from pathlib import Path

import pytest
from tests.integration.harness import CALM, START_S, Swarm, finish, run_toml
from tests.peer.data.making import URL, serving

from shoal.peer.data.build import about_tokenizer, build_shards
from shoal.peer.data.documents import input_files, plan_pieces

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_members_train_on_shards_from_mirrors(swarm: Swarm) -> None:
    shards = swarm.folder / "shards"
    texts = Path(sysconfig.get_path("stdlib")) / "json"
    pieces = plan_pieces("text", input_files(texts, "text"))
    manifest = build_shards(shards, pieces, "bytes", about_tokenizer("bytes"), block_bytes=4096)
    toml = run_toml(source=URL).replace(f'"{URL}"', f'"{URL}"\nmanifest = "{manifest.digest.hex()}"')
    host = swarm.host(toml)
    with serving(shards, lies=True) as liar, serving(shards) as server:

        def home(label: str) -> tuple[str, ...]:
            return ("env", f"SHOAL_HOME={swarm.folder / label / 'home'}", *CALM)

        named = ("--data", liar.url, "--data", server.url)
        one = swarm.member(host.invite, "one", home("one"), extra=named)
        other = swarm.member(host.invite, "other", home("other"), extra=named)
        one.committed(within_s=START_S)
        other.committed(within_s=START_S)
        other.kill()
        last = one.last_round()
        asked = len(server.asked)
        kept = len(list((swarm.folder / "other" / "home" / "data").glob("*/*.block")))
        assert kept > 0
        other.start()
        other.committed(after=last, within_s=START_S)
        # Both go on, and who came back has its manifest and its blocks still.
        assert not [path for path, span in server.asked[asked:] if not span]
        assert "is not used any more" in one.text()
        assert liar.blocks_asked <= 6
        finish(host, [one, other])
