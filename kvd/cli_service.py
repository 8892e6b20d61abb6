"""`kvd service`: kvd under the user's service manager, launchd on macOS, systemd elsewhere.

May import click, kvd.cli_common, kvd.cli_config, kvd.cli_options, kvd.errors, kvd.ops, kvd_client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

from kvd.cli_common import fails_cleanly
from kvd.cli_config import command_of, config_path, options_of, shared_setting
from kvd.cli_options import json_option, where_options
from kvd.ops.service import Manager, manager
from kvd.ops.service_files import ServicePlan
from kvd_client.config_file import default_config_file
from kvd_client.paths import default_socket, resolve_data_dir

CARRIED = ("KVD_CONFIG", "KVD_DATA_DIR", "KVD_SOCKET")
"""Variables whose meaning the service keeps: they become part of its command."""

OTHERS = ("KVD_THREADS", "KVD_BLAS", "KVD_KERNEL_CACHE")
"""Variables that are no options of `kvd serve`."""


@click.group("service")
def service() -> None:
    """Run kvd in the background, from login on: launchd on macOS, systemd elsewhere. Nothing here needs root."""


_FORCE = click.option("--force", is_flag=True, help="Replace or remove files that somebody else wrote or changed.")


@service.command("install")
@where_options(folder="Data folder of the service", socket="Unix socket of the service")
@click.option("--on-demand", is_flag=True, help="Start at the first connection instead of at login.")
@click.option("--dry-run", is_flag=True, help="Print the files and change nothing.")
@_FORCE
@click.pass_context
@fails_cleanly
def install(
    ctx: click.Context, data_dir: Path | None, socket: Path | None, on_demand: bool, dry_run: bool, force: bool
) -> None:
    """Write the service's files and start it; once more with other options puts those in force.

    Settings belong into the configuration file (`kvd config path`), which the service reads as `kvd serve` does.
    The manager owns the socket: clients may connect before the daemon is ready, and wait while it restarts.

    Example: kvd service install --on-demand
    """
    plan = plan_of(ctx, data_dir, socket, on_demand=on_demand)
    chosen = manager()
    if dry_run:
        for path, text in chosen.files(plan).items():
            click.echo(f"--- {path}\n{text}")
        return
    for line in chosen.install(plan, force=force):
        click.echo(line)
    for name in left_out(ctx):
        click.echo(
            f"note: {name} is set here but not for the service; put its setting into "
            f"{config_path(ctx) or default_config_file()}",
            err=True,
        )
    click.echo(f"clients find it at {plan.socket}; `kvd service status` and `kvd service logs` show how it fares")


@service.command("uninstall")
@_FORCE
@fails_cleanly
def uninstall(force: bool) -> None:
    """Stop the service and remove its files. Agents, models and the configuration file stay."""
    for line in manager().uninstall(force=force):
        click.echo(line)


@service.command("status")
@json_option
@fails_cleanly
def status(as_json: bool) -> None:
    """What the service manager says. Exits 1 unless the daemon's process runs.

    Example: kvd service status --json
    """
    chosen: Manager = manager()
    found = chosen.status()
    if as_json:
        facts = {"manager": chosen.name, "installed": found.installed, "state": found.state, "pid": found.pid}
        click.echo(json.dumps({**facts, "files": [str(path) for path in found.files], "detail": dict(found.detail)}))
    else:
        pid = f", process {found.pid}" if found.pid is not None else ""
        click.echo(f"{chosen.name}: {found.state}{pid}")
        for name, value in found.detail.items():
            click.echo(f"  {name}: {value}")
        for path in found.files:
            click.echo(f"  file: {path}")
        if not found.installed:
            click.echo("install it with: kvd service install")
    sys.exit(0 if found.pid is not None else 1)


@service.command("logs")
@click.option("--lines", "-n", type=click.IntRange(0), default=100, show_default=True, help="Last lines to show.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes.")
@fails_cleanly
def logs(lines: int, follow: bool) -> None:
    """Show the service's log: JSON lines, one for each request.

    Example: kvd service logs -n 20 -f
    """
    chosen = manager()
    if not chosen.status().installed:
        click.echo(
            "kvd: no service is installed, so there is no log of one; install it with: kvd service install", err=True
        )
        sys.exit(1)
    command = chosen.logs_command(lines=lines, follow=follow)
    try:
        sys.exit(subprocess.run(command, check=False).returncode)
    except FileNotFoundError:
        click.echo(f"kvd: {command[0]} is not there; the log is the service manager's", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def plan_of(ctx: click.Context, data_dir: Path | None, socket: Path | None, *, on_demand: bool) -> ServicePlan:
    """What `kvd service install` installs.

    Args:
        ctx: of the command.
        data_dir: as it was named, by flag, variable or file; None: the default.
        socket: likewise.
        on_demand: start at the first connection.
    """
    named_folder = shared_setting(ctx, "data_dir", data_dir)
    named_socket = shared_setting(ctx, "socket", socket)
    if named_folder is not None and named_socket is None:
        socket = None  # another folder was named on the spot: its own socket is meant, not the file's
    folder = resolve_data_dir(data_dir, {})
    at = Path(os.path.abspath(socket.expanduser())) if socket else default_socket(folder)
    command = [*program(), "serve"]
    if named_folder is not None:
        command += ["--data-dir", str(folder)]
    if named_socket is not None:
        command += ["--socket", str(at)]
    used = config_path(ctx)
    # the default file is found by itself; in a service nothing else would name another one
    environment = {"KVD_CONFIG": str(used)} if used is not None and used != default_config_file() else {}
    library = Path("~/Library/Logs").expanduser()
    return ServicePlan(
        command=command,
        socket=str(at),
        environment=environment,
        log_file=library / "kvd.log",
        error_file=library / "kvd.stderr.log",
        on_demand=on_demand,
    )


def program() -> list[str]:
    """How kvd is called by an absolute path: the command beside this Python, or this Python itself."""
    beside = Path(sys.executable).with_name("kvd")
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "kvd"]


def left_out(ctx: click.Context) -> list[str]:
    """Variables that are set now, would change `kvd serve`, and that the service will not see."""
    root = ctx.find_root().command
    assert isinstance(root, click.Group)
    names = [str(param.envvar) for param in options_of(command_of(root, "serve")).values() if param.envvar]
    return [name for name in (*names, *OTHERS) if os.environ.get(name) and name not in CARRIED]


__all__ = ["service"]
