"""Load objects from extras: a recipe may require an extra that is not installed.

load_optional("data.extras.gpu_decoding:DeviceDecoder", "data.decode=gpu")   →   the class DeviceDecoder
"""

from pkgutil import resolve_name
from typing import Any

from data.errors import DataError


class MissingExtra(DataError):
    """A recipe needs an extra that is not installed."""


def load_optional(name: str, needed_by: str) -> Any:
    """Import the object "module:name". Raises MissingExtra if its extra is not installed.

    `needed_by` is the recipe setting that needs the extra; the message quotes it.
    """
    try:
        return resolve_name(name)
    except ModuleNotFoundError as error:
        module = name.partition(":")[0]
        # If a library that the extra imports is missing, let its own error through.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtra(f"{needed_by} needs {error.name.replace('.', '/')}, which is not installed") from None
