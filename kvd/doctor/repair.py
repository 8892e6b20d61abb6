"""Heals a data folder: modes, a stale socket, bad pages, recovery for real, a catalog made anew.

Works only with the folder's lock, so never beside a daemon. Each thing done is said; nothing that a log names is
deleted, and what is bad goes to quarantine. May be killed anywhere and run again. Imports kvd.config, kvd.errors,
kvd.model.errors, kvd.store, kvd.quant and this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from kvd.config import DEFAULT_MODEL
from kvd.doctor.context import Context
from kvd.doctor.deep import verify_all
from kvd.doctor.findings import counted
from kvd.doctor.folder_state import CATALOG_FILES, REPLACED, Entry, take_inventory
from kvd.doctor.socket_state import remove_stale
from kvd.doctor.store_look import ABSENT, UNREADABLE, dry_run, read_catalog, with_types
from kvd.errors import KvdError
from kvd.model.errors import ModelNotFound
from kvd.quant.calibration import load_calibration
from kvd.quant.conditioning import load_conditioning, save_conditioning
from kvd.quant.errors import ConditioningDamaged
from kvd.store.catalog import CATALOG_ERRORS, open_catalog
from kvd.store.errors import DataFolderLocked
from kvd.store.fs import make_folder
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.side_files import write_small_file
from kvd.store.swap_dir import SwapDir


def repair(context: Context, done: Callable[[str], None], *, rebuild: bool) -> str | None:
    """Heal what can be healed.

    Args:
        context: what to heal; its findings are of before, so the checks afterwards need another one.
        done: told of each thing that was done.
        rebuild: drop the catalogs and make them anew from logs and page headers.

    Returns:
        Why nothing was done; None when the repair was made, or there was nothing to repair.
    """
    state = context.state
    if state.state == "missing" or (state.state == "empty" and not context.fingerprints):
        return None  # no folder of kvd's, so nothing to repair; what is there is left as it is
    if not state.may_be_searched:
        return f"{state.text}: it is left as it is"
    if state.uid != os.getuid():
        return f"{context.options.data_dir} belongs to user {state.uid}: run the repair as that user"
    if isinstance(context.model_or_error, ModelNotFound) and context.options.model != DEFAULT_MODEL:
        return f"there is no model {context.options.model!r}, so nothing was repaired for it or for others"
    root_was_exposed = bool(state.mode & 0o077)
    try:
        context.folder.open()
    except DataFolderLocked as error:
        stop = f"stop it first: {context.options.shutdown()}" + ("" if error.pid is None else f", or: kill {error.pid}")
        return f"{error.message} To repair it, {stop}"
    except KvdError as error:
        return error.message
    except OSError as error:
        return f"{context.options.data_dir} cannot be changed: {error.strerror or error}"
    try:
        if root_was_exposed:
            done(f"closed {context.options.data_dir} to other users")
        if state.state == "empty":
            done("wrote VERSION")
        _repair_locked(context, done, rebuild=rebuild)
    finally:
        context.folder.close()
    return None


def _repair_locked(context: Context, done: Callable[[str], None], *, rebuild: bool) -> None:
    _correct_modes(context, context.inventory.entries, done)
    _guarded(done, "the stale socket", lambda: _remove_socket(context, done))
    _guarded(done, "the conditioning constants", lambda: _restore_constants(context, done))
    if context.options.deep:
        _guarded(done, "corrupt pages", lambda: _put_corrupt_aside(context, done))
    for fingerprint in context.fingerprints:
        _guarded(done, context.title(fingerprint), lambda each=fingerprint: _repair_store(context, each, done, rebuild))  # type: ignore[misc]
    known = {entry.path for entry in context.inventory.entries}
    moved = [entry for entry in take_inventory(context.options.data_dir).entries if entry.path not in known]
    _correct_modes(context, moved, done)  # as what went to quarantine may be: a folder that lay in a catalog's place


def _guarded(done: Callable[[str], None], what: str, step: Callable[[], None]) -> None:
    """Run a step; what the disk refuses is said and does not keep the others from being made."""
    try:
        step()
    except (OSError, KvdError) as error:
        done(f"could not repair {what}: {error}")


def _correct_modes(context: Context, entries: Iterable[Entry], done: Callable[[str], None]) -> None:
    for entry in entries:
        if not entry.is_exposed or entry.path == context.options.data_dir:
            continue
        mode = 0o700 if entry.file_type == "folder" else 0o600
        try:
            if os.lstat(entry.path).st_mode != 0 and not entry.path.is_symlink():
                context.fs.chmod(entry.path, mode)
                done(f"mode of {entry.path}: {entry.mode:04o} to {mode:04o}")
        except OSError as error:
            done(f"could not change the mode of {entry.path}: {error.strerror or error}")


def _remove_socket(context: Context, done: Callable[[str], None]) -> None:
    if remove_stale(context.options.socket):
        done(f"removed the stale socket {context.options.socket}")


def _restore_constants(context: Context, done: Callable[[str], None]) -> None:
    """Write damaged constants anew, where the examined model's calibration has them."""
    model = context.model
    calibration = None if model is None else load_calibration(model.folder.path, model.spec.fingerprint)
    own = {} if calibration is None else {constants.digest: constants for constants in calibration.conditioning}
    for entry in context.inventory.of_kind("constants"):
        try:
            load_conditioning(entry.path)
        except ConditioningDamaged:
            constants = own.get(entry.path.stem)
            if constants is not None:
                save_conditioning(
                    constants, entry.path.parent, lambda path, data: write_small_file(context.fs, path, data)
                )
                done(f"wrote the conditioning constants {entry.path.name} anew")


