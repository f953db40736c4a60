"""Finds workers that are slower than the others, from the seconds that each spent in each step, and names the cause.

All workers of a synchronous group take equally long for a step, because the fast ones wait for the slowest. Compared
are therefore only the seconds in which a worker did not wait for others, split by cause: data, compute, link, host and
garbage collection.

1. For each cause, a worker's seconds in a step are compared with the median of all other workers in the same step, in
   units of the others' whole time. Changes that all workers share, such as a larger image size, cancel out.
2. A worker is *steadily* slow if this difference is at least LEAST in both halves of the window (medians), positive in
   most of its steps, and not explained by the differences between the other workers, or by its own differences between
   parts of the window. A cause that varies much, such as other programs on the host, thus does not hide another cause.
3. A worker is slow *in bursts* if its mean time is at least 1 + LEAST_OF_BURSTS times that of the others in every part
   of the window. Few steps suffice, for example if a signal stops the worker in one of ten steps.
4. The named cause is the one with the largest difference to the other workers in the second half of the window. If the
   worker is steadily slow, only the causes of step 2 count.

In:  seconds (W, S, 5); worker 3 needs 0.181 s more for data in each step than the other seven, whose steps take 1 s
Out: [SlowWorker(rank=3, factor=1.18, cause="data", seconds=0.212, others=0.031, low=0.027, high=0.036)]
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.floating]

CAUSES = ("data", "compute", "link", "host", "gc")
COMPUTE = CAUSES.index("compute")
LINK = CAUSES.index("link")
HOST = CAUSES.index("host")
GC = CAUSES.index("gc")

# A slow worker is found at most WINDOW + 2 · PART steps after it became slow: a part is compared after the next one.
WINDOW = 80  # steps
PART = 10  # steps between two comparisons
HALF = WINDOW // 2
LEAST = 0.05  # smallest difference of a slow worker, relative to the others
MOST_STEPS = 0.7  # share of the window's steps that are slower
LEAST_OF_BURSTS = 0.25
# A link is slow if its round trips take this many times as long as those of the others, and at least this much longer.
SLOW_LINK = 3.0
LEAST_DELAY_S = 0.0003
# In units of the spread (1.48 · median absolute deviation) of all workers' ratios; used if there are enough workers.
MOST_SPREADS = 5.0
ENOUGH_WORKERS = 8
MANY_WORKERS = 32  # for more, the median of all workers replaces that of all others
LEAST_SECONDS = 1e-9
LEAST_RATIO = 0.5  # of which a logarithm is computed: a pause of the other worker must not count more
SPREAD = 1.4826  # of a normal distribution, in median absolute deviations
# The mean logarithm of 1 + difference must be above USUAL by this many standard errors.
MOST_ERRORS = 5.0
USUAL = 0.02  # difference between equal workers
LARGEST_DECAY = 0.95

# W: workers, S: steps of a window, P: parts of a window


@dataclass(frozen=True)
class SlowWorker:
    """A worker that is slower than the others, and the cause: its seconds per step, and those of the other workers."""

    rank: int
    factor: float  # of a step without waiting for others, relative to the others' median, because of the cause
    cause: str  # one of CAUSES
    seconds: float
    others: float  # median
    low: float  # of the others: 10th percentile
    high: float  # 90th percentile


def slow_workers(seconds: Seconds) -> list[SlowWorker]:
    """Return the slow workers of a window (W, S, causes), the slowest first."""
    if len(seconds) < 2:
        return []
    steady, bursts = are_slow(seconds)  # (W, causes), (W,)
    ranks = np.flatnonzero(steady.any(-1) | bursts).tolist()
    if not ranks:
        return []
    # The first half may contain steps before a worker became slow.
    recent = without_rare_steps(seconds)[:, -HALF:]
    all_excesses = excesses(recent)  # (W, S, causes)
    slow = []
    for rank in ranks:
        location = np.median(recent, 1) if steady[rank].any() else recent.mean(1)  # (W, causes)
        others = np.delete(location, rank, 0)
        others[:, LINK] = 0.0
        usual = np.median(others, 0)
        excess = all_excesses[rank]  # (S, causes)
        if steady[rank].any():
            # Other causes may differ more, but by chance.
            cause = int(np.where(steady[rank], np.median(excess, 0), -np.inf).argmax())
            factor = 1 + np.median(excess[:, cause])
        else:
            cause = int(excess.mean(0).argmax())
            own = recent[rank].sum(-1)
            factor = (own / others_of(recent.sum(-1) - recent[..., LINK])[rank]).mean()
        low, high = np.percentile(others[:, cause], [10, 90])
        slow.append(
            SlowWorker(
                rank,
                factor=float(factor),
                cause=CAUSES[cause],
                seconds=float(location[rank, cause]),
                others=float(usual[cause]),
                low=float(low),
                high=float(high),
            )
        )
    return sorted(slow, key=lambda worker: -worker.factor)


def are_slow(seconds: Seconds) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which workers are steadily slow, by cause (…, W, causes), and which in bursts (…, W), in windows."""
    excess = excesses(without_rare_steps(seconds))  # (…, W, S, causes)
    ratio = np.moveaxis(np.maximum(1 + excess, LEAST_RATIO), -1, 0)  # (causes, …, W, S)
    total = np.moveaxis(totals(excess), -1, 0)
    steady = (ratio > 1).mean(-1) >= MOST_STEPS
    for values, least in ((ratio, LEAST), (total, -USUAL)):
        steady &= np.median(in_parts(values, HALF), -1).min(-1) >= 1 + least
    if steady.any():
        steady &= is_apart(np.median(ratio, -1)) & is_certain(np.log(ratio))

    means = in_parts(seconds.sum(-1), PART).mean(-1)  # (…, W, P)
    without_links = in_parts(seconds.sum(-1) - seconds[..., LINK], PART).mean(-1)
    score = (means / others_of(without_links)).min(-1)
    return np.moveaxis(steady, 0, -1), (score >= 1 + LEAST_OF_BURSTS) & is_apart(score)


