"""The files that make kvd a service of this user: systemd units and a launchd job, as text.

The files in `systemd/` and `launchd/` of the sources are what these functions give for the default places, with the
reasons for each setting; a test holds the two together. Pure; imports the standard library only.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvd.errors import InvalidParams

LABEL: Final = "io.kvd.daemon"
MARK: Final = "made by `kvd service install`"
"""A line of every file that is installed: who wrote it, and who may take it away."""

WATCHDOG_S: Final = 120
STOP_S: Final = 150


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """What is installed.

    Attributes:
        command: how `kvd serve` is called, the program first, by absolute paths.
        socket: the path that the manager listens at.
        environment: variables of the service.
        log_file: JSON lines go here (launchd; under systemd they go to the journal).
        error_file: what precedes logging (launchd).
        on_demand: start at the first connection, not at login.
    """

    command: Sequence[str]
    socket: str
    environment: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None
    error_file: Path | None = None
    on_demand: bool = False


def systemd_service(plan: ServicePlan, *, mark: bool = True) -> str:
    """`kvd.service`.

    Args:
        plan: what is to run; `%` in its strings is a specifier of systemd's, see `literal`.
        mark: begin with `MARK`.
    """
    head = f"# {MARK}; your own settings belong in an override: systemctl --user edit kvd.service\n" if mark else ""
    variables = "".join(f"Environment={_assigned(name, value)}\n" for name, value in plan.environment.items())
    return f"""{head}[Unit]
Description=kvd: virtual memory for the attention state of language-model agents
# The socket is optional: without kvd.socket the daemon makes its own.
After=kvd.socket

[Service]
# READY is sent when the model is loaded. The first start may fetch and calibrate one.
Type=notify
ExecStart={" ".join(map(_quoted, plan.command))}
{variables}TimeoutStartSec=30min

# SIGTERM drains: running requests finish, or are cancelled after the grace; every durable turn is on disk already.
KillMode=mixed
TimeoutStopSec={STOP_S}s
Restart=on-failure
RestartSec=2s

# Longer than the slowest prefill chunk of the slowest model: a busy engine is no dead engine.
WatchdogSec={WATCHDOG_S}s

# Prompts are private: whatever the daemon makes, nobody else reads.
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Left out on purpose. MemoryDenyWriteExecute: kernels are compiled at run time. PrivateDevices: it hides the GPU.
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


def systemd_socket(plan: ServicePlan, *, mark: bool = True) -> str:
    """`kvd.socket`; arguments as of `systemd_service`."""
    head = f"# {MARK}\n" if mark else ""
    return f"""{head}[Unit]
Description=kvd's socket: clients may connect before the daemon runs, and wait while it restarts

[Socket]
# The default of `kvd serve` and `kvd-client`; keep it in step with KVD_SOCKET or --socket.
ListenStream={plan.socket}
SocketMode=0600
DirectoryMode=0700
FileDescriptorName=kvd

[Install]
WantedBy=sockets.target
"""


def launchd_job(plan: ServicePlan) -> dict[str, Any]:
    """The property list of the launchd agent, as Python values."""
    log = [] if plan.log_file is None else ["--log-file", str(plan.log_file)]
    # Back after a crash or kill -9, not after a clean stop. That setting loads the job at login, whatever RunAtLoad
    # says (launchd.plist(5)); one that starts on demand is brought back by the next connection anyway.
    start: dict[str, Any] = {} if plan.on_demand else {"RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}}
    job: dict[str, Any] = {
        "Label": LABEL,
        "ProgramArguments": [*plan.command, *log],
        **start,
        # the default, Standard, throttles CPU and disk of a job that no app waits for; here somebody always waits
        "ProcessType": "Interactive",
        "ThrottleInterval": 2,
        "ExitTimeOut": STOP_S,
        "Umask": 0o077,
        "Sockets": {
            "kvd": {
                "SockFamily": "Unix",
                "SockType": "stream",
                "SockPathName": plan.socket,
                "SockPathMode": 0o600,
            }
        },
        "SoftResourceLimits": {"NumberOfFiles": 8192},
    }
    if plan.environment:
        job["EnvironmentVariables"] = dict(plan.environment)
    if plan.error_file is not None:
        job["StandardErrorPath"] = str(plan.error_file)
    return job


def launchd_text(plan: ServicePlan) -> str:
    """The property list as XML, with `MARK` in a comment, read back to be sure that launchd can."""
    text = plistlib.dumps(launchd_job(plan), sort_keys=False).decode("utf-8")
    first, second, rest = text.split("\n", 2)
    text = "\n".join((first, second, f"<!-- {MARK} -->", rest))
    assert plistlib.loads(text.encode("utf-8")) == launchd_job(plan)
    return text


def literal(text: str) -> str:
    """Text in a unit file that is no specifier of systemd's, whatever percent signs it has.

    Raises:
        InvalidParams: it has a line break, which no unit file can hold.
    """
    if "\n" in text or "\r" in text:
        raise InvalidParams(f"a path with a line break cannot stand in a unit file: {text!r}", parameter="path")
    return text.replace("%", "%%")


def _assigned(name: str, value: str) -> str:
    """An assignment of `Environment=`, where a dollar sign has no meaning and must stay as it is."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return (
        f'"{name}={escaped}"' if escaped != value or any(map(str.isspace, value)) or "'" in value else f"{name}={value}"
    )


def _quoted(word: str) -> str:
    """A word of a command line in a unit file."""
    if word and not any(letter.isspace() or letter in "\"'\\$;" for letter in word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


__all__ = [
    "LABEL",
    "MARK",
    "ServicePlan",
    "launchd_job",
    "launchd_text",
    "literal",
    "systemd_service",
    "systemd_socket",
]
