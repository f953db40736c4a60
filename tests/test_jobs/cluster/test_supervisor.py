"""The supervisor with scripted worker groups: which attempt follows, after which wait, and how a stage ends."""

import dataclasses
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import ExitCode, Preempted
from jobs.cluster import supervisor
from jobs.cluster.elastic import Growth
from jobs.cluster.failure import StageFailed, WorkerGroupError
from jobs.cluster.supervisor import Attempt, exclude_node, exclude_unlike_nodes, supervise
from jobs.cluster.worker_group import DRAINED, DrainEvent
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.identity import NO_RANK, Identity
from pipeline.monitoring.watchdog import PhaseReport, Watch
from tests.support.contexts import pretrain_context
from tests.support.identities import worker

pytestmark = pytest.mark.quick

START = "the beginning (no checkpoint yet)"
GROWING = "committing this step, then continuing with more workers"
VALUE = {"step": 40}


@dataclass(frozen=True)
class Ends:
    """The end of one attempt, and the events before it."""

    cause: str = ""  # of worker 1's failure; "": it returns
    exit_code: int | None = None
    kind: str = ""
    commits: int | None = None  # a step
    grows: int | None = None  # number of workers to grow to
    drained: tuple[int | None, ...] = ()  # ranks on draining nodes; None: the driver's own node
    stops: bool = False  # the driver has received a stop request
    world: int = 2  # number of workers with room


DIES = Ends("killed by SIGKILL")
RAISES = Ends("ValueError: no", kind="ValueError")


@dataclass
class Stand:
    """Replaces nodes, worker groups, clock and checkpoints, and records the requests to them."""

    folder: Path
    script: list[Ends]
    cluster: ClusterConfig = ClusterConfig(workers=2, backend="processes", backoff_s=5.0)  # noqa: RUF009 (frozen)
    stops_at: float = float("inf")  # seconds on the test's clock
    steps: list[int] = field(default_factory=list)  # committed steps, oldest first
    log: list[str] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)  # of the nodes
    worlds: list[int] = field(default_factory=list)  # of the attempts
    seconds: float = 1000.0
    is_stopped: bool = False
    own_node = ""

    def context(self) -> Any:
        stop = lambda: self.is_stopped or self.seconds >= self.stops_at  # noqa: E731
        return pretrain_context(self.folder, self.cluster, log=self.log.append, stop_requested=stop)

    def reserve(self, run: str, worlds: list[int], log: Any, on_tick: Callable[[], None]) -> int:
        on_tick()
        self.asked.append(("reserve", tuple(worlds)))
        return self.script[0].world

    def room(self) -> int:
        return 0

    def avoid(self, node_ids: list[str]) -> None:
        self.asked.append(("avoid", *node_ids))

    def stay_on(self, node_ids: set[str]) -> None:
        self.asked.append(("stay on", *node_ids))

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def group(self, nodes: Any, cluster: ClusterConfig, folder: Path, **options: Any) -> Any:
        """A worker group that ends according to the script."""
        ends = self.script.pop(0)
        self.worlds.append(cluster.world)
        node = SimpleNamespace(node_id=f"id{cluster.world}")
        group = SimpleNamespace(drain_events={}, links=[SimpleNamespace(agent=node)], folder=folder, remarks=[])
        group.phases = lambda: {1: PhaseReport(7, "forward", 3, "")}

        def run(function: Any, task: Any, on_tick: Any) -> Any:
            on_tick.__self__.growth.target = ends.grows
            for rank in ends.drained:
                group.drain_events[rank] = DrainEvent(f"n{rank}", f"id{rank}", DRAINED)
            if ends.commits is not None:
                self.steps.append(ends.commits)
            self.is_stopped = ends.stops
            if ends.cause:
                raise WorkerGroupError(1, "n1", ends.cause, "its stacks", exit_code=ends.exit_code, kind=ends.kind)
            return VALUE

        group.run = run
        return group

    def supervise(self, monkeypatch: pytest.MonkeyPatch, worlds: tuple[int, ...] = (2,)) -> Any:
        clock = SimpleNamespace(monotonic=lambda: self.seconds, sleep=self.sleep, strftime=lambda text: "now")
        monkeypatch.setattr(supervisor, "nodes_of", lambda cluster: self)
        monkeypatch.setattr(supervisor, "WorkerGroup", self.group)
        monkeypatch.setattr(supervisor, "time", clock)
        monkeypatch.setattr(StageCheckpoints, "committed_steps", lambda checkpoints: self.steps[::-1])
        return supervise(print, lambda number: {"attempt": number}, self.context(), worlds=worlds, stall_s=60.0)


