"""Where models live: outside the data folder, so that wiping caches never costs a download.

May import nothing of kvd.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import platformdirs

MODEL_DIR_VARIABLE: Final = "KVD_MODEL_DIR"


def model_dir(override: str | Path | None = None) -> Path:
    """The folder of installed models: `override`, else `KVD_MODEL_DIR`, else the platform's user data folder.

    The folder need not exist yet.
    """
    chosen = override or os.environ.get(MODEL_DIR_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(platformdirs.user_data_dir("kvd-models", appauthor=False))
