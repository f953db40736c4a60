"""The watchdog: a hang is reported with rank, phase and shard."""

import pytest
import torch

from data.index.document import load_index
from data.reader import ShardReader
from pipeline.evaluation.evaluator import EvaluationGroup, Evaluator
from pipeline.monitoring.watchdog import PhaseReport, Phases, Stall, Watch, read_phase

pytestmark = pytest.mark.quick


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def group(tmp_path) -> list[Phases]:
    return [Phases(tmp_path, rank, 3600) for rank in range(3)]


class FolderWatch(Watch):
    """A watch that gets the phases that an agent would read from the workers' folder."""

    def __init__(self, folder, world: int, **options) -> None:
        super().__init__(world, **options)
        self.folder = folder

    def find_stall(self, frozen):
        places = {rank: read_phase(self.folder, rank) for rank in range(self.world)}
        return super().find_stall({rank: place for rank, place in places.items() if place is not None}, frozen)


@pytest.fixture
def watch(tmp_path, clock, group) -> FolderWatch:
    return FolderWatch(tmp_path, 3, stall_s=10, clock=clock)


def awake(rank: int) -> bool:
    return False


def put(group: list[Phases], *phases: str) -> None:
    """Move all workers through a whole step, then into the given phases."""
    order = ["data", "forward", "backward", "reduce"]
    for worker, phase in zip(group, phases, strict=True):
        for passed in [*order, *order[: order.index(phase)]]:
            worker.enter(passed, 6)
        worker.enter(phase, 7, "train-000003.tar" if phase == "data" else "")


READER = "data of step 8, shard train-000003.tar"
WAITED_FOR = "stuck for 11s; the other workers are waiting for it"
COLLECTIVE = "stuck collective: all 3 workers have been in it for 11s"
FROZEN = "frozen: stopped by a signal, no progress for 11s"
VERDICTS = [  # phases of the three workers, the stopped rank; expected rank, phase and cause
    (("reduce", "data", "reduce"), None, 1, READER, "stalled reader: no batch for 11s"),
    (("reduce", "reduce", "forward"), None, 2, "forward of step 8", WAITED_FOR),
    (("reduce", "reduce", "reduce"), None, 0, "reduce of step 8", COLLECTIVE),
    (("reduce", "backward", "reduce"), 1, 1, "backward of step 8", FROZEN),
    (("reduce", "reduce", "reduce"), 2, 2, "reduce of step 8", FROZEN),
    (("data", "data", "reduce"), None, 0, READER, "stalled reader: no batch for 11s"),
]


@pytest.mark.parametrize(("phases", "stopped", "rank", "place", "cause"), VERDICTS)
def test_stall_names_the_late_worker(phases, stopped, rank, place, cause, group, watch, clock) -> None:
    put(group, *phases)
    assert watch.find_stall(awake) is None
    clock.now = 9
    assert watch.find_stall(awake) is None, "judged before the time-out"
    clock.now = 11
    assert watch.find_stall(lambda r: r == stopped) == Stall(rank, cause)
    assert str(watch.places[rank]) == place


def test_no_stall_while_any_worker_moves(group, watch, clock) -> None:
    put(group, "reduce", "data", "reduce")
    for clock.now in range(0, 60, 6):
        group[1].enter("data", 7)
        assert watch.find_stall(awake) is None


def test_every_phase_is_watched(tmp_path, group, watch, clock) -> None:
    """Watch a worker that never starts, one stuck at the start, a rank 0 working alone, a stuck evaluation."""
    late = FolderWatch(tmp_path, 3, stall_s=10, start_s=100, clock=clock)
    for worker in group[:2]:
        worker.enter("join", 0)
    assert watch.find_stall(awake) is late.find_stall(awake) is None
    clock.now = 11
    assert watch.find_stall(awake) == Stall(2, "not started: no progress for 11s")
    assert late.find_stall(awake) is None, "importing takes its time"
    clock.now = 12
    with group[0].rank_0_phase("restore", 0, True):  # rank 0 restores while the others wait
        for worker in group[1:]:
            for phase in ("restore", "wait") if worker is group[1] else ("join", "restore", "wait"):
                worker.enter(phase, 0)
        assert watch.find_stall(awake) is None
        clock.now = 23
        assert watch.find_stall(awake) == Stall(0, "stuck for 11s; the other workers are waiting for it")
        assert str(watch.places[0]) == "restore"
    group[2].enter("evaluate", 40, "test-000001.tar")
    assert watch.find_stall(awake) is None
    assert str(watch.places[2]) == "evaluate after step 40, shard test-000001.tar"