RESTARTS = [
    # attempts; for each restart, the wait in seconds and the start in the log
    ([Ends()], []),
    ([DIES, DIES, DIES, Ends()], [(5, START), (10, START), (20, START)]),
    ([dataclasses.replace(DIES, commits=0), Ends()], [(0, "step 0")]),
    ([DIES, dataclasses.replace(DIES, commits=4), DIES, Ends()], [(5, START), (0, "step 4"), (5, "step 4")]),
    # The same exception again, with a new checkpoint each time; another exception.
    (
        [dataclasses.replace(RAISES, commits=step) for step in (3, 6, 9)] + [Ends()],
        [(0, f"step {n}") for n in (3, 6, 9)],
    ),
    ([RAISES, Ends("KeyError: 'a'", kind="KeyError"), Ends()], [(5, START), (10, START)]),
]


@pytest.mark.parametrize(("script", "restarts"), RESTARTS)
def test_failed_attempt_is_followed_by_another_after_a_wait(script, restarts, tmp_path, monkeypatch) -> None:
    stand = Stand(tmp_path, list(script))
    causes = [ends.cause for ends in script[:-1]]
    assert stand.supervise(monkeypatch) == VALUE
    expected = []
    for cause, (seconds, start) in zip(causes, restarts, strict=True):
        wait = f" in {seconds} s" if seconds else ""
        expected.append(f"worker 1 on n1, in forward of step 4: {cause}; restarting from {start}{wait}")
    assert stand.log == expected
    # Waits consist of sleeps of 0.2 s.
    assert stand.seconds - 1000 == pytest.approx(sum(seconds for seconds, _ in restarts), abs=0.21 * len(restarts))
    incidents = tmp_path / "pretrain-1" / "incidents.txt"
    assert incidents.exists() == bool(causes)
    if causes:
        expected = []
        for number, cause in enumerate(causes, 1):
            expected += [f"now attempt {number}: worker 1 on n1, in forward of step 4: {cause}", "its stacks"]
        assert incidents.read_text().splitlines() == expected
    folders = sorted(path.name for path in (tmp_path / "pretrain-1" / "attempts").iterdir())
    assert folders == [f"attempt-{number:06d}" for number in range(1, len(script) + 1)]


ENDINGS = [
    # attempts, exit code, message
    ([RAISES, RAISES], 70, "pretrain: worker 1 on n1, in forward of step 4: ValueError: no\n  2 attempts in a row"),
    (
        [Ends("OSError: no", kind="PermissionError")] * 2,
        74,
        "2 attempts in a row ended without a new checkpoint; the next would",
    ),
    ([DIES] * 4, 70, "4 attempts in a row ended without a new checkpoint; the next would start from the beginning"),
    (
        [dataclasses.replace(DIES, commits=5)] + [DIES] * 4,
        70,
        "4 attempts in a row ended without .*; the next .* from step 5",
    ),
    ([Ends("DataError: shard 7", 65, "DataError")], 65, "^pretrain: shard 7$"),
    ([Ends("Preempted: stopped at step 9", 75, "Preempted", stops=True)], 75, "^stopped at step 9$"),
    ([Ends("Preempted: stopped at step 9", 75, "Preempted")], 75, "^stopped at step 9$"),
    ([dataclasses.replace(DIES, stops=True, commits=8)], 75, "killed by SIGKILL; stopped at step 8; run the same"),
    # If a stop and a move are both requested, the stop takes precedence.
    ([Ends("Preempted: at 9", 75, "Preempted", stops=True, grows=4)], 75, "^at 9$"),
    (
        [Ends("Preempted: at 9", 75, drained=(1, None), commits=9)],
        75,
        "; stopped at step 9, because this command runs on that node; run the same",
    ),
]


