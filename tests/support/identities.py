"""Workers and nodes by hand, with the packages of today."""

from typing import Any

from pipeline.identity import Identity


def worker(rank: int, **others: Any) -> Identity:
    """A worker by hand, on a node of its own."""
    packages = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "ray": "2.60.0", "numpy": "2.3.0"}
    packages |= others.pop("packages", {})
    known: dict[str, Any] = {"rank": rank, "node": f"n{rank}", "root": "/p", "code": "a" * 64, "packages": packages}
    return {**known, "device": "cpu", "driver": "", **others}  # type: ignore[typeddict-item]
