"""Model files of mlx-lm without the rest of it, and the rest when it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from kvd import launcher
launcher.prepare()
from kvd.model import mlx_lm_door
mlx_lm_door.prepare()
mlx_lm_door.prepare()
import mlx_lm.models.llama, mlx_lm
heavy = lambda: sorted(name for name in ("transformers", "huggingface_hub") if name in sys.modules)
seen = {"models": heavy(), "unknown": hasattr(mlx_lm.models, "nothing"), "dunder": hasattr(mlx_lm, "__nothing__")}
seen["after_dunder"] = heavy()
from mlx_lm import load, stream_generate
import mlx_lm.utils
seen |= {"load": load is mlx_lm.utils.load, "version": bool(mlx_lm.__version__), "all": heavy()}
seen["missing"] = hasattr(mlx_lm, "nothing")
print(json.dumps(seen))
"""

LOAD = """
import sys
from kvd import launcher
launcher.prepare()
from kvd.model.loader import load
from kvd.model.registry import resolve
load(resolve(sys.argv[1], None))
print(sorted(name for name in ("transformers", "huggingface_hub") if name in sys.modules))
"""


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_runs_late_and_is_whole_then() -> None:
    """Model files import alone; whatever else is asked of the package is there, as without the door."""
    seen = json.loads(_run(SCRIPT))
    assert seen == {
        "models": [],
        "unknown": False,
        "dunder": False,
        "after_dunder": [],
        "load": True,
        "version": True,
        "all": ["huggingface_hub", "transformers"],
        "missing": False,
    }


def test_a_plain_model_loads_without_the_heavy_imports(tiny_model_dir: Path) -> None:
    """What a start of the daemon imports of mlx-lm is the model's own file."""
    assert _run(LOAD, str(tiny_model_dir)).strip() == "[]"