@pytest.mark.parametrize(("script", "exit_code", "message"), ENDINGS)
def test_stage_that_cannot_continue_ends_with_its_cause(script, exit_code, message, tmp_path, monkeypatch) -> None:
    stand = Stand(tmp_path, list(script))
    with pytest.raises((StageFailed, Preempted), match=message) as caught:
        stand.supervise(monkeypatch)
    assert caught.value.exit_code == exit_code
    assert not stand.script
    # A requested stop or move is not an incident.
    asked = [ends for ends in script if ends.exit_code == 75]
    assert (tmp_path / "pretrain-1" / "incidents.txt").exists() == (asked == [])


def test_stop_is_noticed_during_the_wait_for_a_restart(tmp_path, monkeypatch) -> None:
    stand = Stand(tmp_path, [DIES, DIES, Ends()], stops_at=1007.0)
    with pytest.raises(Preempted, match="stopped while waiting to restart from the beginning"):
        stand.supervise(monkeypatch)
    assert len(stand.script) == 1
    assert 1007 <= stand.seconds < 1007.5


def test_stop_before_the_first_attempt_leaves_no_files(tmp_path, monkeypatch) -> None:
    stand = Stand(tmp_path, [Ends()], is_stopped=True)
    with pytest.raises(Preempted, match="stopped before the workers started, at the beginning"):
        stand.supervise(monkeypatch)
    assert len(stand.script) == 1
    assert not (tmp_path / "pretrain-1" / "attempts").exists()


def test_a_stage_moves_off_nodes_grows_and_falls_back_without_a_restart(tmp_path, monkeypatch) -> None:
    asked = "Preempted: at a step"
    script = [
        Ends(asked, 75, drained=(0, 1), commits=5, world=2),
        Ends(asked, 75, grows=4, commits=8, world=2),
        Ends("killed by SIGKILL", world=4),
        Ends(world=2),
    ]
    stand = Stand(tmp_path, script)
    assert stand.supervise(monkeypatch, (4, 2)) == VALUE
    assert stand.log == [
        "leaving the cluster: n0 (its node is being drained), n1 (its node is being drained); "
        "moving the workers to other nodes, resuming from step 5",
        "scaling up from 2 to 4 workers, resuming from step 8",
        "worker 1 on n1, in forward of step 4: killed by SIGKILL; "
        "no commit with 4 workers, so falling back to 2 workers on the previous nodes and resuming from step 8",
    ]
    reserve = ("reserve", (4, 2))
    assert stand.asked == [
        reserve,
        ("avoid", "id0", "id1"),
        reserve,
        reserve,
        ("stay on", "id2"),
        ("reserve", (2,)),
    ]
    assert stand.worlds == [2, 2, 4, 2]
    assert stand.seconds == 1000


def test_incident_in_a_shard_whose_name_is_not_utf8_is_recorded(tmp_path) -> None:
    context = Stand(tmp_path, []).context()
    context.directory.mkdir(parents=True)
    phases = {1: PhaseReport(7, "data", 3, "caf\udce9.tar")}
    supervisor.write_incident(context, 3, WorkerGroupError(1, "n1", "killed by SIGKILL"), phases)
    text = (context.directory / "incidents.txt").read_text()
    assert r"in data of step 4, shard caf\udce9.tar: killed by SIGKILL" in text


@pytest.mark.parametrize("failing", [[DIES, DIES, DIES], [RAISES]])
def test_failures_before_a_move_with_a_commit_do_not_count_as_attempts_in_a_row(failing, tmp_path, monkeypatch) -> None:
    moves = Ends("Preempted: at 5", 75, drained=(1,), commits=5)
    stand = Stand(tmp_path, [*failing, moves, *failing, Ends()])
    assert stand.supervise(monkeypatch) == VALUE
    # The wait before a restart starts again at 5 s.
    waits = [5, 10, 20][: len(failing)]
    assert stand.seconds - 1000 == pytest.approx(2 * sum(waits), abs=0.21 * 2 * len(waits))


