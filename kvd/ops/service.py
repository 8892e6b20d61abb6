"""Installs, removes and looks at kvd as a service of this user: systemd's user manager or launchd.

Theory of operation. A manager is asked by its own command (`systemctl --user`, `launchctl`); nothing here needs root.
Installing writes the files first and tells the manager then; a file that somebody else wrote, or changed, is not
written over and not removed. Installing again puts new settings in force: the service is restarted, and its agents
resume from disk. The functions return what they did in words, for people.

The standard library, kvd.ops.service_files and kvd.ops.errors only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvd.ops.errors import ServiceRefused
from kvd.ops.service_files import (
    LABEL,
    MARK,
    STOP_S,
    ServicePlan,
    launchd_text,
    literal,
    systemd_service,
    systemd_socket,
)

SERVICE, SOCKET = "kvd.service", "kvd.socket"
COMMAND_S = STOP_S + 30.0
"""How long a manager may take to answer: a stop lasts as long as the daemon's drain may. A start is not waited for."""

_GONE = (3, 36, 113)
"""What `launchctl bootout` says of a job that is not there, or on its way out."""

_AGAIN = (5, 37)
"""What `launchctl bootstrap` says while the job that was booted out has not ended."""


LOOK_S = 0.5
"""How often it is looked whether a job has ended."""

