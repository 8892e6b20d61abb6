"""mlx-lm by itself, as the reference: cold prefill and decoding in a process of its own, same BLAS, threads, float32.

Run as `python -m kvd.bench.reference MODEL_FOLDER STEP REPEATS DECODE < ids`; prints JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFILL_STEPS = (512, 2048)
"""mlx-lm's default step is 2048; 512 is kvd's chunk. The better of the two is quoted."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a model runs.

    Attributes:
        prefill_s: seconds from a prompt to the logits of its last token, cold.
        decode_s: seconds of a decode step after it, median.
    """

    prefill_s: float
    decode_s: float


def first_token_s(folder: Path, ids: Sequence[int], *, step: int, repeats: int) -> list[float]:
    """Seconds from a prompt to mlx-lm's first token, cold each time, in a fresh process.

    Args:
        folder: the model in mlx-lm's layout.
        ids: the prompt's token ids.
        step: mlx-lm's prefill step.
        repeats: runs; the first one warms nothing up that a user would have warm.
    """
    return _measured(folder, ids, step, repeats, 0)["prefill_s"]


def speed(folder: Path, ids: Sequence[int], *, step: int, repeats: int, decode: int) -> Speed:
    """mlx-lm's prefill of all ids but the last `decode`, and decoding of those, in a fresh process.

    Args:
        folder: the model in mlx-lm's layout.
        ids: prompt and continuation.
        step: mlx-lm's prefill step.
        repeats: prefills; the fastest counts.
        decode: decode steps, at least one.
    """
    measured = _measured(folder, ids, step, repeats, decode)
    return Speed(min(measured["prefill_s"]), statistics.median(measured["decode_s"]))


def _measured(folder: Path, ids: Sequence[int], step: int, repeats: int, decode: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "kvd.bench.reference", str(folder), str(step), str(repeats), str(decode)]
    done = subprocess.run(command, input=json.dumps(list(ids)).encode(), capture_output=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure in this process; see the module docstring."""
    from kvd import launcher

    launcher.prepare()
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from kvd.model.loader import load
    from kvd.model.registry import ModelFolder

    folder = Path(sys.argv[1])
    step, repeats, decode = (int(argument) for argument in sys.argv[2:5])
    ids = json.load(sys.stdin)
    model: Any = load(ModelFolder(folder.name, folder)).model
    prompt = mx.array(ids[: len(ids) - decode])
    next(generate_step(prompt[:32], model, max_tokens=1, prefill_step_size=step))
    times: list[float] = []
    cache: Any = None
    for _ in range(repeats):
        cache = make_prompt_cache(model)
        began = time.perf_counter()
        token, _ = next(generate_step(prompt, model, max_tokens=1, prefill_step_size=step, prompt_cache=cache))
        int(token)
        times.append(time.perf_counter() - began)
    steps: list[float] = []
    for at in range(len(ids) - decode, len(ids)):
        began = time.perf_counter()
        logits = model(mx.array([ids[at : at + 1]]), cache=cache)
        int(mx.argmax(logits[0, -1]))
        steps.append(time.perf_counter() - began)
    print(json.dumps({"prefill_s": times, "decode_s": steps}))


if __name__ == "__main__":
    main()
