"""Tars as other people's programs write them: Python, GNU tar, Go, Java, libarchive (BSD, macOS, Windows), git.

Each writer makes a tar of the members (name, content), with the header fields of that program.
"""

import io
import struct
import tarfile
from collections.abc import Callable, Sequence

BLOCK = 512
Members = Sequence[tuple[str, bytes]]


def padded(content: bytes) -> bytes:
    """Return content filled up to whole blocks."""
    return content + bytes(-len(content) % BLOCK)


def header(
    name: bytes,
    size: int,
    kind: bytes = b"0",
    *,
    mode: bytes = b"0000644\0",
    owner: bytes = b"0000000\0",
    size_field: bytes | None = None,
    mtime: bytes = b"14000000000\0",
    magic: bytes = b"ustar\x0000",
    names: tuple[bytes, bytes] = (b"", b""),
    device: bytes = b"0000000\0",
    prefix: bytes = b"",
    link: bytes = b"",
    checksum: str = "%06o\0 ",
) -> bytes:
    """Return a header of 512 bytes; every field is given as it is stored."""
    if size_field is None:
        size_field = b"%011o\0" % size
    fields = [name.ljust(100, b"\0"), mode, owner, owner, size_field, mtime, b" " * 8, kind, link.ljust(100, b"\0")]
    fields += [magic, names[0].ljust(32, b"\0"), names[1].ljust(32, b"\0"), device, device, prefix.ljust(155, b"\0")]
    block = b"".join(fields).ljust(BLOCK, b"\0")
    assert len(block) == BLOCK
    assert len(name) <= 100
    assert len(prefix) <= 155
    return block[:148] + (checksum % sum(block)).encode() + block[156:]


def record(name: str, value: bytes) -> bytes:
    """Return a PAX record, whose length counts its own digits."""
    rest = b" " + name.encode() + b"=" + value + b"\n"
    length = len(rest)
    while length != len(str(length)) + len(rest):
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def base_256(number: int, width: int = 12) -> bytes:
    """Return a number as GNU tar stores those too large for octal digits."""
    return b"\x80" + number.to_bytes(width - 1, "big")


# ------------------------------------------------------------------------------------------------ writers


def python(format: int) -> Callable[[Members], bytes]:
    """Return a writer by Python's tarfile."""

    def write(members: Members) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                info.mtime = 1700000000.25 if format == tarfile.PAX_FORMAT else 1700000000  # type: ignore[assignment]
                tar.addfile(info, io.BytesIO(content))
        return buffer.getvalue()

    return write