LOOKS = int((STOP_S + 10) / LOOK_S)


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ended: its exit code and what it said."""

    code: int
    out: str
    err: str


Run = Callable[[Sequence[str]], Ran]


def run_command(arguments: Sequence[str]) -> Ran:
    """Run a manager's command; one that is missing, or does not end, counts as failed."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except OSError as error:
        return Ran(127, "", f"{arguments[0]}: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"{' '.join(arguments)} did not end within {COMMAND_S:g} s")
    return Ran(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a manager says of the service.

    Attributes:
        installed: its files are there.
        state: the manager's word (`running`, `activating`, `not running`, ...); `not installed` without files.
        pid: of the daemon, None when it does not run.
        detail: what else the manager says, by its own names.
        files: its files.
    """

    installed: bool
    state: str
    pid: int | None
    detail: Mapping[str, str]
    files: tuple[Path, ...]


class Manager(Protocol):
    """A service manager of this user."""

    name: str

    def files(self, plan: ServicePlan) -> dict[Path, str]:
        """The files of a service, by path."""

    def install(self, plan: ServicePlan, *, force: bool = False) -> list[str]:
        """Write the files and put the service in force; what was done, in words.

        Raises:
            ServiceRefused: the manager does not answer or refuses, or a file is somebody else's.
        """

    def uninstall(self, *, force: bool = False) -> list[str]:
        """Stop the service and remove its files; agents stay on disk.

        Raises:
            ServiceRefused: as of `install`.
        """

    def status(self) -> ServiceState:
        """What the manager says."""

    def logs_command(self, *, lines: int, follow: bool) -> list[str]:
        """The command that shows the log."""


class SystemdUser:
    """systemd's user manager (implements `Manager`).

    Args:
        folder: of the user's units.
        run: runs commands.
    """

    name = "systemd"

    def __init__(self, folder: Path | None = None, run: Run = run_command) -> None:
        xdg = os.environ.get("XDG_CONFIG_HOME", "")
        base = Path(xdg) if os.path.isabs(xdg) else Path("~/.config").expanduser()
        self.folder = folder or base / "systemd" / "user"
        self._run = run

    def files(self, plan: ServicePlan) -> dict[Path, str]:
        """See `Manager.files`."""
        plain = replace(
            plan,
            command=[literal(word) for word in plan.command],
            socket=literal(plan.socket),
            environment={name: literal(value) for name, value in plan.environment.items()},
        )
        return {self.folder / SERVICE: systemd_service(plain), self.folder / SOCKET: systemd_socket(plain)}

    def install(self, plan: ServicePlan, *, force: bool = False) -> list[str]:
        """See `Manager.install`."""
        self._check()
        done = _write(self.files(plan), force=force)
        self._tell("daemon-reload")
        units = [SOCKET] if plan.on_demand else [SOCKET, SERVICE]
        if plan.on_demand:
            self._tell("disable", SERVICE)
        self._tell("enable", *units)
        # what runs must be that of the new files; --no-block: a first start may fetch a model for minutes
        self._tell("stop", SERVICE, SOCKET)
        self._tell("start", "--no-block", *units)
        return [*done, f"enabled and started: {', '.join(units)}"]

    def uninstall(self, *, force: bool = False) -> list[str]:
        """See `Manager.uninstall`."""
        paths = [path for path in (self.folder / SERVICE, self.folder / SOCKET) if path.exists()]
        if not paths:
            return ["not installed"]
        self._check()
        _check_ours(paths, force=force)
        self._tell("disable", "--now", SOCKET, SERVICE)
        done = _remove(paths)
        self._tell("daemon-reload")
        return ["stopped", *done]

    def status(self) -> ServiceState:
        """See `Manager.status`."""
        paths = tuple(path for path in (self.folder / SERVICE, self.folder / SOCKET) if path.exists())
        names = ("ActiveState", "SubState", "MainPID", "StatusText", "Result", "NRestarts", "UnitFileState")
        ran = self._run(["systemctl", "--user", "show", SERVICE, "--property", ",".join(names)])
        detail = dict(line.split("=", 1) for line in ran.out.splitlines() if "=" in line)
        if ran.code != 0:
            detail["error"] = ran.err.strip()
        pid = detail.get("MainPID", "0")
        state = f"{detail['ActiveState']} ({detail.get('SubState', '')})" if "ActiveState" in detail else "unknown"
        return ServiceState(
            installed=bool(paths),
            state=state if paths else "not installed",
            pid=int(pid) if pid.isdigit() and pid != "0" else None,
            detail=detail,
            files=paths,
        )

    def logs_command(self, *, lines: int, follow: bool) -> list[str]:
        """See `Manager.logs_command`."""
        more = ["--follow"] if follow else ["--no-pager"]
        return ["journalctl", "--user", "--unit", SERVICE, "--output", "cat", "--lines", str(lines), *more]

    def _check(self) -> None:
        ran = self._run(["systemctl", "--user", "show-environment"])
        if ran.code != 0:
            raise ServiceRefused(
                f"systemd's user manager does not answer: {_reason(ran)}; log in as the user itself (not by su or "
                "sudo), or run `kvd serve` by other means",
                manager=self.name,
            )

    def _tell(self, *arguments: str) -> None:
        _demand(self._run, self.name, ["systemctl", "--user", *arguments])


class Launchd:
    """launchd's agents of this user (implements `Manager`).

    Args:
        folder: of the user's agents.
        run: runs commands.
        log_file: where the daemon logs, for `logs_command`.
        uid: of the user.
        sleep: seconds, between looks at a job that is to end.
    """

    name = "launchd"

    def __init__(
        self,
        folder: Path | None = None,
        run: Run = run_command,
        *,
        log_file: Path | None = None,
        uid: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder = folder or Path("~/Library/LaunchAgents").expanduser()
        self.log_file = log_file or Path("~/Library/Logs/kvd.log").expanduser()
        self._run = run
        self._sleep = sleep
        self._domain = f"gui/{os.getuid() if uid is None else uid}"

    @property
    def _path(self) -> Path:
        return self.folder / f"{LABEL}.plist"

    def files(self, plan: ServicePlan) -> dict[Path, str]:
        """See `Manager.files`."""
        return {self._path: launchd_text(plan)}

    def install(self, plan: ServicePlan, *, force: bool = False) -> list[str]:
        """See `Manager.install`."""
        done = _write(self.files(plan), force=force)
        # launchd makes the socket, not its folder, and the folder of prompts must be private from the first moment
        Path(plan.socket).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._boot_out()
        load = ["launchctl", "bootstrap", self._domain, str(self._path)]
        for _ in range(LOOKS):
            ran = self._run(load)
            if ran.code not in _AGAIN:
                break
            self._sleep(LOOK_S)
        if ran.code != 0:
            raise ServiceRefused(f"`{' '.join(load)}` failed: {_reason(ran)}", manager=self.name, exit_code=ran.code)
        return [*done, f"loaded: {self._domain}/{LABEL}"]

    def _boot_out(self) -> bool:
        """End the job and wait until it is gone: launchctl answers before the daemon has drained.

        Returns:
            Whether there was one.

        Raises:
            ServiceRefused: it is still there when it should long have been killed.
        """
        look = ["launchctl", "print", f"{self._domain}/{LABEL}"]
        if self._run(look).code != 0:
            return False
        ran = self._run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])
        if ran.code != 0 and ran.code not in _GONE:
            raise ServiceRefused(f"launchd keeps the job: {_reason(ran)}", manager=self.name, exit_code=ran.code)
        for _ in range(LOOKS):
            if self._run(look).code != 0:
                return True
            self._sleep(LOOK_S)
        raise ServiceRefused(f"{self._domain}/{LABEL} does not end", manager=self.name)

    def uninstall(self, *, force: bool = False) -> list[str]:
        """See `Manager.uninstall`."""
        if not self._path.exists():
            return ["not installed"]
        _check_ours([self._path], force=force)
        done = ["stopped"] if self._boot_out() else []
        return [*done, *_remove([self._path])]

    def status(self) -> ServiceState:
        """See `Manager.status`."""
        installed = self._path.exists()
        ran = self._run(["launchctl", "print", f"{self._domain}/{LABEL}"])
        detail: dict[str, str] = {}
        for line in ran.out.splitlines():
            name, found, value = line.strip().partition(" = ")
            # the job's own lines come first; the same names further down are of parts of it
            if found and not value.endswith("{"):
                detail.setdefault(name, value)
        state = detail.get("state", "unknown") if ran.code == 0 else "not loaded"
        pid = detail.get("pid", "")
        return ServiceState(
            installed=installed,
            state=state if installed else "not installed",
            pid=int(pid) if pid.isdigit() else None,
            detail={name: detail[name] for name in ("state", "pid", "last exit code", "runs") if name in detail},
            files=(self._path,) if installed else (),
        )

    def logs_command(self, *, lines: int, follow: bool) -> list[str]:
        """See `Manager.logs_command`."""
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self.log_file)]


def manager(platform: str = sys.platform) -> Manager:
    """The service manager of this machine."""
    return Launchd() if platform == "darwin" else SystemdUser()


def _demand(run: Run, name: str, arguments: Sequence[str]) -> None:
    ran = run(arguments)
    if ran.code != 0:
        raise ServiceRefused(f"`{' '.join(arguments)}` failed: {_reason(ran)}", manager=name, exit_code=ran.code)


def _reason(ran: Ran) -> str:
    said = (ran.err.strip() or ran.out.strip()).splitlines()
    return said[-1] if said else f"exit code {ran.code}"


def _check_ours(paths: Sequence[Path], *, force: bool) -> None:
    for path in paths:
        if not force and MARK not in path.read_text("utf-8", errors="replace"):
            raise ServiceRefused(
                f"{path} was not {MARK}; move it away, or say --force to lose it", path=str(path), manager=""
            )


def _write(files: Mapping[Path, str], *, force: bool) -> list[str]:
    """Write files whole or not at all; those that are as they should be stay."""
    _check_ours([path for path in files if path.exists()], force=force)
    done = []
    for path, text in files.items():
        if path.exists() and path.read_text("utf-8", errors="replace") == text:
            done.append(f"unchanged: {path}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text, "utf-8")
        new.chmod(0o644)
        new.replace(path)
        done.append(f"written: {path}")
    return done


def _remove(paths: Sequence[Path]) -> list[str]:
    for path in paths:
        path.unlink(missing_ok=True)
    return [f"removed: {path}" for path in paths]


__all__ = ["Launchd", "Manager", "Ran", "ServiceState", "SystemdUser", "manager", "run_command"]
