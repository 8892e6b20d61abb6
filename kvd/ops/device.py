"""What the machine has, and what of it kvd may take: memory for the budget, disk for the quota.

Imports the standard library and kvd.ops.sizes only; what the GPU recommends is passed in by whoever may ask mlx.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvd.ops.sizes import format_size

__all__ = [
    "Clamped",
    "DeviceFacts",
    "DeviceLimit",
    "budget_room",
    "clamp_budget",
    "clamp_footprint",
    "clamp_quota",
    "device_facts",
    "device_limit",
]

GPU_SHARE = 0.9
"""Of a GPU's own memory, at most this for model and pages together: its kernels and the driver need some."""
MEMORY_SHARE = 0.75
"""Of the memory, at most this for model and pages together: the rest keeps the system and its file cache alive."""
FOOTPRINT_SHARE = 0.9
"""Of the memory, the whole process may take this: beyond it the machine begins to swap."""
DISK_SHARE = 0.5
"""Of the free disk, at most this for swap files by default: somebody else needs room too."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Memory and disk of this machine.

    Attributes:
        memory_bytes: physical memory, or the limit of our control group if that is less.
        disk_free_bytes: free on the file system of the data folder, for an ordinary user.
        disk_total_bytes: size of that file system.
    """

    memory_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """What a GPU can hold.

    Attributes:
        limit_bytes: most bytes for model and pages together.
        is_own_memory: the GPU has memory of its own: pages there take none of the machine's.
    """

    limit_bytes: int
    is_own_memory: bool


@dataclass(frozen=True, slots=True)
class Clamped:
    """A limit after the machine's word.

    Attributes:
        granted_bytes: what applies.
        reason: why it is less than what was wanted, with the figures; None if it is not.
    """

    granted_bytes: int
    reason: str | None


def device_facts(data_dir: Path, *, root: Path = Path("/")) -> DeviceFacts:
    """Ask the machine.

    Args:
        data_dir: a folder on the disk in question; need not exist yet.
        root: where `proc` and `sys` are looked for.

    Raises:
        OSError: the disk does not answer.
    """
    existing = data_dir.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    limits = [_physical_memory_bytes(), *_group_limits_bytes(root)]
    return DeviceFacts(memory_bytes=min(limits), disk_free_bytes=usage.free, disk_total_bytes=usage.total)


def device_limit(info: Mapping[str, object]) -> DeviceLimit | None:
    """What mlx says of the device it computes on, as a limit; None on a CPU, or where it says nothing of memory.

    Args:
        info: `mx.device_info()`. Apple's GPUs share the machine's memory and recommend a working set; CUDA states the
            memory of the card.
    """
    recommended, total = info.get("max_recommended_working_set_size"), info.get("total_memory")
    if isinstance(recommended, int) and recommended > 0:
        return DeviceLimit(recommended, is_own_memory=False)
    if isinstance(total, int) and total > 0:
        return DeviceLimit(int(total * GPU_SHARE), is_own_memory=True)
    return None


def clamp_budget(
    wanted_bytes: int, facts: DeviceFacts, *, reserved_bytes: int, device: DeviceLimit | None = None
) -> Clamped:
    """The page budget that this machine can hold.

    Args:
        wanted_bytes: the configured budget.
        facts: the machine.
        reserved_bytes: what the model takes besides pages: weights, scratch of a step.
        device: of the GPU that holds model and pages; None on a CPU.
    """
    room_bytes, reason = budget_room(facts, reserved_bytes=reserved_bytes, device=device)
    if wanted_bytes <= room_bytes:
        return Clamped(wanted_bytes, None)
    return Clamped(room_bytes, f"budget {format_size(wanted_bytes)} cut to {format_size(room_bytes)}: {reason}")


def budget_room(facts: DeviceFacts, *, reserved_bytes: int, device: DeviceLimit | None = None) -> tuple[int, str]:
    """The largest page budget that this machine can hold, and where the figure comes from, in words.

    Args:
        facts: the machine.
        reserved_bytes: as for `clamp_budget`.
        device: as for `clamp_budget`.
    """
    ceiling_bytes = int(facts.memory_bytes * MEMORY_SHARE)
    origin = f"{MEMORY_SHARE:.0%} of the machine's {format_size(facts.memory_bytes)}"
    if device is not None and device.is_own_memory:
        ceiling_bytes, origin = device.limit_bytes, f"the {format_size(device.limit_bytes)} that the GPU can hold"
    elif device is not None and device.limit_bytes < ceiling_bytes:
        ceiling_bytes, origin = device.limit_bytes, f"the device's working set of {format_size(device.limit_bytes)}"
    room_bytes = max(0, ceiling_bytes - reserved_bytes)
    return room_bytes, f"{origin}, less {format_size(reserved_bytes)} for the model"


def clamp_footprint(wanted_bytes: int | None, facts: DeviceFacts) -> Clamped:
    """The limit of the whole process's memory on this machine.

    Args:
        wanted_bytes: the configured limit; None for the default share of the machine's memory.
        facts: the machine.
    """
    most_bytes = int(facts.memory_bytes * FOOTPRINT_SHARE)
    if wanted_bytes is None or wanted_bytes <= most_bytes:
        return Clamped(most_bytes if wanted_bytes is None else wanted_bytes, None)
    return Clamped(
        most_bytes,
        f"footprint-limit {format_size(wanted_bytes)} cut to {format_size(most_bytes)}: {FOOTPRINT_SHARE:.0%} of the "
        f"machine's {format_size(facts.memory_bytes)}",
    )


def clamp_quota(wanted_bytes: int | None, facts: DeviceFacts, *, used_bytes: int) -> Clamped:
    """The disk quota of the data folder.

    Args:
        wanted_bytes: the configured quota; None for the default share of the disk.
        facts: the machine.
        used_bytes: what the folder holds already; it counts as ours to keep.
    """
    if wanted_bytes is None:
        return Clamped(int((facts.disk_free_bytes + used_bytes) * DISK_SHARE), None)
    room_bytes = facts.disk_free_bytes + used_bytes
    if wanted_bytes <= room_bytes:
        return Clamped(wanted_bytes, None)
    return Clamped(
        room_bytes,
        f"quota {format_size(wanted_bytes)} cut to {format_size(room_bytes)}: "
        f"{format_size(facts.disk_free_bytes)} free and {format_size(used_bytes)} used already",
    )


def _physical_memory_bytes() -> int:
    if sys.platform == "darwin":
        value = ctypes.c_uint64(0)
        length = ctypes.c_size_t(ctypes.sizeof(value))
        library = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
        if library.sysctlbyname(b"hw.memsize", ctypes.byref(value), ctypes.byref(length), None, 0) == 0:
            return int(value.value)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits_bytes(root: Path) -> list[int]:
    """Memory limits of our control groups (v1 and v2) and of all groups above them."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            text = _read(base.joinpath(*parts[:depth], name)).strip()
            if text.isdigit() and int(text) > 0:
                limits.append(int(text))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
