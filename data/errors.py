"""Every way a command can end: the exit codes, and the exceptions that carry them.

This is the lowest floor of the project: it imports nothing, and every package but `models` raises what stands here.
`models` knows nothing of processes; it raises ValueError, and its callers say what that means for a run.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process ends with; the values are those of sysexits.h where one fits."""

    DONE = 0
    USAGE = 64  # the command line is wrong
    DATA = 65  # missing, short, corrupt or mislabelled data
    UNAVAILABLE = 69  # storage, cluster or a needed program does not answer
    INTERNAL = 70  # the run diverged, or a bug
    OWNED = 73  # another live process owns the run directory
    IO = 74  # the disk refuses, or has not kept a checkpoint as it was written
    PREEMPTED = 75  # stopped after committing: run the same command again
    CONFIG = 78  # the recipe is wrong
    INTERRUPTED = 130  # Ctrl-C; of a run the second one: ended without a commit


class PatchlineError(Exception):
    """An error whose text says what was found, what was expected and what to type next, one line each."""

    exit_code: int | None = ExitCode.INTERNAL


class UsageError(PatchlineError):
    """The command line asks for something that does not exist."""

    exit_code = ExitCode.USAGE


class ConfigError(PatchlineError):
    """A recipe, an override or a DeepSpeed file says something that cannot run."""

    exit_code = ExitCode.CONFIG


class DataError(PatchlineError):
    """The data itself is wrong: missing, short, corrupt, mislabelled."""

    exit_code = ExitCode.DATA


class StorageError(PatchlineError):
    """The storage does not answer however often it is asked, or lacks something that a run needs of it."""

    exit_code = ExitCode.UNAVAILABLE


class ClusterError(PatchlineError):
    """The cluster is missing, refuses us or is too small."""

    exit_code = ExitCode.UNAVAILABLE


class MismatchedNodes(ClusterError):
    """Workers have other code or other packages than the others: without their nodes the rest may go on."""


class CheckpointError(PatchlineError):
    """A checkpoint cannot be written, cannot be read, or no longer belongs to this attempt."""

    exit_code = ExitCode.IO


class RunOwned(PatchlineError):
    """Another live process owns the run directory."""

    exit_code = ExitCode.OWNED


class Preempted(PatchlineError):
    """The run was asked to stop, has committed, and wants to be run again."""

    exit_code = ExitCode.PREEMPTED


class Diverged(PatchlineError):
    """The loss or the gradients stayed non-finite."""

    exit_code = ExitCode.INTERNAL


class RolledBack(PatchlineError):
    """Non-finite steps in a row: the next attempt starts from the last checkpoint and leaves them out."""

    exit_code = None  # the attempt ends, the stage does not


def exit_code(error: BaseException) -> int:
    """Return the code that a process ends with because of this exception; never None, which would end it with 0."""
    own_code = getattr(error, "exit_code", None)
    if own_code is not None:
        return int(own_code)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, OSError):
        return ExitCode.IO
    return ExitCode.INTERNAL
