"""Record the call stack of three events of a run: the start of workers, the first forward pass, the first commit.

python -m tests.support.stacks FOLDER RECIPE [key=value ...]    # runs the recipe, leaves FOLDER/<event>.json
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from data import storage
from jobs.__main__ import main
from jobs.cluster import fork_server, nodes
from jobs.cluster.nodes import ThisMachine
from tests.support.drives import launch_by_fork

ROOT = Path(__file__).parents[2]
PACKAGES = ("models", "data", "pipeline", "jobs")

Call = tuple[str, str]  # the file, from the root of the checkout, and the function's qualified name


def our_calls() -> list[Call]:
    """Return the active calls of our four packages in this thread, outermost first."""
    calls = []
    for frame, _ in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        if is_ours:
            calls.append((str(path.relative_to(ROOT)), frame.f_code.co_qualname))
    calls.reverse()
    return calls


def record(folder: Path, event: str) -> None:
    """Write the call stack of the first event with this name; ignore later ones."""
    file = folder / f"{event}.json"
    if not file.exists():
        file.write_text(json.dumps(our_calls()))


def recorded(folder: Path, event: str) -> list[Call]:
    """Return the recorded call stack of an event. Raises an error if the event did not happen."""
    file = folder / f"{event}.json"
    assert file.exists(), f"no process recorded the event {event}"
    return [(path, name) for path, name in json.loads(file.read_text())]


def recording_worker(folder: Path, run_worker: Callable[..., None]) -> Callable[..., None]:
    """Wrap `run_worker` of a forked worker so that events in the worker are recorded."""
    rename = storage.rename

    def before_forward(module: torch.nn.Module, inputs: object) -> None:
        # `model(images)`: our outermost module, which DeepSpeed's engine calls.
        if type(module).__module__.split(".")[0] == "models":
            record(folder, "forward")

    def before_rename(source: Path, destination: Path) -> None:
        # The rename that commits a checkpoint.
        if destination.name.startswith("step-"):
            record(folder, "commit")
        rename(source, destination)

    def run_and_record(*arguments: object) -> None:
        register_module_forward_pre_hook(before_forward)
        storage.rename = before_rename  # type: ignore[assignment]
        run_worker(*arguments)

    return run_and_record


def recording_call(folder: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `ThisMachine.call` to record the call stack at the start of the first workers."""

    def record_and_call(place: object, method: str, *arguments: object) -> Any:
        if method == "start":
            record(folder, "start")
        return call(place, method, *arguments)

    return record_and_call


def numbered(calls: list[Call]) -> Iterator[str]:
    """Return the calls as numbered lines: "1 jobs/__main__.py main"."""
    for number, (path, name) in enumerate(calls, 1):
        yield f"{number:2} {path:32} {name}"


def record_run(folder: Path, words: list[str]) -> int:
    """Run a recipe in this process and its forks, record the events, and return the command's exit code."""
    # The fork server is a fork of this process, so patches made here also apply in the workers.
    fork_server.ForkServer.launch = launch_by_fork  # type: ignore[method-assign, assignment]
    fork_server.run_worker = recording_worker(folder, fork_server.run_worker)  # type: ignore[assignment]
    ThisMachine.call = recording_call(folder, ThisMachine.call)  # type: ignore[method-assign]
    code = main(["run", *words])
    for machine in nodes._machines.values():
        machine.agent.close()
    return code


if __name__ == "__main__":
    sys.exit(record_run(Path(sys.argv[1]), sys.argv[2:]))
