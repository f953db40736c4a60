"""Who ended an attempt under Ray: Train's error, the workers' own records and the state of the nodes, made into one.

1. Train's error names the workers that it saw fail. When one dies, all its peers raise within 0.1 s, so it names many.
2. A worker that left no end, and of which Train says nothing, may have gone with its node. That is asked for here,
   because Ray itself takes 15 s to find out, or 65 s. `lost_node` asks as soon as a peer has raised.
3. workers/failures.py picks the one to blame.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from data.errors import ClusterError
from jobs.scheduling import placement, queue
from jobs.workers.failures import group_failure, has_lost_a_peer
from jobs.workers.worker_files import WorkerRecord, oom_kills, records
from jobs.workers.worker_group import WorkerGroupError

ANSWER_S = 3.0  # for a node that is alive to take a connection
OOM_ANSWER_S = 20.0  # for a task on another node that reads a counter
EVICTED = "killed by Ray's out-of-memory killer"


def failure_of(error: BaseException, folder: Path, world: int) -> WorkerGroupError:
    """Join Train's error and the workers' own records into one that names who failed first."""
    # Train's error about workers has the errors of those that failed, by rank.
    worker_errors: Mapping[int, BaseException] | None = getattr(error, "worker_failures", None)
    if worker_errors is None:
        # Workers may outlive their controller for a moment in these places: others are asked for.
        queue.wait_again()
        placement.release()
        return _controller_failure(getattr(error, "controller_failure", error))
    written = records(folder, world)
    deaths = {}
    for rank, worker_error in worker_errors.items():
        # Where the folder is not there on its node, a worker cannot write down how it ended.
        if rank not in written and isinstance(worker_error, ClusterError):
            kind = type(worker_error).__name__
            exit_code = worker_error.exit_code
            return WorkerGroupError(rank, "another node", f"{kind}: {worker_error}", exit_code=exit_code, kind=kind)
        deaths[rank] = describe_death(worker_error, written.get(rank))
    # When a whole node dies, its peers raise before Ray knows of it, and Train ends the attempt because of them.
    for rank, loss in _gone_with_their_nodes(written).items():
        deaths.setdefault(rank, loss)
    return group_failure(folder, world, deaths)


def lost_node(folder: Path, world: int, written: Mapping[int, WorkerRecord]) -> WorkerGroupError | None:
    """Return the error of an attempt that has lost a node, as soon as its peers know; None where there is no such loss.

    `written` are the workers' records as last seen.
    Train cannot tell before Ray has missed the node, because it waits for an answer from every worker.
    """
    # Without a peer that has raised, a node that takes no connection may only be slow: that is for Ray to judge.
    if not any(has_lost_a_peer(record) for record in written.values()):
        return None
    deaths = _gone_with_their_nodes(written)
    if not deaths:
        return None
    return group_failure(folder, world, deaths)


def _gone_with_their_nodes(written: Mapping[int, WorkerRecord]) -> dict[int, str]:
    """Say of the workers that left no end how their nodes were lost, of those whose nodes were.

    Of none where a worker has asked for an exit code: then Train ends the others, who may not come to write their
    ends, and a node that is drained is gone as soon as its workers are.
    """
    losses: dict[int, str] = {}
    if any(record.get("exit_code") is not None for record in written.values()):
        return losses
    loss_of_node: dict[str, str] = {}  # a node that is silent takes seconds to ask, however many workers it had
    for rank, record in written.items():
        if "ended" in record:
            continue
        node_id = record.get("node_id", "")
        if node_id not in loss_of_node:
            loss_of_node[node_id] = _loss_of_node(record)
        if loss_of_node[node_id]:
            losses[rank] = loss_of_node[node_id]
    return losses


def _controller_failure(error: BaseException) -> WorkerGroupError:
    """Describe the end of Train's controller, for which no single worker is to blame."""
    if isinstance(error, ActorDiedError):
        cause = "Train's controller died (killed, or crashed)"
    elif isinstance(error, OutOfMemoryError):
        # Ray's memory monitor may kill all processes of a worker group, Train's controller included.
        cause = f"{EVICTED}: {str(error).splitlines()[0]}"
    else:
        cause = f"did not start: {type(error).__name__}: {error}"
    return WorkerGroupError(None, "", cause, str(error))


def describe_death(error: BaseException, record: WorkerRecord | None) -> str:
    """Say how a worker ended that left this record, and of which Train says this."""
    # A lost node takes its worker along: the node is the cause to name.
    loss = _loss_of_node(record) if record is not None else ""
    if loss:
        return loss
    # Ray's own killer, which acts before the kernel's, raises an error that Train wraps.
    ray_error = getattr(error, "health_check_failure", error)
    if isinstance(ray_error, OutOfMemoryError):
        return EVICTED
    # Ray does not tell of which signal a worker died, so the kernel's counter is a hint and no proof.
    if record is not None and _oom_kills_on(record) > record["oom_kills"]:
        return "its process died, and its node's out-of-memory killer has struck since it started"
    return "its process died (killed, or crashed)"


def _loss_of_node(record: WorkerRecord) -> str:
    """Say how the node of a worker was lost; "" where it is there. The next attempt is placed without a lost node."""
    node_id = record.get("node_id", "")
    for node in ray.nodes():
        if node["NodeID"] != node_id:
            continue
        if not node["Alive"]:
            return "its node left the cluster"
        # Ray's own health check takes 15 s for a node that refuses, and 65 s for one that is silent.
        if not _answers(node["NodeManagerAddress"], node["NodeManagerPort"]):
            placement.avoid(node_id)
            return "its node does not answer"
        return ""
    return "its node left the cluster"


def _answers(address: str, port: int) -> bool:
    """Tell whether a node's raylet takes a connection."""
    try:
        socket.create_connection((address, port), ANSWER_S).close()
    except OSError:
        return False
    return True


def _oom_kills_on(record: WorkerRecord) -> int:
    """Return the counter of out-of-memory kills of a worker's machine; another machine's is read by a task there."""
    if record["node"] == socket.gethostname():
        return oom_kills()
    # Not soft: on any other node the task would read the wrong counter.
    on_that_node = NodeAffinitySchedulingStrategy(record.get("node_id", ""), soft=False)
    # Without a CPU of its own, because the workers may have taken all CPUs of that node.
    remote_oom_kills: Any = ray.remote(num_cpus=0)(oom_kills)
    try:
        count = remote_oom_kills.options(scheduling_strategy=on_that_node).remote()
        return ray.get(count, timeout=OOM_ANSWER_S)
    except Exception:
        # The node is going as well, or is too busy to answer: then we do not know.
        return 0
