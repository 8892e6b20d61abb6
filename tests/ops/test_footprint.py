"""Process footprint: what only this process needs."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvd.ops import Footprint, measure_footprint

MB = 1_000_000
LINUX = sys.platform.startswith("linux")


def test_memory_that_is_written_counts_and_is_given_back() -> None:
    """64 MB of private memory appear in the figure and disappear with it."""
    before = measure_footprint()
    with mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        during = measure_footprint()
    after = measure_footprint()
    assert during.source == before.source
    assert during.footprint_bytes - before.footprint_bytes >= 60 * MB
    assert during.footprint_bytes - after.footprint_bytes >= 60 * MB


@pytest.mark.skipif(not LINUX, reason="phys_footprint has its own rules for mapped files")
def test_clean_pages_of_files_do_not_count(tmp_path: Path) -> None:
    """A mapped file that was only read costs nothing: the system may drop it."""
    drive = Path("/var/tmp") if os.access("/var/tmp", os.W_OK) else tmp_path  # a file in memory does cost something
    with tempfile.NamedTemporaryFile(dir=drive) as file:
        file.write(b"w" * (32 * MB))
        file.flush()
        before = measure_footprint().footprint_bytes
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            assert sum(view[offset] for offset in range(0, len(view), mmap.PAGESIZE)) > 0
            assert measure_footprint().footprint_bytes - before < 8 * MB


def test_another_process_can_be_measured() -> None:
    """A test can watch a daemon from outside."""
    script = "block = bytearray(64_000_000); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert measure_footprint(child.pid).footprint_bytes >= 64 * MB
    with pytest.raises(ProcessLookupError):
        measure_footprint(child.pid)


def proc_with(folder: Path, **files: str) -> Path:
    """A process file system that has one process, this one."""
    own = folder / "self"
    own.mkdir(parents=True)
    for name, text in files.items():
        (own / name).write_text(text)
    return folder


@pytest.mark.skipif(sys.platform == "darwin", reason="there is no /proc")
def test_sources_in_order_of_trust(tmp_path: Path) -> None:
    """`status` counts anonymous, shared and swapped memory; without it `statm`, without both `getrusage`."""
    page_bytes = resource.getpagesize()
    status = "VmRSS:\t900 kB\nRssAnon:\t100 kB\nRssFile:\t800 kB\nRssShmem:\t20 kB\nVmSwap:\t3 kB\n"
    both = proc_with(tmp_path / "a", status=status, statm="500 300 100 1 0 200 0\n")
    assert measure_footprint(proc=both) == Footprint(123 * 1024, "status")
    old = proc_with(tmp_path / "b", status="VmRSS:\t900 kB\n", statm="500 300 100 1 0 200 0\n")
    assert measure_footprint(proc=old) == Footprint(200 * page_bytes, "statm")
    none = measure_footprint(os.getpid(), proc=tmp_path / "c")
    assert none.source == "getrusage"
    assert none.footprint_bytes > MB
