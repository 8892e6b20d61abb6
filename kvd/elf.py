"""A shared library under other names: exported symbols lose a prefix, in a copy that is loaded from memory.

Theory of operation. OpenBLAS as built for SciPy exports `scipy_cblas_sgemm`, so that it cannot be mistaken for another
BLAS; we want exactly that mistake. A symbol's name is an offset into a table of strings: moving the offset on by the
prefix's length renames it, and nothing in the file moves. The hash table that the dynamic linker looks names up in is
made anew, in the old one's place. That table wants symbols ordered by bucket, and reordering them would mean to rewrite
every relocation; so the new one has a single bucket, which holds symbols in any order. A Bloom filter in front turns
away nearly every name that is not there, so the long bucket is walked only for names that are. (Formats: System V ABI,
chapters 4 and 5; GNU hash: the dynamic linker's `elf/dl-lookup.c`.)

Must not import mlx or numpy: runs before both. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from pathlib import Path

PT_LOAD, PT_DYNAMIC = 1, 2
DT_HASH, DT_STRTAB, DT_SYMTAB, DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
SYMBOL_BYTES = 24


def without_prefix(image: bytes, prefix: bytes) -> bytes:
    """A copy of a 64-bit little-endian ELF library whose exported symbols have lost `prefix`.

    Raises:
        OSError: the file is not such a library, or has no GNU hash table.
    """
    try:
        return _renamed(image, prefix)
    except (struct.error, ValueError, KeyError, IndexError, StopIteration) as error:
        raise OSError("it is not a 64-bit ELF library with a GNU hash table") from error


def load_image(image: bytes, name: str) -> ctypes.CDLL:
    """Load a shared library from bytes into the global symbol scope; nothing is left on disk.

    Raises:
        OSError: the system refuses to map it.
    """
    try:
        fd = os.memfd_create(name)
    except (AttributeError, OSError):  # old kernels; sandboxes that forbid it
        fd = -1
    if fd >= 0:
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(image)
            # stays open: the linker knows libraries by path, and would take the next file of this number for this one
            return ctypes.CDLL(f"/proc/self/fd/{fd}", mode=ctypes.RTLD_GLOBAL)
        except OSError:  # vm.memfd_noexec, or no /proc
            os.close(fd)
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        path = Path(folder) / name
        path.write_bytes(image)
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _renamed(image: bytes, prefix: bytes) -> bytes:
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 32)
    entry_bytes, entries = struct.unpack_from("<HH", image, 54)
    # Program header: type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment.
    headers = [struct.unpack_from("<IIQQQQQQ", image, table + index * entry_bytes) for index in range(entries)]
    dynamic = next(header for header in headers if header[0] == PT_DYNAMIC)
    tags: dict[int, int] = dict(struct.iter_unpack("<qQ", image[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16]))
    if DT_HASH in tags:
        raise ValueError("a second hash table would keep the old names")

    def place(address: int) -> int:
        """Where in the file an address is."""
        for kind, _, offset, start, _, length, _, _ in headers:
            if kind == PT_LOAD and start <= address < start + length:
                return int(offset + address - start)
        raise ValueError(f"address {address:#x} is in no segment")

    copy = bytearray(image)
    strings, symbols, hashes = (place(tags[tag]) for tag in (DT_STRTAB, DT_SYMTAB, DT_GNU_HASH))
    _, first, words, shift = struct.unpack_from("<4I", image, hashes)
    count = _symbol_count(image, hashes)
    codes: list[int] = []
    for index in range(first, count):
        position = symbols + index * SYMBOL_BYTES
        (offset,) = struct.unpack_from("<I", image, position)
        name = image[strings + offset : image.index(b"\0", strings + offset)]
        if name.startswith(prefix):
            struct.pack_into("<I", copy, position, offset + len(prefix))
            name = name.removeprefix(prefix)
        codes.append(_gnu_hash(name))
    bloom = [0] * words
    for code in codes:
        bloom[code // 64 % words] |= 1 << code % 64 | 1 << (code >> shift) % 64
    last = len(codes) - 1
    chain = [code | 1 if index == last else code & ~1 for index, code in enumerate(codes)]
    made = struct.pack(f"<4I{words}QI{len(chain)}I", 1, first, words, shift, *bloom, first, *chain)
    copy[hashes : hashes + len(made)] = made  # never longer than what was there: that had one bucket at least
    return bytes(copy)


def _symbol_count(image: bytes, hashes: int) -> int:
    """Dynamic symbols, as the hash table knows them: the chain of the last bucket ends with the last one."""
    buckets, first, words, _ = struct.unpack_from("<4I", image, hashes)
    start = hashes + 16 + 8 * words
    last: int = max(struct.unpack_from(f"<{buckets}I", image, start))
    if last < first:
        raise ValueError("the library exports nothing")
    chain = start + 4 * buckets
    while not struct.unpack_from("<I", image, chain + 4 * (last - first))[0] & 1:
        last += 1
    return last + 1


def _gnu_hash(name: bytes) -> int:
    code = 5381
    for byte in name:
        code = (code * 33 + byte) & 0xFFFFFFFF
    return code
