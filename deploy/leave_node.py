"""Tells Ray that this machine is about to go, and waits until what runs on it has committed and left.

    python deploy/leave_node.py 110          # a pod's preStop hook; or whatever hears of a spot machine's end

1. The node is drained: runs with a worker here commit their step and go on elsewhere; a run whose driver is here
   commits and ends with 75 (docs/design/cluster.md, "Notices").
2. It returns when no worker and no driver is left here, or after so many seconds.
"""

import subprocess
import sys
import time

import psutil
import ray

POLL_S = 1.0
# Titles that Ray gives to the processes of Train's workers, and the command of a driver.
WORKER = "TrainWorker"
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
        is_worker = bool(words) and words[0].startswith("ray::") and WORKER in words[0]
        is_driver = words[1:4] == DRIVER
        if is_worker or is_driver:
            return True
    return False


if __name__ == "__main__":
    main(float(sys.argv[1]))
