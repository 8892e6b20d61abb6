"""Steps of exports and imports on the swap thread, as jobs wait for them.

Every touch of a file outside the data folder is a step there: it moves a page or a few megabytes, and others read,
commit and compute between two of them.

Owner: the engine thread. May import kvd.errors, kvd.quant.spec, kvd.store, kvd.vm.window and siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from kvd.errors import InvalidParams
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.waiting import Wait
from kvd.store.swap_ops import StoreHands, SwapResult
from kvd.vm.window import first_seen_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.scheduler.core import EngineCore

T = TypeVar("T")


def port_path(text: object) -> Path:
    """The path of an exported file.

    Raises:
        InvalidParams: it is not absolute, or names no file.
    """
    words = str(text)
    path = Path(words)
    if "\0" in words or not path.is_absolute() or path.name in ("", "..") or words.endswith("/"):
        raise InvalidParams(f"path must be the absolute path of a file, not {words[:200]!r}", parameter="path")
    return path


def resumable(lost: Iterable[tuple[int, int]], windows: Sequence[int | None], computed: int) -> int:
    """The deepest position, at most `computed`, whose next step sees none of the lost pages (group, number)."""
    missing = list(lost)
    while True:
        whole = -(-computed // PAGE_TOKENS)
        seen = [n for group, n in missing if first_seen_page(computed, windows[group], PAGE_TOKENS) <= n < whole]
        if not seen:
            return computed
        computed = min(seen) * PAGE_TOKENS


def file_step(core: EngineCore, path: Path, step: Callable[[StoreHands], T]) -> Generator[Wait, None, T]:
    """Run a step and wait for what it returns.

    Raises:
        KvdError: what the step raised, or FileFault for what the file's disk refused.
    """
    result = yield from swap_answer(lambda take: core.store.file_step(str(path), step, take))
    if result.error is not None:
        raise result.error
    return cast("T", result.value)


def swap_answer(submit: Callable[[Callable[[SwapResult], None]], None]) -> Generator[Wait, None, SwapResult]:
    """Submit an operation and wait for its answer."""
    answers: list[SwapResult] = []
    submit(answers.append)
    yield lambda: bool(answers)
    return answers[0]


__all__ = ["file_step", "port_path", "resumable", "swap_answer"]
