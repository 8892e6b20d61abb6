"""Exported agents' files, read and written step by step.

Theory of operation. A writer is a temporary file beside the target until it is whole, and a note in the data folder
says where that file is, so that the next start removes what a killed daemon left. The last step gives it its name, and
takes that from nobody unless told to. A reader goes through the file once
for the checksum and keeps a digest of every part; a part that is read later and has another one is refused, so that a
file which changes under the reader cannot slip in what was never verified.

May import the siblings agent_file, errors, fs and page_file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Final

import xxhash

from kvd.store.agent_file import CALLERS_ERRNOS, AgentFileHeader, header_bytes, read_header, why_not
from kvd.store.errors import AgentFileInvalid, FilePathRefused
from kvd.store.fs import TEMP_SUFFIX, FileHandle, FileSystem, is_temp_name, make_folder, write_file
from kvd.store.page_file import CHECKSUM_BYTES

VERIFIED_AT_ONCE_BYTES: Final = 4 << 20
"""About how much one step of the checksum reads: a few milliseconds during which nobody else gets the disk."""


_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What a file system without hard links says (exFAT, some of the network's)."""


class AgentFileReader:
    """Reads one file in steps: `open`, `verify` until it says so, then the parts. Owner: one import.

    Args:
        path: the file; links are not followed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header: AgentFileHeader | None = None
        self._places: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, bytes] = {}
        self._left: list[tuple[str, int]] = []
        self._whole = xxhash.xxh3_128()
        self._at = 0

    def open(self, fs: FileSystem) -> AgentFileHeader:
        """Read the header; raises as `read_header`."""
        header, head_bytes = read_header(fs, self.path)
        self._header, self._at = header, 0
        self._left = [("header", head_bytes), *header.parts()]
        return header

    def verify(self, fs: FileSystem) -> bool:
        """Go on with the checksum; True once the whole file has been read and is what was written.

        Raises:
            AgentFileInvalid: it is not.
            OSError: the disk refused.
        """
        taken = 0
        while self._left and taken < VERIFIED_AT_ONCE_BYTES:
            name, length = self._left.pop(0)
            data = fs.read(self.path, offset=self._at, limit=length)
            if len(data) != length:
                raise AgentFileInvalid(path=str(self.path), reason="it was cut while it was read")
            self._whole.update(data)
            self._digests[name] = xxhash.xxh3_128_digest(data)
            self._places[name] = (self._at, length)
            self._at += length
            taken += length
        if self._left:
            return False
        if fs.read(self.path, offset=self._at, limit=CHECKSUM_BYTES) != self._whole.digest():
            raise AgentFileInvalid(path=str(self.path), reason="its checksum does not hold: it is damaged")
        head = header_bytes(self.header)
        if xxhash.xxh3_128_digest(head) != self._digests["header"]:
            raise AgentFileInvalid(path=str(self.path), reason="it changed while it was read")
        return True

    @property
    def header(self) -> AgentFileHeader:
        """What `open` read."""
        assert self._header is not None
        return self._header

    def part(self, fs: FileSystem, name: str) -> bytes:
        """One verified piece of the payload: `record`, `conditioning.<group>.<centre|scale>`, `pages.<group>.<number>`.

        Raises:
            AgentFileInvalid: it is not what the checksum was taken over.
            OSError: the disk refused.
        """
        offset, length = self._places[name]
        data = fs.read(self.path, offset=offset, limit=length)
        if xxhash.xxh3_128_digest(data) != self._digests[name]:
            raise AgentFileInvalid(path=str(self.path), reason="it changed while it was read")
        return data


class AgentFileWriter:
    """Writes one file in steps: `begin`, `append` the payload in order, `finish` or `abandon`. Owner: one export.

    Args:
        path: absolute.
        force: replace a file that is there.
        notes: folder of the notes that say where unfinished files are.
    """

    def __init__(self, path: Path, *, force: bool, notes: Path) -> None:
        self.path = path
        self._force = force
        self._notes = notes
        self._temp: Path | None = None
        self._note: Path | None = None
        self._handle: FileHandle | None = None
        self._digest = xxhash.xxh3_128()
        self._written = 0

    def begin(self, fs: FileSystem, header: AgentFileHeader) -> None:
        """Make the temporary file and write the header.

        Raises:
            FilePathRefused: the path cannot be used, or a file is there already.
            OSError: the disk refused.
        """
        self._check(fs)
        token = secrets.token_hex(6)
        self._temp = self.path.with_name(f".{self.path.name}.{token}{TEMP_SUFFIX}")
        self._note = self._notes / token
        make_folder(fs, self._notes)
        write_file(fs, self._note, [os.fsencode(self._temp)])
        self._digest, self._written = xxhash.xxh3_128(), 0
        try:
            self._handle = fs.create(self._temp)
        except OSError as error:
            if error.errno in CALLERS_ERRNOS:
                raise FilePathRefused(path=str(self.path), reason=why_not(error)) from error
            raise
        self.append(fs, header_bytes(header))

    def _check(self, fs: FileSystem) -> None:
        try:
            parent, found = fs.stat(self.path.parent), fs.stat(self.path)
        except OSError as error:
            raise FilePathRefused(path=str(self.path), reason=why_not(error)) from error
        if parent is None:
            raise FilePathRefused(path=str(self.path), reason=f"there is no folder {self.path.parent}")
        if found is not None and (found.is_folder or found.is_special):
            raise FilePathRefused(path=str(self.path), reason="it is a folder, pipe, socket or device")
        if found is not None and not self._force:
            raise self._taken()

    def append(self, fs: FileSystem, data: bytes | memoryview) -> None:
        """Write the next piece; OSError when the disk refuses."""
        assert self._handle is not None
        fs.write(self._handle, data)
        self._digest.update(data)
        self._written += len(data)

    def finish(self, fs: FileSystem) -> int:
        """Complete the file and put it in place; it survives a loss of power when this returns.

        Returns:
            Its bytes.

        Raises:
            FilePathRefused: a file has come to be there meanwhile.
            OSError: the disk refused.
        """
        assert self._handle is not None
        assert self._temp is not None
        self.append(fs, self._digest.digest())
        fs.fsync(self._handle)
        fs.close(self._handle)
        self._handle = None
        self._check(fs)
        if self._force:
            fs.rename(self._temp, self.path)
        else:
            self._put_new(fs, self._temp)
        fs.fsync_dir(self.path.parent)
        self._forget(fs)
        return self._written

    def _put_new(self, fs: FileSystem, temp: Path) -> None:
        """Give the file its name if nobody has it: of several who try at once, whoever they are, one gets it."""
        try:
            try:
                fs.link(temp, self.path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # a file system without second names: an empty file takes the name first. A crash just here leaves it.
                fs.close(fs.create(self.path))
                try:
                    fs.rename(temp, self.path)
                except OSError:
                    fs.unlink(self.path)
                    raise
                return
        except FileExistsError as error:
            raise self._taken() from error
        fs.unlink(temp)

    def _taken(self) -> FilePathRefused:
        return FilePathRefused(path=str(self.path), reason="there is a file already; force replaces it", exists=True)

    def abandon(self, fs: FileSystem) -> None:
        """Remove what was written, as far as the disk allows; the next start removes the rest."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                fs.close(self._handle)
            self._handle = None
        if self._temp is not None:
            try:
                _remove(fs, self._temp)
            except OSError:
                return  # the note stays
        self._forget(fs)

    def _forget(self, fs: FileSystem) -> None:
        if self._note is not None:
            with contextlib.suppress(OSError):
                fs.unlink(self._note)
        self._note = self._temp = None


def remove_unfinished(fs: FileSystem, notes: Path, *, dry_run: bool) -> list[str]:
    """Remove files that exports of a killed daemon were writing, wherever they are.

    Returns:
        Their paths.
    """
    removed: list[str] = []
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = fs.listdir(notes)
    for name in names:
        if is_temp_name(name):
            continue
        try:
            temp = Path(os.fsdecode(fs.read(notes / name, limit=1 << 16)))
            found = fs.stat(temp) if is_temp_name(temp.name) and temp.is_absolute() else None
            is_ours = found is not None and not (found.is_folder or found.is_special)
            if is_ours:
                removed.append(str(temp))
            if not dry_run:
                if is_ours:
                    _remove(fs, temp)
                fs.unlink(notes / name)
        except (OSError, ValueError):  # a disk that is not there now: the note stays for a later start
            continue
    return removed


def _remove(fs: FileSystem, temp: Path) -> None:
    """Remove an unfinished file for good: its note may only go when the file cannot come back."""
    if fs.stat(temp) is not None:
        fs.unlink(temp)
    if fs.stat(temp.parent) is not None:
        fs.fsync_dir(temp.parent)


__all__ = ["AgentFileReader", "AgentFileWriter", "remove_unfinished"]
