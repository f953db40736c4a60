"""Saturating power laws: y = floor + Σ amount_i · x_i^−exponent_i, with intervals, and a prediction that is tested.

With parameters and training samples as x this is the third approach of Hoffmann et al. 2022 ("Chinchilla").

1. Variable projection (Golub and Pereyra 1973): for given exponents, floor and amounts are a linear least-squares
   problem, so that a search runs over the exponents alone: a grid, then Levenberg-Marquardt. Deviations are relative.
2. Intervals are those of a parametric bootstrap, basic (Davison and Hinkley 1997, 5.2): the law is fitted to studies
   drawn from itself, with the noise of its residuals, which few points do not tell exactly: it is drawn too, as 1 / χ.
   All draws are fitted side by side.
3. Leave the largest out: the law of all other points says where the largest lies, before it is looked at.

`test_power_law.py` plants laws: 90 % intervals hold their parameters in 86 to 94 of 100 studies.
"""

from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.9
EXPONENTS = (0.02, 3.0)  # least and most; beyond them a law is a line, or a step
STARTS = np.geomspace(0.1, 1.5, 6)
ROUNDS = 30
STEP = 1e-5  # of a derivative


@dataclass(frozen=True)
class Law:
    """A fitted law; `draws` are the parameters of the studies that were drawn from it."""

    scale: np.ndarray  # (k,), geometric mean of each x, by which it is divided
    exponents: np.ndarray  # (k,)
    linear: np.ndarray  # (1 + k,): floor, and the amount of each term at `scale`
    noise: float  # relative standard deviation of a value
    drawn_noise: np.ndarray  # (draws, 1)
    drawn_exponents: np.ndarray  # (draws, k)
    drawn_linear: np.ndarray  # (draws, 1 + k)

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the values (n,) at x (n, k)."""
        values: np.ndarray = design(x / self.scale, self.exponents) @ self.linear
        return values

    def interval_at(self, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return low and high (n,) between which new values at x (n, k) lie: of the law, and of their own noise."""
        at_scale = np.broadcast_to(x / self.scale, (len(self.drawn_linear), *x.shape))
        drawn = (design(at_scale, self.drawn_exponents) @ self.drawn_linear[..., None])[..., 0]
        value = self.at(x)
        errors = drawn - value + self.drawn_noise * value * rng.standard_normal(drawn.shape)
        below, above = np.quantile(errors, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
        return value - above, value - below

    def parameters(self) -> dict[str, tuple[float, float, float]]:
        """Return value, low and high of floor, amounts and exponents; amounts are those at `scale`."""
        value = np.concatenate([self.linear, self.exponents])
        drawn = np.concatenate([self.drawn_linear, self.drawn_exponents], axis=-1)
        below, above = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
        terms = range(1, 1 + len(self.exponents))
        names = ["floor", *(f"amount {term}" for term in terms), *(f"exponent {term}" for term in terms)]
        rows = zip(value.tolist(), (2 * value - above).tolist(), (2 * value - below).tolist(), strict=True)
        return dict(zip(names, rows, strict=True))


def design(x: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the columns (…, n, 1 + k) of which a law is the sum, of x (…, n, k) and exponents (…, k)."""
    powers = np.exp(-exponents[..., None, :] * np.log(x))
    return np.concatenate([np.ones((*powers.shape[:-1], 1)), powers], axis=-1)


def project(x: np.ndarray, y: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best linear parameters (…, 1 + k) for these exponents (…, k), and the relative residuals (…, n)."""
    columns = design(x, exponents) / y[..., None]
    q, r = np.linalg.qr(columns)
    linear = np.linalg.solve(r, q.swapaxes(-1, -2) @ np.ones((*y.shape, 1)))
    return linear[..., 0], 1 - (columns @ linear)[..., 0]


def search(x: np.ndarray, y: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return exponents, linear parameters and sums of squares of the best laws of y (…, n), from `start` (k,) on."""
    k = x.shape[-1]
    exponents = np.broadcast_to(start, (*y.shape[:-1], k)).copy()
    linear, residuals = project(x, y, exponents)
    squares = np.square(residuals).sum(-1)
    damping = np.full(squares.shape, 1e-3)
    for _ in range(ROUNDS):
        slopes = [(project(x, y, exponents + STEP * unit)[1] - residuals) / STEP for unit in np.eye(k)]
        jacobian = np.stack(slopes, axis=-1)
        normal = jacobian.swapaxes(-1, -2) @ jacobian
        diagonal = np.diagonal(normal, axis1=-2, axis2=-1) * damping[..., None] + 1e-12
        gradient = jacobian.swapaxes(-1, -2) @ residuals[..., None]
        step = -np.linalg.solve(normal + diagonal[..., None] * np.eye(k), gradient)[..., 0]
        tried = np.clip(exponents + np.clip(step, -0.3, 0.3), *EXPONENTS)
        tried_linear, tried_residuals = project(x, y, tried)
        tried_squares = np.square(tried_residuals).sum(-1)
        is_better = tried_squares < squares
        exponents = np.where(is_better[..., None], tried, exponents)
        linear = np.where(is_better[..., None], tried_linear, linear)
        residuals = np.where(is_better[..., None], tried_residuals, residuals)
        squares = np.where(is_better, tried_squares, squares)
        damping = np.clip(np.where(is_better, damping / 5, damping * 5), 1e-9, 1e9)
    return exponents, linear, squares


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
    starts = np.stack(np.meshgrid(*[STARTS] * k), axis=-1).reshape(-1, k)
    _, residuals = project(scaled, np.broadcast_to(y, (len(starts), n)), starts)
    exponents, linear, squares = search(scaled, y, starts[np.square(residuals).sum(-1).argmin()])
    # 2. The same for studies that are drawn from the law.
    noise = float(np.sqrt(squares / freedom))
    drawn_noise = noise * np.sqrt(freedom / rng.chisquare(freedom, (draws, 1)))
    drawn = design(scaled, exponents) @ linear * (1 + drawn_noise * rng.standard_normal((draws, n)))
    drawn_exponents, drawn_linear, _ = search(scaled, np.maximum(drawn, 1e-12), exponents)
    return Law(scale, exponents, linear, noise, drawn_noise, drawn_exponents, drawn_linear)


def leave_largest_out(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, draws: int = 200
) -> tuple[int, float, float, float]:
    """Return which point is the largest, and value, low and high that the law of all others predicts for it."""
    largest = int(np.log(x).sum(1).argmax())
    others = np.arange(len(x)) != largest
    law = fit(x[others], y[others], rng, draws)
    at = x[largest : largest + 1]
    low, high = law.interval_at(at, rng)
    return largest, float(law.at(at)[0]), float(low[0]), float(high[0])
