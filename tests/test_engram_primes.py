"""The prime walk against the published layout and against trial division."""

from v41jax.engram_primes import engram_primes, engram_rows, is_prime

LAYER_1 = [
    [57, 79, 81, 97, 121, 129, 133, 183],
    [189, 207, 211, 253, 277, 289, 307, 321],
    [339, 381, 393, 399, 403, 409, 447, 463],
]
LAYER_14 = [
    [477, 487, 499, 507, 511, 573, 609, 627],
    [667, 669, 693, 697, 711, 729, 759, 769],
    [781, 799, 813, 819, 841, 877, 879, 889],
]


def test_released_primes_and_rows():
    primes = engram_primes((1, 14), 16_000_000, 4, 8)
    assert [[[p - 16_000_000 for p in order] for order in layer] for layer in primes] == [LAYER_1, LAYER_14]
    assert engram_rows((1, 14), 16_000_000, 4, 8) == (384_006_168, 384_016_682)


def test_worked_example():
    assert engram_primes((1, 3), 50, 4, 2) == (
        ((53, 59), (61, 67), (71, 73)),
        ((79, 83), (89, 97), (101, 103)),
    )
    assert engram_rows((1, 3), 50, 4, 2) == (384, 552)


def test_primality_is_exact():
    by_division = [n for n in range(3000) if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))]
    assert [n for n in range(3000) if is_prime(n)] == by_division
    pseudoprimes = [3215031751, 3474749660383, 341550071728321, 3825123056546413051]
    assert not any(map(is_prime, pseudoprimes))
    assert is_prime(2**61 - 1)


def test_no_engram_layer_means_no_primes():
    assert engram_primes((), 500, 4, 2) == () and engram_rows((), 500, 4, 2) == ()
