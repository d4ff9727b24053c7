from blake3 import blake3

from shoal.swarm.averaging.merkle import MerkleTree, is_of
from shoal.swarm.averaging.results import RunningDigest, part_digest

CHUNKS = [memoryview(one) for one in (b"a", b"", b"bc")]
DIGESTS = [blake3(bytes(one), derive_key_context="shoal result chunk, version 1").digest() for one in CHUNKS]
ROOT = MerkleTree(DIGESTS).root


def test_it_is_the_root_over_the_chunks_digests() -> None:
    assert part_digest(CHUNKS) == ROOT
    assert part_digest(iter(CHUNKS)) == ROOT
    assert part_digest(CHUNKS[:1]) == DIGESTS[0]


def test_one_chunk_with_its_path_shows_what_the_digest_committed_to() -> None:
    tree = MerkleTree(DIGESTS)
    for index, digest in enumerate(DIGESTS):
        path = tree.path(index, index + 1)
        assert is_of(part_digest(CHUNKS), len(CHUNKS), index, [digest], path)
        assert not is_of(part_digest(CHUNKS), len(CHUNKS), index, [part_digest([memoryview(b"x")])], path)


def test_other_bytes_or_the_same_cut_elsewhere_have_another_digest() -> None:
    for other in ((b"a", b"", b"bd"), (b"a", b"b", b"c"), (b"abc",), (b"a", b"bc"), (b"", b"a", b"bc")):
        assert part_digest(map(memoryview, other)) != ROOT


def test_a_digest_of_chunks_that_come_one_by_one_is_that_of_all() -> None:
    running = RunningDigest()
    for count in range(1, 4):
        assert running.of(CHUNKS[:count]) == part_digest(CHUNKS[:count])
    assert running.of(CHUNKS) == ROOT


def test_a_chunk_that_came_instead_of_another_is_digested() -> None:
    running = RunningDigest()
    running.read([memoryview(b"x"), *CHUNKS[1:]])
    assert running.of(CHUNKS) == ROOT
    assert running.of(CHUNKS[:1]) == DIGESTS[0]


def test_what_was_read_is_not_read_again() -> None:
    memory = bytearray(b"a")
    chunks, running = [memoryview(memory), *CHUNKS[1:]], RunningDigest()
    running.read(chunks[:1])
    memory[0] = ord("x")
    assert running.of(chunks) == ROOT
