"""Roots of contributions: a proof shows its run of leaves, and nothing else passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.averaging.merkle import DIGEST_BYTES, MerkleTree, is_of, leaf_digest, path_bytes


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int]:
    leaves = draw(st.integers(1, 40))
    start = draw(st.integers(0, leaves - 1))
    return leaves, start, draw(st.integers(start + 1, leaves))


def tree_of(leaves: int) -> tuple[MerkleTree, list[bytes]]:
    digests = [leaf_digest(bytes([leaf])) for leaf in range(leaves)]
    return MerkleTree(digests), digests


@given(runs())
def test_a_run_of_leaves_is_shown_by_its_path(run: tuple[int, int, int]) -> None:
    leaves, start, stop = run
    tree, digests = tree_of(leaves)
    path = tree.path(start, stop)
    assert len(path) == path_bytes(leaves, start, stop)
    assert is_of(tree.root, leaves, start, digests[start:stop], path)


@given(runs(), st.data())
def test_nothing_else_passes(run: tuple[int, int, int], data: st.DataObject) -> None:
    leaves, start, stop = run
    tree, digests = tree_of(leaves)
    path, shown = tree.path(start, stop), digests[start:stop]
    other = list(shown)
    other[data.draw(st.integers(0, len(shown) - 1))] = leaf_digest(b"another")
    assert not is_of(tree.root, leaves, start, other, path)
    assert not is_of(tree.root, leaves, start, shown, path + bytes(DIGEST_BYTES))
    assert not is_of(leaf_digest(b"another"), leaves, start, shown, path)
    elsewhere = data.draw(st.integers(0, leaves - len(shown)))
    assert is_of(tree.root, leaves, elsewhere, shown, path) is (elsewhere == start)


@pytest.mark.parametrize("leaves", [2, 3, 4, 7])
def test_an_inner_node_does_not_pass_for_a_leaf(leaves: int) -> None:
    tree, digests = tree_of(leaves)
    node = digests[0] + digests[1]
    assert leaf_digest(node) not in (tree.root, *digests)
    assert not is_of(tree.root, (leaves + 1) // 2, 0, [leaf_digest(node)], tree.path(0, 2))
