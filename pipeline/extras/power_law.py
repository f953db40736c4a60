"""Fit saturating power laws, y = floor + Σ amount_i · x_i^−exponent_i, with confidence intervals and a holdout test.

With parameters and training samples as x, this is the third approach of Hoffmann et al. 2022 ("Chinchilla").

1. Variable projection (Golub and Pereyra 1973): for given exponents, floor and amounts solve a linear least-squares
   problem, so only the exponents need a search. Residuals are relative. Floor and amounts are constrained to be
   non-negative, as in Hoffmann et al.: on digits, a law with a floor of −0.26 predicted accuracies above 100 %.
2. The intervals come from a basic parametric bootstrap (Davison and Hinkley 1997, 5.2): the law is refitted to studies
   drawn from itself with the noise of its residuals. A few points do not determine the noise exactly, so its scale is
   drawn too, as 1 / χ.
3. Leave-largest-out: a law fitted to all other points predicts the largest one.

`test_power_law.py` generates data from known laws, and counts how often the intervals cover the true parameters
(docs/studies.md).
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.9
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
EXPONENTS = (0.02, 3.0)  # bounds; outside of them a law degenerates to a line or a step
STARTS = np.geomspace(0.1, 1.5, 6)  # starting points of the search, for each exponent


@dataclass(frozen=True)
class Law:
    """A law in k variables fitted to n points, and the bootstrap laws fitted to studies drawn from it.

    The parameters of a law are its floor, the amount of each term at x = `scale`, and the exponents.
    """

    scale: np.ndarray  # (k,); each x is divided by it
    fitted: np.ndarray  # (1 + 2k,)
    noise: float  # relative standard deviation of a value
    drawn: np.ndarray  # (draws, 1 + 2k)
    drawn_noise: np.ndarray  # (draws, 1)

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the values (n,) at x (n, k)."""
        return values_of(self.fitted, x / self.scale)

    def interval_at(self, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the prediction interval, low and high (n,), for new noisy values at x (n, k)."""
        value = self.at(x)
        errors = np.apply_along_axis(values_of, 1, self.drawn, x / self.scale) - value
        errors += self.drawn_noise * value * rng.standard_normal(errors.shape)
        below, above = np.quantile(errors, TAILS, axis=0)
        return value - above, value - below

    def record(self) -> dict[str, Any]:
        """Convert the law to plain data; `law_of` is the inverse."""
        values = asdict(self)
        for name, value in values.items():
            values[name] = np.asarray(value).tolist()
        return values

    def parameters(self) -> dict[str, tuple[float, float, float]]:
        """Return (value, low, high) for the floor, the amounts and the exponents, by name."""
        below, above = np.quantile(self.drawn, TAILS, axis=0)
        rows = np.stack([self.fitted, 2 * self.fitted - above, 2 * self.fitted - below], axis=-1)
        names = ["floor"]
        for name in ("amount", "exponent"):
            for term in range(1, 1 + len(self.scale)):
                names.append(f"{name} {term}")
        return dict(zip(names, map(tuple, rows.tolist()), strict=True))


def law_of(record: Mapping[str, Any]) -> Law:
    """Restore a law from its `record`."""
    values = dict(record)
    for name in ("scale", "fitted", "drawn", "drawn_noise"):
        values[name] = np.array(values[name])
    return Law(**values)


def values_of(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the values (n,) of a law at x (n, k), which has already been divided by the scale."""
    amounts, exponents = np.split(parameters[1:], 2)
    values: np.ndarray = parameters[0] + x**-exponents @ amounts
    return values


def project(exponents: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters of the best law with the given exponents, and its relative residuals (n,)."""
    from scipy.optimize import nnls  # imported here because checking a recipe does not need it

    columns = np.column_stack([np.ones(len(x)), x**-exponents]) / y[:, None]
    linear = np.linalg.lstsq(columns, np.ones(len(y)))[0]
    # Losses and errors are not negative, and do not increase with the size or the data.
    if linear.min() < 0:
        linear = nnls(columns, np.ones(len(y)))[0]
    return np.concatenate([linear, exponents]), columns @ linear - 1


def search(y: np.ndarray, x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the parameters of the least-squares law for y (n,), with a search that starts at the exponents `start`."""
    from scipy.optimize import least_squares  # imported here because checking a recipe does not need it

    best = least_squares(lambda exponents: project(exponents, x, y)[1], start, bounds=EXPONENTS)
    return project(best.x, x, y)[0]


def fit(x: np.ndarray, y: np.ndarray, rng: np.random.Generator, draws: int = 200) -> Law:
    """Fit a law to positive values y (n,) at positive x (n, k).

    Raises ValueError if there are too few points, or if a variable has fewer than 3 distinct values.
    """
    n, k = x.shape
    freedom = n - (1 + 2 * k)
    if freedom < 1:
        raise ValueError(f"{n} points, expected at least {2 + 2 * k} for a law with {1 + 2 * k} parameters")
    for column in x.T:
        if len(np.unique(column)) < 3:
            raise ValueError(f"a variable of the law has {len(np.unique(column))} values, expected at least 3")
    if not (x > 0).all() or not (y > 0).all():
        raise ValueError("a value is 0 or less, but a power law needs positive values")
    scale = np.exp(np.log(x).mean(0))
    scaled = x / scale
    # 1. Start from the best point of a coarse grid, because the sum of squares may have several minima.
    starts = map(np.array, itertools.product(STARTS, repeat=k))
    start = min(starts, key=lambda exponents: np.square(project(exponents, scaled, y)[1]).sum())
    fitted = search(y, scaled, start)
    # 2. Refit studies drawn from the law.
    value = values_of(fitted, scaled)
    noise = float(np.sqrt(np.square(value / y - 1).sum() / freedom))
    drawn_noise = noise * np.sqrt(freedom / rng.chisquare(freedom, (draws, 1)))
    studies = np.maximum(value * (1 + drawn_noise * rng.standard_normal((draws, n))), 1e-12)
    drawn = np.apply_along_axis(search, 1, studies, scaled, fitted[1 + k :])
    return Law(scale, fitted, noise, drawn, drawn_noise)


def leave_largest_out(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, draws: int = 200
) -> tuple[int, float, float, float]:
    """Return the index of the largest point, and its value, low and high predicted by the law of all other points."""
    largest = int(np.log(x).sum(1).argmax())
    law = fit(np.delete(x, largest, 0), np.delete(y, largest), rng, draws)
    at = x[[largest]]
    low, high = law.interval_at(at, rng)
    return largest, float(law.at(at)[0]), float(low[0]), float(high[0])
