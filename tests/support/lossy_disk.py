"""A simulated disk that forgets: after `crash()` only what was flushed is certain.

The model. A folder's names and a file's content are durable separately. Content becomes durable by `fsync` of the file,
names (creations, renames, removals, new folders) by `fsync_dir` of their folder. Everything else may survive or not,
independently and in any order: each unflushed name change is kept or dropped, each unflushed write is kept, dropped,
torn at any byte or replaced by zeros. A rename is one change per folder it touches. After a failed `fsync` the data
that was to be flushed is in doubt for good: a later success does not cover it (as on Linux).

Faults: `crash_at` stops the world at the n-th operation (a write may then have happened in part); `fail` makes
operations raise OSError. `operations` counts.

The SQLite catalog cannot live in memory. Its files are kept in a real folder; the catalog is derived state, so `crash`
may do anything to them: keep, delete, restore an older copy, flip bytes, as `catalog_after_crash` says.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from kvd.store.fs import FileHandle, FileStat
from tests.support.lossy_nodes import File, Folder, Truncate, Write, change_content

CATALOG = "catalog.sqlite3"


class SimulatedCrash(BaseException):
    """The machine died. Not an Exception: no handler of the code under test may survive it."""


class LossyFileSystem:
    """Implements `kvd.store.fs.FileSystem` in memory. Not thread safe.

    Args:
        side: real folder for the catalog's files.
        seed: of every random choice.
    """

    def __init__(self, side: Path, *, seed: int = 0) -> None:
        self.side = side
        self.random = random.Random(seed)
        self.operations = 0
        self.log: list[str] = []
        self.crash_at: int | None = None
        self.fail: Callable[[int, str, Path | None], int | None] = lambda number, name, path: None
        self.catalog_after_crash = "keep"
        self._root = Folder()
        self._handles: dict[int, tuple[File, Path]] = {}
        self._side_handles: set[int] = set()
        self._next_handle = 1000
        self._dead = False
        self._clock = 0

    # ---- faults and the crash ---------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Lose what was not certain and come up again. Open handles and locks are gone."""
        self._settle(self._root)
        self._handles.clear()
        self._side_handles.clear()
        self._dead = False
        self.crash_at = None
        self.operations = 0
        self.log.clear()
        self._treat_catalog()

    def reboot_clean(self) -> None:
        """Everything survives: a plain kill of the process."""
        self._handles.clear()
        self._dead = False
        self.crash_at = None
        self.operations = 0

    def _step(self, name: str, path: Path | None) -> None:
        """Count an operation; die or fail here if that was asked for."""
        if self._dead:
            raise SimulatedCrash
        self.operations += 1
        self.log.append(f"{name} {path.name if path is not None else ''}")
        if self.crash_at is not None and self.operations >= self.crash_at:
            self._dead = True
        else:
            code = self.fail(self.operations, name, path)
            if code is not None:
                raise OSError(code, os.strerror(code), str(path))

    def _die_if_dead(self) -> None:
        if self._dead:
            raise SimulatedCrash

    def _settle(self, folder: Folder) -> None:
        """Turn a folder into what a crash leaves of it."""
        changes = [change for change in folder.pending if self.random.random() < 0.5]
        if self.random.random() < 0.5:
            self.random.shuffle(changes)
        for change in changes:
            self._apply_names(folder.durable, change)
        folder.pending.clear()
        folder.live = dict(folder.durable)
        for node in folder.live.values():
            if isinstance(node, Folder):
                self._settle(node)
            else:
                self._settle_file(node)

    def _settle_file(self, file: File) -> None:
        style = self.random.choice(("none", "all", "some"))
        for change in file.pending:
            keep = style == "all" or (style == "some" and self.random.random() < 0.5)
            if not keep:
                if style == "some" and isinstance(change, Write) and self.random.random() < 0.5:
                    self._torn(file, change)
                continue
            change_content(file.durable, change)
        file.pending.clear()
        file.live = bytearray(file.durable)

    def _torn(self, file: File, change: Write) -> None:
        cut = self.random.randrange(len(change.data) + 1)
        if self.random.random() < 0.5:
            change_content(file.durable, Write(change.offset, change.data[:cut]))
        else:
            change_content(file.durable, Write(change.offset, change.data[:cut] + bytes(len(change.data) - cut)))

    @staticmethod
    def _apply_names(names: dict[str, File | Folder], change: list[tuple[str, File | Folder | None]]) -> None:
        for name, node in change:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node

    def _treat_catalog(self) -> None:
        backup = self.side.with_name(self.side.name + ".old")
        if self.catalog_after_crash == "delete":
            shutil.rmtree(self.side, ignore_errors=True)
        elif self.catalog_after_crash == "older" and backup.exists():
            shutil.rmtree(self.side, ignore_errors=True)
            shutil.copytree(backup, self.side)
        elif self.catalog_after_crash == "garbage":
            for path in self.side.rglob(f"{CATALOG}*"):
                data = bytearray(path.read_bytes())
                for _ in range(8 if data else 0):
                    data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                path.write_bytes(data)

    def remember_catalog(self) -> None:
        """Keep a copy of the catalog's files for `catalog_after_crash = "older"`."""
        backup = self.side.with_name(self.side.name + ".old")
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(self.side, backup)

    # ---- direct access for tests ------------------------------------------------------------------------------------

    def poke(self, path: Path, data: bytes) -> None:
        """Put a durable file there, as another program would have; parents must exist."""
        parent = self._folder(path.parent)
        file = File(bytearray(data), bytearray(data))
        parent.live[path.name] = parent.durable[path.name] = file

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all in it, as `rm -r` would."""
        for names in (self._folder(path.parent).live, self._folder(path.parent).durable):
            names.pop(path.name, None)

    def live_files(self) -> dict[Path, bytes]:
        """Every file a program would see now."""
        found: dict[Path, bytes] = {}

        def walk(folder: Folder, path: Path) -> None:
            for name, node in folder.live.items():
                if isinstance(node, Folder):
                    walk(node, path / name)
                else:
                    found[path / name] = bytes(node.live)

        walk(self._root, Path("/"))
        return found

    # ---- FileSystem -------------------------------------------------------------------------------------------------

    def create(self, path: Path) -> FileHandle:
        """See `FileSystem.create`."""
        self._step("create", path)
        self._die_if_dead_sometimes()
        folder = self._folder(path.parent)
        if path.name in folder.live:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        return self._open(self._new_file(folder, path), path)

    def open_append(self, path: Path) -> FileHandle:
        """See `FileSystem.open_append`."""
        if path.name.startswith(CATALOG):
            real = self.database_path(path)
            os.close(os.open(real, os.O_CREAT | os.O_RDWR, 0o600))
            self._next_handle += 1
            self._side_handles.add(self._next_handle)
            return FileHandle(self._next_handle)
        self._step("open_append", path)
        self._die_if_dead_sometimes()
        folder = self._folder(path.parent)
        file = folder.live.get(path.name)
        if isinstance(file, Folder):
            raise IsADirectoryError(errno.EISDIR, "folder", str(path))
        return self._open(file or self._new_file(folder, path), path)

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        file, path = self._file(handle)
        content = bytes(data)
        try:
            self._step("write", path)
        except OSError:
            self._write(file, content[: self.random.randrange(len(content) + 1)])
            raise
        if self._dead:
            self._write(file, content[: self.random.randrange(len(content) + 1)])
            raise SimulatedCrash
        self._write(file, content)

    def truncate(self, handle: FileHandle, file_bytes: int) -> None:
        """See `FileSystem.truncate`."""
        file, path = self._file(handle)
        self._step("truncate", path)
        self._die_if_dead_sometimes()
        change = Truncate(file_bytes)
        change_content(file.live, change)
        file.pending.append(change)
        self._die_if_dead()

    def fsync(self, handle: FileHandle) -> None:
        """See `FileSystem.fsync`."""
        file, path = self._file(handle)
        try:
            self._step("fsync", path)
        except OSError:
            for change in file.pending:
                change.doubtful = True
            raise
        self._die_if_dead_sometimes()
        for change in file.pending:
            if not change.doubtful or self.random.random() < 0.5:
                change_content(file.durable, change)
        file.pending.clear()
        self._die_if_dead()

    def close(self, handle: FileHandle) -> None:
        """See `FileSystem.close`."""
        self._side_handles.discard(handle)
        self._handles.pop(handle, None)

    def rename(self, source: Path, target: Path) -> None:
        """See `FileSystem.rename`."""
        self._step("rename", target)
        self._die_if_dead_sometimes()
        old, new = self._folder(source.parent), self._folder(target.parent)
        if source.name not in old.live:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(source))
        node = old.live.pop(source.name)
        new.live[target.name] = node
        if old is new:
            old.pending.append([(source.name, None), (target.name, node)])
        else:
            old.pending.append([(source.name, None)])
            new.pending.append([(target.name, node)])
        self._die_if_dead()

    def link(self, source: Path, target: Path) -> None:
        """See `FileSystem.link`."""
        self._step("link", target)
        self._die_if_dead_sometimes()
        old, new = self._folder(source.parent), self._folder(target.parent)
        if source.name not in old.live:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(source))
        if target.name in new.live:
            raise FileExistsError(errno.EEXIST, "the name is taken", str(target))
        node = old.live[source.name]
        new.live[target.name] = node
        new.pending.append([(target.name, node)])
        self._die_if_dead()

    def unlink(self, path: Path) -> None:
        """See `FileSystem.unlink`."""
        self._step("unlink", path)
        self._die_if_dead_sometimes()
        folder = self._folder(path.parent)
        if path.name not in folder.live:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        del folder.live[path.name]
        folder.pending.append([(path.name, None)])
        self._die_if_dead()

    def mkdir(self, path: Path) -> None:
        """See `FileSystem.mkdir`."""
        self._step("mkdir", path)
        self._die_if_dead_sometimes()
        parent = self._folder(path.parent)
        if path.name in parent.live:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        folder = Folder()
        parent.live[path.name] = folder
        parent.pending.append([(path.name, folder)])
        self._die_if_dead()

    def fsync_dir(self, path: Path) -> None:
        """See `FileSystem.fsync_dir`."""
        self._step("fsync_dir", path)
        self._die_if_dead_sometimes()
        folder = self._folder(path)
        for change in folder.pending:
            self._apply_names(folder.durable, change)
        folder.pending.clear()
        self._die_if_dead()

    def chmod(self, path: Path, mode: int) -> None:
        """See `FileSystem.chmod`."""
        if path.name.startswith(CATALOG):
            return
        node = self._node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        node.mode = mode

    def read(self, path: Path, *, offset: int = 0, limit: int = -1, drop_cache: bool = False) -> bytes:
        """See `FileSystem.read`."""
        self._step("read", path)
        self._die_if_dead()
        node = self._node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, "folder", str(path))
        data = bytes(node.live[offset:])
        return data if limit < 0 else data[:limit]

    def read_into(self, path: Path, buffer: memoryview, *, drop_cache: bool = False) -> int:
        """See `FileSystem.read_into`."""
        data = self.read(path, limit=len(buffer), drop_cache=drop_cache)
        buffer[: len(data)] = data
        return len(data)

    def listdir(self, path: Path) -> list[str]:
        """See `FileSystem.listdir`."""
        self._die_if_dead()
        return sorted(self._folder(path).live)

    def entries(self, path: Path) -> list[tuple[str, FileStat]]:
        """See `FileSystem.entries`."""
        return [(name, found) for name in self.listdir(path) if (found := self.stat(path / name)) is not None]

    def stat(self, path: Path) -> FileStat | None:
        """See `FileSystem.stat`."""
        self._die_if_dead()
        if path.name.startswith(CATALOG):
            real = self.database_path(path)
            return FileStat(False, real.stat().st_size, 0o600, 0.0) if real.exists() else None
        node = self._node(path)
        if node is None:
            return None
        if isinstance(node, Folder):
            return FileStat(True, 0, node.mode, 0.0)
        return FileStat(False, len(node.live), node.mode, float(node.mtime))

    def lock(self, path: Path) -> FileHandle:
        """See `FileSystem.lock`."""
        return self.open_append(path)

    def database_path(self, path: Path) -> Path:
        """See `FileSystem.database_path`."""
        real = self.side / path.relative_to("/")
        real.parent.mkdir(parents=True, exist_ok=True)
        return real

    # ---- internals --------------------------------------------------------------------------------------------------

    def _die_if_dead_sometimes(self) -> None:
        """At the fatal operation: die before its effect half of the time (after it otherwise)."""
        if self._dead and self.random.random() < 0.5:
            raise SimulatedCrash

    def _node(self, path: Path) -> File | Folder | None:
        node: File | Folder = self._root
        for part in path.parts[1:]:
            if not isinstance(node, Folder) or part not in node.live:
                return None
            node = node.live[part]
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        return node

    def _file(self, handle: FileHandle) -> tuple[File, Path]:
        self._die_if_dead()
        if handle not in self._handles:
            raise OSError(errno.EBADF, "bad handle")
        return self._handles[handle]

    def _new_file(self, folder: Folder, path: Path) -> File:
        file = File()
        folder.live[path.name] = file
        folder.pending.append([(path.name, file)])
        return file

    def _open(self, file: File, path: Path) -> FileHandle:
        self._next_handle += 1
        self._handles[self._next_handle] = (file, path)
        self._die_if_dead()
        return FileHandle(self._next_handle)

    def _write(self, file: File, data: bytes) -> None:
        change = Write(len(file.live), data)
        change_content(file.live, change)
        file.pending.append(change)
        self._clock += 1
        file.mtime = self._clock