def excesses(seconds: Seconds) -> Seconds:
    """Return by how much each cause takes a worker longer than the others, relative to the others' whole time.

    The result and `seconds` have the shape (…, W, S, causes).
    """
    # Two workers share a slow link, so the others count without theirs.
    others = np.stack([others_of(seconds[..., cause]) for cause in range(len(CAUSES))], -1)
    others[..., LINK] = 0.0
    excess: Seconds = seconds - others
    # If other programs use the processors, longer computing means proportionally longer waiting for a processor.
    rate = seconds[..., HOST].mean(-1) / np.maximum(seconds[..., COMPUTE].mean(-1), LEAST_SECONDS)  # (…, W)
    rate = np.minimum(rate, others_of(rate[..., None])[..., 0])[..., None]
    for cause in (COMPUTE, GC):
        waiting = rate * excess[..., cause]
        excess[..., cause] += waiting
        excess[..., HOST] -= waiting
    # The time that other programs take varies with each step; its mean suffices here.
    whole = seconds.sum(-1) - seconds[..., LINK] - seconds[..., HOST] + seconds[..., HOST].mean(-1, keepdims=True)
    excess /= others_of(whole)[..., None]
    return excess


def totals(excess: Seconds) -> Seconds:
    """Return a worker's whole time relative to the others, for each possible cause of a difference.

    Other programs take time from the workers at random. Unless they are the cause, their share does not count.
    """
    total = np.repeat(1 + excess.sum(-1, keepdims=True), len(CAUSES), -1)
    without_host = total[..., HOST] - excess[..., HOST]
    for cause in range(len(CAUSES)):
        if cause != HOST:
            total[..., cause] = without_host
    return total


