"""Iterate over the files in an archive without unpacking it to disk, or over the files in a folder.

`members` detects the format from the first bytes, not from the file name:
1. a folder yields its files, sorted by name;
2. a zip yields its members in the order of its directory;
3. a tar, uncompressed or compressed with gzip, xz or bzip2, yields its regular files in their order in the tar. The tar
   is read once as a stream, so each member must be read before the next one is requested.

    images.tar.gz                         Member("images/cat_1.jpg", …)     .read() → b"\\xff\\xd8…"
      ./images/cat_1.jpg             →    Member("images/cat_2.jpg", …)
      ./images/._cat_1.jpg                (hidden files, such as those of macOS, are skipped)
      ./images/cat_2.jpg

DataError is raised for an archive that is truncated or damaged, or that continues after its end. Python's `tarfile`
would silently stop there.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, cast

from data.checks import printable
from data.errors import DataError
from data.extras.sources.folders import in_words
from data.extras.sources.tar_offsets import MAX_EXTENSION, check_uncompressed
from data.extras.sources.walk import files_below
from data.images.decode import MAX_BYTES

GZIP_START = b"\x1f\x8b"
# First bytes of compressed files → function that opens them as a stream.
COMPRESSIONS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    GZIP_START: gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    b"BZh": bz2.open,
}
ZIP_START = b"PK"
RAR_START = b"Rar!"
IS_ENCRYPTED = 0x1  # bit of a zip member's flags
# Types of tar headers whose content `tarfile` reads into memory: PAX records (per member or global) and GNU long names.
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError)
CHUNK = 1 << 20  # bytes per read when skipping data


@dataclass(frozen=True)
class Member:
    """A file in an archive or a folder."""

    name: str  # path in the archive
    opened: Callable[[], Any]  # returns an open file; for a tar, it is valid until the next member is requested
    archive: str  # name of the archive in messages

    def read(self, most: int = MAX_BYTES) -> bytes:
        """Return the member's full content; raises DataError if it is damaged or larger than `most` bytes.

        The limit protects against decompression bombs: a few compressed megabytes may expand to gigabytes.
        """
        content = self.start(most + 1)
        if len(content) > most:
            raise DataError(
                f"{self.archive}: {printable(self.name)} is larger than the limit of {most:,} bytes\n"
                "  remove this file from the archive, or make it smaller"
            )
        return content

    def start(self, most: int) -> bytes:
        """Return up to `most` bytes from the start of the member's content; raises DataError if they are damaged."""
        with naming_damage(f"{self.archive}: {printable(self.name)}"), self.opened() as file:
            return file.read(most)

    @property
    def base(self) -> str:
        """Last component of the path."""
        return self.name.rpartition("/")[2]


def members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """Yield the files of a folder, zip or tar, except hidden ones.

    Raises DataError if the path does not exist, has another format, or is damaged.
    """
    path = Path(path)
    if path.is_dir():
        skipped: Counter[str] = Counter()
        for file_path in files_below(path, skipped):
            yield Member(file_path.relative_to(path).as_posix(), partial(open, file_path, "rb"), str(path))
        if skipped:
            logging.getLogger(__name__).warning("%s: skipped %s", path, in_words(skipped))
        return
    if not path.is_file():
        raise DataError(f"{path}: file not found")
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(0)
        if start.startswith(RAR_START):
            raise DataError(
                f"{path}: RAR archives are not supported; unpack the archive and pass the path of the resulting folder"
            )
        if start.startswith(ZIP_START):
            yield from zip_members(file, str(path))
        else:
            # Python cannot decompress the other kinds, zstd and lz4.
            if not start.startswith(tuple(COMPRESSIONS)):
                check_uncompressed(start, str(path))
            content: IO[bytes] = file
            for start_of_kind, open_kind in COMPRESSIONS.items():
                if start.startswith(start_of_kind):
                    content = open_kind(file)
            with content:
                yield from tar_members(content, str(path))


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed with gzip, xz or bzip2."""
    with open(path, "rb") as file:
        return file.read(8).startswith(tuple(COMPRESSIONS))


# --------------------------------------------------------------------------------------- each kind of archive


def zip_members(file: IO[bytes], name: str) -> Iterator[Member]:
    """Yield the files of a zip; raises DataError if they are encrypted."""
    with naming_damage(name), zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.is_dir() or is_hidden(info.filename):
                continue
            if info.flag_bits & IS_ENCRYPTED:
                raise DataError(
                    f"{name}: {printable(info.filename)} is encrypted\n"
                    "  unzip the archive with the password that its authors publish, and pass the path of the "
                    "resulting folder"
                )
            yield Member(info.filename.removeprefix("./"), partial(archive.open, info), name)


def tar_members(file: IO[bytes], name: str) -> Iterator[Member]:
    """Yield the regular files of a tar, read as a stream; the tar may itself be a member of another tar.

    Raises DataError if it is not a tar, if it is truncated, or if anything except zeros follows its end.
    """
    others = 0
    with naming_damage(name), tarfile.open(fileobj=file, mode="r|", tarinfo=TarHeader) as archive:
        while (info := archive.next()) is not None:
            # Clear tarfile's list of all members, which is not needed here and would grow without limit.
            archive.members = []  # type: ignore[attr-defined]
            if info.isfile() and not info.issparse():
                if not is_hidden(info.name):
                    yield Member(info.name.removeprefix("./"), partial(archive.extractfile, info), name)
            elif not info.isdir():
                others += 1
        # Read the rest of the stream, which also verifies the checksum of a compressed tar.
        stream = cast(IO[bytes], archive.fileobj)
        while chunk := stream.read(CHUNK):
            if chunk.strip(b"\0"):
                raise DataError(
                    f"{name}: more data follows the end of the tar\n"
                    "  expected a single tar, but the file may contain several concatenated tars; download it again"
                )
    if others:
        logging.getLogger(__name__).warning("%s: skipped %d links, device files or sparse files", name, others)


class TarHeader(tarfile.TarInfo):
    """Tar header with strict checks: `tarfile` would treat a damaged or missing header as the end of the tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header; raises DataError if it announces an extension too large for memory."""
        header = super().frombuf(buf, encoding, errors)
        if header.type in EXTENSIONS and header.size > MAX_EXTENSION:
            raise DataError(f"an extension header has {header.size:,} bytes, expected at most {MAX_EXTENSION:,}")
        return header

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """Read the next header; raises DataError if it is invalid or missing before the end of the tar."""
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            is_end = type(error).__name__ == "EOFHeaderError"  # a block of zeros, the regular end of a tar
            if is_end:
                raise
            raise DataError(
                f"no valid tar header at byte {tarfile_.offset:,} ({error})\n"
                "  the tar is truncated or damaged: download it again, and compare its size or checksum"
            ) from None


def is_hidden(name: str) -> bool:
    """Return whether the last component of a path begins with a dot, like the extra files of macOS."""
    return name.rpartition("/")[2].startswith(".")


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Context manager that converts errors from a truncated or damaged archive to a DataError with its name."""
    try:
        yield
    except DAMAGE as error:
        raise DataError(
            f"{name}: truncated or damaged ({error})\n  download the archive again, and compare its size"
        ) from None
    except DataError as error:
        if str(error).startswith(name):
            raise
        raise DataError(f"{name}: {error}") from None
