"""A Ray cluster on the hosts of tests/support/hosts.py, started as the README's "Submit to a cluster" says, line by
line.

    with RayHosts(shared, ["h0", "h1", "h2"]) as cluster:      # the first is the head
        driver = cluster.campaign(recipe, run)                  # `python -m jobs run` on the head, beside the cluster
        cluster.network["h1"].kill()
        cluster.join("h1")                                      # booted anew under its old name

Only one line of the README belongs to the other machines: the one that joins them.
"""

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from pipeline.monitoring.telemetry import read_metrics
from tests.support.hosts import HOME, ROOT, Host, Network

HEADING = "## Submit to a cluster"
HEAD_LINE = "ray start --head"
NODE_LINE = "ray start --address"
# A busy machine of two cores runs three hosts: Ray's agents take longer to start than it waits for them.
PATIENCE = {"RAY_agent_register_timeout_ms": "240000", "RAY_worker_register_timeout_seconds": "240"}
START_TIMEOUT_S = 180.0
POLL_S = 0.01


def readme_lines() -> list[str]:
    """Return the lines of the first code block of the README's section, without their comments."""
    section = (ROOT / "README.md").read_text().partition(HEADING)[2]
    block = section.split("```")[1]
    return [line.partition(" # ")[0].strip() for line in block.strip().splitlines()]


def readme_line(word: str) -> str:
    """Return the only command of the section that contains the word."""
    (line,) = (line for line in readme_lines() if word in line)
    return line


def in_session(line: str) -> str:
    """Return a command with the section's preceding `export` lines: every command runs in a separate shell."""
    lines = readme_lines()
    exports = [earlier for earlier in lines[: lines.index(line)] if earlier.startswith("export ")]
    return "\n".join([*exports, line])


def do_not_say(line: str) -> None:
    """Discard output; the default for `say`."""


class RayHosts:
    """A Ray cluster of simulated hosts; the first host is the head."""

    def __init__(self, shared: Path, names: list[str], say: Callable[[str], None] = do_not_say) -> None:
        self.network = Network(shared)
        self.names = names
        self.say = say  # receives each typed command and its host
        self.token_path: dict[str, str] = {}  # for commands on the head whose home lacks the token
        try:
            self.start()
        except BaseException:
            self.network.close()
            raise

    def __enter__(self) -> "RayHosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.network.close()

    @property
    def head(self) -> Host:
        return self.network[self.names[0]]

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    def start(self) -> None:
        """Boot all hosts and start Ray on each, beginning with the head."""
        for name in self.names:
            self.network.boot(name)
        for line in (readme_line("get-auth-token"), readme_line(HEAD_LINE)):
            self._say_session(self.head.name, in_session(line))
            self.head.run(in_session(line), timeout_s=START_TIMEOUT_S, **PATIENCE)
        self._start_nodes(self.names[1:])

    def join(self, *names: str, **environment: str) -> None:
        """Boot new or killed hosts and join them to the cluster."""
        for name in names:
            self.network.boot(name)
        self._start_nodes(list(names), **environment)

    def drain(self, name: str, run: Path, stays_s: int) -> None:
        """Drain a host with a worker of the run, as a pool of preemptible nodes does."""
        (node_id,) = {record["node_id"] for record in newest_records(run).values() if record["node"] == name}
        self.head.run(
            f"ray drain-node --address {self.address} --node-id {node_id} --reason DRAIN_NODE_REASON_PREEMPTION "
            f"--reason-message 'taken back' --deadline-remaining-seconds {stays_s}",
            RAY_AUTH_MODE="token",
            **self.token_path,
        )

    def _start_nodes(self, names: list[str], **environment: str) -> None:
        token = self.head.run(f"cat {HOME}/.ray/auth_token").strip()
        command = in_session(readme_line(NODE_LINE)).replace("HEAD", self.head.name)
        # Ray limits its start to 30 s, which a busy machine may exceed; a systemd unit would retry it.
        again = " || ".join([command, *[command.splitlines()[-1]] * 2])
        log_file = self.network.shared / "nodes.log"
        with log_file.open("w") as log:
            # "with the head's token", as the README says.
            copy = f"(umask 077; mkdir {HOME}/.ray; printf {token} >{HOME}/.ray/auth_token)\n"
            started = []
            for name in names:
                self._say_session(name, command)
                started.append(self.network[name].start(copy + again, log, **PATIENCE, **environment))
            codes = [process.wait(START_TIMEOUT_S) for process in started]
        if any(codes):
            raise RuntimeError(f"{command}: exit codes {codes}\n{log_file.read_text()}")

    def _say_session(self, name: str, command: str) -> None:
        for line in command.splitlines():
            self.say(f"{name}$ {line}")

    def campaign(self, recipe: Path, run: Path, *overrides: str) -> "Driver":
        """Start `python -m jobs run` on the head."""
        return Driver(self, [str(recipe), f"run={run}", "cluster.backend=ray", *overrides], run)


