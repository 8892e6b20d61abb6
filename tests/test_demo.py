"""The demo on the tiny model: every promise it prints is checked by it, and all of them hold."""

from pathlib import Path

import pytest
from rich.console import Console

from kvd.demo import ROLES, report_facts, run_demo

pytestmark = pytest.mark.daemon


def test_the_demo_keeps_its_promises(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, P2, P14, P34: kill -9, restart and a killed client; answers equal to an unbroken run, all tokens reused."""
    monkeypatch.setenv("KVD_THREADS", "1")
    with Path("/dev/null").open("w") as nowhere:
        report = run_demo(model=str(tiny_model_dir), options=("--check",), console=Console(file=nowhere))
    assert [check.name for check in report.checks if not check.held] == []
    assert [row.agent for row in report.rows] == list(ROLES)
    for row in report.rows:
        assert row.warm_cached_tokens == row.computed_tokens > 1000
        assert min(row.cold_s, row.hot_s, row.warm_s) > 0
    assert report_facts(report)["held"] is True