@pytest.mark.parametrize(
    "cause", ["killed by the out-of-memory killer", "OutOfMemoryError: CUDA", "bad_alloc", "other"]
)
def test_out_of_memory_incident_suggests_settings(cause, tmp_path) -> None:
    context = Stand(tmp_path, []).context()
    context.directory.mkdir(parents=True)
    supervisor.write_incident(
        context, 3, WorkerGroupError(2, "n2", cause, "stacks"), {1: PhaseReport(7, "forward", 3, "")}
    )
    remedy = (
        ""
        if cause == "other"
        else "; to use less memory, decrease micro_batch or data.processes, or increase checkpoint_blocks"
    )
    text = (context.directory / "incidents.txt").read_text().splitlines()
    assert text[0].endswith(f" attempt 3: worker 2 on n2: {cause}{remedy}")
    assert text[1:] == ["stacks"]


LOOKS = [
    # all ended, node draining, grows, stop requested → number of stop requests, log
    (False, False, False, False, 0, []),
    (True, False, False, False, 0, []),
    (False, True, False, False, 1, []),
    (
        False,
        False,
        True,
        False,
        1,
        [f"room for 4 workers, currently 2; {GROWING}"],
    ),
    (False, False, False, True, 1, []),
]


@pytest.mark.parametrize(("ended", "drained", "grows", "stops", "asked", "said"), LOOKS)
def test_workers_are_asked_to_commit_before_a_move_growth_or_stop(
    ended, drained, grows, stops, asked, said, tmp_path
) -> None:
    stand = Stand(tmp_path, [], is_stopped=stops)
    looks: list[object] = []
    stops_asked: list[bool] = []
    group = SimpleNamespace(
        folder=tmp_path, drain_events={1: "event"} if drained else {}, have_all_ended=lambda: ended, is_frozen=None
    )
    group.phases = dict
    group.request_stop = lambda: stops_asked.append(True) or True
    growth = Growth((4,), 60.0, lambda: 4, lambda: 8)
    growth.is_due = lambda: grows and (setattr(growth, "target", 4) or True)  # type: ignore[method-assign]
    watch = SimpleNamespace(world=2, find_stall=lambda *arguments: looks.append(arguments))
    attempt = Attempt(stand.context(), 1, group, watch, growth, can_commit=True)  # type: ignore[arg-type]
    group.node_names = ["n0", "n1"]
    attempt.check()
    assert len(stops_asked) == asked
    assert len(looks) == (not ended)
    assert stand.log == said
    # The new number of workers is logged once, and the stop is requested repeatedly.
    attempt.check()
    assert len(stops_asked) == 2 * asked
    assert len([line for line in stand.log if "room" in line]) == len(said)


def test_stuck_worker_ends_the_attempt(tmp_path) -> None:
    stand = Stand(tmp_path, [])
    now = [0.0]
    places = {0: PhaseReport(9, "reduce", 3, ""), 1: PhaseReport(7, "data", 3, "a.tar")}
    judged = SimpleNamespace(silent_failure=lambda rank, cause: WorkerGroupError(rank, f"n{rank}", cause))
    group = SimpleNamespace(folder=tmp_path, drain_events={}, have_all_ended=lambda: False, phases=lambda: places)
    group.is_frozen = lambda rank: False
    silent = [True]
    group.has_silent_agent = lambda: silent[0]
    group.evidence = lambda: judged
    watch = Watch(2, stall_s=60.0, clock=lambda: now[0])
    growth = Growth((), 60.0, lambda: 0, lambda: -1)
    attempt = Attempt(stand.context(), 1, group, watch, growth, can_commit=True)  # type: ignore[arg-type]
    attempt.check()
    now[0] = 61.0
    attempt.check()  # nothing is known about the worker: its agent is silent
    silent[0] = False
    with pytest.raises(WorkerGroupError, match="worker 1 on n1: "):
        attempt.check()


