from shoal.swarm.coordinator.lease_ledger import MAX_FRAGMENTS, LeaseLedger


def test_a_life() -> None:
    ledger = LeaseLedger()
    ledger.grant("a", ledger.choose(10))
    ledger.grant("b", ledger.choose(5))
    assert ledger.held == {"a": [(0, 10)], "b": [(10, 15)]}
    assert ledger.holds("a", [(2, 5), (5, 10)])
    assert not ledger.holds("a", [(9, 11)])
    assert not ledger.holds("nobody", [(0, 1)])
    ledger.commit("a", [(0, 4)])
    ledger.give_back("a", keep=[(4, 6)])
    assert (ledger.held["a"], ledger.pool) == ([(4, 6)], [(6, 10)])
    ledger.give_back("a")
    assert ledger.pool == [(4, 10)]
    assert ledger.outstanding() == 5
    assert ledger.choose(3) == [(4, 7)], "returned ones come first"
    assert ledger.choose(8) == [(4, 10), (15, 17)]
    ledger.grant("b", ledger.choose(8))
    assert (ledger.fresh, ledger.pool, ledger.held) == (17, [], {"b": [(4, 17)]})
    ledger.commit("b", [(4, 17)])
    assert ledger.held == {}


def test_a_lease_fits_into_a_message() -> None:
    ledger = LeaseLedger(fresh=10_000, pool=[(2 * one, 2 * one + 1) for one in range(5000)])
    assert len(ledger.choose(4000)) == MAX_FRAGMENTS
    assert ledger.choose(3) == [(0, 1), (2, 3), (4, 5)]
