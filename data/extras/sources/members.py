"""The files inside an archive, one after the other, without unpacking it to disk; a folder is read like its archive.

`members` opens what is there, which its first bytes tell and not its name:
1. a folder gives its files, sorted by name;
2. a zip gives its members in the order of its directory;
3. a tar, plain or compressed with gzip, xz or bzip2, gives its plain files in the order in which they lie there. It is
   read once from its beginning to its end, so that a member has to be read before the next one is asked for.

    images.tar.gz                         Member("images/cat_1.jpg", …)     .read() → b"\\xff\\xd8…"
      ./images/cat_1.jpg             →    Member("images/cat_2.jpg", …)
      ./images/._cat_1.jpg                (hidden files are passed over: macOS leaves them)
      ./images/cat_2.jpg

Whatever is cut short, damaged, or goes on behind its end raises DataError: Python's own `tarfile` stops there silently.
"""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, cast

from data.checks import printable
from data.errors import DataError
from data.images.decode import MAX_BYTES
from data.index.tar import MAX_EXTENSION

GZIP_START = b"\x1f\x8b"
# What compressed files begin with, and what reads each as a stream.
COMPRESSIONS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    GZIP_START: gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    b"BZh": bz2.open,
}
ZIP_START = b"PK"
RAR_START = b"Rar!"
IS_ENCRYPTED = 0x1  # of a zip member's flags
# Kinds of tar headers that `tarfile` reads whole: PAX records, of a member or of all, and GNU's long names.
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError)
CHUNK = 1 << 20  # bytes that are read at once where they are not kept


@dataclass(frozen=True)
class Member:
    """A file of an archive: its path in there, and what opens it."""

    name: str
    opened: Callable[[], Any]  # gives an open file; of a tar until the next member is asked for
    archive: str  # for messages

    def read(self, most: int = MAX_BYTES) -> bytes:
        """Return the whole content; raises DataError where the archive is damaged in it, or where it is larger.

        A few megabytes of zeros, compressed, may be gigabytes.
        """
        content = self.start(most + 1)
        if len(content) > most:
            raise DataError(
                f"{self.archive}: {printable(self.name)}: more than {most:,} bytes\n"
                "  expected no larger file here: take it out of the archive, or make it smaller"
            )
        return content

    def start(self, most: int) -> bytes:
        """Return so many bytes of the content at most; raises DataError where the archive is damaged in them."""
        with naming_damage(f"{self.archive}: {printable(self.name)}"), self.opened() as file:
            return file.read(most)

    @property
    def base(self) -> str:
        """The last part of its path."""
        return self.name.rpartition("/")[2]


def members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """Give the files of a folder, zip or tar but for hidden ones; raises DataError where it is none, or is damaged."""
    path = Path(path)
    if path.is_dir():
        for directory, folders, names in os.walk(path):
            # os.walk goes down into them in the order in which it finds them here.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                file_path = Path(directory, name)
                if not name.startswith("."):
                    yield Member(file_path.relative_to(path).as_posix(), partial(open, file_path, "rb"), str(path))
        return
    if not path.is_file():
        raise DataError(f"there is nothing at {path}")
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(0)
        if start.startswith(RAR_START):
            raise DataError(f"{path}: a rar, which only its own program reads; unpack it and name the folder")
        if start.startswith(ZIP_START):
            yield from zip_members(file, str(path))
        else:
            content: IO[bytes] = file
            for start_of_kind, open_kind in COMPRESSIONS.items():
                if start.startswith(start_of_kind):
                    content = open_kind(file)
            with content:
                yield from tar_members(content, str(path))


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed in a way that is read here."""
    with open(path, "rb") as file:
        return file.read(8).startswith(tuple(COMPRESSIONS))


# --------------------------------------------------------------------------------------- each kind of archive


def zip_members(file: IO[bytes], name: str) -> Iterator[Member]:
    """Give the files of a zip; raises DataError where they are encrypted."""
    with naming_damage(name), zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.is_dir() or is_hidden(info.filename):
                continue
            if info.flag_bits & IS_ENCRYPTED:
                raise DataError(
                    f"{name}: {printable(info.filename)} is encrypted\n"
                    "  expected a zip without a password: unzip it with the one that its owners give, name the folder"
                )
            yield Member(info.filename.removeprefix("./"), partial(archive.open, info), name)


def tar_members(file: IO[bytes], name: str) -> Iterator[Member]:
    """Give the plain files of a tar that is read from a stream; also of a tar that is a member of another one.

    Raises DataError where it is none, is cut short, or where anything but zeros follows its end.
    """
    others = 0
    with naming_damage(name), tarfile.open(fileobj=file, mode="r|", tarinfo=TarHeader) as archive:
        while (info := archive.next()) is not None:
            # tarfile keeps a list of all that it has seen, which nobody here looks at.
            archive.members = []  # type: ignore[attr-defined]
            if info.isfile() and not info.issparse():
                if not is_hidden(info.name):
                    yield Member(info.name.removeprefix("./"), partial(archive.extractfile, info), name)
            elif not info.isdir():
                others += 1
        # What follows the end is read, which also checks the sums of a compressed tar.
        stream = cast(IO[bytes], archive.fileobj)
        while chunk := stream.read(CHUNK):
            if chunk.strip(b"\0"):
                raise DataError(
                    f"{name}: more follows behind the end of the tar\n"
                    "  expected one tar: these may be several, one appended to the other; download it again"
                )
    if others:
        logging.getLogger(__name__).warning("%s: passed over: %d links, devices or sparse files", name, others)


class TarHeader(tarfile.TarInfo):
    """A header of a tar where the tar goes on: `tarfile` takes one that is damaged or missing for the tar's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header; raises DataError where it says more about the next member than the memory may hold."""
        header = super().frombuf(buf, encoding, errors)
        if header.type in EXTENSIONS and header.size > MAX_EXTENSION:
            raise DataError(f"an extension header of {header.size:,} bytes, expected {MAX_EXTENSION:,} at most")
        return header

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """Read the next header; raises DataError where there is none and the tar has not ended either."""
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            is_end = type(error).__name__ == "EOFHeaderError"  # a block of zeros, as it should be
            if is_end:
                raise
            raise DataError(
                f"no valid tar header at byte {tarfile_.offset:,} ({error})\n"
                "  expected a whole tar, compressed or not: download it again and compare its size or checksum"
            ) from None


def is_hidden(name: str) -> bool:
    """Return whether the last part of a path begins with a dot, as what macOS leaves beside each file does."""
    return name.rpartition("/")[2].startswith(".")


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Raise DataError, which names the archive, where it is cut short or damaged."""
    try:
        yield
    except DAMAGE as error:
        raise DataError(
            f"{name}: cut short or damaged ({error})\n"
            "  expected a whole archive: download it again and compare its size"
        ) from None
    except DataError as error:
        if str(error).startswith(name):
            raise
        raise DataError(f"{name}: {error}") from None
