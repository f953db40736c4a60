"""Implements `patchline replay RUN step=N`: rebuild the global batch of a step, and show its samples.

The batch is rebuilt by pipeline/extras/replays/batch.py.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from data.checks import printable
from data.errors import UsageError
from data.files import atomic_file
from jobs.extras.replays.trained import find_trained


def replay(run: str, step: str, target: str | None) -> dict[str, Any]:
    """Return a summary and the extreme samples of a step's batch; write the batch to the .npz file `target` if given.

    Raises UsageError if the arguments are invalid, or DataError if a file in the run was modified.
    """
    # Check the target first, because rebuilding the batch takes long.
    if target:
        file = Path(target)
        if file.suffix != ".npz":
            raise UsageError(f"--to {file} does not end in .npz\n  expected a file name such as batch.npz")
        if file.is_dir():
            raise UsageError(f"--to {file} is a folder\n  expected a file name, for example {file / 'batch.npz'}")
        if not file.parent.is_dir():
            raise UsageError(
                f"--to {file}: the folder {file.parent} does not exist\n  create it, or use another folder"
            )
    folder = find_trained(run)
    text = step.removeprefix("step=")
    if not text.isdigit() or text == "0":
        raise UsageError(f"{step!r} is not a step\n  expected step=N, with a number of at least 1 as in the log")
    number = int(text)
    # Imported after the checks, because it imports torch, which takes seconds.
    from pipeline.extras.replays.batch import TrainedStage, steps_in

    stage = TrainedStage(folder)
    batch = stage.batch(number)
    if target:
        with atomic_file(Path(target)) as temporary:
            np.savez(temporary, images=batch.images, labels=batch.labels, ids=batch.ids)

    # Describe the samples of the batch, and the records of each attempt that trained the step.
    lines: list[str] = []
    shards = [batch.source.shards[shard].name for shard in batch.ids[:, 1]]
    labels = Counter(batch.labels[batch.labels >= 0].tolist())
    lines.append(
        f"{folder.name}: step {number}, {len(batch.ids)} samples of {batch.images.shape[1]}×{batch.images.shape[2]}"
    )
    for record in stage.records:
        if record["kind"] == "spike":
            # The record of a spike also contains the preceding steps.
            for recent in record["recent"]:
                if recent["step"] == number:
                    lines.append(
                        f"attempt {record['attempt']}: gradient norm {recent['grad_norm']:.3g}, loss "
                        f"{recent['loss']:.6f} (recorded with the spike at step {record['step']}: "
                        f"{record['grad_norm']:.3g}, normal up to {record['limit']:.3g})"
                    )
        elif record["kind"] == "train" and number in steps_in(record):
            loss = record["losses"][steps_in(record).index(number)]
            lines.append(f"attempt {record['attempt']}: loss {loss:.6f}")
    lines.append(f"epochs {sorted(set(batch.ids[:, 0].tolist()))}, shards {', '.join(sorted(set(shards)))}")
    counts = [f"{printable(batch.source.class_name(label))} {count}" for label, count in sorted(labels.items())]
    lines.append(f"labels: {', '.join(counts) or 'none'}")
    for sample in batch.bad:
        lines.append(f"replaced: {sample.shard} {sample.key}: {sample.reason}")

    # Blank and broken images are usually extreme: describe the darkest, the brightest and the flattest.
    means = batch.images.mean((1, 2, 3))
    spreads = batch.images.std((1, 2, 3))
    for name, slot in {"darkest": means.argmin(), "brightest": means.argmax(), "flattest": spreads.argmin()}.items():
        lines.append(
            f"{name}: slot {slot}, sample {batch.ids[slot, 2]} of {shards[slot]}, "
            f"mean {means[slot]:.1f}, std {spreads[slot]:.1f}"
        )
    if target:
        lines.append(f"written: {target}")
    return {
        "stage": folder.name,
        "step": number,
        "shape": list(batch.images.shape),
        "ids": batch.ids.tolist(),
        "shards": sorted(set(shards)),
        "labels": dict(sorted(labels.items())),
        "written": target,
        "report": lines,
    }
