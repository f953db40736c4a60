"""Exit codes of all commands, and the exceptions that carry them.

This module imports nothing from the project, so every package can use it. The `models` package raises ValueError
instead, and its callers choose the exit code.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any


class ExitCode(IntEnum):
    """Process exit codes; the values follow sysexits.h if it defines a matching code."""

    DONE = 0
    USAGE = 64  # the command line is wrong
    DATA = 65  # missing, short, corrupt or mislabelled data
    UNAVAILABLE = 69  # storage, cluster or a required program does not respond
    INTERNAL = 70  # the run diverged, or a bug
    OWNED = 73  # another live process owns the run directory
    IO = 74  # the disk rejects a write, or a checkpoint cannot be read back as written
    PREEMPTED = 75  # stopped after a commit; run the same command again to resume
    CONFIG = 78  # the recipe is wrong
    INTERRUPTED = 130  # Ctrl-C; for a run only the second Ctrl-C, which ends it without a commit


class PatchlineError(Exception):
    """An error for the user; its message has one line each for the problem, the expectation and the remedy.

    The first line is the problem. A line that contains a command ends with the command. With `--json`,
    jobs/extras/json_output.py derives the next steps from these lines.
    """

    exit_code: int | None = ExitCode.INTERNAL
    details: Mapping[str, Any] = MappingProxyType({})  # other values of the JSON document, such as a list of checks


class UsageError(PatchlineError):
    """The command line refers to something that does not exist."""

    exit_code = ExitCode.USAGE


class ConfigError(PatchlineError):
    """A recipe, an override or a DeepSpeed file contains an invalid setting."""

    exit_code = ExitCode.CONFIG


class DataError(PatchlineError):
    """Data is missing, truncated, corrupt or mislabelled."""

    exit_code = ExitCode.DATA


class StorageError(PatchlineError):
    """The storage does not respond after all retries, or lacks a feature that a run needs."""

    exit_code = ExitCode.UNAVAILABLE


class ClusterError(PatchlineError):
    """The cluster is missing, rejects the connection, or is too small."""

    exit_code = ExitCode.UNAVAILABLE


class MismatchedNodes(ClusterError):
    """Some nodes have different code or packages from the majority; the run can restart without them."""


class CheckpointError(PatchlineError):
    """A checkpoint cannot be written or read, or a newer attempt has taken over."""

    exit_code = ExitCode.IO


class OutputError(PatchlineError):
    """The standard output cannot be written."""

    exit_code = ExitCode.IO


class RunOwned(PatchlineError):
    """Another live process owns the run directory."""

    exit_code = ExitCode.OWNED


class Preempted(PatchlineError):
    """The run received a stop request and has committed; run the same command again to resume."""

    exit_code = ExitCode.PREEMPTED


class Diverged(PatchlineError):
    """The loss or the gradients stayed non-finite."""

    exit_code = ExitCode.INTERNAL


class CorruptWorker(PatchlineError):
    """A worker's results differ from a repetition by other workers; the next attempt avoids its node."""

    exit_code = None  # ends the attempt, but not the stage


class RolledBack(PatchlineError):
    """Too many consecutive steps were non-finite; the next attempt resumes from the last checkpoint and skips them."""

    exit_code = None  # ends the attempt, but not the stage


def exit_code(error: BaseException) -> int:
    """Return the process exit code for an exception; never None, because `sys.exit(None)` would report success."""
    own_code = getattr(error, "exit_code", None)
    if own_code is not None:
        return int(own_code)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, OSError):
        return ExitCode.IO
    return ExitCode.INTERNAL