def test_first_worker_that_does_not_start_is_named_unless_another_is_stopped(group, watch, clock) -> None:
    group[0].enter("join", 0)
    watch.find_stall(awake)
    clock.now = 11
    assert watch.find_stall(awake) == Stall(1, "not started: no progress for 11s")
    clock.now = 22
    assert watch.find_stall(lambda rank: rank == 2).rank == 2


def places_of(world: int, steps: int, behind: int | None) -> dict[int, PhaseReport]:
    """Return phases of workers after some steps, one of which is still in an earlier phase."""
    entered = 100 + 4 * steps
    places = dict.fromkeys(range(world), PhaseReport(entered, "reduce", 8, ""))
    if behind is not None:
        places[behind] = PhaseReport(entered - 2, "forward", 8, "")
    return places


@pytest.mark.parametrize("world", [256, 4096])
def test_large_group_stalls_only_when_its_last_worker_stops_moving(world, clock) -> None:
    watch = Watch(world, stall_s=10, clock=clock)
    places = places_of(world, 0, None)
    assert watch.find_stall(places, awake) is None
    # All workers hang except one.
    clock.now = 11
    places[world - 1] = PhaseReport(102, "reduce", 8, "")
    assert watch.find_stall(places, awake) is None
    clock.now = 22
    stuck = world // 2
    places = {rank: PhaseReport(103 - (rank == stuck), "reduce", 8, "") for rank in range(world)}
    assert watch.find_stall(places, awake) is None, "they have moved since"
    clock.now = 33
    assert watch.find_stall(places, awake) == Stall(stuck, "stuck for 11s; the other workers are waiting for it")


def test_extra_is_called_with_each_phase(group) -> None:
    phases: list[tuple[str, int]] = []
    group[0].on_enter = lambda phase, step: phases.append((phase, step))
    group[0].enter("data", 6, "train-000003.tar")
    with group[0].rank_0_phase("restore", 7, is_rank_0=True):
        group[1].enter("data", 6)
    assert phases == [("data", 6), ("restore", 7), ("wait", 7)]


@pytest.mark.parametrize("letter", ["a", "é", "𝄞"])
def test_long_shard_name_is_cut_at_the_start(letter, group, watch) -> None:
    for worker in group:
        worker.enter("data", 10**9, 244 * letter + "-000123.tar")
    assert watch.find_stall(awake) is None
    place = str(watch.places[2])
    assert place.startswith(f"data of step {10**9 + 1}, shard …{letter}")
    assert place.endswith(f"{letter}-000123.tar")


def test_shard_name_that_is_not_utf8_can_be_logged(tmp_path, group) -> None:
    group[0].enter("data", 6, "caf\udce9.tar")
    assert str(read_phase(tmp_path, 0)).encode() == rb"data of step 7, shard caf\udce9.tar"


def test_evaluation_phase_names_the_shard_being_read(tmp_path, shards, monkeypatch) -> None:
    """Read batches of 30 from shards of 100: the phase file always names the shard being read."""
    worker = Phases(tmp_path, 0, 3600)
    index = load_index(shards / "train")
    evaluator = Evaluator(
        group=EvaluationGroup(worker, torch.device("cpu"), wants_stop=lambda: False),
        model=torch.nn.Identity(),
        dtype=torch.float32,
        folder=tmp_path,
        preprocess="resize(16)",
        micro_batch=30,
    )
    named: list[str] = []
    read = ShardReader.read

    def reading(reader: ShardReader, shard: int, sample: int) -> tuple[str, bytes, bytes]:
        place = read_phase(tmp_path, 0)
        assert place is not None
        assert index.shards[shard].name in place.shard, f"{index.shards[shard].name} is read, {place.shard} is named"
        named.append(place.shard)
        return read(reader, shard, sample)

    monkeypatch.setattr(ShardReader, "read", reading)
    assert sum(batch.mask.sum() for batch in evaluator.batches(index)) == index.samples == len(named)
    assert named[0] == index.shards[0].name
    assert f"{index.shards[0].name} … {index.shards[1].name}" in named
    worker.close()


def test_worker_continues_on_a_full_disk(tmp_path, monkeypatch) -> None:
    def refuse(*args):
        raise OSError(28, "No space left on device")

    worker = Phases(tmp_path, 0, 3600)
    monkeypatch.setattr("os.pwrite", refuse)
    worker.enter("data", 1)
    worker.close()
    assert (tmp_path / "rank-00000.phase").read_text() == ""
