"""Reads every page file and every log of the data folder and verifies all checksums.

Imports kvd.store and this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvd.doctor.context import Context
from kvd.doctor.folder_state import odd_type
from kvd.doctor.store_look import NO_FILE
from kvd.ids import PageId
from kvd.store.agent_log import log_seed, scan_log
from kvd.store.fs import NotRegularFile
from kvd.store.layout import is_log_name
from kvd.store.swap_dir import SwapDir
from kvd.store.verify import page_fault


@dataclass(slots=True)
class DeepResult:
    """One model's part.

    Attributes:
        fingerprint: the model.
        pages: page files read.
        records: log records with their checksums.
        read_bytes: bytes of both.
        bad_pages: pages whose file is not what was written, with the reason.
        bad_logs: names of logs with changed records; an append that never finished is none.
        unreadable: files that the disk refused to read.
    """

    fingerprint: str
    pages: int = 0
    records: int = 0
    read_bytes: int = 0
    bad_pages: dict[PageId, str] = field(default_factory=dict)
    bad_logs: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def verify_all(context: Context) -> list[DeepResult]:
    """Verify every model's files; the reporter sees the bytes. Files that vanish meanwhile are left out."""
    total_bytes = sum(
        entry.file_bytes for kind in ("swap", "logs") for entry in context.inventory.entries if entry.kind == kind
    )
    context.reporter.stage("verify pages and logs", total_bytes)
    return [_verify(context, fingerprint) for fingerprint in context.fingerprints]


def _verify(context: Context, fingerprint: str) -> DeepResult:
    result = DeepResult(fingerprint)
    swap = SwapDir(context.folder, fingerprint, context.fs)
    layouts = context.layouts(fingerprint)
    for page_id in swap.scan().pages:
        found = odd_type(swap.path(page_id))  # a link: folders, pipes and the like are no pages to the scan
        data = None if found else _read(context, swap.path(page_id), result)
        if found:
            result.bad_pages[page_id] = f"{NO_FILE} {found}"
        elif data is not None:
            result.pages += 1
            fault = page_fault(data, page_id, fingerprint, layouts)
            if fault:
                result.bad_pages[page_id] = fault
    agents = context.folder.agents_folder(fingerprint)
    for name in context.fs.listdir(agents) if context.fs.stat(agents) is not None else []:
        data = _read(context, agents / name, result) if is_log_name(name) else None
        if data is not None:
            scan = scan_log(data, log_seed(fingerprint, name))
            result.records += len(scan.frames)
            if scan.damage is not None and scan.damage.kind == "corrupt":
                result.bad_logs.append(name)
    return result


def _read(context: Context, path: Path, result: DeepResult) -> bytes | None:
    """A file's bytes; None when it vanished, is none, or cannot be read (then the result says so)."""
    try:
        data = context.fs.read(path, drop_cache=True)
    except (FileNotFoundError, NotADirectoryError, NotRegularFile):  # the last is a foreign file
        return None
    except OSError as error:
        found = odd_type(path)
        result.unreadable.append(f"{path}: {f'{NO_FILE} {found}' if found else error.strerror or error}")
        return None
    result.read_bytes += len(data)
    context.reporter.advance(len(data))
    return data


__all__ = ["DeepResult", "verify_all"]
