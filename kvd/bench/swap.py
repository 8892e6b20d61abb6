"""`kvd bench swap`: how fast agents go to disk and come back, beside plain reads and writes of the same files.

Theory of operation. One agent at a time is sealed, evicted and faulted in through the daemon's own path
(`kvd.bench.swap_rig`). Beside each swap-in the very same files are read one after the other, each in one call, into
memory that is there already: no checksum, no page table, no threads. Beside each swap-out as many files of the same
bytes are written with the same system calls: a temporary name, one write, fsync, rename, fsync of the folder. Both
sides of a pass drop the page cache first, by the same means, and the side that begins changes with each pass. Medians
are given, of times and of the ratios of each pass.

May import kvd.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import xxhash

from kvd.bench.eviction_speed import BAR_US, Speed, measure
from kvd.bench.harness import drop_page_cache, scratch_folder
from kvd.bench.swap_rig import Rig, agent_buffer, smollm2_layout
from kvd.cli_common import fail
from kvd.cli_options import fixed_format_option, json_option
from kvd.errors import EnvironmentFault, InvalidParams, KvdError
from kvd.ids import SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.store.swap_thread import READERS

READ_BAR: Final = 0.7
"""Least rate of a swap-in, as part of the plain read's."""

WRITE_BAR: Final = 0.5
"""Least rate of a swap-out, as part of the plain write's."""


@dataclass(frozen=True, slots=True)
class Side:
    """One direction.

    Attributes:
        kvd_mb_s, plain_mb_s: medians, in 10**6 bytes a second.
        ratio: median of the ratios of each pass.
        bar: what it has to be at least.
        kvd_fsyncs, plain_fsyncs: of one agent; without those of the catalog.
    """

    kvd_mb_s: float
    plain_mb_s: float
    ratio: float
    bar: float
    kvd_fsyncs: int = 0
    plain_fsyncs: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the command prints.

    Attributes:
        tokens, pages, page_bytes, agent_bytes: of the agent that is swapped; bytes of frames.
        kv_format: of its pages, in the geometry of SmolLM2-135M.
        page_cache: how it was dropped.
        readers: threads that read pages.
        repeats: passes; medians count.
        swap_in, swap_out: both directions.
        checksum_gb_s: xxh3_128 over the agent's pages, 10**9 bytes a second on one thread.
        checksum_share: seconds that takes for the agent, as part of a swap-in.
        pager: looking up and touching pages, in microseconds a page; bar `pager_bar_us`.
        pager_bar_us: what each of both may take.
    """

    tokens: int
    pages: int
    page_bytes: int
    agent_bytes: int
    kv_format: str
    page_cache: str
    readers: int
    repeats: int
    swap_in: Side
    swap_out: Side
    checksum_gb_s: float
    checksum_share: float
    pager: Speed
    pager_bar_us: float


def run_swap(
    folder: Path, *, kv_format: str, tokens: int, repeats: int, pages: int, tell: Callable[[str], None]
) -> Report:
    """Measure.

    Args:
        folder: empty, on the disk to be measured.
        kv_format: name of a page format.
        tokens: length of the agent.
        repeats: passes.
        pages: pages in the table whose look-up is timed.
        tell: progress, one line each.

    Raises:
        EnvironmentFault: what came in is not what went out.
    """
    layout = smollm2_layout(kv_format)
    with Rig(folder / "kvd", layout, tokens) as rig:
        agent_bytes = rig.pages * layout.payload_bytes
        plain = PlainFiles(folder / "plain")
        outs: list[tuple[float, float]] = []
        fsyncs = (0, 0)
        space = rig.new_agent()  # the first pass warms up and is not counted
        for number in range(repeats + 1):
            tell(f"swap-out, pass {number + 1} of {repeats + 1}")
            seconds, fsyncs = _out(rig, plain, space if number == 0 else rig.new_agent(), kvd_first=number % 2 == 0)
            outs += [seconds] if number else []
            plain.clear()
        rig.load(space)
        before = rig.digest(space)
        rig.release(space)
        ins: list[tuple[float, float]] = []
        how = ""
        for number in range(repeats + 1):
            tell(f"swap-in, pass {number + 1} of {repeats + 1}")
            seconds, how = _in(rig, space, folder, kvd_first=number % 2 == 0)
            ins += [seconds] if number else []
            if rig.digest(space) != before:
                raise EnvironmentFault("what was swapped in is not what was swapped out")
            rig.release(space)
        files = [path.read_bytes() for path in rig.files(space)]
        checksum_s = min(_seconds(lambda: [xxhash.xxh3_128_digest(data) for data in files]) for _ in range(5))
    tell(f"page table with {pages} pages")
    swap_in = _side(ins, agent_bytes, READ_BAR)
    return Report(
        tokens=rig.pages * PAGE_TOKENS,
        pages=rig.pages,
        page_bytes=layout.payload_bytes,
        agent_bytes=agent_bytes,
        kv_format=kv_format,
        page_cache=how,
        readers=READERS,
        repeats=repeats,
        swap_in=swap_in,
        swap_out=_side(outs, agent_bytes, WRITE_BAR, fsyncs),
        checksum_gb_s=agent_bytes / checksum_s / 1e9,
        checksum_share=checksum_s * swap_in.kvd_mb_s * 1e6 / agent_bytes,
        pager=measure("lru", pages, repeats=3),
        pager_bar_us=BAR_US,
    )


class PlainFiles:
    """Files written and read as one would without kvd, with what makes them as durable.

    Args:
        folder: made; all files lie in 256 folders below it, as kvd's do.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for first in range(256):
            (folder / f"{first:02x}").mkdir(parents=True, mode=0o700)
        self._paths: list[Path] = []
        self.fsyncs = 0

    def write(self, contents: Sequence[bytes]) -> None:
        """One file each, durable when this returns."""
        for data in contents:
            name = secrets.token_hex(16)
            path = self._folder / name[:2] / name
            temp = path.with_suffix(".tmp")
            handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(handle, data)
                self._fsync(handle)
            finally:
                os.close(handle)
            os.replace(temp, path)
            handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._fsync(handle)
            finally:
                os.close(handle)
            self._paths.append(path)

    def clear(self) -> None:
        """Remove what was written."""
        for path in self._paths:
            path.unlink()
        self._paths.clear()

    def _fsync(self, handle: int) -> None:
        import fcntl

        self.fsyncs += 1
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is None:
            os.fsync(handle)
        else:
            fcntl.fcntl(handle, full)


