"""A shuffle of any length that is computed and never held in memory.

    permuted(positions, length=10**9, seed=0, index=3)

A position is encrypted by a Feistel network over the smallest number of bits
that holds all positions. A result outside of the range is encrypted again
until it is inside (cycle walking), so the result is a permutation of the
range. The key is (seed, pass).

References:
    M. Luby, C. Rackoff: How to Construct Pseudorandom Permutations from
    Pseudorandom Functions, SIAM J. Computing 17(2), 1988.
    J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014 (the round function, SplitMix64).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Even, so that the two halves have their own widths again at the end. Where
# the halves are short, the four of the theorem are not enough.
_ROUNDS, _ROUNDS_IF_SHORT = 6, 12
_SHORT_BITS = 16

_GOLDEN = 0x9E3779B97F4A7C15


def permuted(
    positions: tf.Tensor, length: int, seed: int, index: Any
) -> tf.Tensor:
    """Returns which rows are at some positions of a shuffled pass.

    Args:
        positions: Integers `[n]` from 0 to `length - 1`, int64.
        length: The number of rows.
        seed: Decides the order, together with the pass.
        index: The pass, integer or tensor.

    Returns:
        Row numbers `[n]`, int64. All positions together give each row once.
    """
    bits = max(2, (length - 1).bit_length())
    keys = _keys(seed, index, _rounds(bits))
    end = tf.constant(length, tf.uint64)

    def outside(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(values >= end)

    def again(values: tf.Tensor) -> tuple[tf.Tensor]:
        return (
            tf.where(values >= end, _encrypted(values, bits, keys), values),
        )

    values = _encrypted(tf.cast(positions, tf.uint64), bits, keys)
    (values,) = tf.while_loop(outside, again, (values,))
    return tf.cast(values, tf.int64)


def _encrypted(values: tf.Tensor, bits: int, keys: tf.Tensor) -> tf.Tensor:
    """Returns a permutation of the numbers of so many bits."""
    right_bits = bits // 2
    left_bits = bits - right_bits
    left = _shifted(values, right_bits)
    right = tf.bitwise.bitwise_and(values, _ones(right_bits))
    for number in range(_rounds(bits)):
        noise = _mixed(right * _number(_GOLDEN) + keys[number])
        noise = tf.bitwise.bitwise_and(noise, _ones(left_bits))
        left, right = right, tf.bitwise.bitwise_xor(left, noise)
        left_bits, right_bits = right_bits, left_bits
    high = tf.bitwise.left_shift(left, _number(right_bits))
    return tf.bitwise.bitwise_or(high, right)


def _rounds(bits: int) -> int:
    return _ROUNDS if bits > _SHORT_BITS else _ROUNDS_IF_SHORT


def _keys(seed: int, index: Any, rounds: int) -> tf.Tensor:
    """Returns a key for each round, of (seed, pass)."""
    first = _mixed(_number(seed % 2**64) + _number(_GOLDEN))
    key = _mixed(first + tf.cast(index, tf.uint64))
    steps = [(number + 1) * _GOLDEN % 2**64 for number in range(rounds)]
    return _mixed(key + tf.constant(steps, tf.uint64))


def _mixed(values: tf.Tensor) -> tf.Tensor:
    """Returns the numbers with their bits mixed: the end of SplitMix64."""
    values = _folded(values, 30) * _number(0xBF58476D1CE4E5B9)
    values = _folded(values, 27) * _number(0x94D049BB133111EB)
    return _folded(values, 31)


def _folded(values: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(values, _shifted(values, bits))


def _shifted(values: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(values, _number(bits))


def _ones(bits: int) -> tf.Tensor:
    return _number(2**bits - 1)


def _number(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
