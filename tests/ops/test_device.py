"""What the machine has and what kvd may take of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvd.ops import (
    Clamped,
    DeviceFacts,
    DeviceLimit,
    budget_room,
    clamp_budget,
    clamp_footprint,
    clamp_quota,
    device_facts,
    device_limit,
)

GB = 1_000_000_000
MACHINE = DeviceFacts(memory_bytes=16 * GB, disk_free_bytes=100 * GB, disk_total_bytes=500 * GB)


def test_this_machine_answers(tmp_path: Path) -> None:
    """Real figures, also for a folder that does not exist yet."""
    facts = device_facts(tmp_path / "not" / "yet")
    assert facts.memory_bytes > GB // 4
    assert facts.disk_total_bytes == shutil.disk_usage(tmp_path).total
    assert 0 < facts.disk_free_bytes <= facts.disk_total_bytes


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "1000000\n",
            "sys/fs/cgroup/memory.max": "max\n",
        },
        {"proc/self/cgroup": "9:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000\n"},
    ],
)
def test_a_control_groups_limit_is_the_memory_there_is(tmp_path: Path, files: dict[str, str]) -> None:
    """A container sees the host's memory in /proc; its limit counts."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert device_facts(tmp_path, root=tmp_path).memory_bytes == 1_000_000


def test_a_budget_that_fits_is_kept() -> None:
    """P21: the default of 10.2 GB fits a machine of 16 GB beside a small model."""
    assert clamp_budget(10_200_000_000, MACHINE, reserved_bytes=GB).granted_bytes == 10_200_000_000


def test_a_budget_over_the_machine_is_cut_with_the_figures() -> None:
    """P21: what is granted, with the weights, leaves a quarter of the memory; the reason has every figure."""
    clamped = clamp_budget(10_200_000_000, MACHINE, reserved_bytes=8 * GB)
    assert clamped.granted_bytes == 4 * GB
    assert clamped.reason is not None
    for figure in ("10.2 GB", "4 GB", "16 GB", "8 GB"):
        assert figure in clamped.reason


def test_the_devices_own_word_counts() -> None:
    """A GPU that recommends less than the memory share limits the budget; nothing goes below zero."""
    apple = device_limit({"max_recommended_working_set_size": 5 * GB, "memory_size": 16 * GB})
    assert clamp_budget(10 * GB, MACHINE, reserved_bytes=GB, device=apple).granted_bytes == 4 * GB
    assert clamp_budget(10 * GB, MACHINE, reserved_bytes=20 * GB).granted_bytes == 0


def test_pages_in_a_cards_memory_take_none_of_the_machines() -> None:
    """P21: with CUDA the card limits the budget, in both directions; the reason says so."""
    card = device_limit({"total_memory": 100 * GB, "free_memory": 99 * GB})
    assert card == DeviceLimit(90 * GB, is_own_memory=True)
    assert clamp_budget(80 * GB, MACHINE, reserved_bytes=GB, device=card) == Clamped(80 * GB, None)
    cut = clamp_budget(200 * GB, MACHINE, reserved_bytes=GB, device=card)
    assert cut.granted_bytes == 89 * GB
    assert "90 GB that the GPU can hold" in str(cut.reason)
    assert device_limit({}) is None


def test_quota_counts_what_is_ours_already() -> None:
    """P25: the default is finite; a restart with a full folder does not shrink it to what is left."""
    assert clamp_quota(None, MACHINE, used_bytes=0).granted_bytes == 50 * GB
    assert clamp_quota(None, MACHINE, used_bytes=20 * GB).granted_bytes == 60 * GB
    assert clamp_quota(80 * GB, MACHINE, used_bytes=0).granted_bytes == 80 * GB
    cut = clamp_quota(200 * GB, MACHINE, used_bytes=20 * GB)
    assert cut.granted_bytes == 120 * GB
    assert "100 GB free" in str(cut.reason)


def test_the_footprint_is_bounded_by_the_machine() -> None:
    """P23: by default nine tenths of its memory; what is wanted less is kept, what is more is cut with the figures."""
    assert clamp_footprint(None, MACHINE) == Clamped(14_400_000_000, None)
    assert clamp_footprint(GB, MACHINE) == Clamped(GB, None)
    cut = clamp_footprint(20 * GB, MACHINE)
    assert cut.granted_bytes == 14_400_000_000
    assert cut.reason == "footprint-limit 20 GB cut to 14.4 GB: 90% of the machine's 16 GB"


def test_the_largest_budget_is_what_a_larger_one_is_cut_to() -> None:
    """P21: at run time a budget over it is refused with the same words."""
    room_bytes, reason = budget_room(MACHINE, reserved_bytes=2 * GB)
    clamped = clamp_budget(100 * GB, MACHINE, reserved_bytes=2 * GB)
    assert (clamped.granted_bytes, room_bytes) == (10 * GB, 10 * GB)
    assert clamped.reason == f"budget 100 GB cut to 10 GB: {reason}"
