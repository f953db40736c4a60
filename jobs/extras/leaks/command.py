"""`patchline leaks`: find training images that also occur in a test set.

patchline leaks shards/train --test shards/test --output leaks
patchline subset shards/train --but leaks/leaks.json --output shards/train-clean
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jobs.answer import Answer, Step, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.data_commands import CacheFolder, cache_config, refuse_file, stoppable
from jobs.extras.named_weights import find_weights
from jobs.extras.progress import ProgressMeter
from jobs.named_stages import find_set

Train = Annotated[list[str], typer.Argument(help="Training sets: index files, or the folders that contain them.")]
Test = Annotated[list[str], typer.Option(help="Test set: an index file, or the folder that contains it; repeatable.")]
Output = Annotated[str, typer.Option(help="Folder for leaks.json, report.txt and leaks.html.")]
Fits = Annotated[
    float, typer.Option(min=0.5, max=1.0, help="Minimum pixel similarity of a match; 1 means equal pixels.")
]
Weights = Annotated[
    str | None,
    typer.Option(help="Also compare features computed with these weights, from Patchline, .npz, timm or HF."),
]
Cosine = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Minimum cosine similarity of a match; requires --weights.")
]
Workers = Annotated[int, typer.Option(min=0, help="Number of shards to process in parallel; 0 means one per CPU core.")]

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
) -> Answer:
    """Find training images that also occur in a test set, even if cropped, mirrored or re-encoded."""
    from hashlib import sha256  # loads OpenSSL, which would slow down `--help`

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
    # Imported after the arguments were checked, because it imports torch, which takes seconds.
    from pipeline.extras import leak_embedding

    # 1. Compare features. Matches are kept in a journal until leaks.json is written.
    embeddings = None
    if weights is not None:
        import torch

        from jobs.extras.conversion import verify
        from pipeline.evaluation.any_weights import load

        verify(weights, log=lambda text: None)  # raises if the file's digest is wrong
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        progress = ProgressMeter("shards, comparing features")
        with stoppable():
            model = load(weights, {}).to(device)
            # Identify the weights by their content, independent of the file format.
            digest = sha256()
            for name, value in sorted(model.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.detach().cpu().contiguous().numpy().tobytes())
            embeddings = leak_embedding.find_similar(
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

    # 2. Compare the images. After an interruption, the same command resumes here too.
    progress = ProgressMeter("shards, test sets first")
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

    # 3. Write a text report and an HTML page, and print the commands that exclude the leaks from each training set.
    report = lines(found_leaks, train_sets, test_sets)
    write_atomically(folder / REPORT, "\n".join(report) + "\n")
    write_page(folder / PAGE, found_leaks, train_sets, test_sets, fetched_by)

    report.append(f"written  {folder / DOCUMENT}  {REPORT}  {PAGE}")
    steps: list[Step] = []
    for number in sorted({pair.train_set for pair in found_leaks.pairs}):
        path = found_leaks.train[number].path
        clean = f"{path.rstrip('/').removesuffix(SUFFIX)}-clean"
        words = ["subset", path, "--but", str(folder / DOCUMENT), "--output", clean]
        command = f"python -m jobs {shlex.join(words)}"
        report.append(f"to train without the leaks, run {command}")
        steps.append({"do": "first", "command": command, "text": report[-1], "replaces": path, "writes": clean})
    document = {
        "leaks": str(folder / DOCUMENT),
        "page": str(folder / PAGE),
        "pairs": len(found_leaks.pairs),
        "compared": found_leaks.looked_at,
        "report": report,
        "next": steps,
    }
    return Answer(document, report_lines)
