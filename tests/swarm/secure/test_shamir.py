import itertools
from collections import Counter

import pytest

from shoal.swarm.secure import shamir


def test_published_vector() -> None:
    """The example of the article on Shamir's secret sharing in Wikipedia: 1234 + 166 x + 94 x**2 modulo 1613."""
    coefficients = iter([166, 94])
    shares = shamir.split(1234, range(1, 7), 3, lambda _: next(coefficients), 1613)
    assert shares == [1494, 329, 965, 176, 1188, 775]
    for chosen in itertools.combinations(range(6), 3):
        assert shamir.combine({one + 1: shares[one] for one in chosen}, 1613) == 1234


def test_any_threshold_of_shares_gives_the_secret_and_one_less_does_not() -> None:
    secret = 2**256 - 5
    shares = dict(zip(range(1, 6), shamir.split(secret, range(1, 6), 4), strict=True))
    for chosen in itertools.combinations(shares, 4):
        assert shamir.combine({one: shares[one] for one in chosen}) == secret
    assert shamir.combine({one: shares[one] for one in (1, 2, 3)}) != secret


def test_fewer_shares_than_the_threshold_say_nothing() -> None:
    """All polynomials over a small field: what two of three see has the same distribution for each secret."""
    prime, threshold = 5, 3
    for seen in itertools.combinations(range(4), threshold - 1):
        distributions = []
        for secret in range(prime):
            views = Counter[tuple[int, ...]]()
            for drawn in itertools.product(range(prime), repeat=threshold - 1):
                coefficients = iter(drawn)
                shares = shamir.split(secret, [1, 2, 3, 4], threshold, lambda _, of=coefficients: next(of), prime)
                views[tuple(shares[one] for one in seen)] += 1
            distributions.append(views)
        assert all(one == distributions[0] for one in distributions)
        assert len(distributions[0]) == prime ** (threshold - 1), "uniform"


def test_the_modulus_is_the_first_prime_above_all_keys() -> None:
    def is_prime(n: int) -> bool:
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            power = pow(base, odd, n)
            if power in (1, n - 1):
                continue
            for _ in range(twos - 1):
                power = power * power % n
                if power == n - 1:
                    break
            else:
                return False
        return True

    assert is_prime(shamir.PRIME)
    assert not any(is_prime(2**256 + one) for one in range(297))


def test_bytes_that_are_no_share_are_none() -> None:
    assert shamir.unpack_share(shamir.pack_share(shamir.PRIME - 1)) == shamir.PRIME - 1
    for wrong in (shamir.PRIME.to_bytes(33, "big"), b"\xff" * 33, b"\0" * 32, b""):
        assert shamir.unpack_share(wrong) is None


@pytest.mark.parametrize("secret", [-1, shamir.PRIME])
def test_a_secret_is_of_the_field(secret: int) -> None:
    with pytest.raises(AssertionError):
        shamir.split(secret, [1, 2], 2)