def old(members: Members) -> bytes:
    """Write as Unix version 7 did: without a magic number, with spaces in the numbers."""
    parts = []
    for name, content in members:
        fields = {"mode": b"   644 \0", "owner": b"     0 \0", "magic": bytes(8), "device": bytes(8)}
        head = header(
            name.encode(), len(content), b"\0", size_field=b"%11o " % len(content), mtime=b"14000000000 ", **fields
        )
        parts += [head, padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


def go(members: Members) -> bytes:
    """Write as Go's archive/tar: PAX headers for names that need them and for fractions of a second; no padding."""
    parts = []
    for name, content in members:
        folder, slash, base = name.rpartition("/")
        encoded = name.encode()
        records = record("mtime", b"1700000000.123456789")
        if not name.isascii() or len(encoded) > 100:
            records += record("path", encoded)
        zeros = {"mode": b"0000000\0", "mtime": b"%011o\0" % 0}
        pax_name = f"{folder}{slash}PaxHeaders.0/{base}".encode().decode("ascii", "ignore").encode()[:100]
        parts += [header(pax_name, len(records), b"x", **zeros), padded(records)]
        parts += [header(name.encode("ascii", "ignore")[:100], len(content)), padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


def java(members: Members) -> bytes:
    """Write as commons-compress 1.21 with POSIX long names: spaces after numbers, `./PaxHeaders.X/`."""
    numbers = {"mode": b"0100644 ", "owner": b"0000000 ", "device": b"0000000 ", "mtime": b"15302627400 "}
    parts = []
    for name, content in members:
        encoded = name.encode()
        if not name.isascii() or len(encoded) > 100:
            records = record("path", encoded)
            pax_name = b"./PaxHeaders.X/" + bytes(ord(letter) & 0x7F for letter in name.replace("/", "_"))
            parts += [header(pax_name[:99], len(records), b"x", size_field=b"%011o " % len(records), **numbers)]
            parts += [padded(records)]
        parts += [header(encoded[:100], len(content), size_field=b"%011o " % len(content), **numbers), padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


def libarchive(members: Members) -> bytes:
    """Write as bsdtar of BSD, macOS and Windows: spaces after numbers, `PaxHeader/`, a first `./`."""
    numbers = {"mode": b"000644 \0", "owner": b"000000 \0", "mtime": b"14524770600 ", "device": b"000000 \0"}
    root = {**numbers, "mode": b"000755 \0", "size_field": b"%011o " % 0}
    parts = [header(b"./", 0, b"5", **root)]
    for name, content in members:
        encoded = name.encode()
        records = b""
        if not name.isascii() or len(encoded) > 100:
            records += record("path", encoded)
        records += record("mtime", b"1700000000.5") + record("LIBARCHIVE.creationtime", b"1699999999.75")
        records += record("SCHILY.xattr.com.apple.FinderInfo", b"\n 12 path=no\n\0\xff")
        folder, slash, base = name.rpartition("/")
        pax_name = f"{folder}{slash}PaxHeader/{base}".encode("ascii", "ignore")[:100]
        parts += [header(pax_name, len(records), b"x", size_field=b"%011o " % len(records), **numbers)]
        parts += [padded(records)]
        short = name.encode("ascii", "ignore")[:100]
        parts += [header(short, len(content), size_field=b"%011o " % len(content), **numbers), padded(content)]
    tar = b"".join(parts) + bytes(2 * BLOCK)
    return tar + bytes(-len(tar) % (20 * BLOCK))


def macos(members: Members) -> bytes:
    """Write as tar of macOS without COPYFILE_DISABLE: a `._` member before every file, and a `.DS_Store`."""
    double = struct.pack(">II16xHIII", 0x00051607, 0x00020000, 1, 9, 38, 32) + bytes(40)
    doubled: list[tuple[str, bytes]] = [(".DS_Store", b"\0\0\0\1Bud1" + bytes(60))]
    for name, content in members:
        folder, slash, base = name.rpartition("/")
        doubled += [(f"{folder}{slash}._{base}", double), (name, content)]
    return libarchive(doubled)


def git(members: Members) -> bytes:
    """Write as `git archive`: a global PAX header with the commit first."""
    comment = record("comment", b"0123456789abcdef0123456789abcdef01234567")
    mode = {"mode": b"0000664\0", "names": (b"root", b"root")}
    parts = [header(b"pax_global_header", len(comment), b"g", mode=b"0000666\0", names=(b"root", b"root"))]
    parts += [padded(comment)]
    for name, content in members:
        encoded = name.encode()
        prefix = b""
        if len(encoded) > 100:
            folder, _, base = encoded.rpartition(b"/")
            prefix, encoded = folder, base
        parts += [header(encoded, len(content), prefix=prefix, **mode), padded(content)]
    tar = b"".join(parts) + bytes(2 * BLOCK)
    return tar + bytes(-len(tar) % (20 * BLOCK))


def gnu_large(members: Members) -> bytes:
    """Write as GNU tar writes numbers that do not fit in octal digits: sizes in base 256, and `././@LongLink`."""
    magic = {"magic": b"ustar  \0", "names": (b"root", b"root"), "device": bytes(8)}
    parts = []
    for name, content in members:
        long_name = name.encode() + b"\0"
        # Its own header has the prefix field for times of access, which is no folder.
        parts += [header(b"././@LongLink", len(long_name), b"L", **magic), padded(long_name)]
        number = {"size_field": base_256(len(content)), "mtime": base_256(1 << 40), "owner": base_256(1 << 33, 8)}
        parts += [header(name.encode()[:100], len(content), prefix=b"14000000000\0", **number, **magic)]
        parts += [padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


def pax_sizes(members: Members) -> bytes:
    """Write sizes as PAX records, with a size of 0 in the header, as star and Go do beyond 8 GiB."""
    parts = []
    for name, content in members:
        records = record("size", str(len(content)).encode()) + record("path", name.encode())
        parts += [header(b"PaxHeaders/x", len(records), b"x"), padded(records)]
        parts += [header(b"x", 0), padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


def with_prefix(write: Callable[[Members], bytes], prefix: str) -> Callable[[Members], bytes]:
    """Return a writer whose names begin with a prefix, as those of `tar -C folder -cf a.tar .`."""
    return lambda members: write([(prefix + name, content) for name, content in members])


def with_folders(members: Members) -> bytes:
    """Write a member for every folder, before its files."""
    parts = []
    seen: set[str] = set()
    for name, content in members:
        folder = name.rpartition("/")[0]
        if folder and folder not in seen:
            seen.add(folder)
            parts.append(header(f"{folder}/".encode(), 0, b"5", mode=b"0000755\0"))
        parts += [header(name.encode(), len(content)), padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


def contiguous(members: Members) -> bytes:
    """Write every file with type 7."""
    parts: list[bytes] = []
    for name, content in members:
        parts += [header(name.encode(), len(content), b"7"), padded(content)]
    return b"".join(parts) + bytes(2 * BLOCK)


WRITERS: dict[str, Callable[[Members], bytes]] = {
    "python ustar": python(tarfile.USTAR_FORMAT),
    "python gnu": python(tarfile.GNU_FORMAT),
    "python pax": python(tarfile.PAX_FORMAT),
    "version 7": old,
    "go": go,
    "java": java,
    "libarchive": libarchive,
    "macos": macos,
    "git": git,
    "gnu large numbers": gnu_large,
    "pax sizes": pax_sizes,
    "dot slash": with_prefix(python(tarfile.GNU_FORMAT), "./"),
    "slash": with_prefix(old, "/"),
    "folders": with_folders,
    "contiguous": contiguous,
}


def members_by_tarfile(tar: bytes) -> dict[str, bytes]:
    """Return {name: content} of the regular files that Python's tarfile reads."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for info in archive:
            file = archive.extractfile(info) if info.isfile() else None
            if file is not None:
                found[info.name] = file.read()
    return found
