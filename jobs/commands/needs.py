"""What a preflight says and goes by: a line of it, and what a campaign will ask of its cluster."""

from dataclasses import dataclass, field
from typing import Literal

from data.errors import ExitCode


@dataclass(frozen=True)
class Finding:
    """One line of a preflight."""

    level: Literal["OK", "WARN", "FAIL"]
    subject: str
    text: str
    remedy: str = ""
    exit_code: ExitCode = ExitCode.DONE  # of a FAIL: what the run would end with

    def lines(self) -> list[str]:
        """Return the finding as a terminal shows it."""
        lines = [f"{self.level:4} {self.subject:11} {self.text}"]
        if self.remedy:
            lines.append(f"     → {self.remedy}")
        return lines


@dataclass(frozen=True)
class StageNeed:
    """What one trained stage will ask of workers and links."""

    name: str
    gradient_bytes: int  # that are summed over the workers at once
    reductions: float  # of so many bytes in a step
    compute_s: float | None  # of a step, as `plan` assumes it of a GPU; None on CPUs, of which it assumes nothing
    memory_bytes: int | None  # a worker's states and activations, as `plan` estimates them; None: not traced
    snapshot_bytes: int  # a worker's share of a checkpoint, in host memory
    checkpoint_bytes: int  # of all workers
    disk_bytes: int  # for all checkpoints and weights to come


@dataclass(frozen=True)
class Needs:
    """What a campaign will ask of its cluster."""

    workers: int
    gpus_per_worker: int
    code: str  # digest of the driver's
    stages: list[StageNeed]
    sets: dict[str, float | None]  # path → bytes/s that a worker needs of it; None: not known
    is_shared: bool = True  # the run directory; not of a run in an object store
    not_made: list[str] = field(default_factory=list)  # sets that an earlier stage will make
    unused_gpus: list[str] = field(default_factory=list)  # what session.warn_of_unused_gpus says
