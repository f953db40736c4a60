"""Drains this machine's Ray node, and waits until all runs on it have committed and left.

    python deploy/leave_node.py 110          # in a pod's preStop hook, or when a spot machine is reclaimed

1. The node is drained: runs with a worker on it commit their step and continue on other nodes; a run with its driver
   on it commits and ends with exit code 75 (docs/design/cluster.md, "Notices").
2. The command returns when no worker or driver is left on the node, or after the given number of seconds.
"""

import subprocess
import sys
import time
from contextlib import suppress

import psutil
import ray

POLL_S = 1.0
# A worker is forked by its agent's fork server, so both have the same command line.
FORK_SERVER = "jobs.cluster.fork_server"
DRIVER = ["-m", "jobs", "run"]  # beginning of a driver's arguments


def main(patience_s: float) -> None:
    """Drain this node, and wait until runs have left it."""
    deadline = time.monotonic() + patience_s
    ray.init(address="auto", logging_level="error", log_to_driver=False)
    context = ray.get_runtime_context()
    command = ["ray", "drain-node", "--address", context.gcs_address, "--node-id", context.get_node_id()]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "this machine is about to leave"]
    command += ["--deadline-remaining-seconds", str(int(patience_s))]
    subprocess.run(command, check=True)
    while is_busy() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def is_busy() -> bool:
    """Return whether a worker or driver of a run is on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == DRIVER:
            return True
        # The process may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if FORK_SERVER in words and parent is not None and parent.cmdline() == words:
                return True
    return False


if __name__ == "__main__":
    main(float(sys.argv[1]))
