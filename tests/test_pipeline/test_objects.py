"""Workers exchange objects as JSON; received bytes that are not JSON never execute code."""

import io
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.errors import ClusterError, MismatchedNodes, RunOwned
from pipeline.checkpoints.manifest import Manifest, NewerSchema
from pipeline.checkpoints.stage_checkpoints import Decision, WrittenFile
from pipeline.objects import CLASSES, JsonReader, JsonWriter, encoded, send_as_json
from pipeline.process_group import Arrival

pytestmark = pytest.mark.quick

MANIFEST = Manifest(
    step=3, samples_seen=48, updates=3, ledger="ab", attempt=1, world=2, zero=1, config={"a": [1, None]}, key="k",
    code="c", bad_samples=0, masked=[(1, 2, 3, 4)],
)  # fmt: skip
RECORD: Any = {"bytes": 4, "sha256": "ab" * 32, "chunks": ["cd"]}
VALUES = [
    None,
    [True, 1, 0.1, -0.0, 1e308, math.inf, "é\ud83d\n", {"a": {"class": "a name"}}],
    {1: "a", (2, "b"): [None]},
    ("node", {"NCCL_DEBUG": "INFO"}),
    Decision(MANIFEST),
    Decision(None, "No space left on device", True),
    WrittenFile("rank-00000.safetensors", RECORD, node="n1"),
    Arrival({"node": "n", "rank": 1}, 1764071.25, True, 7),  # type: ignore[typeddict-item]
]


def sent(value: object) -> Any:
    file = io.BytesIO()
    JsonWriter(file).dump(value)
    return JsonReader(io.BytesIO(file.getvalue())).load()


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_object_arrives_as_it_was_sent(value) -> None:
    received = sent(value)
    assert received == value
    assert type(received) is type(value)


def test_numbers_of_arrays_and_tensors_arrive_bit_for_bit() -> None:
    array = np.array([[1, 2**62], [-3, 4]])
    tensor = torch.tensor([0.1, math.nan, -math.inf])
    received = sent({"array": array, "tensor": tensor, "scalar": np.int64(7)})
    assert received["array"].dtype == array.dtype
    assert received["array"].tolist() == array.tolist()
    assert received["tensor"].numpy().tobytes() == tensor.numpy().tobytes()
    assert int(received["scalar"]) == 7


@pytest.mark.parametrize("kind", [ClusterError, MismatchedNodes, RunOwned, NewerSchema])
def test_error_arrives_with_its_class_and_message(kind) -> None:
    received = sent([kind("two nodes differ")])[0]
    assert type(received) is kind
    assert str(received) == "two nodes differ"


class Attack:
    """Unpickling this creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_pickled_bytes_execute_nothing(tmp_path) -> None:
    target = tmp_path / "executed"
    content = pickle.dumps(Attack(target))
    with pytest.raises(ValueError):
        JsonReader(io.BytesIO(content)).load()
    assert not target.exists()
    pickle.loads(content)
    assert target.exists(), "the attack works on pickle"


@pytest.mark.parametrize(
    "text",
    [
        b'{"class": "os.system", "items": ["touch /tmp/x"]}',
        b'{"class": "subprocess.Popen", "fields": {"args": ["true"]}}',
        b'{"class": "array", "dtype": "|O", "shape": [1], "content": "AAAAAAAAAAA="}',
    ],
)
def test_class_outside_the_table_is_refused(text) -> None:
    with pytest.raises(ValueError, match="from another worker"):
        JsonReader(io.BytesIO(text)).load()


def test_object_of_another_class_is_not_sent() -> None:
    with pytest.raises(TypeError, match=r"objects of .*Attack; add this class to CLASSES"):
        encoded([Attack(Path("x"))])
    assert all(name.startswith(("pipeline.", "data.")) for name in CLASSES)


def test_collectives_of_a_real_group_send_json(tmp_path, monkeypatch) -> None:
    """A group of one worker over gloo; a pickle would contain the name of the module."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as torch_objects

    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(torch_objects, name, getattr(torch_objects, name))
    send_as_json()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, Decision(MANIFEST))
        assert gathered == [Decision(MANIFEST)]
        told = [WrittenFile("a", error="full", node="n")]
        dist.broadcast_object_list(told, src=0)
        assert told == [WrittenFile("a", error="full", node="n")]
        with pytest.raises(TypeError, match="Attack"):
            dist.all_gather_object(gathered, Attack(tmp_path))
    finally:
        dist.destroy_process_group()
