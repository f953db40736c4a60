"""Parts that a recipe can name and that an installation may lack: the modules of extras.

load_optional("data.extras.gpu_decoding:DeviceDecoder", "data.decode=gpu")   →   the class DeviceDecoder
"""

from pkgutil import resolve_name
from typing import Any

from data.errors import DataError


def load_optional(name: str, needed_by: str) -> Any:
    """Import what "module:name" names. Raises DataError if its extra is not installed.

    `needed_by` is what the recipe says, for the message.
    """
    try:
        return resolve_name(name)
    except ModuleNotFoundError as error:
        module = name.partition(":")[0]
        # A library that the extra needs is another matter, with a message of its own.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise DataError(f"{needed_by} needs {error.name.replace('.', '/')}, which is not installed") from None
