"""Records the calls that stand above an event; a module of its own, because workers import it by name."""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "pipeline", "jobs")

Call = tuple[str, str]  # the file, from the root of the checkout, and the function's qualified name


def our_calls() -> list[Call]:
    """The calls of our four packages that are under way in this thread, the outermost first."""
    calls = []
    for frame, _ in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        if is_ours:
            calls.append((str(path.relative_to(ROOT)), frame.f_code.co_qualname))
    calls.reverse()
    return calls


def record(folder: Path, event: str) -> None:
    """Write the calls above the first event of this name; later ones leave no trace."""
    file = folder / f"{event}.json"
    if not file.exists():
        file.write_text(json.dumps(our_calls()))


def recorded(folder: Path, event: str) -> list[Call]:
    """The calls above an event; fails where it has not happened."""
    file = folder / f"{event}.json"
    assert file.exists(), f"no process recorded the event {event}"
    return [(path, name) for path, name in json.loads(file.read_text())]


class RecordingTarget:
    """Stands in for what a worker process runs: records what happens in the worker, then calls the real thing."""

    def __init__(self, folder: Path, target: Callable[..., None]) -> None:
        self.folder = folder
        self.target = target

    def __call__(self, *arguments: object, **keywords: object) -> None:
        register_module_forward_pre_hook(self.before_forward)
        self.rename = os.rename
        os.rename = self.before_rename
        self.target(*arguments, **keywords)

    def before_forward(self, module: torch.nn.Module, inputs: object) -> None:
        """Record `model(images)`: the outermost module of ours, which DeepSpeed's engine calls."""
        is_ours = type(module).__module__.split(".")[0] == "models"
        if is_ours:
            record(self.folder, "forward")

    def before_rename(self, source: str | Path, destination: str | Path) -> None:
        """Record the rename that makes a checkpoint exist."""
        if Path(destination).name.startswith("step-"):
            record(self.folder, "commit")
        self.rename(source, destination)


def recording_start(folder: Path, start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    """`Process.start` that records who starts the first worker, and has what goes on in the worker recorded too."""

    def start_and_record(process: BaseProcess) -> None:
        record(folder, "start")
        process._target = RecordingTarget(folder, process._target)  # type: ignore[attr-defined]
        start(process)

    return start_and_record


def numbered(calls: list[Call]) -> Iterator[str]:
    """The calls as lines of a map: "1 jobs/__main__.py main"."""
    for number, (path, name) in enumerate(calls, 1):
        yield f"{number:2} {path:32} {name}"
