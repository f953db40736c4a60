"""The process that tells one tracker of a campaign: python -m jobs.monitor.tracking wandb|mlflow ORDER.

1. The order is a file that says what there is to tell:

       {"config": {"project": "vit"}, "run": "digits", "stages": [{"directory": "/runs/digits/pretrain-1a2b3c4d",
        "name": "pretrain", "facts": {"recipe": "a954ab872216", "config": {…}, …}}, …]}

2. Every few seconds the new records of each stage's metrics.jsonl go to the tracker: a record's numbers, at its step.
3. `tracker-wandb.json` in the stage's folder keeps the id of the stage's run there, and how many bytes were sent: after
   a restart the same run goes on, and nothing is sent twice.
4. Standard input closes: one more look, then the client has its time to send what it holds.

Lines on standard output are for people: the driver says them. Nothing here imports torch or Ray.
"""

import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from data.files import write_whole
from jobs.monitor.view import records_since
from pipeline.monitoring.telemetry import Record

LOOK_EVERY_S = 5.0
END_S = 60  # after the end of standard input; the driver may have been killed, and then nobody ends this process
NOT_NUMBERS = ("kind", "time", "attempt", "step")
LONGEST_TEXT = 500  # characters of a parameter in MLflow


class Sink(Protocol):
    """A tracker's client."""

    def begin(self, stage: Mapping[str, Any]) -> str:
        """Return the id of a new run of the tracker, for a stage."""

    def open(self, stage: Mapping[str, Any], run_id: str) -> None:
        """Go on with the run that has this id, or begin it, and tell what is known of the stage."""

    def send(self, records: Sequence[Record]) -> None:
        """Send records of the stage that is open."""

    def close(self) -> None:
        """End the stage that is open, once all is sent."""


# ------------------------------------------------------------------------ the two trackers


class Wandb:
    """Weights & Biases: one run a stage, grouped by the campaign's run."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        import wandb

        self.wandb = wandb
        self.order = order
        self.run: Any = None

    def begin(self, stage: Mapping[str, Any]) -> str:
        # Chosen here, so that it is known before the server has answered, and offline.
        return secrets.token_hex(6)

    def open(self, stage: Mapping[str, Any], run_id: str) -> None:
        wandb = self.wandb
        facts = stage["facts"]
        config = self.order["config"]
        self.run = wandb.init(
            project=config["project"],
            entity=config["entity"] or None,
            id=run_id,
            resume="allow",
            name=f"{self.order['run']}/{stage['name']}",
            group=self.order["run"],
            config=facts,
            allow_val_change=True,
            dir=stage["directory"],
            # This process computes nothing: what it prints and uses is not the run's.
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                disable_code=True,
                git_commit=facts.get("commit") or None,
            ),
        )
        # An attempt that went back to a checkpoint reports steps again: W&B's own counter would drop them.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        where = self.run.url or f"offline in {self.run.dir}; later: wandb sync"
        say(f"{stage['name']} is at {where}")

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self.run.log({**numbers_of(record), "step": record["step"]})

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """MLflow: one run a stage, tagged with the campaign's run."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow = mlflow
        self.order = order
        self.client = mlflow.MlflowClient(tracking_uri=order["config"]["uri"])
        self.run_id = ""

    def begin(self, stage: Mapping[str, Any]) -> str:
        name = self.order["config"]["experiment"]
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            experiment = self.client.get_experiment(self.client.create_experiment(name))
        run_name = f"{self.order['run']}/{stage['name']}"
        return self.client.create_run(experiment.experiment_id, run_name=run_name).info.run_id

    def open(self, stage: Mapping[str, Any], run_id: str) -> None:
        self.run_id = run_id
        self.client.update_run(run_id, status="RUNNING")
        facts = flat(stage["facts"])
        # MLflow refuses a parameter that changes; a field that may change on resume stays what it was at first. Tags,
        # which may change, tell of this start.
        known = self.client.get_run(run_id).data.params
        parameters = []
        for name, text in facts.items():
            if name not in known and text:
                parameters.append(self.mlflow.entities.Param(name, text[:LONGEST_TEXT]))
        for begin in range(0, len(parameters), 100):
            self.client.log_batch(run_id, params=parameters[begin : begin + 100])
        for name in ("code", "commit"):
            self.client.set_tag(run_id, f"patchline.{name}", facts[name])
        self.client.set_tag(run_id, "mlflow.source.git.commit", facts["commit"])
        say(f"{stage['name']} is run {run_id} of experiment {self.order['config']['experiment']}")

    def send(self, records: Sequence[Record]) -> None:
        metrics = []
        for record in records:
            milliseconds = int(record["time"] * 1000)
            for key, number in numbers_of(record).items():
                metrics.append(self.mlflow.entities.Metric(key, number, milliseconds, record["step"]))
        # The server takes so many at once.
        for begin in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics=metrics[begin : begin + 1000])

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


