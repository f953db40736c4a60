"""Simulate how often the 90 % intervals of scaling laws contain the true values, on the grids of real studies.

    OMP_NUM_THREADS=1 python -m benchmarks.laws [--studies 200] [--seed 1000] [--draws 200]

Each study draws measurements of a known law with relative normal noise, and tests the true floor, the true exponents,
and a new measurement at four times the largest size and length with the intervals of pipeline/extras/power_law.py. A
value lies in its interval if its test does not reject it. Seeds below 1200 were seen while the method was developed.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeline.extras.power_law import ValueTests, fit, values_of

# Parameters of Ti/16, S/16, the M/16 of studies/scaling.yaml, and B/16; training samples of its lengths.
SIZES = {"3 sizes": (5.7e6, 22e6, 86e6), "4 sizes": (5.7e6, 22e6, 49e6, 86e6)}
LENGTHS = {"3 sizes": (1e8, 2e8, 3e8, 4e8, 5e8), "4 sizes": (1.2e8, 2.5e8, 3.7e8, 4.9e8, 6.1e8)}
# Floor, amounts and exponents.
LAWS = {"high floor": (0.25, 0.2, 0.3, 0.35, 0.45), "low floor": (0.10, 0.3, 0.3, 0.3, 0.3)}
QUANTITIES = ("floor", "exponent 1", "exponent 2", "forecast")


class Case(NamedTuple):
    """A simulated study: a grid, a law and the relative noise of a measurement."""

    grid: str
    law: str
    noise: float


def points_of(grid: str) -> np.ndarray:
    """Return the points (n, 2) of a grid."""
    return np.stack(np.meshgrid(SIZES[grid], LENGTHS[grid], indexing="ij"), axis=-1).reshape(-1, 2)


def holds(case: Case, seed: int, draws: int) -> Iterator[tuple[str, bool]]:
    """Simulate the study with this seed, and yield for each quantity whether its interval contains the true value."""
    x = points_of(case.grid)
    scaled = x / np.exp(np.log(x).mean(0))
    law = np.array(LAWS[case.law])
    largest = 4 * scaled.max(0)
    rng = np.random.default_rng(seed)
    y = values_of(law, scaled) * (1 + case.noise * rng.standard_normal(len(x)))
    measured = float(values_of(law, largest[None])[0]) * (1 + case.noise * rng.standard_normal())
    fitted = fit(x, y, draws)
    tests = ValueTests(scaled, y, fitted.at(x), draws)
    predicted = float(values_of(fitted.fitted, largest[None])[0])
    yield "floor", not tests.linear(0).rejects(law[0])
    yield "exponent 1", not tests.exponent(1).rejects(np.log(law[3]))
    yield "exponent 2", not tests.exponent(2).rejects(np.log(law[4]))
    yield "forecast", not tests.forecast(largest, predicted).rejects(measured)


def coverage(case: Case, studies: int, seed: int, draws: int) -> dict[str, float]:
    """Return the share of studies whose interval contains the true value, by quantity."""
    held = dict.fromkeys(QUANTITIES, 0)
    for number in range(seed, seed + studies):
        for quantity, is_inside in holds(case, number, draws):
            held[quantity] += is_inside
    return {quantity: count / studies for quantity, count in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    print(f"seeds {options.seed} to {options.seed + options.studies - 1}\n")
    print(f"| grid | law | noise | {' | '.join(QUANTITIES)} |\n|---|---|---|{'---|' * len(QUANTITIES)}")
    for grid in SIZES:
        for law in LAWS:
            for noise in (0.01, 0.03):
                held = coverage(Case(grid, law, noise), options.studies, options.seed, options.draws)
                numbers = " | ".join(f"{held[quantity]:.1%}" for quantity in QUANTITIES)
                print(f"| {grid} × 5 lengths | {law} | {noise:.0%} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
