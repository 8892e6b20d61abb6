"""mlx-lm's own batched generation as the reference: in a process of its own, same BLAS, threads, ids, float32 KV.

Run as `python -m kvd.bench.serve_reference MODEL_FOLDER NEW_TOKENS REPEATS < prompts`; prints JSON. Its batch generator
reads all prompts together and then decodes them together, padded to the longest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.errors import EnvironmentFault, InternalError


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """Tokens a second of a batch, the best of the repeats for each.

    Attributes:
        decode_tokens_s: from the first token of all rows to the last.
        whole_tokens_s: new tokens over the whole time, prompts included.
    """

    decode_tokens_s: float
    whole_tokens_s: float


def batch_speed(folder: Path, prompts: Sequence[Sequence[int]], *, new_tokens: int, repeats: int) -> BatchSpeed:
    """Measure in a fresh process.

    Args:
        folder: the model in mlx-lm's layout.
        prompts: token ids, one list a row.
        new_tokens: of each row.
        repeats: the best of so many runs counts, after one that warms up.

    Raises:
        EnvironmentFault: the process failed.
    """
    command = [sys.executable, "-m", "kvd.bench.serve_reference", str(folder), str(new_tokens), str(repeats)]
    prompts_json = json.dumps([list(ids) for ids in prompts]).encode()
    done = subprocess.run(command, input=prompts_json, capture_output=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"mlx-lm's batched generation failed: {done.stderr.decode(errors='replace')[-800:]}")
    return BatchSpeed(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure in this process; see the module docstring."""
    from kvd import launcher

    launcher.prepare()
    from kvd.model.loader import load
    from kvd.model.registry import ModelFolder

    folder = Path(sys.argv[1])
    new_tokens, repeats = (int(argument) for argument in sys.argv[2:4])
    prompts: list[list[int]] = json.load(sys.stdin)
    model: Any = load(ModelFolder(folder.name, folder)).model
    _generate(model, [ids[:16] for ids in prompts], 2)
    runs = [_generate(model, prompts, new_tokens) for _ in range(repeats)]
    total, rows = new_tokens * len(prompts), len(prompts)
    print(
        json.dumps(
            {
                "decode_tokens_s": max((total - rows) / max(end - first, 1e-9) for _, first, end in runs),
                "whole_tokens_s": max(total / (end - began) for began, _, end in runs),
            }
        )
    )


def _generate(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, float]:  # noqa: ANN401
    """Seconds when it began, when every row had its first token, and when the last token was there."""
    from mlx_lm.generate import BatchGenerator

    rows = len(prompts)
    generator = BatchGenerator(
        model, max_tokens=new_tokens, stop_tokens=None, completion_batch_size=rows, prefill_batch_size=rows
    )
    began = time.perf_counter()
    generator.insert(prompts)
    made, first, end = 0, began, began
    while made < new_tokens * rows:
        responses = generator.next_generated()
        if not responses:
            raise InternalError(f"mlx-lm ended after {made} of {new_tokens * rows} tokens")
        made += len(responses)
        end = time.perf_counter()
        if made <= rows:
            first = end
    generator.close()
    return began, first, end


if __name__ == "__main__":
    main()
