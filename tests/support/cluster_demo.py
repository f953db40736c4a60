"""Run `make cluster-demo`: the commands of the README's "Submit to a cluster", on three simulated hosts.

1. Create three hosts (tests/support/hosts.py) and start Ray on each with the README's commands.
2. Submit, list and follow the digits campaign from the head, with the README's commands.
3. After the first commit, kill one of the two training hosts with all its processes: the run continues.
4. Stop the run, which commits, and submit it again: the same command resumes and finishes the campaign.

The demo always removes its hosts and processes. The run's folder stays for inspection.
"""

import subprocess
import sys
import time
from pathlib import Path

from data.errors import ExitCode
from pipeline.checkpoints.manifest import committed
from tests.support import hosts
from tests.support.hosts import ROOT, Host
from tests.support.ray_hosts import RayHosts, in_session, newest_nodes, readme_line

NAMES = ["head", "left", "right"]
STEP_TIMEOUT_S = 300.0
CAMPAIGN_TIMEOUT_S = 900.0
COMMITS_BEFORE_STOP = 2
POLL_S = 0.2


class Terminal:
    """Runs the README's commands on the head and shows their output as a user would see it."""

    def __init__(self, head: Host, shared: Path) -> None:
        self.head = head
        self.shared = shared
        print(f"{head.name}$ {readme_line('export RAY_ADDRESS')}", flush=True)

    def command(self, word: str) -> str:
        """Show the README's command that contains the word, and return it as a shell command."""
        line = readme_line(word)
        print(f"{self.head.name}$ {line.replace('/shared', str(self.shared))}", flush=True)
        return in_session(line).replace("/shared", str(self.shared))

    def type(self, word: str) -> None:
        """Run the README's command that contains the word, and show its output."""
        print(self.head.run(self.command(word), timeout_s=STEP_TIMEOUT_S), end="", flush=True)

    def follow(self) -> subprocess.Popen[bytes]:
        """Start the README's command that follows the run's log, and show the log as it arrives."""
        return self.head.start(self.command(" logs "), sys.stdout)


def main() -> int:
    """Run the demo; return exit code 0 if the campaign resumed and finished."""
    reason = hosts.missing()
    if reason:
        print(f"cluster-demo: {reason}\n  `make demo` shows a killed worker without hosts", file=sys.stderr)
        return ExitCode.UNAVAILABLE
    shared = ROOT / "runs" / time.strftime("cluster-demo-%Y%m%d-%H%M%S")
    shared.mkdir(parents=True)
    began = time.monotonic()
    print(f"cluster-demo: three hosts, {', '.join(NAMES)}, that share {shared}; the README's lines, typed on them")
    with RayHosts(shared, NAMES, say=print) as cluster:
        went_on = show_campaign(cluster, shared)
    print(f"cluster-demo: {time.monotonic() - began:.0f}s in all; hosts and processes are gone, the run is in {shared}")
    return ExitCode.DONE if went_on else ExitCode.INTERNAL


def show_campaign(cluster: RayHosts, shared: Path) -> bool:
    """Submit, kill a host, stop, submit again; return whether the loss was noticed and the campaign finished."""
    terminal = Terminal(cluster.head, shared)
    run = shared / "runs" / "digits"
    terminal.type(" submit ")
    terminal.type(" list")
    follower = terminal.follow()

    # Kill the first training host other than the head: the driver runs on the head.
    wait_for_commits(run, 1)
    nodes = newest_nodes(run)
    victim = next(node for node in nodes.values() if node != cluster.head.name)
    count = cluster.network[victim].kill()
    killed_at = time.monotonic()
    print(f"cluster-demo: {victim} is dead, with its {count} processes; the workers were on {nodes}", flush=True)
    wait_for_commits(run, COMMITS_BEFORE_STOP)
    nodes_after = newest_nodes(run)
    after_s = time.monotonic() - killed_at
    print(f"cluster-demo: {after_s:.0f}s later the workers on {nodes_after} have committed", flush=True)

    # `logs` ends as the run ends.
    terminal.type(" stop ")
    stopped_code = follower.wait(STEP_TIMEOUT_S)
    terminal.type(" submit ")
    ended_code = terminal.follow().wait(CAMPAIGN_TIMEOUT_S)
    terminal.type(" list")
    print(f"cluster-demo: the log of the stopped job ended with {stopped_code}, that of the second with {ended_code}")
    return victim not in nodes_after.values() and (stopped_code, ended_code) == (ExitCode.PREEMPTED, ExitCode.DONE)


def wait_for_commits(run: Path, count: int) -> None:
    """Wait until pretraining has committed this many checkpoints. Raises TimeoutError."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    steps: set[str] = set()
    while len(steps) < count:
        for folder in run.glob("pretrain-*/checkpoints"):
            steps.update(checkpoint.name for checkpoint in committed(folder))
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(steps)} of {count} commits in {STEP_TIMEOUT_S:.0f} s; see {run}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
