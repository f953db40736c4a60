"""Fit saturating power laws, y = floor + Σ amount_i · x_i^−exponent_i, with confidence intervals and a holdout test.

With parameters and training samples as x, this is the third approach of Hoffmann et al. 2022 ("Chinchilla").

1. Variable projection (Golub and Pereyra 1973): for given exponents, floor and amounts solve a linear least-squares
   problem, so only the exponents need a search. Residuals are relative. Floor and amounts are constrained to be
   non-negative, as in Hoffmann et al.: on digits, a law with a floor of −0.26 predicted accuracies above 100 %.
2. An interval contains the values that a profile-likelihood test does not reject. The statistic of a value is the
   increase in the sum of squares, relative to the noise, if the law is constrained to this value. A value is rejected
   if its statistic exceeds the 90th percentile over studies drawn from the best law with this value: near a bound, such
   as a floor of 0, that percentile is smaller than the percentile of the F distribution.
3. A forecast is tested in the same way, as a measurement added to the points.
4. Leave-largest-out: a law fitted to all other points predicts the largest one.

`python -m benchmarks.laws` counts how often the intervals contain the true values (docs/studies.md).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

CONFIDENCE = 0.9
EXPONENTS = (0.02, 3.0)  # bounds; outside of them a law degenerates to a line or a step
STARTS = np.geomspace(0.1, 1.5, 6)  # starting points of the search, for each exponent
VALUES = 3  # distinct values that each variable needs
DRAWS = 200  # simulated studies for each tested value
FINE, COARSE = 41, 21  # points of the grid of exponents, for the data and for a simulated study
HALVINGS = 20  # steps of a bisection


@dataclass(frozen=True)
class Law:
    """A law in k variables fitted to n points.

    The parameters of a law are its floor, the amount of each term at x = `scale`, and the exponents.
    """

    x: np.ndarray  # (n, k)
    y: np.ndarray  # (n,)
    scale: np.ndarray  # (k,); each x is divided by it
    fitted: np.ndarray  # (1 + 2k,)
    noise: float  # relative standard deviation of a value
    draws: int

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the values (n,) at x (n, k)."""
        return values_of(self.fitted, x / self.scale)

    @cached_property
    def _tests(self) -> "ValueTests":
        return ValueTests(self.x / self.scale, self.y, self.at(self.x), self.draws)

    def interval_at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the prediction interval, low (n,) and high (n,), for new noisy values at x (n, k)."""
        intervals = []
        for value, place in zip(self.at(x), x / self.scale, strict=True):
            test = self._tests.forecast(place, float(value))
            high = 2 * float(value)
            while not test.rejects(high) and high < 1e6 * value:
                high *= 2
            intervals.append(test.interval(float(value), 1e-9 * float(value), high))
        low, high_ends = np.array(intervals).T
        return low, high_ends

    def record(self) -> dict[str, Any]:
        """Convert the law to plain data; `law_of` is the inverse function."""
        values = asdict(self)
        for name, value in values.items():
            values[name] = np.asarray(value).tolist()
        return values

    def parameters(self) -> dict[str, tuple[float, float, float]]:
        """Return (value, low, high) for the floor, the amounts and the exponents, by name.

        An interval that begins at 0, or an exponent's interval that reaches a bound, has only one meaningful end: the
        points do not determine the other.
        """
        k = self.x.shape[1]
        amounts, exponents = np.split(self.fitted[1:], 2)
        most = 1.5 * float(self.y.max())
        rows = {"floor": (float(self.fitted[0]), *self._tests.linear(0).interval(float(self.fitted[0]), 0.0, most))}
        for term in range(1, 1 + k):
            value = float(amounts[term - 1])
            rows[f"amount {term}"] = (value, *self._tests.linear(term).interval(value, 0.0, most))
        for term in range(1, 1 + k):
            value = float(np.clip(exponents[term - 1], *EXPONENTS))
            low, high = self._tests.exponent(term).interval(np.log(value), *np.log(EXPONENTS))
            rows[f"exponent {term}"] = (value, min(value, float(np.exp(low))), max(value, float(np.exp(high))))
        return rows


def law_of(record: Mapping[str, Any]) -> Law:
    """Build a law from plain data, as returned by `Law.record`."""
    values = dict(record)
    for name in ("x", "y", "scale", "fitted"):
        values[name] = np.array(values[name])
    return Law(**values)


def values_of(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a law's values (n,) at x (n, k); x must already be divided by the scale."""
    amounts, exponents = np.split(parameters[1:], 2)
    values: np.ndarray = parameters[0] + x**-exponents @ amounts
    return values