def _put_corrupt_aside(context: Context, done: Callable[[str], None]) -> None:
    for result in verify_all(context):
        swap = SwapDir(context.folder, result.fingerprint, context.fs)
        for page_id, why in result.bad_pages.items():
            target = swap.quarantine(page_id)
            if target is not None:
                done(f"put page {page_id} aside ({why}): {target}")


def _put_strangers_aside(context: Context, fingerprint: str, done: Callable[[str], None]) -> None:
    """Put page files aside that say they are others, which recovery does not see where the catalog vouches for them."""
    swap = SwapDir(context.folder, fingerprint, context.fs)
    for page_id, why in dry_run(context, fingerprint).missing_pages.items():
        target = None if why == ABSENT or why.startswith(UNREADABLE) else swap.quarantine(page_id)
        if target is not None:
            done(f"put page {page_id} aside ({why}): {target}")


def _repair_store(context: Context, fingerprint: str, done: Callable[[str], None], rebuild: bool) -> None:
    title = context.title(fingerprint)
    counters: dict[str, int] = {}
    if rebuild:
        old = read_catalog(context, fingerprint)
        counters = {} if old.contents is None else old.contents.counters
        if old.fault or old.unread:
            done(f"{title}: lifetime counters begin at 0 again, the old catalog tells none: {old.fault or old.unread}")
        aside = _move_catalog_aside(context, fingerprint)
        if aside is not None:
            done(f"{title}: moved the catalog, to be replaced, to {aside}")
    _put_strangers_aside(context, fingerprint, done)
    report = recover(
        context.folder,
        fingerprint,
        context.layouts(fingerprint),
        context.fs,
        full_groups=context.full_groups(fingerprint),
    )
    for line in _told(with_types(context, fingerprint, report), rebuild=rebuild):
        done(f"{title}: {line}")
    if counters:
        try:
            catalog, _, _ = open_catalog(context.fs, context.folder.catalog_path(fingerprint), fingerprint)
            for name, value in counters.items():
                catalog.put_counter(name, value)
            catalog.commit()
            catalog.close()
        except CATALOG_ERRORS as error:
            done(f"{title}: lifetime counters begin at 0 again, they could not be written: {error}")


def _move_catalog_aside(context: Context, fingerprint: str) -> Path | None:
    """Move the database and its side files to quarantine under names that belong together; None when there is none."""
    folder = context.folder.model_folder(fingerprint)
    quarantine = context.folder.quarantine_folder(fingerprint)
    found = [name for name in CATALOG_FILES if context.fs.stat(folder / name) is not None]
    if not found:
        return None
    make_folder(context.fs, quarantine)
    number = 0
    while any(name.startswith(f"catalog-{number}.") for name in context.fs.listdir(quarantine)):
        number += 1
    for name in found:
        context.fs.rename(folder / name, quarantine / name.replace(".", f"-{number}{REPLACED}", 1))
    context.fs.fsync_dir(quarantine)
    context.fs.fsync_dir(folder)
    return quarantine / f"catalog-{number}{REPLACED}sqlite3"


def _told(report: RecoveryReport, *, rebuild: bool) -> list[str]:
    """What recovery did, a line each."""
    lines = []
    for trouble in report.log_troubles:
        who = trouble.log if trouble.agent is None else "/".join(trouble.agent)
        if trouble.kind in ("torn", "corrupt"):
            lines.append(
                f"cut {trouble.lost_bytes} bytes ({trouble.kind}, wrong {trouble.reason}) from the log of {who}"
            )
        else:
            lines.append(f"the log of {who} is {trouble.kind}: {trouble.reason}")
    if report.quarantined:
        lines.append(
            f"put {counted(len(report.quarantined), 'file')} into quarantine: {', '.join(report.quarantined[:5])}"
        )
    if report.orphans_deleted:
        lines.append(f"deleted {counted(report.orphans_deleted, 'page')} that no log names")
    if report.temp_files_deleted:
        lines.append(f"deleted {counted(len(report.temp_files_deleted), 'unfinished file')}")
    if report.missing_pages:
        lines.append(f"{counted(len(report.missing_pages), 'page')} lost; the tokens are computed again")
    if report.dropped_rows:
        lines.append(f"dropped {counted(report.dropped_rows, 'row')} of the catalog")
    if rebuild:
        lines.append(
            f"rebuilt the catalog: {counted(len(report.agents), 'agent')}, {counted(len(report.pages), 'page')}"
        )
    else:
        if report.adopted_pages:
            lines.append(f"added {counted(report.adopted_pages, 'page')} to the catalog")
        lines += list(report.facts)
    return lines


__all__ = ["repair"]
