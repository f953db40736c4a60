"""Random numbers and permutations derived from integer keys, identical on every machine and in every process.

The functions use explicit 64-bit integer arithmetic, so no change in a library's random generator can alter them.
The exception is `few_shot_rows`, which uses NumPy's generator, as the original code does.

    permute(np.arange(5), …, key_of(seed, epoch))    the numbers 0 … 4 in another order
    Draws(7).uniform()                               the first random number of key 7
    stratified(rows, labels, seed=0)                 the rows permuted; the first tenth has a tenth of every class
    few_shot_rows(labels, shots=10, seed=0)          ten rows of every class, drawn by NumPy's generator
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # Feistel rounds; 4 suffice in theory for large domains (Luby & Rackoff 1988), small domains need more


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele et al. 2014): a bijection of uint64 that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: np.ndarray | int) -> np.ndarray:
    """Hash integers, or arrays of integers, into one uint64 key per element."""
    # An array of one number instead of a scalar: products must wrap around at 2⁶⁴, and NumPy warns if a scalar does.
    key = np.zeros(1, np.uint64)
    for part in parts:
        number = np.asarray(part, np.int64).astype(np.uint64)
        key = mix(key * np.uint64(0x9E3779B97F4A7C15) + number + np.uint64(0x632BE59BD9B4E019))
    return key


def permute(x: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Map each x through the pseudorandom permutation of 0 … size−1 that its key defines; all arrays have equal length.

    Uses a Feistel network over Z_a × Z_b, where a·b is slightly larger than `size` (Black & Rogaway 2002).
    """
    size = size.astype(np.uint64)
    # `a` need not be the exact root: `b` is chosen so that a·b ≥ size for any rounding of the floating-point root.
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a

    # Cycle walking: a result outside 0 … size−1 goes through the network again until it falls inside.
    sent = x.astype(np.uint64)
    outside = np.arange(len(x))
    while len(outside):
        # Pass once through the network: each half in turn is shifted by a hash of the other half; all are uint64.
        keys = key[outside]
        modulus_a = a[outside]
        modulus_b = b[outside]
        left = sent[outside] // modulus_b
        right = sent[outside] % modulus_b
        for turn in range(0, ROUNDS, 2):
            left_key = keys + right * np.uint64(ROUNDS) + np.uint64(turn)
            left = (left + mix(left_key)) % modulus_a
            right_key = keys + left * np.uint64(ROUNDS) + np.uint64(turn + 1)
            right = (right + mix(right_key)) % modulus_b
        moved = left * modulus_b + right
        sent[outside] = moved
        outside = outside[moved >= size[outside]]
    return sent.astype(np.int64)


# ------------------------------------------------------------------------------------------------ single numbers

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / φ, the counter's step


class Draws:
    """A SplitMix64 generator (Steele et al. 2014), seeded with a key below 2⁶⁴; equal keys give equal numbers."""

    def __init__(self, key: int):
        self.state = key

    def uniform(self) -> float:
        """Return a number in [0, 1)."""
        # Python integers do not wrap around like the uint64 of the original; MASK keeps the lower 64 bits.
        self.state = (self.state + GOLDEN) & MASK
        x = self.state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x = x ^ (x >> 31)
        return (x >> 11) * 2.0**-53  # 53 bits, the precision of a float

    def below(self, n: int) -> int:
        """Return an integer in 0 … n−1; 0 if n is 0."""
        return int(self.uniform() * n)


# ------------------------------------------------------------------------------------------- samples of every class


def stratified(rows: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Permute rows so that every prefix and every interval contains about its share of each class.

    `labels` has one label per row. A class with n rows has one row in each n-th of the permutation, at an offset drawn
    per class. Without the offsets, all classes with a single row would be in the middle.
    """
    hashes = key_of(seed, 0, rows)
    by_class = np.lexsort((hashes, labels))
    classes, first, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(rows)) - np.repeat(first, counts)
    offset = (key_of(seed, 1, classes) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    place = (rank + np.repeat(offset, counts)) / np.repeat(counts, counts)
    return rows[by_class[np.lexsort((hashes[by_class], place))]]


def few_shot_rows(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Return the training rows of a few-shot split: the first `shots` rows of a permutation of each class.

    The rows are ordered by class. A class with fewer rows contributes all of them. The rows for a larger `shots`
    include those for a smaller value. The rows equal those of big_vision's evaluators/fewshot_lsr.py. Rows with
    negative labels are never picked.
    """
    # One generator for all classes, as in the original; visiting the classes in another order would pick other rows.
    rng = np.random.default_rng(seed)
    picked = [np.empty(0, np.int64)]
    for label in range(int(labels.max()) + 1):
        rows_of_class = np.flatnonzero(labels == label)
        picked.append(rng.permutation(rows_of_class)[:shots])
    return np.concatenate(picked)