class SupervisedHosts(RayHosts):
    """Hosts whose deploy/systemd units keep a Ray cluster and a campaign alive.

    Each host, when it is booted, starts its units (tests/support/supervisor.py): the first the head and the driver, the
    others a node each. From then on nobody types anything: tests cut, mend, kill and boot.
    """

    def __init__(self, shared: Path, names: list[str], recipe: Path) -> None:
        self.recipe = recipe  # <shared>/NAME.yaml, whole: the driver's unit adds nothing to it
        self.token = shared / "auth_token"
        self.token.write_text(os.urandom(32).hex())
        self.token.chmod(0o600)
        self.driver: subprocess.Popen[bytes] | None = None  # the supervisor of the driver, on the head
        super().__init__(shared, names)
        self.token_path["RAY_AUTH_TOKEN_PATH"] = str(self.token)

    def start(self) -> None:
        """Boot all hosts."""
        for name in self.names:
            self.network.boot(name)
            self._start_nodes([name])

    def _start_nodes(self, names: list[str], **environment: str) -> None:
        for name in names:
            if name == self.names[0]:
                self._start_unit(name, "patchline-head.service", environment)
                driver = f"patchline-driver@{self.recipe.stem}.service"
                self.driver = self._start_unit(name, driver, environment)
            else:
                self._start_unit(name, "patchline-node.service", environment)

    def stop_driver(self) -> None:
        """Stop the driver's unit as `systemctl stop` does; the process here has only entered the host."""
        assert self.driver is not None
        for process in psutil.Process(self.driver.pid).children():
            process.terminate()

    def _start_unit(self, host: str, unit: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        head = self.names[0]
        words = [f"HEAD={head}", f"RAY_ADDRESS={head}:6379", f"RECIPES={self.recipe.parent}"]
        words.append(f"RAY_AUTH_TOKEN_PATH={self.token}")
        command = ["python", "-m", "tests.support.supervisor", unit, *words]
        with (self.network.shared / f"{host}-{unit.partition('@')[0].removesuffix('.service')}.log").open("a") as log:
            return self.network[host].start(command, log, OMP_NUM_THREADS="1", **PATIENCE, **environment)


class Driver:
    """A running `python -m jobs run` on the head of a cluster, with its output."""

    def __init__(self, cluster: RayHosts, words: list[str], run: Path) -> None:
        self.cluster = cluster
        self.run = run
        self.log = run.parent / f"{run.name}.log"
        with self.log.open("a") as log:
            command = ["python", "-m", "jobs", "run", *words]
            self.process = cluster.head.start(command, log, RAY_ADDRESS=cluster.address, OMP_NUM_THREADS="1")

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit code and return it. Raises TimeoutError with the output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the driver had not ended after {timeout_s:.0f} s:\n{self.output}") from None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the command on its host; the process here has only entered the host for it."""
        for process in psutil.Process(self.process.pid).children():
            process.terminate()

    def until(self, claim: Callable[[], bool], timeout_s: float) -> float:
        """Wait until a claim about the run is true; return the seconds. Raises an error on timeout or early exit."""
        began = time.monotonic()
        while not claim():
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"waited {timeout_s:.0f} s in vain:\n{self.output}")
            if self.process.poll() is not None:
                raise TimeoutError(f"the driver ended with {self.process.poll()} meanwhile:\n{self.output}")
            time.sleep(POLL_S)
        return time.monotonic() - began


def newest_records(run: Path) -> dict[int, dict[str, Any]]:
    """Return the records of the started ranks of pretraining's newest attempt."""
    folders = sorted(run.glob("pretrain-*/attempts/attempt-*"))
    records = {}
    for path in sorted(folders[-1].glob("rank-*.json")):
        record = json.loads(path.read_text())
        records[record["rank"]] = record
    return records


def newest_nodes(run: Path) -> dict[int, str]:
    """Return the host of each rank of pretraining's newest attempt."""
    return {rank: record["node"] for rank, record in newest_records(run).items()}


def a_worker_host(driver: Driver, rng: random.Random) -> str:
    """Return a host, other than the head, on which a worker runs."""
    head = driver.cluster.names[0]
    return rng.choice(sorted(node for node in newest_nodes(driver.run).values() if node != head))


def has_reported(run: Path, step: int) -> Callable[[], bool]:
    """Return a function that tells whether any attempt of the run has reported the step."""

    def look() -> bool:
        return any(record["step"] >= step for folder in run.glob("pretrain-*") for record in read_metrics(folder))

    return look


def is_saving(run: Path, step: int | None = None) -> Callable[[], bool]:
    """Return a function that tells whether a save of this step, or of any step, has begun but is not committed."""
    number = "*" if step is None else f"{step:010d}"
    return lambda: any(run.glob(f"pretrain-*/checkpoints/.tmp-{number}-*"))
