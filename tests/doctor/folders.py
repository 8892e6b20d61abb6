"""Helpers of the doctor's tests: a folder's every byte, mode and time; examinations; damage."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvd.doctor import Check, Options, Report, examine
from kvd.doctor.examine import CHECKS
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder, log_name
from kvd.store.swap_ops import AppendRecordOp, WritePageOp
from kvd.store.swap_store import SwapStore
from tests.support.store_data import LAYOUTS, ModelAgent, header_of, open_store

FOLDER_CHECKS = tuple(entry for entry in CHECKS if entry[0] not in ("versions", "device", "blas", "attention"))
"""All but the machine's."""


def tree(*roots: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, modification time and content of everything under some folders; links are not followed."""
    found: dict[str, tuple[int, int, bytes]] = {}
    for root in roots:
        for path in (root, *sorted(root.rglob("*"))):
            facts = os.lstat(path)
            content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
            found[str(path)] = (facts.st_mode, facts.st_mtime_ns, content)
    return found


def look_at(
    data_dir: Path,
    model: Path,
    *,
    deep: bool = False,
    repair: bool = False,
    rebuild: bool = False,
    socket: Path | None = None,
    everything: bool = False,
) -> Report:
    """Examine a folder."""
    options = Options(
        data_dir=data_dir,
        socket=socket or data_dir / "kvd.sock",
        model_dir=model.parent / "none",
        model=str(model),
        deep=deep,
    )
    return examine(options, repairing=repair, rebuild=rebuild, checks=CHECKS if everything else FOLDER_CHECKS)


def named(report: Report, name: str) -> Check:
    """The only check of that name."""
    (check,) = [check for check in report.checks if check.name == name]
    return check


def statuses(report: Report) -> dict[str, str]:
    """Checks that are not well."""
    return {check.name: check.status for check in report.checks if check.status != "ok"}


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file; its times stay."""
    facts = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def pages(data_dir: Path) -> list[Path]:
    """Page files, sorted."""
    return sorted(data_dir.glob("*/swap/*/*.safetensors"))


def logs(data_dir: Path) -> list[Path]:
    """Agents' logs, sorted."""
    return sorted(data_dir.glob("*/agents/*.log"))


def log_of(data_dir: Path, agent: str) -> Path:
    """The log of an agent."""
    return next(path for path in logs(data_dir) if path.name == log_name("default", agent))


def commit(store: SwapStore, agent: ModelAgent, tokens: int) -> ModelAgent:
    """One durable turn of a model agent."""
    after, record, sealed = agent.turn(tokens)
    for group, page in sealed:
        payload = after.page_bytes(group, page.runs[0].start // 256)
        assert store.perform(WritePageOp(header_of(page, group), LAYOUTS[group], payload)).error is None
    assert store.perform(AppendRecordOp(record)).error is None
    return after


def unknown_model(root: Path) -> DataFolder:
    """A data folder of a model that is not installed: `ada` (2 pages a group and a tail) and `bob` (1 page)."""
    folder, _, store = open_store(RealFileSystem(), root)
    for name, turns in (("ada", (300, 250)), ("bob", (256,))):
        agent = ModelAgent(name)
        for tokens in turns:
            agent = commit(store, agent, tokens)
    store.close()
    folder.close()
    return folder
