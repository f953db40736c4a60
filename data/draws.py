"""Random numbers and permutations by key: the same on every machine, in every process, whoever asks.

All arithmetic of an order is on 64-bit integers and written out here, so that no library's random generator can change
it. The few samples of a class are drawn as the original code drew them, by NumPy's generator.

    permute(np.arange(5), …, key_of(seed, epoch))    the numbers 0 … 4 in another order
    Draws(7).uniform()                               the first number of the key 7
    stratified(rows, labels, seed=0)                 the rows in an order whose first tenth has a tenth of every class
    few_shot_rows(labels, shots=10, seed=0)          ten rows of every class, as NumPy's generator draws them
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # Feistel rounds; 4 suffice in theory for large domains (Luby & Rackoff 1988), small ones need more


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele et al. 2014): a bijection of uint64 that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: np.ndarray | int) -> np.ndarray:
    """Fold integers (or arrays of them) into one uint64 key each."""
    # An array of one number, not a scalar: the hash needs products to wrap around at 2⁶⁴, and NumPy warns of it in
    # scalars.
    key = np.zeros(1, np.uint64)
    for part in parts:
        number = np.asarray(part, np.int64).astype(np.uint64)
        key = mix(key * np.uint64(0x9E3779B97F4A7C15) + number + np.uint64(0x632BE59BD9B4E019))
    return key


def permute(x: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Send each x where the permutation of 0 … size−1 named by its key sends it; all are arrays of one length.

    A Feistel network permutes the a·b numbers of Z_a × Z_b, a little more than `size` (Black & Rogaway 2002).
    """
    size = size.astype(np.uint64)
    # `a` need not be the exact root: `b` is made so that a·b is at least `size`, whatever floating point gave.
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a

    # What falls outside 0 … size−1 walks on along its cycle of the network until it is inside again.
    sent = x.astype(np.uint64)
    outside = np.arange(len(x))
    while len(outside):
        # Once through the network: each half in turn is shifted by a hash of the other half; all are uint64.
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


# ------------------------------------------------------------------------------------------------ one by one

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / φ, the counter's step


class Draws:
    """SplitMix64 (Steele et al. 2014) from a key below 2⁶⁴: `Draws(7)` gives the same numbers everywhere."""

    def __init__(self, key: int):
        self.state = key

    def uniform(self) -> float:
        """Return a number in [0, 1)."""
        # Python's integers do not wrap around as the uint64 of the original do: MASK keeps the lower 64 bits.
        self.state = (self.state + GOLDEN) & MASK
        x = self.state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x = x ^ (x >> 31)
        return (x >> 11) * 2.0**-53  # the 53 bits that a float holds

    def below(self, n: int) -> int:
        """Return a whole number in 0 … n−1 (0 where n is 0)."""
        return int(self.uniform() * n)


# ------------------------------------------------------------------------------------------- some of every class


def stratified(rows: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Permute rows, of one label each, so that every stretch of them has about its share of each class.

    A class of n rows has one in each n-th of the permutation, at an offset of its own: classes of a single row would
    otherwise all lie in its middle.
    """
    hashes = key_of(seed, 0, rows)
    by_class = np.lexsort((hashes, labels))
    classes, first, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(rows)) - np.repeat(first, counts)
    offset = (key_of(seed, 1, classes) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    place = (rank + np.repeat(offset, counts)) / np.repeat(counts, counts)
    return rows[by_class[np.lexsort((hashes[by_class], place))]]


def few_shot_rows(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Pick rows for training: the first `shots` of a permutation of every class, classes in order, one generator.

    A class with fewer rows gives all it has; larger shots contain smaller ones. As big_vision's
    evaluators/fewshot_lsr.py draws them; rows with a negative label are never picked.
    """
    # One generator for all classes, as in the original: another order of classes would pick other rows.
    rng = np.random.default_rng(seed)
    picked = [np.empty(0, np.int64)]
    for label in range(int(labels.max()) + 1):
        rows_of_class = np.flatnonzero(labels == label)
        picked.append(rng.permutation(rows_of_class)[:shots])
    return np.concatenate(picked)
