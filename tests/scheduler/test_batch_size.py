"""The default of `--max-batch` follows memory and device."""

from __future__ import annotations

from typing import Literal

import pytest

from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.batch_size import AGENT_TOKENS, DEVICE_ROWS, default_max_batch

PAGE = 1000
AGENT = AGENT_TOKENS // PAGE_TOKENS * PAGE


@pytest.mark.parametrize(
    ("usable_bytes", "device", "expected"),
    [
        (0, "cpu", 1),
        (AGENT - 1, "cpu", 1),
        (3 * AGENT, "cpu", 3),
        (3 * AGENT - 1, "gpu", 2),
        (100 * AGENT, "cpu", DEVICE_ROWS["cpu"]),
        (100 * AGENT, "gpu", DEVICE_ROWS["gpu"]),
    ],
)
def test_as_many_as_fit_and_the_device_gains_by(
    usable_bytes: int, device: Literal["cpu", "gpu"], expected: int
) -> None:
    """Memory decides below the device's rows, never less than one (P21)."""
    sizes = {"groups": [(PAGE, None)], "context_tokens": 8192, "chunk_tokens": 512}
    assert default_max_batch(usable_bytes=usable_bytes, device=device, **sizes) == expected  # type: ignore[arg-type]


def test_windows_and_short_contexts_take_less() -> None:
    """A group with a window counts what a step sees of it, and no agent is longer than the model's context."""
    full = default_max_batch(
        usable_bytes=4 * AGENT, groups=[(PAGE, None)], context_tokens=8192, chunk_tokens=256, device="gpu"
    )
    short = default_max_batch(
        usable_bytes=4 * AGENT, groups=[(PAGE, None)], context_tokens=2048, chunk_tokens=256, device="gpu"
    )
    windowed = default_max_batch(
        usable_bytes=4 * AGENT, groups=[(PAGE, 256)], context_tokens=8192, chunk_tokens=256, device="gpu"
    )
    assert (full, short) == (4, 8)
    assert windowed > full
