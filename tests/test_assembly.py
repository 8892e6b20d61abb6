"""What the composition root tells an operator about limits that the machine cuts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd import assembly
from kvd.assembly import Assembly, holds_no_page
from kvd.config import DEFAULT_QUOTA_BYTES, ConfigError, Settings
from kvd.ops.device import DeviceFacts


@pytest.mark.parametrize(("quota_bytes", "is_asked_for"), [(DEFAULT_QUOTA_BYTES, False), (60_000_000_000, True)])
def test_a_cut_quota_is_a_notice_only_where_it_was_asked_for(
    quota_bytes: int, is_asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is cut on most machines: that is said at level info, and a start without settings has no warning."""
    monkeypatch.setattr(assembly, "device_facts", lambda data_dir: DeviceFacts(64 << 30, 50_000_000_000, 10**12))
    monkeypatch.setattr(assembly, "stated_scratch_bytes", lambda spec: 0)
    told: list[tuple[str, dict[str, object]]] = []
    settings = Settings(tmp_path, tmp_path / "s", "m", tmp_path, quota_bytes=quota_bytes)
    made = Assembly(settings, {}, lambda event, **facts: told.append((event, facts)))
    loaded = SimpleNamespace(weights_bytes=0, spec=None)
    granted = made._clamp(cast("Any", loaded), cast("Any", SimpleNamespace(used_bytes=0)))
    assert granted[1] == 50_000_000_000
    assert [notice.startswith("quota 60 GB cut to 50 GB") for notice in made._notices] == [True] * is_asked_for
    assert [(event, facts["level"]) for event, facts in told] == [("quota", "info")] * (not is_asked_for)


@pytest.mark.parametrize("limit_bytes", [None, 1_000_000, 1 << 40])
def test_a_footprint_limit_leaves_room_for_what_is_loaded(
    limit_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P23: one that would refuse every request is refused at the start; one beyond the machine is cut, in words."""
    monkeypatch.setattr(assembly, "device_facts", lambda data_dir: DeviceFacts(64 << 30, 10**12, 10**12))
    settings = Settings(tmp_path, tmp_path / "s", "m", tmp_path, footprint_limit_bytes=limit_bytes)
    made = Assembly(settings, {}, lambda event, **facts: None)
    if limit_bytes == 1_000_000:
        with pytest.raises(ConfigError, match=r"footprint-limit 1 MB is too little: the daemon takes .* before it has"):
            made._pressure()
        return
    assert made._pressure().hard_bytes == int((64 << 30) * 0.9)
    assert [notice.startswith("footprint-limit 1.1 TB cut to 61.8 GB") for notice in made._notices] == (
        [] if limit_bytes is None else [True]
    )


def test_a_machine_that_is_short_of_memory_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P23: where nobody asked for a limit the daemon starts, and says why it will refuse."""
    monkeypatch.setattr(assembly, "device_facts", lambda data_dir: DeviceFacts(1_000_000, 10**12, 10**12))
    made = Assembly(Settings(tmp_path, tmp_path / "s", "m", tmp_path), {}, lambda event, **facts: None)
    assert made._pressure().level == "none", "it is looked at once a second from now on"
    (notice,) = made._notices
    assert notice.startswith("the machine is short of memory: the daemon takes ")


def test_a_budget_that_holds_no_page_is_said_at_the_start() -> None:
    """P8: else the first request is the one that tells, by its refusal."""
    assert holds_no_page(2_396_160, 2_396_160) == []
    (notice,) = holds_no_page(1_000_000, 2_396_160)
    assert "budget of 1 MB holds no page" in notice
    assert "takes 2.4 MB" in notice
    assert "--budget" in notice
