"""Handwritten identities of workers and nodes, with the installed package versions."""

from typing import Any

from pipeline.identity import Identity


def worker(rank: int, **others: Any) -> Identity:
    """Return a handwritten worker on a separate node."""
    packages = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "ray": "2.60.0", "numpy": "2.3.0"}
    packages |= others.pop("packages", {})
    known: dict[str, Any] = {"rank": rank, "node": f"n{rank}", "root": "/p", "code": "a" * 64, "packages": packages}
    return {**known, "device": "cpu", "driver": "", **others}  # type: ignore[typeddict-item]