# ------------------------------------------------------------------------ nodes that differ from the majority


class NodesByHand:
    """Fake nodes with these versions of torch and room for two workers each; their ids are "id0", "id1", …."""

    def __init__(self, versions: str, code: Mapping[int, str]) -> None:
        self.known: dict[str, Identity] = {}
        for number, version in enumerate(versions):
            node = worker(number, packages={"torch": version}, code=code.get(number, "a" * 64))
            self.known[f"id{number}"] = {**node, "rank": NO_RANK}
        self.left_out: set[str] = set()

    def identities(self) -> dict[str, Identity]:
        return self.known

    def exclude(self, node_ids: Set[str], least: int) -> int:
        self.left_out |= node_ids
        return 2 * (len(self.known) - len(node_ids))


@pytest.mark.parametrize(
    ("versions", "code", "least", "left_out", "said"),
    [
        ("132", {}, 2, set(), ": a tie, each on 1 of 3 nodes"),
        ("322", {}, 4, {"id0"}, "excluded from this campaign: n0 (node n0 has torch 3, 2 of 3 nodes have 2); "),
        ("322", {}, 5, {"id0"}, "\n  without n0, the cluster has room for only 4 of 5 workers"),
        ("2232", {1: "b" * 64}, 4, {"id1", "id2"}, "excluded from this campaign: n1, n2 (node n1 runs "),
        ("22", {0: "b" * 64, 1: "b" * 64}, 1, {"id0", "id1"}, "\n  without n0, n1, the cluster has room for only 0"),
        # The differing node has left meanwhile, or the workers run on a single machine.
        ("22", {}, 1, set(), "worker 1 on n1 has torch 3"),
        ("", {}, 1, set(), "worker 1 on n1 has torch 3"),
    ],
)  # fmt: skip
def test_nodes_that_differ_from_the_majority_are_excluded_if_enough_remain(
    versions, code, least, left_out, said, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(supervisor, "code_version", lambda: "a" * 64)
    lines: list[str] = []
    context = pretrain_context(tmp_path, ClusterConfig(workers=4), log=lines.append)
    nodes: Any = NodesByHand(versions, code)
    failure = WorkerGroupError(
        0, "n0", "MismatchedNodes: worker 1 on n1 has torch 3", exit_code=ExitCode.UNAVAILABLE, kind="MismatchedNodes"
    )
    try:
        exclude_unlike_nodes(context, nodes, failure, least)
    except StageFailed as error:
        assert error.exit_code == ExitCode.UNAVAILABLE
        assert str(error).startswith("pretrain: worker 1 on n1 has torch 3")
        lines.append(str(error))
    assert len(lines) == 1, lines
    assert said in lines[0], lines
    assert nodes.left_out == left_out


@pytest.mark.parametrize(
    ("versions", "left_out", "line"),
    [
        ("222", {"id1"}, "excluded from this campaign: n1, whose worker 3 computed wrong results"),
        (
            "22",
            {"id1"},
            "n1 computed wrong results but cannot be excluded, because the other nodes do not have enough room",
        ),
        (
            "",
            set(),
            "n1 computed wrong results but cannot be excluded, because the other nodes do not have enough room",
        ),
    ],
)
def test_node_of_a_worker_with_wrong_results_is_excluded_if_enough_remain(versions, left_out, line, tmp_path) -> None:
    lines: list[str] = []
    context = pretrain_context(tmp_path, ClusterConfig(workers=4), log=lines.append)
    nodes: Any = NodesByHand(versions, {})
    node_id = "id1" if versions else ""  # without Ray, nodes have no ids
    failure = WorkerGroupError(3, "n1", "CorruptWorker: worker 3 is wrong", kind="CorruptWorker", node_id=node_id)
    exclude_node(context, nodes, failure, 4)
    assert lines == [line]
    assert nodes.left_out == left_out
