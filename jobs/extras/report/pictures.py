"""The images of a run's page, as small JPEGs in base64: judged samples, the batch of a spike, figures of `analyze`, and
what was said and pictured of steps that were taken again.

All of them together are `MOST` at the most, so that a page stays below two megabytes however many stages it shows.
What cannot be read costs the page a picture, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from data.errors import PatchlineError
from data.extras.pages.page import jpeg
from data.images.decode import BadImage, decode
from data.index.index import Index
from data.remote.config import CacheConfig
from data.shards.reader import ShardReader
from jobs.extras.history import RunHistory, StageHistory
from jobs.terminal import COMMAND, as_typed
from pipeline import artifacts

SAMPLES = "Samples with predictions"
MOST = 240  # pictures of a page; a thumbnail has about 4 kB
OF_SPIKE = 16  # of the global batch
SPIKES = 3  # the newest of a stage, whose batches are shown
FIGURE = 800  # pixels of the longer side
FIGURES = {
    "attention.png": "what the class token attends to",
    "inside.png": "patch filters, positions, and how far each head looks",
}
REPLAYS = 20  # that are shown
ANALYSES = 3  # folders of `analyze` that are shown


class Picture(NamedTuple):
    """An image with what is said of it."""

    image: Markup  # as a JPEG in base64
    caption: str
    name: str = ""  # of the sample
    is_wrong: bool = False


class Gallery(NamedTuple):
    """Pictures under a heading; a remark where some are missing, or what they are."""

    title: str
    pictures: list[Picture]
    remark: str = ""


class Album:
    """Makes the pictures of one page, as many as it has room for."""

    def __init__(self, *, with_replay: bool = True) -> None:
        self.left = MOST
        self.with_replay = with_replay  # imports torch, and decodes: a few seconds

    def judged(self, stage: StageHistory, examples: Mapping[str, Any], index: Index) -> Gallery:
        """Return samples of the newest evaluation with their predictions, the confident mistakes first."""
        of_set = "/".join(Path(examples["set"]).parts[-2:])
        remark = f"of step {examples['step']} on {of_set}: the confident mistakes first, then right ones"
        pictures: list[Picture] = []
        if index.remote and not self.with_replay:
            how = as_typed(f"{COMMAND} report {stage.address.rpartition('/')[0]}")
            return Gallery(SAMPLES, pictures, f"its images lie in a store; to see them: {how}")
        try:
            settings = {**stage.record["config"]["data"]["cache"], "attempts": 2}
            reader = ShardReader(index, cache=CacheConfig(**settings), by_range=True)
            for example in islice(examples["samples"], self.left):
                key, encoded, _ = reader.read(example["shard"], example["sample"])
                names = [index.class_name(label) for label in example["labels"]]
                is_wrong = example["predicted"] not in example["labels"]
                said = f"{index.class_name(example['predicted'])} {example['confidence']:.0%}"
                caption = f"✓ {said}"
                if is_wrong:
                    caption = f"✗ {said}, it is {', '.join(names)}"
                pictures.append(Picture(jpeg(decode(encoded)), caption, key, is_wrong))
        except (PatchlineError, BadImage, OSError, ValueError, LookupError, TypeError) as error:
            remark = f"the others cannot be shown: {str(error) or repr(error)}"
        self.left -= len(pictures)
        return Gallery(SAMPLES, pictures, remark)

    def spikes(self, stage: StageHistory) -> list[Gallery]:
        """Return the newest spikes, each with images of its batch as the model saw them."""
        galleries = []
        for spike in stage.of_kind("spike")[-SPIKES:]:
            title = f"Spike at step {spike['step']}: gradient norm {spike['grad_norm']:.3g}"
            if spike["limit"] < 1e300:  # until enough norms are known there is no limit
                title += f", usual up to {spike['limit']:.3g}"
            command = as_typed(f"{COMMAND} replay {stage.address} step={spike['step']}")
            if not self.with_replay or self.left < OF_SPIKE:
                galleries.append(Gallery(title, [], f"to see its batch: {command}"))
                continue
            pictures = []
            remark = f"images of its batch, as the model saw them; all of them: {command} --to batch.npz"
            try:
                from pipeline.extras.replays.batch import TrainedStage  # with it comes torch

                batch = TrainedStage(stage.folder).batch(spike["step"], most=OF_SPIKE)
                for image, labels, (_epoch, shard, sample) in zip(batch.images, batch.labels, batch.ids, strict=True):
                    names = map(batch.source.class_name, labels[labels >= 0].tolist())
                    place = f"{batch.source.shards[int(shard)].name}, {sample}"
                    pictures.append(Picture(jpeg(image), ", ".join(names), place))
                self.left -= len(pictures)
            except Exception as error:  # a set that is gone, a store that does not answer, a changed config
                remark = f"its batch cannot be rebuilt: {str(error) or repr(error)}"
            galleries.append(Gallery(title, pictures, remark))
        return galleries

    def replays(self, run: RunHistory) -> list[Gallery]:
        """Return what replays of the run have said, whose folders lie beside it, and searches of its own spikes."""
        folder = run.stages[0].folder.parent.resolve()
        paths = list(folder.glob(f"*/{artifacts.SEARCHES}/step-*.json"))
        for pattern in ("*/audit.json", "*/bisect.json", "*/step-*/bisect.json"):
            paths += folder.parent.glob(pattern)
        galleries = []
        for path in sorted(paths):
            pictures = []
            title = str(path.relative_to(folder.parent))
            try:
                record = artifacts.read_record(path)
                # A search of the run itself names no run.
                if record.get("run", str(folder)) != str(folder):
                    continue
                title = f"{record.get('command', 'searched beside training')}, {record['date']}"
                remark = "; ".join(record["said"])
                for sample in record.get("samples", ())[: self.left]:
                    if sample.get("picture"):
                        image = decode((path.parent / Path(sample["picture"]).name).read_bytes())
                        names = ", ".join(sample["labels"])
                        pictures.append(
                            Picture(jpeg(image), names, f"{sample['shard']}/{sample['key']}", is_wrong=True)
                        )
            except (PatchlineError, BadImage, OSError, ValueError, LookupError, TypeError) as error:
                remark = f"it cannot be shown: {error}"
            self.left -= len(pictures)
            galleries.append(Gallery(title, pictures, remark))
        return galleries[-REPLAYS:]

    def analyses(self, run: Path) -> list[Gallery]:
        """Return the figures that `analyze` has left in the run's folder or in a stage's."""
        galleries = []
        for numbers in sorted([*run.glob("*/analysis.json"), *run.glob("*/*/analysis.json")])[:ANALYSES]:
            pictures = []
            try:
                analysis = json.loads(numbers.read_bytes())
                remark = f"{analysis['weights']}, over {len(analysis['images'])} images"
                for name, what in FIGURES.items():
                    pictures.append(Picture(jpeg(decode((numbers.parent / name).read_bytes()), FIGURE), what, name))
            except (OSError, BadImage, ValueError, LookupError, TypeError) as error:
                remark = f"it cannot be shown: {error}"
            galleries.append(Gallery(str(numbers.parent.relative_to(run)), pictures, remark))
        return galleries
