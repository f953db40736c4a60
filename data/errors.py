"""The two ways data can stop a run, each with its exit code."""


class DataError(Exception):
    """The data itself is wrong: missing, short, corrupt, mislabelled (exit 65)."""

    exit_code = 65


class StorageError(Exception):
    """The storage does not answer, however often it is asked (exit 69)."""

    exit_code = 69
