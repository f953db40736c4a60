"""Saturating power laws: y = floor + Σ amount_i · x_i^−exponent_i, with intervals, and a prediction that is tested.

With parameters and training samples as x this is the third approach of Hoffmann et al. 2022 ("Chinchilla").

1. Variable projection (Golub and Pereyra 1973): for given exponents, floor and amounts are a linear least-squares
   problem, so that a search runs over the exponents alone. Deviations are relative. Floor and amounts are not negative,
   as in Hoffmann et al.: on digits a law with a floor of −0.26 foretold accuracies above 100 %.
2. Intervals are those of a parametric bootstrap, basic (Davison and Hinkley 1997, 5.2): the law is fitted to studies
   drawn from itself, with the noise of its residuals, which few points do not tell exactly: it is drawn too, as 1 / χ.
3. Leave the largest out: the law of all other points says where the largest lies, before it is looked at.

`test_power_law.py` plants laws, and counts how often the intervals hold their parameters (docs/studies.md).
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.9
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
EXPONENTS = (0.02, 3.0)  # least and most; beyond them a law is a line, or a step
STARTS = np.geomspace(0.1, 1.5, 6)  # of the search, for each exponent


@dataclass(frozen=True)
class Law:
    """A law of k axes that was fitted to n points, and those that were fitted to studies drawn from it.

    The parameters of each are its floor, the amount of each term where x is `scale`, and the exponents.
    """

    scale: np.ndarray  # (k,), by which each x is divided
    fitted: np.ndarray  # (1 + 2k,)
    noise: float  # relative standard deviation of a value
    drawn: np.ndarray  # (draws, 1 + 2k)
    drawn_noise: np.ndarray  # (draws, 1)

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the values (n,) at x (n, k)."""
        return values_of(self.fitted, x / self.scale)

    def interval_at(self, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return low and high (n,) between which new values at x (n, k) lie: of the law, and of their own noise."""
        value = self.at(x)
        errors = np.apply_along_axis(values_of, 1, self.drawn, x / self.scale) - value
        errors += self.drawn_noise * value * rng.standard_normal(errors.shape)
        below, above = np.quantile(errors, TAILS, axis=0)
        return value - above, value - below

    def record(self) -> dict[str, Any]:
        """Return the law as plain data, of which `law_of` makes it again."""
        values = asdict(self)
        for name, value in values.items():
            values[name] = np.asarray(value).tolist()
        return values

    def parameters(self) -> dict[str, tuple[float, float, float]]:
        """Return value, low and high of floor, amounts and exponents."""
        below, above = np.quantile(self.drawn, TAILS, axis=0)
        rows = np.stack([self.fitted, 2 * self.fitted - above, 2 * self.fitted - below], axis=-1)
        names = ["floor"]
        for name in ("amount", "exponent"):
            for term in range(1, 1 + len(self.scale)):
                names.append(f"{name} {term}")
        return dict(zip(names, map(tuple, rows.tolist()), strict=True))


def law_of(record: Mapping[str, Any]) -> Law:
    """Return the law that was recorded."""
    values = dict(record)
    for name in ("scale", "fitted", "drawn", "drawn_noise"):
        values[name] = np.array(values[name])
    return Law(**values)


def values_of(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the values (n,) of a law at x (n, k), divided by its scale."""
    amounts, exponents = np.split(parameters[1:], 2)
    values: np.ndarray = parameters[0] + x**-exponents @ amounts
    return values


def project(exponents: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters of the best law with these exponents, and its relative residuals (n,)."""
    from scipy.optimize import nnls  # here, because a recipe is checked without it

    columns = np.column_stack([np.ones(len(x)), x**-exponents]) / y[:, None]
    linear = np.linalg.lstsq(columns, np.ones(len(y)))[0]
    # No error and no loss falls below zero, and more of an axis makes none worse.
    if linear.min() < 0:
        linear = nnls(columns, np.ones(len(y)))[0]
    return np.concatenate([linear, exponents]), columns @ linear - 1


def search(y: np.ndarray, x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the parameters of the law of y (n,) with the least squares, searched from the exponents `start` on."""
    from scipy.optimize import least_squares  # here, because a recipe is checked without it

    best = least_squares(lambda exponents: project(exponents, x, y)[1], start, bounds=EXPONENTS)
    return project(best.x, x, y)[0]


def fit(x: np.ndarray, y: np.ndarray, rng: np.random.Generator, draws: int = 200) -> Law:
    """Fit a law to values y (n,) above zero at x (n, k) above zero.

    Raises ValueError where there are too few points for it, or an axis does not vary.
    """
    n, k = x.shape
    freedom = n - (1 + 2 * k)
    if freedom < 1:
        raise ValueError(f"{n} points, expected {2 + 2 * k} or more for a law of {1 + 2 * k} parameters")
    for column in x.T:
        if len(np.unique(column)) < 3:
            raise ValueError(f"an axis of the law has {len(np.unique(column))} values, expected 3 or more")
    if not (x > 0).all() or not (y > 0).all():
        raise ValueError("a value is 0 or less: a power law has none of these")
    scale = np.exp(np.log(x).mean(0))
    scaled = x / scale
    # 1. From the best of a coarse grid: the squares have valleys, and one start may miss the deepest.
    starts = map(np.array, itertools.product(STARTS, repeat=k))
    start = min(starts, key=lambda exponents: np.square(project(exponents, scaled, y)[1]).sum())
    fitted = search(y, scaled, start)
    # 2. The same for studies that are drawn from the law.
    value = values_of(fitted, scaled)
    noise = float(np.sqrt(np.square(value / y - 1).sum() / freedom))
    drawn_noise = noise * np.sqrt(freedom / rng.chisquare(freedom, (draws, 1)))
    studies = np.maximum(value * (1 + drawn_noise * rng.standard_normal((draws, n))), 1e-12)
    drawn = np.apply_along_axis(search, 1, studies, scaled, fitted[1 + k :])
    return Law(scale, fitted, noise, drawn, drawn_noise)


def leave_largest_out(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, draws: int = 200
) -> tuple[int, float, float, float]:
    """Return which point is the largest, and value, low and high that the law of all others predicts for it."""
    largest = int(np.log(x).sum(1).argmax())
    law = fit(np.delete(x, largest, 0), np.delete(y, largest), rng, draws)
    at = x[[largest]]
    low, high = law.interval_at(at, rng)
    return largest, float(law.at(at)[0]), float(low[0]), float(high[0])
