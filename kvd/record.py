"""The data folder's record of how its KV was computed: `engine.json`.

Greedy text is promised to continue exactly only with the same attention backend and BLAS thread count. So the first
start records both, and the record wins over later measurements: only a flag, or being unable to follow it, changes it.
Part of the composition root.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from kvd import launcher
from kvd.cores import available_cores
from kvd.store.fs import FileSystem, RealFileSystem
from kvd.store.side_files import read_small_file, write_small_file

RECORD_FILE = "engine.json"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """How the KV in a data folder was computed; None where nothing is recorded.

    Attributes:
        attention: attention backend.
        threads: BLAS threads.
        numerics: version of the arithmetic.
    """

    attention: str | None = None
    threads: int | None = None
    numerics: str | None = None


def read_record(data_dir: Path) -> EngineRecord:
    """The record, empty when there is none or it cannot be read; of a damaged one what is still right."""
    try:
        data = read_small_file(RealFileSystem(), data_dir / RECORD_FILE)
    except OSError:
        data = None
    return EngineRecord() if data is None else parse_record(data)[0]


def parse_record(data: bytes) -> tuple[EngineRecord, bool]:
    """What the bytes of a record say, and whether they are whole: all members there, each of its type.

    A member that is not of its type says nothing.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        return EngineRecord(), False
    attention, threads, numerics = raw.get("attention"), raw.get("threads"), raw.get("numerics")
    record = EngineRecord(
        attention=attention if isinstance(attention, str) else None,
        threads=threads if type(threads) is int and threads > 0 else None,
        numerics=numerics if isinstance(numerics, str) else None,
    )
    return record, all(name in raw and raw[name] == value for name, value in asdict(record).items())


def write_record(data_dir: Path, fs: FileSystem, record: EngineRecord) -> None:
    """Record durably, if it says anything new.

    Raises:
        OSError: the disk refused; the old record stands.
    """
    if record != read_record(data_dir):
        write_small_file(fs, data_dir / RECORD_FILE, json.dumps(asdict(record), indent=1).encode() + b"\n")


def follow_recorded_threads(data_dir: Path) -> None:
    """Start this process again with the recorded thread count, when it differs and can be followed.

    A BLAS takes its thread count when it is loaded, which happens before the data folder is known. `KVD_THREADS` set by
    the user is a flag: it wins and is recorded.
    """
    launch = launcher.report()
    recorded = read_record(data_dir).threads
    if launch is None or launch.path is None or recorded is None or os.environ.get("KVD_THREADS", "").strip():
        return
    if recorded != launch.threads and recorded <= available_cores():
        os.environ["KVD_THREADS"] = str(recorded)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  ourselves, same arguments
