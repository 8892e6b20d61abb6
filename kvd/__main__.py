"""Entry point of the `kvd` command and of `python -m kvd`: the launcher first, then the commands.

May import kvd.launcher and kvd.cli, and the latter only after the launcher has run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from kvd import launcher

NEEDS_MLX = frozenset({"bench", "calibrate", "demo", "doctor", "model", "serve"})
"""Commands that import mlx; the others (and any `--help`) start without loading a BLAS."""


def needs_mlx(arguments: Sequence[str]) -> bool:
    """Whether a command line leads to an import of mlx."""
    if any(argument in ("--help", "--version", "-h") for argument in arguments):
        return False
    return any(argument in NEEDS_MLX for argument in arguments)


def open_standard_streams() -> None:
    """Open standard input, output and error where whoever started us closed them.

    Else the first files that are opened get their numbers: what a library writes to standard error would be written
    into one of those, and Python has no `sys.stderr` at all.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115  (for the process's life)


def main() -> None:
    """Run `kvd`. Ctrl-C is one line and exit code 130, also while modules are being imported."""
    open_standard_streams()
    try:
        if needs_mlx(sys.argv[1:]):
            outcome = launcher.prepare()
            if outcome.warning:
                print(f"kvd: warning: {outcome.warning}", file=sys.stderr)
        from kvd.cli import main as cli_main

        cli_main()
    except KeyboardInterrupt:
        print("kvd: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but the interpreter's own end


if __name__ == "__main__":
    main()
