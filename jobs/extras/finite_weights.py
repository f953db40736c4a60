"""Refuse initial weights with NaN or infinity when the recipe is read.

Without this extra, they are refused by the worker that loads them: a second later, and after the images were packed.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from jobs.resolved_recipe import Available, CheckResult, Stage, reference
from jobs.stages.training import TrainingExtra
from models.extras.finite import check_finite_file
from models.weights.folder import WEIGHTS


class FiniteWeights(TrainingExtra):
    """Checks the initial weights of a stage, unless another stage makes them."""

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Raise DataError if a weight of `init` is NaN or infinite."""
        init = stage.config.init
        if init is None or reference(init) is not None or not available.checks_files:
            return
        file = Path(available.campaign.path_of(init)) / WEIGHTS
        if file.is_file():
            try:
                check_once(file, file.stat().st_mtime_ns)
            except ValueError as error:
                raise DataError(f"{stage.name}: cannot load {init}: {error}") from None
        yield from ()


@functools.cache
def check_once(file: Path, modified_ns: int) -> None:
    """Check a file once in this process, because many stages may start from it, and each is checked several times.

    A file that was modified is checked again. Raises ValueError if a weight is NaN or infinite.
    """
    check_finite_file(file)
