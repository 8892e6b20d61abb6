"""Installing kvd as a service: which files, which commands of the manager, and whose files are left alone."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvd import cli_service
from kvd.cli import main
from kvd.errors import InvalidParams
from kvd.ops.errors import ServiceRefused
from kvd.ops.service import Launchd, Ran, SystemdUser, run_command
from kvd.ops.service_files import (
    LABEL,
    MARK,
    ServicePlan,
    launchd_job,
    literal,
    systemd_service,
    systemd_socket,
)

ROOT = Path(__file__).resolve().parents[2]
PLAN = ServicePlan(["/opt/kvd/bin/kvd", "serve"], "/home/me/.local/share/kvd/kvd.sock")
ODD = ServicePlan(
    ["/opt/my kvd/50%/kvd", "serve", "--data-dir", '/data/"a" $b'],
    "/run/100%/kvd.sock",
    {"KVD_CONFIG": "/etc/my kvd/50%.toml"},
)


class Fake:
    """A manager's command: notes the calls and answers what it was told to."""

    def __init__(self, answers: dict[str, Ran] | None = None) -> None:
        self.calls: list[str] = []
        self.answers = answers or {}
        self.ends_after = 0
        self.slept = 0

    def sleep(self, seconds: float) -> None:
        """Time passes; after so many looks a job that was booted out is gone."""
        assert seconds > 0
        self.slept += 1
        if self.slept == self.ends_after:
            self.answers["launchctl print"] = Ran(113, "", "no such service")
            self.slept = 0

    def __call__(self, arguments: Sequence[str]) -> Ran:
        """See `Run`."""
        line = " ".join(arguments)
        self.calls.append(line)
        return next((ran for start, ran in self.answers.items() if line.startswith(start)), Ran(0, "", ""))


def test_the_files_of_the_sources_are_what_is_installed() -> None:
    """`systemd/` and `launchd/` are for people who install by hand: the same settings, at the default places."""
    usual = ServicePlan(["%h/.local/bin/kvd", "serve"], "%h/.local/share/kvd/kvd.sock")
    assert (ROOT / "systemd" / "kvd.service").read_text() == systemd_service(usual, mark=False)
    assert (ROOT / "systemd" / "kvd.socket").read_text() == systemd_socket(usual, mark=False)
    job = launchd_job(
        ServicePlan(
            ["__KVD__", "serve"],
            "__HOME__/Library/Application Support/kvd/kvd.sock",
            log_file=Path("__HOME__/Library/Logs/kvd.log"),
            error_file=Path("__HOME__/Library/Logs/kvd.stderr.log"),
        )
    )
    assert plistlib.loads((ROOT / "launchd" / f"{LABEL}.plist").read_bytes()) == job


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("plan", [PLAN, ODD], ids=["plain", "odd"])
def test_systemd_accepts_what_is_installed(tmp_path: Path, plan: ServicePlan) -> None:
    """`systemd-analyze verify` has nothing to say, whatever is in the paths."""
    program = tmp_path / "my 50% kvd"
    program.symlink_to(sys.executable)
    plan = ServicePlan([str(program), *plan.command[1:]], plan.socket, plan.environment)
    for path, text in SystemdUser(tmp_path, Fake()).files(plan).items():
        path.write_text(text)
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", "./kvd.service", "./kvd.socket"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kvd." in line]) == (0, [])


def test_systemd_install_status_uninstall(tmp_path: Path) -> None:
    """Files, then the manager; a second install is in force too; what is removed is told."""
    run = Fake({"systemctl --user show kvd.service": Ran(0, "ActiveState=active\nSubState=running\nMainPID=42\n", "")})
    manager = SystemdUser(tmp_path / "units", run)
    assert manager.status().state == "not installed"
    run.calls.clear()
    done = manager.install(PLAN)
    assert done[0] == f"written: {tmp_path / 'units' / 'kvd.service'}"
    assert run.calls == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        "systemctl --user enable kvd.socket kvd.service",
        "systemctl --user stop kvd.service kvd.socket",
        "systemctl --user start --no-block kvd.socket kvd.service",
    ]
    state = manager.status()
    assert (state.installed, state.state, state.pid) == (True, "active (running)", 42)
    run.calls.clear()
    assert manager.install(ServicePlan(PLAN.command, PLAN.socket, on_demand=True))[0].startswith("unchanged: ")
    assert run.calls[2:4] == ["systemctl --user disable kvd.service", "systemctl --user enable kvd.socket"]
    assert run.calls[-1] == "systemctl --user start --no-block kvd.socket"
    run.calls.clear()
    assert len(manager.uninstall()) == 3
    assert run.calls[1:] == [
        "systemctl --user disable --now kvd.socket kvd.service",
        "systemctl --user daemon-reload",
    ]
    assert list((tmp_path / "units").iterdir()) == []
    assert manager.uninstall() == ["not installed"]