def sink_of(name: str, order: Mapping[str, Any]) -> Sink:
    """Return the client of a tracker. Raises ImportError where it is not installed."""
    if name == "wandb":
        return Wandb(order)
    return Mlflow(order)


def numbers_of(record: Record) -> dict[str, float]:
    """Return a record's numbers under the names that TensorBoard has them: {"train/loss": 2.841, …}."""
    numbers = {}
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in NOT_NUMBERS:
            numbers[f"{record['kind']}/{name}"] = float(value)
    return numbers


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as texts by dotted name."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            texts |= flat(value, f"{prefix}{name}.")
        else:
            texts[prefix + name] = str(value)
    return texts


# ------------------------------------------------------------------------ the process


class Courier:
    """Brings what is new in the stages' folders to a tracker."""

    def __init__(self, name: str, order: Mapping[str, Any], sink: Sink) -> None:
        self.name = name
        self.stages = order["stages"]
        self.sink = sink
        self.open_stage: Mapping[str, Any] | None = None

    def look(self) -> None:
        """Send what was added to every stage since the last look."""
        for stage in self.stages:
            directory = Path(stage["directory"])
            memory = self.memory_of(directory)
            while True:
                records, end = records_since(directory / "metrics.jsonl", memory["bytes"])
                if end == memory["bytes"]:
                    break
                self.go_to(stage, memory)
                self.sink.send([record for record in records if "step" in record])
                memory["bytes"] = end
                write_whole(self.memory_file(directory), json.dumps(memory))

    def go_to(self, stage: Mapping[str, Any], memory: dict[str, Any]) -> None:
        """Have this stage's run open in the tracker, and no other."""
        if self.open_stage is stage:
            return
        self.close()
        if memory["id"] is None:
            memory["id"] = self.sink.begin(stage)
            # At once: a run whose id is lost would be begun again.
            write_whole(self.memory_file(Path(stage["directory"])), json.dumps(memory))
        self.sink.open(stage, memory["id"])
        self.open_stage = stage

    def close(self) -> None:
        """End the run that is open in the tracker, if one is."""
        if self.open_stage is not None:
            self.open_stage = None
            self.sink.close()

    def memory_of(self, directory: Path) -> dict[str, Any]:
        """Return the id of a stage's run in the tracker, None where it has none yet, and how many bytes were sent."""
        path = self.memory_file(directory)
        if not path.exists():
            return {"id": None, "bytes": 0}
        return json.loads(path.read_text())

    def memory_file(self, directory: Path) -> Path:
        return directory / f"tracker-{self.name}.json"


def say(line: str) -> None:
    """Say a line to people, by way of the driver."""
    # The driver may be gone; then nobody listens, and the rest is sent all the same.
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())


def wait_for_end(closing: threading.Event) -> None:
    """Set the event when standard input closes, and see to it that this process does not outlive that for long."""
    sys.stdin.read()
    closing.set()


def main(name: str, order_file: Path) -> int:
    """Tell the tracker until standard input closes; return the exit code."""
    order = json.loads(order_file.read_text())
    closing = threading.Event()
    threading.Thread(target=wait_for_end, args=(closing,), daemon=True).start()
    # The driver decides when this ends, not whoever signals everything here.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        courier = Courier(name, order, sink_of(name, order))
    except ImportError as error:
        say(f"{error}; the run goes on without it\n  type pip install 'patchline[trackers]', on the driver's machine")
        return 0
    complaints: set[str] = set()
    is_over = False
    while not is_over:
        is_over = closing.wait(LOOK_EVERY_S)
        if is_over:
            signal.alarm(END_S)
        try:
            courier.look()
            if is_over:
                courier.close()
        except Exception as error:
            lines = str(error).strip().splitlines()
            complaint = f"{type(error).__name__}: {lines[0] if lines else ''}"
            # Each once: a server that is away is asked again at every look.
            if complaint not in complaints:
                say(f"{complaint}; the run goes on, what was not sent is sent later")
            complaints.add(complaint)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
