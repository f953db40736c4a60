"""Nodes that are unlike the others: left out where enough are left, and otherwise named in the refusal."""

from collections.abc import Mapping, Set
from typing import Any

import pytest

from data.errors import ExitCode
from jobs.cluster import supervisor
from jobs.cluster.failure import StageFailed, WorkerGroupError
from jobs.cluster.supervisor import leave_out_unlike
from jobs.cluster_config import ClusterConfig
from pipeline.identity import NO_RANK, Identity
from tests.contexts import pretrain_context
from tests.identities import worker


class NodesByHand:
    """Nodes with these versions of torch, each with room for two workers; the ids are "id0", "id1", …."""

    def __init__(self, versions: str, code: Mapping[int, str]) -> None:
        self.known: dict[str, Identity] = {}
        for number, version in enumerate(versions):
            node = worker(number, packages={"torch": version}, code=code.get(number, "a" * 64))
            self.known[f"id{number}"] = {**node, "rank": NO_RANK}
        self.left_out: set[str] = set()

    def identities(self) -> dict[str, Identity]:
        return self.known

    def leave_out(self, node_ids: Set[str], least: int) -> int:
        self.left_out |= node_ids
        return 2 * (len(self.known) - len(node_ids))


@pytest.mark.parametrize(
    ("versions", "code", "least", "left_out", "said"),
    [
        ("132", {}, 2, set(), ": a tie, each on 1 of 3 nodes"),
        ("322", {}, 4, {"id0"}, "n0: left out for this campaign, because node n0 has torch 3, 2 of 3 nodes 2; "),
        ("322", {}, 5, {"id0"}, "\n  without n0 there is room for 4 of 5 workers"),
        ("2232", {1: "b" * 64}, 4, {"id1", "id2"}, "n1, n2: left out for this campaign, because node n1 runs "),
        ("22", {0: "b" * 64, 1: "b" * 64}, 1, {"id0", "id1"}, "\n  without n0, n1 there is room for 0 of 1 workers"),
        # The odd node has gone meanwhile; or there is one machine, of which nobody is asked.
        ("22", {}, 1, set(), "worker 1 on n1 has torch 3"),
        ("", {}, 1, set(), "worker 1 on n1 has torch 3"),
    ],
)  # fmt: skip
def test_nodes_that_are_unlike_most_are_left_out_where_enough_are_left(
    versions, code, least, left_out, said, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(supervisor, "code_version", lambda: "a" * 64)
    lines: list[str] = []
    context = pretrain_context(tmp_path, ClusterConfig(workers=4), log=lines.append)
    nodes: Any = NodesByHand(versions, code)
    failure = WorkerGroupError(
        0, "n0", "UnlikeNodes: worker 1 on n1 has torch 3", exit_code=ExitCode.UNAVAILABLE, kind="UnlikeNodes"
    )
    try:
        leave_out_unlike(context, nodes, failure, least)
    except StageFailed as error:
        assert error.exit_code == ExitCode.UNAVAILABLE
        assert str(error).startswith("pretrain: worker 1 on n1 has torch 3")
        lines.append(str(error))
    assert len(lines) == 1 and said in lines[0], lines
    assert nodes.left_out == left_out