def test_launchd_install_status_uninstall(tmp_path: Path) -> None:
    """The agent is loaded anew when it was loaded; the socket's folder is private before launchd makes the socket."""
    printed = f"gui/501/{LABEL} = {{\n\tstate = running\n\tpid = 77\n\tlast exit code = 0\n\tspawn = {{\n\tpid = 1\n"
    run = Fake({"launchctl print": Ran(113, "", "no such service")})
    manager = Launchd(tmp_path / "agents", run, log_file=tmp_path / "kvd.log", uid=501, sleep=run.sleep)
    plan = ServicePlan(PLAN.command, str(tmp_path / "data" / "kvd.sock"), {"KVD_CONFIG": "/c"}, tmp_path / "kvd.log")
    path = tmp_path / "agents" / f"{LABEL}.plist"
    assert manager.install(plan)[0] == f"written: {path}"
    assert run.calls == [f"launchctl print gui/501/{LABEL}", f"launchctl bootstrap gui/501 {path}"]
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    job = plistlib.loads(path.read_bytes())
    assert job["ProgramArguments"][-2:] == ["--log-file", str(tmp_path / "kvd.log")]
    assert job["EnvironmentVariables"] == {"KVD_CONFIG": "/c"}
    assert (job["RunAtLoad"], job["Sockets"]["kvd"]["SockPathName"]) == (True, plan.socket)
    assert manager.status().state == "not loaded"
    run.answers["launchctl print"] = Ran(0, printed, "")
    state = manager.status()
    assert (state.state, state.pid, state.detail["last exit code"]) == ("running", 77, "0")
    run.calls.clear()
    run.ends_after = 3
    manager.install(plan)
    assert run.calls[1] == f"launchctl bootout gui/501/{LABEL}"
    assert run.calls[-2:] == [f"launchctl print gui/501/{LABEL}", f"launchctl bootstrap gui/501 {path}"]
    run.answers["launchctl print"] = Ran(0, printed, "")
    run.ends_after = 1
    assert manager.uninstall() == ["stopped", f"removed: {path}"]
    assert not path.exists()
    assert manager.logs_command(lines=5, follow=True) == ["tail", "-n", "5", "-F", str(tmp_path / "kvd.log")]


def test_launchd_takes_its_time(tmp_path: Path) -> None:
    """A job that has not ended yet is waited for; one that never ends is an error, and so is a refused load."""
    run = Fake()  # everything succeeds, so the job is always there
    manager = Launchd(tmp_path, run, uid=1, sleep=run.sleep)
    with pytest.raises(ServiceRefused, match="does not end"):
        manager.install(ServicePlan(PLAN.command, str(tmp_path / "s")))
    assert run.slept > 100
    answers = iter([Ran(5, "", "Input/output error")] * 3 + [Ran(0, "", "")])
    again = Fake({"launchctl print": Ran(113, "", "")})
    plain = Fake.__call__

    class Slow(Fake):
        def __call__(self, arguments: Sequence[str]) -> Ran:
            return next(answers) if arguments[1] == "bootstrap" else plain(again, arguments)

    slow = Slow()
    assert Launchd(tmp_path, slow, uid=1, sleep=slow.sleep).install(ServicePlan(PLAN.command, str(tmp_path / "s")))
    assert slow.slept == 3
    refused = Fake({"launchctl print": Ran(113, "", ""), "launchctl bootstrap": Ran(78, "", "disabled")})
    with pytest.raises(ServiceRefused, match="disabled"):
        Launchd(tmp_path, refused, uid=1, sleep=refused.sleep).install(ServicePlan(PLAN.command, str(tmp_path / "s")))


def test_on_demand_means_not_at_login() -> None:
    """launchd loads a job with KeepAlive.SuccessfulExit at login, whatever RunAtLoad says."""
    job = launchd_job(ServicePlan(PLAN.command, PLAN.socket, on_demand=True))
    assert not {"KeepAlive", "RunAtLoad"} & job.keys()
    assert job["Sockets"]["kvd"]["SockPathName"] == PLAN.socket


def test_a_dollar_sign_is_doubled_in_commands_only() -> None:
    """systemd expands variables in ExecStart, and nowhere else."""
    text = systemd_service(ServicePlan(["/k", "$a b"], "/s", {"KVD_CONFIG": "/d/$team/k.toml", "X": 'a "b" c'}))
    assert 'ExecStart=/k "$$a b"' in text
    assert "Environment=KVD_CONFIG=/d/$team/k.toml\n" in text
    assert 'Environment="X=a \\"b\\" c"' in text


