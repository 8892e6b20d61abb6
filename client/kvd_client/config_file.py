"""What the configuration file says to daemon and clients alike: where they meet.

One TOML file has the settings of everything (docs/configuration.md). The client reads two names at its top, `data_dir`
and `socket`, so that it finds the daemon that was told the same; the rest is the daemon's business. Nothing is created.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd_client.errors import KvdClientError

FILE_NAME = "kvd.toml"
MAX_FILE_BYTES = 1 << 20


class ConfigFileError(KvdClientError):
    """The configuration file cannot be used; the message names it and says why."""


def default_config_file(environ: Mapping[str, str] | None = None, *, platform: str = sys.platform) -> Path:
    """The file when none is named: `kvd.toml` in what `platformdirs.user_config_dir("kvd", appauthor=False)` gives."""
    environ = os.environ if environ is None else environ
    if platform == "darwin":
        return Path("~/Library/Application Support/kvd").expanduser() / FILE_NAME
    xdg = environ.get("XDG_CONFIG_HOME", "")
    return (Path(xdg) / "kvd" if os.path.isabs(xdg) else Path("~/.config/kvd").expanduser()) / FILE_NAME


def config_file(named: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """The file to read: the argument, else `KVD_CONFIG`, else the default one if it exists; an empty name means none.

    A file that was named is returned whether it exists or not: that it is missing is an error of whoever named it.
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get("KVD_CONFIG") if named is None else os.fspath(named)
    if chosen is not None:
        return Path(os.path.abspath(Path(chosen).expanduser())) if chosen else None
    default = default_config_file(environ)
    return default if default.exists() else None


def read_config_file(path: Path) -> dict[str, Any]:
    """Everything a file says.

    Raises:
        ConfigFileError: it is missing, unreadable, too long or no TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigFileError(f"{path}: more than {MAX_FILE_BYTES} bytes")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigFileError(f"{path}: not valid TOML: {error}") from error


def configured_path(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """A path that the file has at its top, or None.

    Args:
        name: `data_dir` or `socket`.
        environ: instead of the process's environment.

    Raises:
        ConfigFileError: as `read_config_file`; or it is no absolute path (one that begins with ~ is).
    """
    path = config_file(environ=environ)
    return None if path is None else path_setting(path, name, read_config_file(path).get(name))


def path_setting(file: Path, name: str, value: object) -> str | None:
    """Check a path of the file.

    Raises:
        ConfigFileError: it is no absolute path.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not os.path.isabs(os.path.expanduser(value)):
        raise ConfigFileError(f'{file}: {name} must be an absolute path such as "/srv/kvd" or "~/kvd", not {value!r}')
    return os.path.expanduser(value)


__all__ = [
    "ConfigFileError",
    "config_file",
    "configured_path",
    "default_config_file",
    "path_setting",
    "read_config_file",
]
