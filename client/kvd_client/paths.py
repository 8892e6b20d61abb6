"""Where the daemon's data folder and socket are. Daemon and client compute them with these functions, so they agree.

Pure but for reading the environment, the working folder and the configuration file: nothing is created.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvd_client.config_file import configured_path

SOCKET_NAME = "kvd.sock"


def default_data_dir(environ: Mapping[str, str] | None = None, *, platform: str = sys.platform) -> Path:
    """The data folder when none is named: what `platformdirs.user_data_dir("kvd", appauthor=False)` gives.

    `~/Library/Application Support/kvd` on macOS, else `$XDG_DATA_HOME/kvd` (when that is absolute) or
    `~/.local/share/kvd`.
    """
    environ = os.environ if environ is None else environ
    if platform == "darwin":
        return Path("~/Library/Application Support/kvd").expanduser()
    xdg = environ.get("XDG_DATA_HOME", "")
    return Path(xdg) / "kvd" if os.path.isabs(xdg) else Path("~/.local/share/kvd").expanduser()


def resolve_data_dir(data_dir: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The data folder as an absolute path: the argument, else `KVD_DATA_DIR`, else the file's, else the default.

    Raises:
        ConfigFileError: the configuration file is asked and cannot be used.
    """
    environ = os.environ if environ is None else environ
    chosen = data_dir or environ.get("KVD_DATA_DIR") or configured_path("data_dir", environ)
    chosen = chosen or default_data_dir(environ)
    return Path(os.path.abspath(Path(chosen).expanduser()))


def socket_path_limit_bytes(platform: str = sys.platform) -> int:
    """Bytes a socket path may have: `sun_path` less its terminating zero (108 bytes on Linux, 104 elsewhere)."""
    return 107 if platform == "linux" else 103


def default_socket(data_dir: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The socket of the daemon that serves a data folder: `<data folder>/kvd.sock`.

    A path over the platform's limit is replaced by one in a folder of this user's own (the server makes it with mode
    0700 and refuses one that is somebody else's) under the temporary folder, named by a hash of the data folder.
    """
    folder = resolve_data_dir(data_dir, environ)
    plain = folder / SOCKET_NAME
    if len(os.fsencode(plain)) <= socket_path_limit_bytes():
        return plain
    digest = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
    for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  (a folder of our own inside, checked by the server)
        short = Path(parent) / f"kvd-{os.getuid()}-{digest}" / SOCKET_NAME
        if len(os.fsencode(short)) <= socket_path_limit_bytes():
            return short
    return plain


def resolve_socket(
    socket: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Path:
    """The socket to use.

    Order: the argument, the one of the `data_dir` argument, `KVD_SOCKET`, the one of `KVD_DATA_DIR`, `socket` and
    `data_dir` of the configuration file, the default.

    What is said on the spot wins over the environment: `--data-dir X` with `KVD_SOCKET` set means X's daemon.

    Raises:
        ConfigFileError: the configuration file is asked and cannot be used.
    """
    environ = os.environ if environ is None else environ
    chosen = socket or (None if data_dir else environ.get("KVD_SOCKET"))
    if not (chosen or data_dir or environ.get("KVD_DATA_DIR")):
        chosen = configured_path("socket", environ)
    if chosen:
        return Path(os.path.abspath(Path(chosen).expanduser()))
    return default_socket(data_dir, environ)


def start_command(socket: Path) -> str:
    """The command that starts the daemon which would answer at `socket`."""
    if socket == resolve_socket():
        return "kvd serve"
    if socket == default_socket(socket.parent):
        return f"kvd serve --data-dir {shlex.quote(os.fspath(socket.parent))}"
    return f"kvd serve --socket {shlex.quote(os.fspath(socket))}"
