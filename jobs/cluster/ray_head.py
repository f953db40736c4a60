"""Starts the processes of an embedded Ray cluster, as a child of its reaper (reaper.py).

    python -m jobs.cluster.ray_head DIRECTORY CPUS

1. Ray's head and its node are started, all on 127.0.0.1, with a token that only this user can read.
2. "ready host:port", or "failed" and the reason, goes to the standard output.
3. This process waits for the end of its standard input, which is the reaper's. Ray's processes die with it.

Facts about Ray that this rests on were measured with 2.60.
"""

import logging
import os
import sys

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

from jobs.cluster.ray_token import ensure_token
from jobs.cluster.worker import LOOPBACK

OBJECT_STORE_BYTES = 200 * 2**20  # Train stores next to nothing; the default is 30 % of the memory


def start_node(directory: str, cpus: int) -> str:
    """Start Ray's processes and return the address of the cluster."""
    ensure_token()
    parameters = RayParams(
        node_ip_address=LOOPBACK,
        num_cpus=cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=directory,
        # Without it Train's run is not on the REST API, and Train warns once a second that it cannot ask for it.
        # Leaving it out saved no time that could be measured.
        include_dashboard=True,
        dashboard_host=LOOPBACK,
        # The first free port from 8265 on; a number would be that port or a failure.
        dashboard_port=None,
        # Any free port, and not 52365: of two clusters on one machine that want the same port, the later one starts
        # without its agent's server, says nothing, and then takes no jobs.
        dashboard_agent_listen_port=0,
        # Two processes are left out, which take half a CPU-second each: what asks for more nodes, of which there are
        # none, and what sends the workers' output to drivers, which do not ask for it.
        no_monitor=True,
        include_log_monitor=False,
    )
    # With `spawn_reaper` the kernel kills Ray's processes when this one dies.
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    return node.gcs_address


def main() -> None:
    # What Ray prints must not reach the pipe on which the driver waits, nor its processes keep it open.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.getLogger(ray.__name__).setLevel(logging.WARNING)
    directory, cpus = sys.argv[1:]
    try:
        print("ready", start_node(directory, int(cpus)), file=answer, flush=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        print("failed", reason[0], file=answer, flush=True)
        return
    answer.close()
    sys.stdin.read()


if __name__ == "__main__":
    main()
