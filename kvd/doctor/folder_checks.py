"""Checks of the data folder's outside: owner, modes, lock, room, foreign files, the engine's record.

Import kvd.store, kvd.ops, kvd.record, kvd.scheduler.core and this package.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from kvd.doctor.context import Context
from kvd.doctor.findings import Check, counted, notice, ok, problem
from kvd.doctor.folder_state import REPLACED, Entry, odd_type
from kvd.ops.device import clamp_quota, device_facts
from kvd.ops.sizes import format_size
from kvd.record import RECORD_FILE, parse_record
from kvd.scheduler.core import NUMERICS
from kvd.store.layout import FORMAT_VERSION
from kvd.store.side_files import read_small_file

NAMED: Final = 5
"""Files a line names; the others are counted."""

LOW_DISK_BYTES: Final = 1_000_000_000
NO_DISK_BYTES: Final = 50_000_000

_REMEDIES: Final = {
    "no_folder": "choose another --data-dir",
    "unreadable": "make it readable for this user, or choose another --data-dir",
    "malformed": "restore VERSION; delete it only if the folder holds nothing to keep",
    "too_new": "upgrade kvd, or choose another --data-dir",
    "older": "start kvd serve once: it converts the folder and keeps a backup",
}


def check_data_folder(context: Context) -> Iterator[Check]:
    """There is a folder of this user, closed to others, in a format that this kvd reads."""
    root, state = context.options.data_dir, context.state
    facts: dict[str, object] = {
        "path": str(root),
        "state": state.state,
        "version": state.version,
        "supported_version": FORMAT_VERSION,
        "mode": f"{state.mode:04o}",
    }
    if state.uid not in (-1, os.getuid()):
        yield problem(
            "data folder",
            f"{root} belongs to user {state.uid}, not to {os.getuid()}",
            f"run kvd as that user, choose another --data-dir, or: chown -R {os.getuid()} {shlex.quote(str(root))}",
            **facts | {"uid": state.uid},
        )
    if state.state == "missing":
        yield notice("data folder", state.text, "kvd serve makes it; if it should be there, check --data-dir", **facts)
    elif not state.may_be_searched:
        yield problem("data folder", state.text, _REMEDIES[state.state], **facts)
    elif state.state == "empty" and state.mode & 0o077 and len(context.inventory.entries) > 1:
        yield problem(
            "data folder",
            f"{root} holds files that are not kvd's and is open to others (mode {state.mode:04o})",
            f"use a folder of its own, or: chmod 700 {shlex.quote(str(root))}",
            **facts,
        )
    elif state.state == "empty" and context.fingerprints:
        yield notice(
            "data folder",
            f"{root} holds models' folders, but VERSION is missing",
            f"nothing: the next start writes it; or: {context.options.repair()}",
            **facts,
        )
    elif state.state == "empty":
        yield ok("data folder", f"{root}: no kvd has used it yet", **facts)
    else:
        yield ok("data folder", f"{root}, format {state.version}", **facts)


def check_modes(context: Context) -> Iterator[Check]:
    """Everything of kvd's is 0700 or 0600 and this user's (P37); every folder can be listed."""
    inventory = context.inventory
    exposed = [entry for entry in inventory.entries if entry.is_exposed]
    if context.state.state == "empty":
        exposed = [entry for entry in exposed if entry.path != context.options.data_dir]
    others = [e for e in inventory.entries if e.kind != "foreign" and e.uid != os.getuid()]
    facts: dict[str, object] = {
        "files": len(inventory.entries),
        "exposed": [str(entry.path) for entry in exposed],
        "others": [str(entry.path) for entry in others],
        "unreadable": list(inventory.unreadable),
    }
    if inventory.unreadable:
        yield problem(
            "modes", f"cannot be read: {_some(inventory.unreadable)}", "make it readable for this user", **facts
        )
    elif others:
        root = shlex.quote(str(context.options.data_dir))
        yield problem("modes", f"belong to other users: {_names(others)}", f"chown -R {os.getuid()} {root}", **facts)
    elif exposed:
        yield problem(
            "modes",
            f"open to other users, who could read prompts: {_names(exposed)}",
            context.options.repair(),
            **facts,
        )
    elif inventory.entries:
        yield ok("modes", f"{len(inventory.entries)} files and folders are this user's alone", **facts)


def check_lock(context: Context) -> Iterator[Check]:
    """Whether a daemon runs on the data folder, and its process id."""
    if not context.state.may_be_searched:
        return
    lock = context.lock
    facts: dict[str, object] = {"held": lock.held, "pid": lock.pid}
    if lock.held:
        yield ok("lock", f"in use by process {lock.pid if lock.pid is not None else '?'}", **facts)
    else:
        yield ok("lock", "free: no daemon uses the folder", **facts)


def check_disk(context: Context) -> Iterator[Check]:
    """Free space, the quota, and what the folder takes by kind."""
    if not context.state.may_be_searched and context.state.state != "missing":
        return
    machine = device_facts(context.options.data_dir)
    used_bytes = context.inventory.used_bytes
    quota = clamp_quota(context.options.quota_bytes, machine, used_bytes=used_bytes)
    by_kind = context.inventory.bytes_by_kind()
    facts: dict[str, object] = {
        "free_bytes": machine.disk_free_bytes,
        "used_bytes": used_bytes,
        "quota_bytes": quota.granted_bytes,
        "by_kind": by_kind,
    }
    parts = ", ".join(f"{kind} {format_size(count)}" for kind, count in by_kind.items() if count and kind != "own")
    text = (
        f"{format_size(used_bytes)} of {format_size(quota.granted_bytes)} used{f' ({parts})' if parts else ''}, "
        f"{format_size(machine.disk_free_bytes)} free"
    )
    if machine.disk_free_bytes < NO_DISK_BYTES:
        yield problem("disk", f"the disk is full: {text}", "free space on the disk of the data folder", **facts)
    elif used_bytes >= quota.granted_bytes:
        yield problem("disk", f"the quota is used up: {text}", "kvd-client rm AGENT, or a larger --quota", **facts)
    elif machine.disk_free_bytes < LOW_DISK_BYTES or used_bytes > 0.9 * quota.granted_bytes:
        yield notice("disk", f"nearly full: {text}", "kvd-client rm AGENT, or free space on the disk", **facts)
    else:
        yield ok("disk", text, **facts)


def check_foreign(context: Context) -> Iterator[Check]:
    """Files that kvd did not make."""
    foreign = [e for e in context.inventory.entries if e.kind == "foreign"]
    if foreign:
        yield notice(
            "foreign files",
            f"not kvd's: {_names(foreign)}; counted against the quota all the same",
            "move them elsewhere",
            paths=[str(entry.path) for entry in foreign],
            bytes=sum(entry.file_bytes for entry in foreign),
        )
    elif context.inventory.entries:
        yield ok("foreign files", "none", paths=[], bytes=0)


def check_quarantine(context: Context) -> Iterator[Check]:
    """What was found bad and put aside; never served."""
    aside = context.inventory.of_kind("quarantine")
    replaced = [entry for entry in aside if REPLACED in str(entry.path.relative_to(context.options.data_dir))]
    bad = [entry for entry in aside if entry not in replaced]
    facts: dict[str, object] = {
        "files": [str(entry.path) for entry in aside],
        "replaced": [str(entry.path) for entry in replaced],
        "bytes": sum(entry.file_bytes for entry in aside),
    }
    if bad:
        bad_bytes = sum(entry.file_bytes for entry in bad)
        yield notice(
            "quarantine",
            f"{counted(len(bad), 'file')}, {format_size(bad_bytes)}, put aside as bad: {_names(bad)}",
            "look at them, then delete them; kvd deletes them when space is short",
            **facts,
        )
    elif replaced:
        text = (
            f"{counted(len(replaced), 'file')} of catalogs replaced by --rebuild; kvd deletes them when space is short"
        )
        yield ok("quarantine", text, **facts)
    elif context.inventory.entries:
        yield ok("quarantine", "empty", **facts)


def check_record(context: Context) -> Iterator[Check]:
    """`engine.json` can be read, and its arithmetic is this kvd's."""
    if not context.state.may_be_searched:
        return
    try:
        data = read_small_file(context.fs, context.options.data_dir / RECORD_FILE)
    except OSError as error:
        found = odd_type(context.options.data_dir / RECORD_FILE)
        if found:
            remedy = "put the file itself back, or delete what is there: the next start of kvd serve writes it anew"
            yield problem("engine record", f"{RECORD_FILE} is {found}, not a file", remedy)
            return
        yield problem("engine record", f"{RECORD_FILE} cannot be read: {error}", "check the disk and the file's mode")
        return
    if data is None:
        yield ok("engine record", "none yet; the first start writes it", record=None)
        return
    record, is_whole = parse_record(data)
    if not is_whole:
        yield notice(
            "engine record",
            f"{RECORD_FILE} is damaged: which backend and thread count computed the pages is not known any more",
            "nothing: the next start of kvd serve writes it anew",
            record=None,
        )
    elif record.numerics not in (None, NUMERICS):
        yield notice(
            "engine record",
            f"the pages were computed by {record.numerics}, this kvd computes by {NUMERICS}",
            "nothing: older agents are computed again when they are used",
            record=asdict(record),
        )
    else:
        yield ok(
            "engine record",
            f"attention {record.attention}, {record.threads} threads, {record.numerics}",
            record=asdict(record),
        )


def _names(entries: list[Entry]) -> str:
    return _some([str(entry.path) for entry in entries])


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


__all__ = [
    "check_data_folder",
    "check_disk",
    "check_foreign",
    "check_lock",
    "check_modes",
    "check_quarantine",
    "check_record",
]
