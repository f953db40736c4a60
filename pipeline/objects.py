"""Sends objects between workers as JSON, because torch's object collectives would pickle them.

Unpickling can execute arbitrary code. Torch's store and gloo accept connections from anyone who can reach their ports,
so an attacker could run code in the workers. `send_as_json` replaces the pickler of `torch.distributed` in this
process, for `all_gather_object`, `broadcast_object_list` and their callers in DeepSpeed. A received object can only be
a JSON value, a tuple, a dict with other keys, an array of numbers, a tensor, or an instance of a class in CLASSES.

    Decision(None, "full disk", False)  →  {"class": "pipeline….Decision", "fields": {"manifest": null, …}}
    (1, 2.5)                            →  {"class": "tuple", "items": [1, 2.5]}
"""

import base64
import dataclasses
import importlib
import json
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as torch_objects

# Accepted dataclasses and exceptions; exceptions are sent with their arguments.
CLASSES = (
    "pipeline.checkpoints.manifest.Manifest",
    "pipeline.checkpoints.stage_checkpoints.WrittenFile",
    "pipeline.checkpoints.stage_checkpoints.Decision",
    "pipeline.process_group.Arrival",
    "pipeline.checkpoints.manifest.DamagedCheckpoint",
    "pipeline.checkpoints.manifest.NewerSchema",
    "data.errors.CheckpointError",
    "data.errors.ClusterError",
    "data.errors.MismatchedNodes",
    "data.errors.RunOwned",
)
NUMBERS = "biuf"  # accepted kinds of NumPy arrays: booleans, integers, floats; arrays of objects would be pickled


def send_as_json() -> None:
    """Make object collectives in this process send JSON. Raises RuntimeError if torch's private names have changed."""
    if not (hasattr(torch_objects, "_pickler") and hasattr(torch_objects, "_unpickler")):
        raise RuntimeError(f"pipeline/objects.py does not support how torch {torch.__version__} pickles objects")
    torch_objects._pickler = JsonWriter  # type: ignore[assignment]
    torch_objects._unpickler = JsonReader  # type: ignore[assignment]


class JsonWriter:
    """Replacement for `pickle.Pickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def dump(self, value: object) -> None:
        """Write an object. Raises TypeError if the receiver would reject any part of the object."""
        self.file.write(json.dumps(encoded(value)).encode())


class JsonReader:
    """Replacement for `pickle.Unpickler`."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def load(self) -> object:
        """Read an object. Raises ValueError if the bytes were not written by JsonWriter."""
        return decoded(json.loads(self.file.read()))


def encoded(value: Any) -> Any:
    """Convert an object to JSON values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if type(value) is tuple:
        return {"class": "tuple", "items": encoded(list(value))}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and "class" not in value:
            return {key: encoded(item) for key, item in value.items()}
        return {"class": "dict", "items": [[encoded(key), encoded(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        return {"class": "tensor", "array": encoded(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS:
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"class": "array", "dtype": value.dtype.str, "shape": list(value.shape), "content": content}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in CLASSES and isinstance(value, Exception):
        return {"class": name, "items": encoded(list(value.args))}
    if name in CLASSES:
        fields = {field.name: encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": name, "fields": fields}
    raise TypeError(f"workers cannot exchange objects of {name}; add this class to CLASSES in pipeline/objects.py")


def decoded(value: Any) -> Any:
    """Restore an object from JSON values. Raises ValueError for a class outside CLASSES."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "class" not in value:
        return {key: decoded(item) for key, item in value.items()}
    name = value["class"]
    if name == "tuple":
        return tuple(decoded(value["items"]))
    if name == "dict":
        return {decoded(key): decoded(item) for key, item in value["items"]}
    if name == "tensor":
        return torch.from_numpy(decoded(value["array"]))
    if name == "array":
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in NUMBERS:
            raise ValueError(f"received an array of {dtype} from another worker, which is not supported")
        return np.frombuffer(bytearray(base64.b64decode(value["content"])), dtype).reshape(value["shape"])
    if name not in CLASSES:
        raise ValueError(
            f"received an object of {str(name)[:80]!r} from another worker, which is not in CLASSES in "
            "pipeline/objects.py"
        )
    module, _, class_name = name.rpartition(".")
    kind = getattr(importlib.import_module(module), class_name)
    if "fields" in value:
        return kind(**decoded(value["fields"]))
    return kind(*decoded(value["items"]))