@pytest.mark.parametrize("make", [SystemdUser, Launchd])
def test_files_of_others_are_left_alone(tmp_path: Path, make: Callable[..., Any]) -> None:
    """A unit that somebody wrote by hand is neither written over nor removed, unless that is said."""
    run = Fake({"launchctl print": Ran(113, "", "no such service")})
    manager = make(tmp_path, run)
    path = next(iter(manager.files(PLAN)))
    path.write_text("mine")
    for refused in (manager.install, lambda _: manager.uninstall()):
        with pytest.raises(ServiceRefused, match=r"--force"):
            refused(ServicePlan(PLAN.command, str(tmp_path / "kvd.sock")))
        assert path.read_text() == "mine"
    assert not any("enable" in call or "bootstrap" in call or "bootout" in call for call in run.calls)
    manager.install(ServicePlan(PLAN.command, str(tmp_path / "kvd.sock")), force=True)
    assert MARK in path.read_text()


def test_a_manager_that_does_not_answer(tmp_path: Path) -> None:
    """Nothing is written; the message has the manager's reason and a way out."""
    run = Fake({"systemctl": Ran(1, "", "Failed to connect to bus: No medium found\n")})
    with pytest.raises(ServiceRefused, match=r"No medium found.*kvd serve"):
        SystemdUser(tmp_path / "units", run).install(PLAN)
    assert not (tmp_path / "units").exists()
    refusing = Fake({"systemctl --user enable": Ran(1, "", "Unit is masked\n")})
    with pytest.raises(ServiceRefused, match=r"enable kvd.socket kvd.service` failed: Unit is masked"):
        SystemdUser(tmp_path / "units", refusing).install(PLAN)


def test_commands_that_cannot_run() -> None:
    """A missing program counts as a failure with a reason."""
    ran = run_command(["/no/such/program", "x"])
    assert (ran.code, "No such file" in ran.err) == (127, True)
    assert run_command([sys.executable, "-c", "print('x')"]).out == "x\n"


def test_literal_paths() -> None:
    """Percent signs are systemd's; a line break cannot be said at all."""
    assert literal("/50%/x") == "/50%%/x"
    with pytest.raises(InvalidParams, match="line break"):
        literal("/a\nb")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs `kvd service ...` against a fake of systemd; the options' variables are not set."""
    run = Fake({"systemctl --user show kvd.service": Ran(0, "ActiveState=failed\nSubState=failed\nMainPID=0\n", "")})
    monkeypatch.setattr(cli_service, "manager", lambda: SystemdUser(tmp_path / "units", run))
    for name in list(os.environ):
        if name.startswith("KVD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str, env: dict[str, str] | None = None) -> Any:
        return CliRunner().invoke(main, [*arguments], env=env)

    return call


def test_the_command_installs_what_serve_would_do(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Folder and socket as `kvd serve` takes them from flag, variable and file; what is left out is told."""
    unit, socket = tmp_path / "units" / "kvd.service", tmp_path / "units" / "kvd.socket"
    done = cli("service", "install", env={"KVD_BUDGET": "8GB"})
    assert done.exit_code == 0, done.output
    assert "note: KVD_BUDGET" in done.output
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    assert line.endswith("kvd serve")
    assert os.path.isabs(line.removeprefix("ExecStart=").split(" ")[0])
    file = tmp_path / "my.toml"
    file.write_text(f'data_dir = "{tmp_path}/f"\nsocket = "{tmp_path}/s.sock"\n')
    assert cli("--config", str(file), "service", "install").exit_code == 0
    assert f"ListenStream={tmp_path}/s.sock" in socket.read_text()
    assert f"Environment=KVD_CONFIG={file}" in unit.read_text()
    assert "--socket" not in unit.read_text()
    assert cli("--config", str(file), "service", "install", "--data-dir", str(tmp_path / "d")).exit_code == 0
    assert f"ListenStream={tmp_path}/d/kvd.sock" in socket.read_text()
    assert f"--data-dir {tmp_path}/d" in unit.read_text()
    before = unit.read_text()
    dry = cli("service", "install", "--dry-run", "--socket", str(tmp_path / "o.sock"))
    assert f"ListenStream={tmp_path}/o.sock" in dry.output
    assert unit.read_text() == before


def test_status_and_uninstall_by_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Exit code 1 unless it runs; JSON has the manager's words; refusals are one line."""
    assert "kvd service install" in cli("service", "status").output
    logs = cli("service", "logs")
    assert (logs.exit_code, "no service is installed" in logs.output) == (1, True), "an empty log would say nothing"
    assert cli("service", "install").exit_code == 0
    status = cli("service", "status", "--json")
    facts = json.loads(status.output)
    assert (status.exit_code, facts["installed"], facts["pid"]) == (1, True, None)
    assert facts["state"] == "failed (failed)"
    (tmp_path / "units" / "kvd.service").write_text("mine")
    refused = cli("service", "uninstall")
    assert (refused.exit_code, refused.output.count("\n"), "--force" in refused.output) == (1, 1, True)
    assert cli("service", "uninstall", "--force").exit_code == 0
    assert list((tmp_path / "units").iterdir()) == []
