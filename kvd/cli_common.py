"""What several `kvd` commands do alike: report an error, find the model or pull the default one.

May import click, kvd.config, kvd.errors and kvd.model.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn, ParamSpec, TypeVar

import click

from kvd.config import DEFAULT_MODEL
from kvd.errors import EnvironmentFault, KvdError

P = ParamSpec("P")
R = TypeVar("R")

EXIT_INTERRUPTED: Final = 130


def ensure_model(name: str, directory: Path) -> Path:
    """Folder of a model; the default one is pulled and calibrated when it is missing.

    Raises:
        KvdError: no such model, or the pull failed (its own output says why).
    """
    from kvd.model.errors import ModelNotFound
    from kvd.model.registry import resolve

    try:
        return resolve(name, directory).path
    except ModelNotFound:
        if name != DEFAULT_MODEL:
            raise
    # a process of its own: what the conversion and the calibration took in memory is gone when the daemon starts
    command = [sys.executable, "-m", "kvd", "model", "pull", name, "--model-dir", str(directory)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise EnvironmentFault(f"model {name} could not be pulled; `kvd model pull {name}` says why")
    return resolve(name, directory).path


def unusable(error: OSError, data: Path) -> str:
    """A refusal of the system while a daemon starts, in words: what was refused, why, and what to do."""
    reason, path = error.strerror or str(error), Path(os.fsdecode(error.filename)) if error.filename else data
    if path == data or data in path.parents or path in data.parents:
        return f"the data folder {data} cannot be made or used: {reason}: {path}; give another one with --data-dir"
    return f"{reason}: {path}"


def fail(error: KvdError, *, as_json: bool = False) -> NoReturn:
    """Report an error as people or programs want it and exit: 2 for a wrong call, 1 otherwise."""
    if as_json:
        facts = {"name": error.name, "message": error.message, "data": error.data}
        click.echo(json.dumps({"error": facts}, default=str))
    click.echo(f"kvd: {error.message}", err=True)
    sys.exit(2 if error.name in ("invalid_params", "config_error") else 1)


def fails_cleanly(command: Callable[P, R]) -> Callable[P, R]:
    """Turn kvd's errors and refusals of the system into one line and an exit code, Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KvdError as error:
            fail(error, as_json=bool(kwargs.get("as_json")))
        except BrokenPipeError:  # whoever read our output has read enough
            raise
        except OSError as error:
            click.echo(f"kvd: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("kvd: interrupted; the same command goes on where it can", err=True)
            sys.exit(EXIT_INTERRUPTED)

    return wrapped


__all__ = ["EXIT_INTERRUPTED", "ensure_model", "fail", "fails_cleanly", "unusable"]