def project(exponents: np.ndarray, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters of the best law with the given exponents, and its residuals (n,) divided by `weights`."""
    from scipy.optimize import nnls  # imported here because checking a recipe does not need it

    columns = np.column_stack([np.ones(len(x)), x**-exponents]) / weights[:, None]
    targets = y / weights
    linear = np.linalg.lstsq(columns, targets)[0]
    # Losses and errors are not negative, and do not increase with the size or the data.
    if linear.min() < 0:
        linear = nnls(columns, targets)[0]
    return np.concatenate([linear, exponents]), columns @ linear - targets


def search(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the parameters of the law that fits y (n,) at x (n, k) with the least squared error."""
    from scipy.optimize import least_squares  # imported here because checking a recipe does not need it

    # Start from the best point of a coarse grid, because the sum of squares may have several minima.
    starts = map(np.array, itertools.product(STARTS, repeat=x.shape[1]))
    start = min(starts, key=lambda exponents: np.square(project(exponents, x, y, weights)[1]).sum())
    best = least_squares(lambda exponents: project(exponents, x, y, weights)[1], start, bounds=EXPONENTS)
    return project(best.x, x, y, weights)[0]


def check_points(values: Sequence[Sequence[float]]) -> None:
    """Raise ValueError if these values of the variables (k lists of n) cannot determine a law."""
    terms = len(values)
    n = len(values[0])
    if n < 2 + 2 * terms:
        raise ValueError(
            f"found {n} points, expected at least {2 + 2 * terms} for a law with {1 + 2 * terms} parameters"
        )
    for column in values:
        distinct = len(set(column))
        if distinct < VALUES:
            raise ValueError(f"a variable of the law has {distinct} distinct values, expected at least {VALUES}")


def fit(x: np.ndarray, y: np.ndarray, draws: int = DRAWS) -> Law:
    """Fit a law to positive values y (n,) at positive x (n, k).

    Raises ValueError if there are too few points, or if a variable has fewer than 3 distinct values.
    """
    n, k = x.shape
    check_points(x.T.tolist())
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a value is infinite or NaN, expected finite numbers")
    if not (x > 0).all() or not (y > 0).all():
        raise ValueError("a value is 0 or less, expected positive values for a power law")
    scale = np.exp(np.log(x).mean(0))
    scaled = x / scale
    # The noise is relative to the true value, so the law itself is a better weight than the noisy value.
    weights = values_of(search(scaled, y, y), scaled)
    fitted = search(scaled, y, weights)
    residuals = y / weights - values_of(fitted, scaled) / weights
    noise = float(np.sqrt(np.square(residuals).sum() / (n - 1 - 2 * k)))
    return Law(x, y, scale, fitted, noise, draws)


def leave_largest_out(x: np.ndarray, y: np.ndarray, draws: int = DRAWS) -> tuple[int, float, float, float]:
    """Return the largest point's index, and its value and interval predicted by a law fitted to all other points."""
    largest = int(np.log(x).sum(1).argmax())
    law = fit(np.delete(x, largest, 0), np.delete(y, largest), draws)
    at = x[[largest]]
    low, high = law.interval_at(at)
    return largest, float(law.at(at)[0]), float(low[0]), float(high[0])


# ------------------------------------------------------------------------------------------------ tests of values


class Grid:
    """The design-matrix columns of all laws with exponents on a grid, and their products, for fast least squares.

    With K = k exponents, every array over the grid has the shape (g1, …, gK).
    """

    def __init__(self, x: np.ndarray, weights: np.ndarray, axes: Sequence[np.ndarray]) -> None:
        """Compute the columns for points x (n, k) and exponents exp(axes); `weights` (n,) divide the rows."""
        self.axes = axes
        self.shape = tuple(map(len, axes))
        self.columns = [1 / weights[None]]  # each (g, n)
        for variable, logs in enumerate(axes):
            self.columns.append(x[:, variable] ** -np.exp(logs)[:, None] / weights)
        terms = len(self.columns)
        self.gram = np.empty((terms, terms, *self.shape))
        for first, second in itertools.product(range(terms), repeat=2):
            if first == second:
                products = np.square(self.columns[first]).sum(1).reshape(self._place(first))
            else:
                low, high = sorted((first, second))
                products = (self.columns[low] @ self.columns[high].T).reshape(
                    np.broadcast_shapes(self._place(low), self._place(high))
                )
            self.gram[first, second] = products
        self._inverses: dict[tuple[int, ...], np.ndarray] = {}

    def _place(self, term: int) -> tuple[int, ...]:
        """Return the shape with which a value that depends only on one term's exponent broadcasts over the grid."""
        return tuple(size if term == axis + 1 else 1 for axis, size in enumerate(self.shape))

    def least(self, targets: np.ndarray, fixed: tuple[int, float] | None = None) -> np.ndarray:
        """Return the smallest sums of squares (studies, g1, …) over all non-negative laws, for targets (studies, n).

        `fixed` is the number and the value of a linear parameter that must not vary. A non-negative least-squares
        solution has some parameters at 0 and the others free: try every subset, and keep the best allowed one.
        """
        studies = len(targets)
        products = []
        for term, column in enumerate(self.columns):
            products.append((targets @ column.T).reshape(studies, *self._place(term)))
        squares = np.square(targets).sum(1).reshape(studies, *[1] * len(self.shape))
        free = list(range(len(self.columns)))
        if fixed is not None:
            term, value = fixed
            free.remove(term)
            squares = squares - 2 * value * products[term] + value**2 * self.gram[term, term]
            products = [product - value * self.gram[other, term] for other, product in enumerate(products)]
        best = np.array(np.broadcast_to(squares, (studies, *self.shape)))
        for size in range(1, len(free) + 1):
            for subset in itertools.combinations(free, size):
                if subset not in self._inverses:
                    gram = np.moveaxis(self.gram[np.ix_(subset, subset)], (0, 1), (-2, -1))
                    # A tiny ridge keeps columns invertible that are nearly equal, such as x^-0.02 and 1.
                    ridge = 1e-12 * np.trace(gram, axis1=-2, axis2=-1)[..., None, None] * np.eye(size)
                    self._inverses[subset] = np.linalg.inv(gram + ridge)
                inverse = self._inverses[subset]
                gain: Any = 0.0
                is_allowed: Any = True
                for row, term in enumerate(subset):
                    solution: Any = 0.0
                    for column_of, other in enumerate(subset):
                        solution = solution + inverse[..., row, column_of] * products[other]
                    is_allowed = is_allowed & (solution >= 0)
                    gain = gain + solution * products[term]
                np.minimum(best, np.where(is_allowed, squares - gain, best), out=best)
        return np.maximum(best, 0.0)


@dataclass(frozen=True)
class ValueTest:
    """Tests values of one quantity: a parameter of the law, or a new measurement."""

    statistic: Callable[[float], float]  # of a value: relative increase of the sum of squares
    critical: Callable[[float], float]  # of a value: the percentile of the statistic if the value is true

    def rejects(self, value: float) -> bool:
        """Return whether the test rejects a value, that is, whether the value lies outside the interval."""
        return self.statistic(value) > self.critical(value)

    def interval(self, estimate: float, least: float, most: float) -> tuple[float, float]:
        """Return the ends of the interval around an estimate, limited to the range from `least` to `most`."""
        ends = []
        for bound in (least, most):
            end = bound
            # The percentile varies slowly with the value, so two corrections suffice.
            for _ in range(3):
                limit = self.critical(end)
                if self.statistic(bound) <= limit:
                    end = bound
                    continue
                inside, outside = estimate, bound
                for _ in range(HALVINGS):
                    middle = (inside + outside) / 2
                    if self.statistic(middle) <= limit:
                        inside = middle
                    else:
                        outside = middle
                end = inside
            ends.append(end)
        return ends[0], ends[1]


class ValueTests:
    """Tests for all quantities of a study; random numbers are fixed, so a study always has the same intervals."""

    def __init__(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray, draws: int) -> None:
        """Build grids of exponents around the best law for y (n,) at x (n, k), already divided by the law's scale.

        The residuals of a law are divided by `weights` (n,).
        """
        from scipy.stats import f as f_distribution  # imported here because checking a recipe does not need it

        n, k = x.shape
        self.x = x
        self.y = y
        self.weights = weights
        self.freedom = n - 1 - 2 * k
        self.normals = np.random.default_rng(0).standard_normal((draws, n + 1))
        # Zoom into the exponents of laws that simulated studies can prefer: a few times the usual threshold.
        self.usual = float(f_distribution.ppf(CONFIDENCE, 1, self.freedom))
        margin = 4 * self.usual
        box = [(math.log(EXPONENTS[0]), math.log(EXPONENTS[1]))] * k
        for _ in range(6):
            axes = [np.linspace(*ends, FINE) for ends in box]
            squares = Grid(x, weights, axes).least((y / weights)[None])[0]
            best = squares.min()
            is_near = squares <= best + max(margin * best / self.freedom, 1e-12)
            smaller = []
            for axis, logs in enumerate(axes):
                near = np.nonzero(is_near.any(tuple(other for other in range(k) if other != axis)))[0]
                smaller.append((float(logs[max(near[0] - 1, 0)]), float(logs[min(near[-1] + 1, FINE - 1)])))
            is_small = all(new[1] - new[0] > 0.75 * (old[1] - old[0]) for old, new in zip(box, smaller, strict=True))
            box = smaller
            if is_small:
                break
        self.fine = Grid(x, weights, [np.linspace(*ends, FINE) for ends in box])
        self.coarse = Grid(x, weights, [np.linspace(*ends, COARSE) for ends in box])
        self.best = float(self.fine.least((y / weights)[None]).min())
        # A floor for the noise of exact data, which has none.
        self.variance = max(self.best / self.freedom, 1e-18)

    def linear(self, term: int) -> ValueTest:
        """Return the test of the floor (`term` 0) or of a term's amount."""
        targets = self.y / self.weights

        def statistic(value: float) -> float:
            return self._statistic(self.fine, targets, (term, value))

        def critical(value: float) -> float:
            return self._critical(self.fine, self.coarse, self.x, self.weights, targets, term, (term, value))

        return ValueTest(statistic, critical)

    def exponent(self, term: int) -> ValueTest:
        """Return the test of the logarithm of a term's exponent."""
        targets = self.y / self.weights

        def at(grid: Grid, value: float) -> Grid:
            axes = list(grid.axes)
            axes[term - 1] = np.array([value])
            return Grid(self.x, self.weights, axes)

        def statistic(value: float) -> float:
            return self._statistic(at(self.fine, value), targets)

        def critical(value: float) -> float:
            grids = at(self.fine, value), at(self.coarse, value)
            return self._critical(*grids, self.x, self.weights, targets, self.x.shape[1] + term)

        return ValueTest(statistic, critical)

    def forecast(self, place: np.ndarray, predicted: float) -> ValueTest:
        """Return the test of a new measurement at `place` (k,), for which the law predicts `predicted`."""
        x = np.vstack([self.x, place])
        weights = np.append(self.weights, predicted)
        fine = Grid(x, weights, self.fine.axes)
        coarse = Grid(x, weights, self.coarse.axes)

        def statistic(value: float) -> float:
            return self._statistic(fine, np.append(self.y, value) / weights)

        def critical(value: float) -> float:
            return self._critical(fine, coarse, x, weights, np.append(self.y, value) / weights)

        return ValueTest(statistic, critical)

    def _statistic(self, grid: Grid, targets: np.ndarray, fixed: tuple[int, float] | None = None) -> float:
        return (float(grid.least(targets[None], fixed).min()) - self.best) / self.variance

    def _critical(
        self,
        fine: Grid,
        coarse: Grid,
        x: np.ndarray,
        weights: np.ndarray,
        targets: np.ndarray,
        parameter: int | None = None,
        fixed: tuple[int, float] | None = None,
    ) -> float:
        """Return the percentile of the statistic over studies drawn from the best law that satisfies the hypothesis.

        `parameter` is the index of the tested parameter; None for a forecast.
        """
        from scipy.optimize import nnls  # imported here because checking a recipe does not need it

        # 1. The best law of the hypothesis.
        squares = fine.least(targets[None], fixed)[0]
        place = np.unravel_index(squares.argmin(), squares.shape)
        exponents = np.exp([axis[index] for axis, index in zip(fine.axes, place, strict=True)])
        columns = np.column_stack([np.ones(len(x)), x**-exponents]) / weights[:, None]
        if fixed is None:
            linear = nnls(columns, targets)[0]
        else:
            term, value = fixed
            others = np.delete(columns, term, 1)
            linear = np.insert(nnls(others, targets - value * columns[:, term])[0], term, value)
        mean = columns @ linear
        # 2. Studies drawn from it, fitted with and without the hypothesis. A forecast is not part of the study.
        n = len(self.y)
        normals = self.normals[:, : len(x)]
        studies = mean * (1 + np.sqrt(self.variance) * normals)
        draws = len(studies)
        of_hypothesis = coarse.least(studies, fixed).reshape(draws, -1).min(1)
        of_any = np.maximum(self.coarse.least(studies[:, :n]).reshape(draws, -1).min(1), 1e-30)
        percentile = np.quantile((of_hypothesis - of_any) / of_any, CONFIDENCE)
        # 3. For the law's linear approximation, the percentile is known: F's. How far its draws miss that corrects for
        # the small number of draws. A vanishing amount would hide its exponent, so it counts as 1 % here.
        slopes = -np.maximum(linear[1:], 0.01) * exponents * np.log(x) * columns[:, 1:]
        tangent = np.column_stack([columns, slopes]) / mean[:, None]
        free = residual_squares(tangent[:n], normals[:, :n])
        if parameter is None:
            restricted = residual_squares(tangent, normals)
        else:
            restricted = residual_squares(np.delete(tangent, parameter, 1), normals)
        known = np.quantile((restricted - free) / free, CONFIDENCE)
        return float(self.usual * percentile / known)


def residual_squares(columns: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the residual sums of squares (studies,) of linear fits to the targets (studies, n)."""
    basis, _ = np.linalg.qr(columns)
    return np.square(targets).sum(1) - np.square(targets @ basis).sum(1)
