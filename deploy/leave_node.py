"""Tells Ray that this machine is about to go, and waits until what runs on it has committed and left.

    python deploy/leave_node.py 110          # a pod's preStop hook; or whatever hears of a spot machine's end

1. The node is drained: runs with a worker here commit their step and go on elsewhere; a run whose driver is here
   commits and ends with 75 (docs/design/cluster.md, "Notices").
2. It returns when no worker and no driver is left here, or after so many seconds.
"""

import subprocess
import sys
import time
from contextlib import suppress

import psutil
import ray

POLL_S = 1.0
# A worker is a fork of its agent's fork server, and has the command of it; and how the command of a driver begins.
FORK_SERVER = "jobs.cluster.fork_server"
DRIVER = ["-m", "jobs", "run"]


def main(patience_s: float) -> None:
    """Drain this node, and wait for what is on it."""
    deadline = time.monotonic() + patience_s
    ray.init(address="auto", logging_level="error", log_to_driver=False)
    context = ray.get_runtime_context()
    command = ["ray", "drain-node", "--address", context.gcs_address, "--node-id", context.get_node_id()]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "this machine is about to go"]
    command += ["--deadline-remaining-seconds", str(int(patience_s))]
    subprocess.run(command, check=True)
    while is_busy() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def is_busy() -> bool:
    """Tell whether a worker of a run, or the driver of one, is on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == DRIVER:
            return True
        # What ends meanwhile is no worker any more.
        with suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if FORK_SERVER in words and parent is not None and parent.cmdline() == words:
                return True
    return False


if __name__ == "__main__":
    main(float(sys.argv[1]))
