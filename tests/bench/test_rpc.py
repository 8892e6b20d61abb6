"""`kvd bench rpc`: real servers on both sides, every figure there, errors of clients told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.rpc import RpcReport, rpc, run_clients, table_lines
from kvd.bench.rpc_gateway import GatewayTtft


@pytest.mark.daemon
def test_the_command_reports_every_figure(tiny_model_dir: Path) -> None:
    """One small run against the tiny model: rates of both sides, and every client process answered."""
    arguments = ["--calls", "20", "--events", "300", "--pairs", "2", "--clients", "3", "--repeats", "1", "--json"]
    result = CliRunner().invoke(rpc, [*arguments, "--model", str(tiny_model_dir)])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["answered"] == facts["clients"] == 3
    assert facts["errors"] == []
    for name in ("health", "stream"):
        assert facts[f"{name}_s"] > 0
        assert facts["met"][name] == (facts[f"{name}_ratio"] >= facts["bar"])
    assert facts["met"]["gateway"] == (facts["gateway"]["added_ms"] < facts["gateway_bar_ms"])
    assert facts["gateway"]["direct_ms"] > 0
    assert facts["gateway"]["gateway_ms"] > 0
    assert facts["bare_s"] > 0
    assert facts["bare_stream_s"] > 0


def test_clients_that_reach_nobody_are_counted(tmp_path: Path) -> None:
    """An answer that did not come is an error in the report, not a hole in it."""
    answered, errors, wall_s = run_clients(tmp_path / "nobody.sock", 2)
    assert answered == 0
    assert len(errors) == 2
    assert all("DaemonUnreachable" in error for error in errors)
    report = RpcReport(
        "m", 1, 1, 1, 10, 20, 0.5, 30, 40, 0.75, GatewayTtft(5.0, 6.0, 1.0), 2, answered, tuple(set(errors)), wall_s
    )
    assert report.facts()["met"] == {"health": False, "stream": True, "gateway": True, "clients": False}
    assert any("DaemonUnreachable" in line for line in table_lines(report))
