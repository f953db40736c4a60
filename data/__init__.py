"""Tar shards in, exactly ordered batches of uint8 images out.

The names below are what the other rooms use; each is imported when it is first asked for, because decoding
processes want neither torch nor webdataset.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "augment": ("AugmentConfig",),
    "cache": ("CacheConfig", "wanted"),
    "doctor": ("Report", "advice", "check", "repair"),
    "errors": ("DataError", "StorageError"),
    "evaluation": ("EvaluationBatch", "EvaluationSet"),
    "index": ("Index", "Shard", "join", "load_index", "without"),
    "indexing": ("build_index",),
    "loader": ("Batch", "TrainLoader", "Wait"),
    "order": ("Ledger", "Mixture", "Order", "shares"),
    "page": ("write_page",),
    "packing": ("pack",),
    "reader": ("check_sizes",),
    "worker": ("BadSample", "images_per_cpu_s"),
    "sources": (
        "Sample",
        "cifar",
        "class_folders",
        "digits",
        "folder_classes",
        "image_parquet",
        "imagenet_real",
        "imagenet_train",
        "imagenet_validation",
        "path_table",
        "tars",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'data' has no attribute {name!r}")
    return getattr(import_module(f"data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
