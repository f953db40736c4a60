"""Checks that configs and commands share, and safe printing of names from outside.

Names from recipes become folders and files, so `check_name` allows only letters, digits, `.`, `_` and `-`. Names inside
tars and folders may contain anything: they are used unchanged, and `printable` escapes them for the terminal.
`at_least` and `more_than_0` check the numbers of a config; they reject NaN, infinity, true and false.
"""

import math
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from data.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(name: object, what: str, remedy: str) -> None:
    """Raise ConfigError unless `name` can name a file; the message begins with `what` and ends with `remedy`."""
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None and name not in (".", "..")
    if not is_name:
        raise ConfigError(
            f"{what} is called {name!r}\n"
            "  expected 1 to 64 of the characters A-Z a-z 0-9 . _ - and neither . nor .. alone\n"
            f"  {remedy}"
        )


def printable(text: str) -> str:
    r"""Escape every character that could control a terminal: `\x1b[2J`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    shown = ""
    for character in text:
        shown += character if character.isprintable() else character.encode("unicode_escape").decode()
    return shown


def printable_lines(text: str) -> str:
    """Escape each line of a text by `printable`; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def redacted(url: str) -> str:
    """Return the URL without user, password, query and fragment, because each may contain a secret."""
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def one_line(text: str) -> str:
    """Join the lines of a text by semicolons."""
    return "; ".join(map(str.strip, text.splitlines()))


def few(texts: Sequence[str], most: int = 4, more: str = " and {} more") -> str:
    """Join the first `most` texts by commas; append how many `more` there are."""
    line = ", ".join(texts[:most])
    if len(texts) > most:
        line += more.format(len(texts) - most)
    return line


def at_least(config: object, least: int, names: str, section: str = "") -> None:
    """Raise ConfigError if a field of `config` is below `least`, infinite or NaN; None is allowed.

    `names` lists the fields, separated by spaces. `section` is a prefix for the message: "data." for data.timeout_s.
    """
    for name in names.split():
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not least <= value < math.inf):
            raise ConfigError(f"{section}{name} is {value}, expected {least} or more")


def more_than_0(config: object, names: str, section: str = "") -> None:
    """Raise ConfigError if a field of `config` is 0 or less, infinite or NaN; arguments as in `at_least`."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not 0 < value < math.inf):
            raise ConfigError(f"{section}{name} is {value}, expected more than 0")
