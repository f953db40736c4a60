"""The work of `patchline replay RUN step=N`: rebuild a step's global batch to look for what broke the step.

pipeline/extras/replays/batch.py rebuilds it.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from data.errors import UsageError
from data.files import atomic_file
from jobs.extras.replays.trained import find_trained
from jobs.terminal import echo
from pipeline.monitoring.telemetry import steps_in


def replay(run: str, step: str, target: str | None) -> None:
    """Print the batch of a step, and the samples that stand out; with a target, write the batch there as .npz.

    Raises UsageError where the words do not fit the run, DataError where a file of it was altered.
    """
    # Before the work, where the batch could not be written under this very name.
    if target:
        file = Path(target)
        if file.suffix != ".npz":
            raise UsageError(f"--to {file} does not end in .npz\n  expected a file's name, as batch.npz")
        if file.is_dir():
            raise UsageError(f"--to {file} is a folder\n  expected a file's name, as {file / 'batch.npz'}")
        if not file.parent.is_dir():
            raise UsageError(f"--to {file}: there is no folder {file.parent}\n  make it, or name a file elsewhere")
    folder = find_trained(run)
    text = step.removeprefix("step=")
    if not text.isdigit() or text == "0":
        raise UsageError(f"{step!r} is not a step\n  expected step=N, N from 1, as the log counts them")
    number = int(text)
    # Only now: it imports torch, for which a refusal does not wait.
    from pipeline.extras.replays.batch import TrainedStage

    stage = TrainedStage(folder)
    batch = stage.batch(number)
    if target:
        with atomic_file(Path(target)) as temporary:
            np.savez(temporary, images=batch.images, labels=batch.labels, ids=batch.ids)

    # What the batch is, and what each attempt that took the step has recorded of it.
    shards = [batch.source.shards[shard].name for shard in batch.ids[:, 1]]
    labels = Counter(batch.labels[batch.labels >= 0].tolist())
    echo(f"{folder.name}: step {number}, {len(batch.ids)} samples of {batch.images.shape[1]}×{batch.images.shape[2]}")
    for record in stage.records:
        if record["kind"] == "spike":
            # It holds the steps before it too, which tell how it came.
            for recent in record["recent"]:
                if recent["step"] == number:
                    echo(
                        f"attempt {record['attempt']}: gradient norm {recent['grad_norm']:.3g}, loss "
                        f"{recent['loss']:.6f} (the spike of step {record['step']}: {record['grad_norm']:.3g}, usual "
                        f"up to {record['limit']:.3g})"
                    )
        elif record["kind"] == "train" and number in steps_in(record):
            loss = record["losses"][steps_in(record).index(number)]
            echo(f"attempt {record['attempt']}: loss {loss:.6f}")
    echo(f"epochs {sorted(set(batch.ids[:, 0].tolist()))}, shards {', '.join(sorted(set(shards)))}")
    echo(f"labels {dict(sorted(labels.items()))}")
    for sample in batch.bad:
        echo(f"replaced: {sample.shard} {sample.key}: {sample.reason}")

    # Blank and broken images are found at the ends: the darkest, the brightest and the flattest.
    means = batch.images.mean((1, 2, 3))
    spreads = batch.images.std((1, 2, 3))
    for name, slot in {"darkest": means.argmin(), "brightest": means.argmax(), "flattest": spreads.argmin()}.items():
        echo(
            f"{name}: slot {slot}, sample {batch.ids[slot, 2]} of {shards[slot]}, "
            f"mean {means[slot]:.1f}, std {spreads[slot]:.1f}"
        )
    if target:
        echo(f"written: {target}")
