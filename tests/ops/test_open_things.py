"""Descriptors and threads of this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvd.ops import count_open_files, count_threads


def test_open_files_are_counted_and_given_back(tmp_path: Path) -> None:
    """Ten more while ten more are open; a system that does not tell gives 0."""
    before = count_open_files()
    handles = [os.open(tmp_path, os.O_RDONLY) for _ in range(10)]
    try:
        assert count_open_files() == before + 10
    finally:
        for handle in handles:
            os.close(handle)
    assert count_open_files() == before
    assert count_open_files(str(tmp_path / "none")) == 0


def test_threads_are_counted() -> None:
    """Three more while three more run."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(3)]
    before = count_threads()
    for thread in threads:
        thread.start()
    try:
        assert count_threads() >= before + 3
    finally:
        end.set()
        for thread in threads:
            thread.join()
