"""Checks that configs and commands share, and how a name that somebody else gave is printed.

Names become folders and files, so `check_name` lets only letters, digits, `.`, `_` and `-` through. Names inside tars
and folders are other people's: they are taken as they are, and `printable` shows them without letting them act on the
terminal. Numbers of configs are checked by `at_least` and `more_than_0`, which NaN, infinity, true and false never
pass.
"""

import math
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from data.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(name: object, what: str, way_out: str) -> None:
    """Raise ConfigError unless `name` can name a file or folder; `what` says of what it is, `way_out` what to type."""
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None and name not in (".", "..")
    if not is_name:
        raise ConfigError(
            f"{what} is called {name!r}\n"
            "  expected 1 to 64 of the characters A-Z a-z 0-9 . _ - and neither . nor .. alone\n"
            f"  {way_out}"
        )


def printable(text: str) -> str:
    r"""Return a text with everything that a terminal would act on written as an escape: `\x1b[2J`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    shown = ""
    for character in text:
        shown += character if character.isprintable() else character.encode("unicode_escape").decode()
    return shown


def printable_lines(text: str) -> str:
    """Return a text of several lines with each of them `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def redacted(url: str) -> str:
    """Return the URL without user, password, query and fragment, any of which may be a secret."""
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def one_line(text: str) -> str:
    """Return a text of several lines as one."""
    return "; ".join(map(str.strip, text.splitlines()))


def few(texts: Sequence[str], most: int = 4, more: str = " and {} more") -> str:
    """Return the first of many texts with commas between, and how many `more` there are."""
    line = ", ".join(texts[:most])
    if len(texts) > most:
        line += more.format(len(texts) - most)
    return line


def at_least(config: object, least: int, names: str, section: str = "") -> None:
    """Raise ConfigError where one of these fields is a number below `least`, infinite or NaN; None passes.

    `names` has spaces between; `section` stands before a name in the message: "data." for data.timeout_s.
    """
    for name in names.split():
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not least <= value < math.inf):
            raise ConfigError(f"{section}{name} is {value}, expected {least} or more")


def more_than_0(config: object, names: str, section: str = "") -> None:
    """Raise ConfigError where one of these fields is 0 or less, infinite or NaN; otherwise as `at_least`."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not 0 < value < math.inf):
            raise ConfigError(f"{section}{name} is {value}, expected more than 0")