def link_seconds(own: Seconds, steps: Seconds, round_trips: Seconds, lowest: Seconds) -> Seconds:
    """Return the seconds of each step that slow links cost, by worker: (…, W, S).

    `own` (…, W, S) are the seconds in which a worker did not wait for others, `steps` (…, S) those of whole steps. What
    is left after the slowest worker's own seconds is the time of the collectives, which is assumed to be proportional
    to the longest `round_trips` (…, W, P), in seconds, in each part of the window; NaN if unknown. A worker's round
    trips are compared with the median of all or, if there are two workers, with its `lowest` so far (…, W).
    """
    # A worker that exchanges data only with workers on its own node has no round trips, and no slow link.
    is_unknown = np.isnan(round_trips).all(-2, keepdims=True)
    usual = np.nanmedian(np.where(is_unknown, 1.0, round_trips), -2, keepdims=True)
    if round_trips.shape[-2] == 2:
        usual = lowest[..., None]
    is_slow = (round_trips >= SLOW_LINK * usual) & (round_trips >= usual + LEAST_DELAY_S)
    share = np.where(is_slow, 1 - usual / np.where(is_slow, round_trips, 1.0), 0.0)
    collectives = np.maximum(steps - own.max(-2), 0.0)[..., None, :]  # (…, 1, S)
    return collectives * np.repeat(share, PART, -1)


def without_rare_steps(seconds: Seconds) -> Seconds:
    """Spread each garbage collection over its half of the window, because few steps have one; return the seconds."""
    smooth = seconds.copy()
    means = in_parts(seconds[..., GC], HALF).mean(-1)  # (…, W, 2)
    smooth[..., GC] = np.repeat(means, HALF, -1)
    return smooth


def in_parts(values: Seconds, length: int) -> Seconds:
    """Split the last axis, the steps, into parts of this length."""
    return values.reshape(*values.shape[:-1], -1, length)


def others_of(values: Seconds) -> Seconds:
    """Return, for each worker and step, the median of all other workers' values (…, W, S)."""
    world = values.shape[-2]
    if world == 2:
        return np.maximum(values[..., ::-1, :], LEAST_SECONDS)
    if world >= MANY_WORKERS:
        median = np.median(values, -2, keepdims=True)
        return np.broadcast_to(np.maximum(median, LEAST_SECONDS), values.shape)
    order = values.argsort(-2)
    ranked = np.take_along_axis(values, order, -2)
    place = order.argsort(-2)  # of each worker in its column of `ranked`
    # Without the value at place p, the number k is `ranked[k]` if k < p, otherwise `ranked[k + 1]`.
    low = (world - 2) // 2
    high = (world - 1) // 2
    middle = [np.take_along_axis(ranked, k + (place <= k), -2) for k in (low, high)]
    return np.maximum((middle[0] + middle[1]) / 2, LEAST_SECONDS)


def is_certain(logarithms: Seconds) -> NDArray[np.bool_]:
    """Return for which workers the mean of all steps (…, W, S) is certainly larger than a usual difference."""
    steps = logarithms.shape[-1]
    mean = logarithms.mean(-1, keepdims=True)
    noise = logarithms - mean
    variance = np.maximum((noise * noise).mean(-1), 1e-12)
    # With noise that decays by the factor c per step, the mean varies as that of (1 − c) / (1 + c) as many independent
    # steps. The estimate of c from few steps is too low by about (1 + 4 c) / steps. Add twice its standard error, too.
    c = np.clip((noise[..., 1:] * noise[..., :-1]).mean(-1) / variance, 0.0, 1.0)
    c = np.minimum(c + (1 + 4 * c) / steps + 2 * np.sqrt((1 - c * c) / steps), LARGEST_DECAY)
    error = np.sqrt(variance * (1 + c) / (1 - c) / steps)
    mean = mean[..., 0]
    if mean.shape[-1] >= ENOUGH_WORKERS:
        mean = mean - np.median(mean, -1, keepdims=True)
    return mean - MOST_ERRORS * error >= USUAL


def is_apart(scores: Seconds) -> NDArray[np.bool_]:
    """Return which workers' scores (…, W) differ from the median by many times the spread of all workers' scores."""
    if scores.shape[-1] < ENOUGH_WORKERS:
        return np.ones(scores.shape, bool)
    distance = scores - np.median(scores, -1, keepdims=True)
    spread = SPREAD * np.median(np.abs(distance), -1, keepdims=True)
    return distance >= MOST_SPREADS * spread
