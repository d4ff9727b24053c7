from shoal.swarm.averaging.results import RunningDigest, part_digest

ABC = bytes.fromhex("6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85")
"""BLAKE3 of "abc", as other implementations have it."""


def test_it_is_blake3_of_the_chunks_one_after_the_other() -> None:
    assert part_digest([memoryview(b"abc")]) == ABC
    assert part_digest(memoryview(one) for one in (b"a", b"", b"bc")) == ABC


def test_other_bytes_have_another_digest() -> None:
    assert part_digest([memoryview(b"ab"), memoryview(b"c")]) == ABC
    assert part_digest([memoryview(b"abd")]) != ABC


def test_a_digest_of_chunks_that_come_one_by_one_is_that_of_all() -> None:
    chunks, running = [memoryview(one) for one in (b"a", b"", b"bc")], RunningDigest()
    for count in range(1, 4):
        assert running.of(chunks[:count]) == part_digest(chunks[:count])
    assert running.of(chunks) == ABC


def test_a_chunk_that_came_instead_of_another_is_digested() -> None:
    first, second, other = memoryview(b"a"), memoryview(b"bc"), memoryview(b"x")
    running = RunningDigest()
    running.of([other, second])
    assert running.of([first, second]) == ABC
    assert running.of([first]) == part_digest([first])


def test_what_was_digested_is_not_read_again() -> None:
    memory = bytearray(b"a")
    chunks, running = [memoryview(memory), memoryview(b"bc")], RunningDigest()
    running.of(chunks[:1])
    memory[0] = ord("x")
    assert running.of(chunks) == ABC
