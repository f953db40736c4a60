"""`patchline leaks`: find training images that are also in a test set, and say which.

patchline leaks shards/train --test shards/test --output leaks
patchline subset shards/train --but leaks/leaks.json --output shards/train-clean
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jobs.commands.arguments import Debug, stoppable
from jobs.commands.sets import cache_config, refuse_file
from jobs.commands.weights import find_weights
from jobs.named_stages import find_set
from jobs.terminal import ProgressMeter, echo

Train = Annotated[list[str], typer.Argument(help="Indexes, or their folders: what was or will be trained on.")]
Test = Annotated[list[str], typer.Option(help="An index, or its folder, that is judged on; repeatable.")]
Output = Annotated[str, typer.Option(help="Folder of leaks.json, the report and the page.")]
Fits = Annotated[float, typer.Option(min=0.5, max=1.0, help="Likeness of two that show the same; 1: equal pixels.")]
Weights = Annotated[str | None, typer.Option(help="Also compare features of these weights: ours, .npz, timm, HF.")]
Cosine = Annotated[float, typer.Option(min=0.0, max=1.0, help="With --weights: of two features, at least.")]
CacheFolder = Annotated[str | None, typer.Option("--cache", help="URLs: folder that shards are fetched to.")]
Workers = Annotated[int, typer.Option(min=0, help="Shards worked on side by side; 0: as many as there are cores.")]

REPORT = "report.txt"
PAGE = "leaks.html"


def leaks(
    train: Train,
    test: Test,
    output: Output,
    fits: Fits = 0.88,
    weights: Weights = None,
    cosine: Cosine = 0.97,
    cache: CacheFolder = None,
    workers: Workers = 0,
    _debug: Debug = False,
) -> None:
    """Find training images that are also in a test set: copies, crops, mirror images, other encodings."""
    from hashlib import sha256  # with OpenSSL, for which `--help` does not wait

    from data.extras.leaks.report import lines, write_page
    from data.extras.leaks.search import DOCUMENT, find_leaks
    from data.files import write_atomically
    from data.index.document import SUFFIX, load_index
    from jobs.cluster_config import cores

    folder = Path(output)
    refuse_file(folder)
    train_sets = {path: load_index(find_set(path)) for path in train}
    test_sets = {path: load_index(find_set(path)) for path in test}
    fetched_by = cache_config(cache)
    if weights is not None:
        weights = find_weights(weights)
    # Only now: it imports torch, for which a refusal does not wait.
    from pipeline.extras import leak_embedding

    # Features first: what they have found waits in a journal of its own for the document.
    embeddings = None
    if weights is not None:
        import torch

        from jobs.commands.conversion import load, verify

        verify(weights, log=lambda text: None)  # it raises where they are not what their maker wrote
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        progress = ProgressMeter("shards, by their features")
        with stoppable():
            model = load(weights, {}).to(device)
            # They are known by their content, whatever file they came from.
            digest = sha256()
            for name, value in sorted(model.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.detach().cpu().contiguous().numpy().tobytes())
            embeddings = leak_embedding.find_alike(
                model,
                (weights, digest.hexdigest()),
                train_sets.values(),
                test_sets.values(),
                folder,
                cosine=cosine,
                device=device,
                cache=fetched_by,
                report=progress.of,
            )

    # Then the pictures themselves. The same call again goes on after a kill, here too.
    progress = ProgressMeter("shards, those of the test sets first")
    with stoppable():
        found_leaks = find_leaks(
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
    (folder / leak_embedding.JOURNAL).unlink(missing_ok=True)

    # The document is there; a report and a page tell people of it, and for each set what to type.
    report = lines(found_leaks, train_sets, test_sets)
    write_atomically(folder / REPORT, "\n".join(report) + "\n")
    write_page(folder / PAGE, found_leaks, train_sets, test_sets, fetched_by)

    for line in report:
        echo(line)
    echo(f"written  {folder / DOCUMENT}  {REPORT}  {PAGE}")
    for number in sorted({pair.train_set for pair in found_leaks.pairs}):
        path = found_leaks.train[number].path
        clean = f"{path.rstrip('/').removesuffix(SUFFIX)}-clean"
        words = ["subset", path, "--but", str(folder / DOCUMENT), "--output", clean]
        echo(f"to train without them: python -m jobs {shlex.join(words)}")
