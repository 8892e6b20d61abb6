"""Makes the listening socket. A path is replaced only if it is a socket at which nobody answers."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvd.front.errors import SocketInUse, SocketRefused
from kvd_client.paths import socket_path_limit_bytes

_PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket and the identity of the file it made (device, inode)."""

    socket: socket.socket
    path: Path
    inode: tuple[int, int]

    def unlink(self) -> None:
        """Remove the file, unless the path has been taken over by another one."""
        try:
            if _inode(self.path) == self.inode:
                self.path.unlink()
        except FileNotFoundError:
            pass


def listen(path: Path, *, backlog_connections: int, limit_bytes: int | None = None) -> Listener:
    """Bind and listen at `path`: mode 0600, in a folder of mode 0700 which is made when missing.

    Args:
        path: where clients connect.
        backlog_connections: connections kept by the kernel until they are accepted.
        limit_bytes: longest path the platform takes; None asks the platform.

    Raises:
        SocketRefused: the path is too long, its folder is open to others or not ours, or it is no socket.
        SocketInUse: a daemon answers there.
    """
    limit = socket_path_limit_bytes() if limit_bytes is None else limit_bytes
    path_bytes = len(os.fsencode(path))
    if path_bytes > limit:
        raise SocketRefused(
            f"the socket path {path} has {path_bytes} bytes, this platform takes {limit}; choose a shorter one",
            path=str(path),
            path_bytes=path_bytes,
            limit_bytes=limit,
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(path.parent)
    with _folder_lock(path.parent):
        _make_way(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            path.chmod(0o600)  # until here the folder alone keeps others out, which is enough
            listener.listen(backlog_connections)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return Listener(listener, path, _inode(path))


def _check_folder(folder: Path) -> None:
    """Only this user may reach into the folder; changing the mode of a folder we did not make is not for us."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        raise SocketRefused(
            f"the socket's folder {folder} belongs to user {status.st_uid}; choose a folder of your own",
            folder=str(folder),
            owner_uid=status.st_uid,
        )
    if mode & 0o077:
        raise SocketRefused(
            f"the socket's folder {folder} has mode {mode:04o}, which lets other users in; "
            f"run `chmod 700 {folder}` or choose another folder",
            folder=str(folder),
            mode=f"{mode:04o}",
        )


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Two daemons that start at a time must not both find the path stale and unlink each other's socket."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_way(path: Path) -> None:
    """Remove a stale socket."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketRefused(f"{path} exists and is no socket; choose another path", path=str(path))
    if _is_answered(path):
        raise SocketInUse(f"a daemon answers at {path} already; stop it or choose another socket", path=str(path))
    path.unlink(missing_ok=True)


def _is_answered(path: Path) -> bool:
    """Whether somebody accepts there; a full or slow queue counts as yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
