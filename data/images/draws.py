"""Random numbers by counter from a key: the same on every machine, whoever draws them."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / φ, the counter's step


class Draws:
    """SplitMix64 (Steele et al. 2014) from a key below 2⁶⁴: `Draws(7)` gives the same numbers everywhere."""

    def __init__(self, key: int):
        self.state = key

    def uniform(self) -> float:
        """A number in [0, 1)."""
        # Python's integers do not wrap around as the uint64 of the original do: MASK keeps the lower 64 bits.
        self.state = (self.state + GOLDEN) & MASK
        x = self.state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x = x ^ (x >> 31)
        return (x >> 11) * 2.0**-53  # the 53 bits that a float holds

    def below(self, n: int) -> int:
        """A whole number in 0 … n−1 (0 where n is 0)."""
        return int(self.uniform() * n)