def read_plain(paths: Sequence[Path], target: memoryview) -> None:
    """Read files one after the other, each with one call, into memory that is there."""
    at = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            at += file.readinto(target[at:]) or 0


def _out(
    rig: Rig, plain: PlainFiles, space: SpaceId, *, kvd_first: bool
) -> tuple[tuple[float, float], tuple[int, int]]:
    """Seconds of kvd and of plain files for one agent, and the flushes of both."""
    contents = [os.urandom(rig.layout.payload_bytes) for _ in range(rig.pages)]
    rig.settle()
    fsyncs, plain_fsyncs = rig.fsyncs, plain.fsyncs
    sides = {"kvd": lambda: rig.seal(space), "plain": lambda: plain.write(contents)}
    times = {name: _seconds(sides[name]) for name in (("kvd", "plain") if kvd_first else ("plain", "kvd"))}
    rig.evict(space)
    return (times["kvd"], times["plain"]), (rig.fsyncs - fsyncs, plain.fsyncs - plain_fsyncs)


def _in(rig: Rig, space: SpaceId, folder: Path, *, kvd_first: bool) -> tuple[tuple[float, float], str]:
    """Seconds of kvd and of plain reading for one agent, each after dropping the page cache, and how that was done."""
    rig.evict(space)
    rig.settle()
    files = rig.files(space)
    target = agent_buffer(sum(path.stat().st_size for path in files))
    sides = {"kvd": lambda: rig.load(space), "plain": lambda: read_plain(files, target)}
    times, how = {}, ""
    for name in ("kvd", "plain") if kvd_first else ("plain", "kvd"):
        how = drop_page_cache(folder)
        times[name] = _seconds(sides[name])
    return (times["kvd"], times["plain"]), how


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _side(
    passes: Sequence[tuple[float, float]], agent_bytes: int, bar: float, fsyncs: tuple[int, int] = (0, 0)
) -> Side:
    return Side(
        kvd_mb_s=agent_bytes / statistics.median(kvd for kvd, _ in passes) / 1e6,
        plain_mb_s=agent_bytes / statistics.median(plain for _, plain in passes) / 1e6,
        ratio=statistics.median(plain / kvd for kvd, plain in passes),
        bar=bar,
        kvd_fsyncs=fsyncs[0],
        plain_fsyncs=fsyncs[1],
    )


@click.command("swap")
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True, help="Length of the agent.")
@fixed_format_option("k8v4")
@click.option(
    "--repeats", type=click.IntRange(1), default=7, show_default=True, help="Passes after the first; medians count."
)
@click.option(
    "--pages", type=click.IntRange(1), default=100_000, show_default=True, help="Pages in the table that is timed."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A folder on the disk to be measured [default: a temporary one].",
)
@json_option
def swap(tokens: int, kv_format: str, repeats: int, pages: int, folder: Path | None, as_json: bool) -> None:
    """Swap-out and swap-in of one agent, beside plain writes and reads of the same files; the page table's speed.

    Needs no model: pages have the geometry of SmolLM2-135M and random contents. What was made is removed again.

    Example: kvd bench swap --folder ~/kvd-disk --json
    """
    if pages > 10_000_000:
        fail(InvalidParams(f"--pages takes at most 10000000, not {pages}", parameter="pages"))
    try:
        with scratch_folder(folder) as scratch:
            report = run_swap(
                scratch,
                kv_format=kv_format,
                tokens=tokens,
                repeats=repeats,
                pages=pages,
                tell=lambda line: click.echo(line, err=True),
            )
    except KvdError as error:
        fail(error)
    except OSError as error:
        fail(EnvironmentFault(f"the disk refused: {error}"))
    click.echo(json.dumps(asdict(report)) if as_json else "\n".join(_lines(report)))


def _lines(report: Report) -> list[str]:
    """The report for people."""
    lines = [
        f"an agent of {report.tokens} tokens: {report.pages} pages of {report.page_bytes:,} bytes "
        f"({report.kv_format}), medians of {report.repeats}, page cache dropped by {report.page_cache}",
        "            kvd MB/s   plain MB/s   ratio     bar",
    ]
    for name, side in (("swap-in", report.swap_in), ("swap-out", report.swap_out)):
        lines.append(f"{name:10} {side.kvd_mb_s:9.0f} {side.plain_mb_s:12.0f} {side.ratio:7.2f} {side.bar:7.2f}")
    lines += [
        f"flushes of one agent: kvd {report.swap_out.kvd_fsyncs}, plain {report.swap_out.plain_fsyncs}",
        f"checksum {report.checksum_gb_s:.1f} GB/s on one thread: {report.checksum_share:.1%} of a swap-in",
        f"{report.pager.pages:,} pages in the table: look-up {report.pager.lookup_us:.2f} us a page, touch "
        f"{report.pager.touch_us:.2f} us; bar {report.pager_bar_us:g}",
    ]
    return lines


__all__ = ["PlainFiles", "Report", "Side", "read_plain", "run_swap", "swap"]
