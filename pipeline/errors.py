"""What can go wrong, as exceptions that know their process exit code (sysexits.h where one fits)."""


class PatchlineError(Exception):
    """One line what was found, one line what was expected, one line what to type next."""

    exit_code = 70


class UsageError(PatchlineError):
    exit_code = 64


class Diverged(PatchlineError):
    """The loss or the gradients stayed non-finite."""

    exit_code = 70


class WentBack(PatchlineError):
    """Non-finite steps in a row: the next attempt starts from the last checkpoint and leaves them out."""

    exit_code = None  # type: ignore[assignment]  # a restart cures it


class CheckpointError(PatchlineError):
    """A checkpoint cannot be written (or no longer belongs to this attempt)."""

    exit_code = 74


class RunOwned(PatchlineError):
    """Another live process owns the run directory."""

    exit_code = 73


class Preempted(PatchlineError):
    """The run was asked to stop, has committed, and wants to be run again."""

    exit_code = 75


class ConfigError(PatchlineError):
    exit_code = 78


def exit_code(error: BaseException) -> int:
    """The exception's own code, else by its kind; never None, which would end the process with 0."""
    code = getattr(error, "exit_code", None)
    by_kind = 130 if isinstance(error, KeyboardInterrupt) else 74 if isinstance(error, OSError) else 70
    return code if code is not None else by_kind
