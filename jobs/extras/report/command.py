"""The command `patchline report`, with its arguments and options."""

import sys
import webbrowser
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from data.errors import UsageError
from jobs.answer import Answer
from jobs.commands.arguments import Debug
from jobs.commands.status import no_run, run_or_stage
from jobs.stage_folders import RECORD

MAX_RUNS = 200


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run directories, folders of single stages, or a folder of runs."),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File to write; default: RUN/report.html, or ./comparison.html for several runs."
        ),
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Also write the learning curves and the figures of studies there, as PDF and SVG for a paper.",
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    _debug: Debug = False,
) -> Answer:
    """Write an HTML report of a run, or of several runs with the first step at which they differ."""
    from jobs.extras import stored_runs
    from jobs.extras.report.page import natural, write_report
    from jobs.extras.report.page_watcher import NAME

    with ExitStack() as copies:
        paths = []
        stores = {}
        for run in runs:
            if "://" in run:
                store, stage = copies.enter_context(stored_runs.local_copy(run, with_logs=True))
                paths.append(store.local / stage)
                stores[paths[-1]] = store
            else:
                path = run_or_stage(run)
                found = [path]
                if not (path / RECORD).exists() and not any(path.glob(f"*/{RECORD}")):
                    found = list({record.parents[1]: None for record in path.glob(f"*/*/{RECORD}")})
                    found.sort(key=lambda run: natural(run.name))
                if not found:
                    raise no_run(path)
                paths += found
        if len(paths) > MAX_RUNS:
            raise UsageError(f"{len(paths)} runs\n  expected at most {MAX_RUNS} runs")
        page = Path(output or "comparison.html")
        if output is None and len(paths) == 1:
            page = Path(NAME) if "://" in runs[0] else paths[0] / NAME
        if output is not None and (page.is_dir() or not page.parent.is_dir()):
            problem = f"{page} is a folder" if page.is_dir() else f"the folder {page.parent} does not exist"
            raise UsageError(f"--output {page}: {problem}\n  expected a file name such as report.html")
        if figures is not None and Path(figures).is_file():
            raise UsageError(f"--figures {figures} is a file\n  expected a folder (created if it does not exist)")
        write_report(paths, page, stores)
        written = []
        if figures is not None:
            from jobs.extras.report.paper import write_figures

            written = write_figures(paths, Path(figures), stores)
    if open_ and not webbrowser.open(page.absolute().as_uri()):
        print(
            "cannot open a browser on this machine; copy the report, a self-contained file, to a machine with one",
            file=sys.stderr,
        )
    return Answer({"page": str(page), "runs": runs, "figures": list(map(str, written))}, lines_of)


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """Return the command's output."""
    lines = [f"page: {document['page']}"]
    if document["figures"]:
        count = len(document["figures"])
        lines.append(f"figures: {count} files in {Path(document['figures'][0]).parent}, half of them PDF, half SVG")
    return lines
