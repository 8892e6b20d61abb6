"""What must be true of a daemon and its folder when all clients have gone: nothing leaked, nothing left, all agrees.

Each function takes plain facts and gives one line for each thing that is wrong, so that tests can plant faults.

May import anything of kvd and kvd_client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvd.doctor import Options, examine
from kvd.doctor.examine import CHECKS
from kvd.doctor.folder_state import take_inventory
from kvd.vm.page import IN_RAM, RESIDENT

FOLDER_CHECKS: Final = (
    "data folder",
    "modes",
    "engine record",
    "constants",
    "store",
    "deep",
    "quarantine",
    "foreign files",
)
"""Checks of `kvd doctor` that look at the folder alone, whatever runs."""

NEVER_LOGGED: Final = frozenset(
    {
        "callback_failed",
        "engine_failed",
        "log_not_compacted",
        "log_rebuilt",
        "log_rewritten",
        "page_not_deleted",
        "pages_vanished",
        "record_invalid",
        "request_failed",
        "turn_not_durable",
    }
)
"""Events of the daemon's log that a sound disk and a sound daemon never give rise to."""


def is_at_rest(figures: Mapping[str, Any], health: Mapping[str, Any]) -> bool:
    """Whether nothing runs, waits or is on its way to disk any more."""
    busy = ("in_flight_bytes", "dirty_bytes", "reserved_bytes")
    return not health["running"] and not health["queued"] and not any(figures[name] for name in busy)


def trouble_with_figures(
    figures: Mapping[str, Any], health: Mapping[str, Any], residency: Mapping[str, Any]
) -> list[str]:
    """A daemon at rest: requests, frames and bytes must agree with the page maps of its agents.

    Args:
        figures: its statistics.
        health: running and queued requests.
        residency: the page maps of all agents.
    """
    troubles = [
        f"{health[name]} requests {name} though no client is there" for name in ("running", "queued") if health[name]
    ]
    troubles += [
        f"{name} is {figures[name]} at rest"
        for name in ("in_flight_bytes", "dirty_bytes", "reserved_bytes", "pinned_bytes")
        if figures[name]
    ]
    troubles += [f"{name} is {figures[name]}" for name in ("load_failures", "write_failures") if figures[name]]
    if figures["pages"]["lost"]:
        troubles.append(f"{figures['pages']['lost']} pages are lost")
    in_frames, in_ram = (
        sum(count for state, count in figures["pages"].items() if state in states) for states in (RESIDENT, IN_RAM)
    )
    mapped = _ram_pages(residency)
    # a tail may be packed between the two answers, so only what is in RAM in either way is compared
    if figures["frames"] != in_frames or in_ram != mapped:
        troubles.append(
            f"frames leak: {figures['frames']} frames in the pool, {in_frames} pages with one in the page table; "
            f"{in_ram} pages in RAM, {mapped} in the agents' page maps"
        )
    if figures["peak_budget_bytes"] > figures["budget_bytes"]:
        troubles.append(f"{figures['peak_budget_bytes']} bytes were held, the budget is {figures['budget_bytes']}")
    return troubles


def _ram_pages(residency: Mapping[str, Any]) -> int:
    """Pages in RAM, a shared one counted once; tails belong to one branch each."""
    sealed: set[str] = set()
    tails = 0
    for agent in residency["agents"]:
        for branch in agent["branches"]:
            for segment in branch["segments"]:
                sealed.update(page["page"] for page in segment["pages"] if page["state"] in IN_RAM)
                tails += segment["tail"] is not None and segment["tail"]["state"] in IN_RAM
    return len(sealed) + tails


def trouble_with_bytes(figures: Mapping[str, Any], data_dir: Path) -> list[str]:
    """What the daemon counts of its disk must be what is there (P6, P25), and nothing unfinished may lie about.

    The catalog grows by itself between two counts of everything, so the sum may be off by as much as it takes.
    """
    inventory = take_inventory(data_dir)
    found = inventory.bytes_by_kind()
    troubles = [
        f"{name} is {figures[name]}, the files have {found[kind]}"
        for name, kind in (("swap_bytes", "swap"), ("log_bytes", "logs"))
        if figures[name] != found[kind]
    ]
    if abs(figures["disk_used_bytes"] - inventory.used_bytes) > max(found["catalog"], 1 << 20):
        troubles.append(f"disk_used_bytes is {figures['disk_used_bytes']}, the files have {inventory.used_bytes}")
    troubles += [f"an unfinished file was left: {entry.path}" for entry in inventory.of_kind("temp")]
    return troubles


def trouble_when_empty(figures: Mapping[str, Any], data_dir: Path) -> list[str]:
    """When every agent was deleted nothing of them may be left, in RAM or on disk."""
    names = ("agents", "frames", "resident_bytes", "swap_bytes", "log_bytes")
    troubles = [f"{name} is {figures[name]} though every agent was deleted" for name in names if figures[name]]
    inventory = take_inventory(data_dir)
    # the file of forks' notes stays, empty
    left = [entry.path for kind in ("swap", "logs") for entry in inventory.of_kind(kind)]
    left = [path for path in left if Path(path).name != "forks.log" or Path(path).stat().st_size]
    return troubles + [f"orphan file: {path}" for path in left]


def trouble_in_folder(options: Options, *, notices: bool) -> list[str]:
    """What `kvd doctor --deep` finds wrong with the folder of a daemon that does not run.

    Args:
        options: the folder.
        notices: the daemon was stopped, not killed, so that unfinished and forgotten files count, too.
    """
    checks = tuple(each for each in CHECKS if each[0] in FOLDER_CHECKS)
    report = examine(options, checks=checks)
    bad = ("problem", "notice") if notices else ("problem",)
    return [f"doctor: {check.name}: {check.text}" for check in report.checks if check.status in bad]


def trouble_in_log(lines: Sequence[str]) -> list[str]:
    """Events in a daemon's log that must not be there, each kind once with its count and first line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill, or words of a library
            if line.startswith("Traceback"):
                found.setdefault("Traceback", []).append(line)
            continue
        event = record.get("event") if isinstance(record, dict) else None
        if event in NEVER_LOGGED:
            found.setdefault(event, []).append(line)
    return [f"the daemon's log has {event} {len(each)} times, first: {each[0][:400]}" for event, each in found.items()]


__all__ = [
    "is_at_rest",
    "trouble_in_folder",
    "trouble_in_log",
    "trouble_when_empty",
    "trouble_with_bytes",
    "trouble_with_figures",
]
