"""A shuffle of any length that is computed and never held in memory.

    permuted(np.arange(64), length=10**9, seed=0, index=3)

A position is encrypted by a Feistel network over the smallest number of bits
that holds all positions. A result outside of the range is encrypted again
until it is inside (cycle walking), so the result is a permutation of the
range. The key is (seed, pass).

The arithmetic is NumPy's: graphs of TensorFlow were seen to compute other
numbers of uint64 than TensorFlow without a graph.

References:
    M. Luby, C. Rackoff: How to Construct Pseudorandom Permutations from
    Pseudorandom Functions, SIAM J. Computing 17(2), 1988.
    J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014 (the round function, SplitMix64).
"""

from __future__ import annotations

import numpy as np

# Even, so that the two halves have their own widths again at the end. Where
# the halves are short, the four of the theorem are not enough.
_ROUNDS, _ROUNDS_IF_SHORT = 6, 12
_SHORT_BITS = 16

_GOLDEN = 0x9E3779B97F4A7C15


def permuted(
    positions: np.ndarray, length: int, seed: int, index: int
) -> np.ndarray:
    """Returns which rows are at some positions of a shuffled pass.

    Args:
        positions: Integers `[n]` from 0 to `length - 1`.
        length: The number of rows.
        seed: Decides the order, together with the pass.
        index: The pass.

    Returns:
        Row numbers `[n]`, int64. All positions together give each row once.
    """
    bits = max(2, (length - 1).bit_length())
    keys = _keys(
        seed, index, _ROUNDS_IF_SHORT if bits <= _SHORT_BITS else _ROUNDS
    )
    values = _encrypted(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= length)
    while outside.size:
        values[outside] = _encrypted(values[outside], bits, keys)
        outside = outside[values[outside] >= length]
    return values.astype(np.int64)


def _encrypted(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Returns a permutation of all numbers below 2 ** bits."""
    right_bits = bits // 2
    left_bits = bits - right_bits
    left = values >> np.uint64(right_bits)
    right = values & np.uint64(2**right_bits - 1)
    for key in keys:
        noise = _mixed(right * np.uint64(_GOLDEN) + key)
        left, right = right, left ^ (noise & np.uint64(2**left_bits - 1))
        left_bits, right_bits = right_bits, left_bits
    return left << np.uint64(right_bits) | right


def _keys(seed: int, index: int, rounds: int) -> np.ndarray:
    """Returns a key for each round, of (seed, pass)."""
    first = _mixed(np.array([(seed + _GOLDEN) % 2**64], np.uint64))
    key = _mixed(first + np.uint64(index))
    steps = [(number + 1) * _GOLDEN % 2**64 for number in range(rounds)]
    return _mixed(key + np.array(steps, np.uint64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns the numbers with their bits mixed: the end of SplitMix64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
