"""Checks shared by configs and commands, and safe printing of untrusted names.

Names from recipes become folders and files, so `check_name` allows only letters, digits, `.`, `_` and `-`. Names inside
tars and folders may contain anything: they are used unchanged, and `printable` escapes them for the terminal. Names
from a bucket, record, manifest, claim or node become paths on this machine only after `check_file_name`.
`at_least` and `more_than_0` check the numbers of a config; they reject NaN, infinity, true and false.
"""

import math
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from data.errors import ConfigError, DataError

STORES = ("s3", "gs", "az", "hf")  # schemes of object stores, whose keys may contain any character
LONGEST_PART = 255  # bytes of the name of a file or folder (NAME_MAX of Linux)
SHA256 = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# KEY and TOKEN must be whole words: TOKENIZERS_PARALLELISM is not a secret.
SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API|ACCESS|AUTH)?(KEY|TOKEN)S?(_|$)", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS access key
    r"|\b(ghp|gho|ghs|github_pat|glpat|hf|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}"  # GitHub, GitLab, Hugging Face, …
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ"  # JSON web token
    r"|://[^/\s:@]*:[^/\s@]+@"  # password in a URL
)


def check_name(name: object, what: str, remedy: str) -> None:
    """Raise ConfigError unless `name` is a safe file name; the message begins with `what` and ends with `remedy`."""
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None and name not in (".", "..")
    if not is_name:
        raise ConfigError(
            f"{what} is named {name!r}\n"
            "  expected 1 to 64 of the characters A-Z a-z 0-9 . _ -, but not . or .. alone\n"
            f"  {remedy}"
        )


def check_file_name(name: object, source: str, *, folders: bool = True) -> str:
    """Check that an untrusted file name stays inside the folder to which it will be appended, and return it.

    Every name from a bucket, record, manifest, claim or another machine passes this check before it becomes a path.
    Raises DataError, whose message begins with `source`, for absolute names, `..`, `.`, `//`, NUL, and parts that no
    Linux file system accepts. If `folders` is False, names with a slash are rejected too.
    """
    is_inside = isinstance(name, str) and "\0" not in name
    if is_inside and isinstance(name, str):
        parts = name.split("/")
        is_inside = all(part not in ("", ".", "..") for part in parts) and (folders or len(parts) == 1)
        try:
            is_inside &= all(len(os.fsencode(part)) <= LONGEST_PART for part in parts)
        except UnicodeEncodeError:  # half of a surrogate pair
            is_inside = False
    if not is_inside or not isinstance(name, str):
        expected = "a path below the folder" if folders else "the name of a file or folder, without slashes"
        raise DataError(
            f"{source}: unsafe name {printable(repr(name)[:200])}\n"
            f"  expected {expected}, without empty parts, '.', '..' or NUL, and with parts of at most {LONGEST_PART} "
            "bytes, so that no file elsewhere is overwritten\n"
            "  rename or delete this entry, or find out who wrote it; then run the same command again"
        )
    return name


def check_sha256(digest: object, source: str) -> str:
    """Check an untrusted sha256 that becomes part of a file name, and return it.

    Raises DataError unless it consists of 64 hex digits.
    """
    if isinstance(digest, str) and SHA256.fullmatch(digest):
        return digest
    raise DataError(
        f"{source}: {printable(repr(digest)[:200])} is not a sha256\n"
        "  expected 64 hexadecimal digits; create this file again, or restore it from a copy"
    )


def printable(text: str) -> str:
    r"""Escape every character that could control a terminal, such as `\x1b[2J`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    shown = ""
    for character in text:
        shown += character if character.isprintable() else character.encode("unicode_escape").decode()
    return shown


def printable_lines(text: str) -> str:
    """Escape each line of a string with `printable`; line breaks are kept."""
    return "\n".join(map(printable, text.split("\n")))


def encodable(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode; they come from names of files that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def redacted(url: str) -> str:
    """Return the URL without user, password, query and fragment, because each may contain a secret.

    In an object store's URL, `?` and `#` are part of the key, unless `name=value` follows the `?`, as in a signed URL.
    """
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    host = parts.netloc.rpartition("@")[2]
    path = parts.path
    if parts.scheme in STORES:
        path = url.partition("://")[2][len(parts.netloc) :]
        before, _, query = path.partition("?")
        if "=" in query:
            path = before
    return f"{parts.scheme}://{host}{path}"


def one_line(text: str) -> str:
    """Join the lines of a text with semicolons."""
    return "; ".join(map(str.strip, text.splitlines()))


def few(texts: Sequence[str], most: int = 4, more: str = " and {} more") -> str:
    """Join the first `most` strings with commas; if there are more, append their number, formatted with `more`."""
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
            raise ConfigError(f"{section}{name} is {value}, expected {finite(value)}{least} or more")


def more_than_0(config: object, names: str, section: str = "") -> None:
    """Raise ConfigError if a field of `config` is 0 or less, infinite or NaN; for the arguments, see `at_least`."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not 0 < value < math.inf):
            raise ConfigError(f"{section}{name} is {value}, expected {finite(value)}more than 0")


def finite(value: float) -> str:
    """Return what to expect in addition if a number is infinite or NaN; "" for any other number."""
    return "" if math.isfinite(value) else "a finite number, "
