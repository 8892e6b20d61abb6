"""mlx-lm by itself, as the reference: cold prefill in a process of its own, same BLAS, same threads, float32.

Run as `python -m kvd.launcher -- -m kvd.bench.reference MODEL_FOLDER STEP REPEATS < ids`; prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREFILL_STEPS = (512, 2048)
"""mlx-lm's default step is 2048; 512 is kvd's chunk. The better of the two is quoted."""


def first_token_s(folder: Path, ids: Sequence[int], *, step: int, repeats: int) -> list[float]:
    """Seconds from a prompt to mlx-lm's first token, cold each time, in a fresh process.

    Args:
        folder: the model in mlx-lm's layout.
        ids: the prompt's token ids.
        step: mlx-lm's prefill step.
        repeats: runs; the first one warms nothing up that a user would have warm.
    """
    command = [sys.executable, "-m", "kvd.bench.reference", str(folder), str(step), str(repeats)]
    done = subprocess.run(command, input=json.dumps(list(ids)).encode(), capture_output=True, check=True)
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Measure in this process; see the module docstring."""
    from kvd import launcher

    launcher.prepare()
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from kvd.model.loader import load
    from kvd.model.registry import ModelFolder

    folder, step, repeats = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ids = json.load(sys.stdin)
    model: Any = load(ModelFolder(folder.name, folder)).model
    prompt = mx.array(ids)
    next(generate_step(prompt[:32], model, max_tokens=1, prefill_step_size=step))
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        token, _ = next(generate_step(prompt, model, max_tokens=1, prefill_step_size=step))
        int(token)
        times.append(time.perf_counter() - began)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
