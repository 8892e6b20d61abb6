"""A folder aside, in the system's temporary folder, for what a look has to write. Imports kvd.errors only."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvd.errors import EnvironmentFault

REMEDY: Final = "free space in the temporary folder, or name another one: TMPDIR=FOLDER kvd doctor"
"""What to do when there is no room aside."""


class NoRoomAside(EnvironmentFault):
    """The temporary folder refused; its name and the system's reason are in the message. The doctor's own."""


@contextmanager
def aside() -> Iterator[Path]:
    """An empty folder, removed at the end.

    Raises:
        NoRoomAside: it cannot be made, or what was done in it raised OSError.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="kvd-doctor-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
    except OSError as error:
        # without any usable folder the system's reason lists those that were tried
        where = tempfile.tempdir or "none is usable"
        raise NoRoomAside(f"the temporary folder ({where}) refuses: {error.strerror or error}") from error


__all__ = ["REMEDY", "NoRoomAside", "aside"]
