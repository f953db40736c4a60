"""The work of `patchline leaks`: find training images that are also in a test set, and say which.

patchline leaks shards/train --test shards/test --output leaks
patchline subset shards/train --but leaks/leaks.json --output shards/train-clean
"""

import shlex
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from data.files import write_whole
from data.index.document import SUFFIX, load_index
from data.index.index import Index
from data.leaks.report import lines, write_page
from data.leaks.search import DOCUMENT, Embeddings, find_leaks
from data.remote.cache import CacheConfig
from jobs.commands.data import cache_config, refuse_file, stoppable
from jobs.commands.weights import load, refuse_missing, verify
from jobs.progress import Progress
from pipeline.evaluation import embedding
from pipeline.preflight.machine import cores

REPORT = "report.txt"
PAGE = "leaks.html"


def search(
    train: list[str],
    test: list[str],
    folder: Path,
    *,
    fits: float,
    weights: str | None,
    cosine: float,
    cache: str | None,
    workers: int,
) -> list[str]:
    """Search, and write leaks.json, the report and the page; the same call again goes on after a kill."""
    refuse_file(folder)
    train_sets = [(path, load_index(path)) for path in train]
    test_sets = [(path, load_index(path)) for path in test]
    fetched_by = cache_config(cache)
    train_indexes = [index for _, index in train_sets]
    test_indexes = [index for _, index in test_sets]
    embeddings = None
    # Features first: what they have found waits in a journal of its own for the document.
    if weights is not None:
        with stoppable(), Progress("shards, by their features") as progress:
            embeddings = alike_by_features(
                weights, train_indexes, test_indexes, folder, cosine, fetched_by, progress.of
            )
    with stoppable(), Progress("shards, those of the test sets first") as progress:
        leaks = find_leaks(
            train_sets,
            test_sets,
            folder,
            fits=fits,
            embeddings=embeddings,
            workers=workers or cores(),
            cache=fetched_by,
            report=progress.of,
            report_test=progress.of,
        )
    (folder / embedding.JOURNAL).unlink(missing_ok=True)
    report = lines(leaks, train_indexes, test_indexes)
    write_whole(folder / REPORT, "\n".join(report) + "\n")
    write_page(folder / PAGE, leaks, train_indexes, test_indexes, fetched_by)

    report.append(f"written  {folder / DOCUMENT}  {REPORT}  {PAGE}")
    for number in sorted({pair.train_set for pair in leaks.pairs}):
        path = train[number]
        clean = f"{path.rstrip('/').removesuffix(SUFFIX)}-clean"
        words = ["subset", path, "--but", str(folder / DOCUMENT), "--output", clean]
        report.append(f"to train without them: python -m jobs {shlex.join(words)}")
    return report


def alike_by_features(
    weights: str,
    train: Sequence[Index],
    test: Sequence[Index],
    folder: Path,
    cosine: float,
    cache: CacheConfig,
    report: Callable[[int, int], None],
) -> Embeddings:
    """Find the pairs whose features are alike. Raises UsageError and DataError where there are no such weights."""
    refuse_missing(weights)
    verify(weights, log=lambda text: None)  # it raises where they are not what their maker wrote
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(weights, {}).to(device)
    named = (weights, weights_digest(model))
    return embedding.find_alike(
        model, named, train, test, folder, cosine=cosine, device=device, cache=cache, report=report
    )


def weights_digest(model: nn.Module) -> str:
    """Return the sha256 of a model's parameters, whatever file they came from."""
    digest = sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
