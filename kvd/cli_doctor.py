"""`kvd doctor`, mounted under `kvd` by `kvd.cli`. What is heavy is imported inside, so that `--help` is quick.

May import kvd.config, kvd.doctor, kvd.errors, kvd.model.paths, kvd.model.progress, kvd.ops.sizes, kvd_client.paths.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from kvd.cli_options import json_last_option, model_options, where_options
from kvd.config import DEFAULT_QUOTA_BYTES
from kvd.errors import KvdError
from kvd.ops.sizes import format_size, parse_size
from kvd_client.paths import default_data_dir, default_socket


def _quota(context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    """The quota in bytes."""
    try:
        return DEFAULT_QUOTA_BYTES if value is None else parse_size(value, what="quota")
    except KvdError as error:
        raise click.BadParameter(error.message) from None


@click.command()
@where_options(folder="Data folder to examine", socket="The daemon's Unix socket")
@model_options
@click.option(
    "--quota",
    metavar="SIZE",
    envvar="KVD_QUOTA",
    show_envvar=True,
    callback=_quota,
    help="Disk that kvd serve may use; here what is used is compared with it, nothing more "
    f"[default: {format_size(DEFAULT_QUOTA_BYTES)}].",
)
@click.option("--deep", is_flag=True, help="Verify the checksum of every page file and log record.")
@click.option("--repair", is_flag=True, help="Heal what can be healed; no daemon may run.")
@click.option("--rebuild", is_flag=True, help="Repair, and make the catalog anew from logs and page headers.")
@json_last_option
def doctor(
    data_dir: Path | None,
    socket: Path | None,
    model_name: str,
    model_dir: Path | None,
    quota: int,
    deep: bool,
    repair: bool,
    rebuild: bool,
    as_json: bool,
) -> None:
    """Examine machine, model, data folder and daemon. Exits 1 when there is a problem.

    Each check says ok, notice or problem, and what to do. Without --repair or --rebuild nothing changes in the data
    folder or beside the model; compiled kernels are kept as always (in kvd/kernels of the user's cache folder, or
    KVD_KERNEL_CACHE).

    Example: kvd doctor --deep --data-dir ~/kvd
    """
    try:
        from rich.console import Console

        from kvd.doctor import Options, examine, render
        from kvd.model.paths import model_dir as models
        from kvd.model.progress import SilentReporter, reporter_for
    except ImportError as error:
        _not_installed(error, as_json=as_json)
        return
    data = (Path(data_dir) if data_dir else default_data_dir()).expanduser().resolve()
    options = Options(
        data_dir=data,
        socket=Path(socket).expanduser().absolute() if socket else default_socket(data_dir),
        model_dir=models(model_dir),
        model=model_name,
        quota_bytes=quota,
        deep=deep,
    )
    reporter = reporter_for(sys.stderr) if deep else SilentReporter()
    try:
        report = examine(options, repairing=repair, rebuild=rebuild, reporter=reporter)
    finally:
        reporter.close()
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        render(report, Console(highlight=False, soft_wrap=True))
    sys.exit(1 if report.problems else 0)


def _not_installed(error: ImportError, *, as_json: bool) -> None:
    """What can still be said when a package that kvd is built on cannot be imported."""
    text, remedy = f"kvd is not installed whole: {error}", "install it again: pip install . in kvd's sources"
    if as_json:
        check = {"name": "versions", "status": "problem", "facts": {}, "text": text, "remedy": remedy}
        click.echo(json.dumps({"checks": [check], "problems": 1, "notices": 0, "repaired": []}))
    else:
        click.echo(f"problem versions  {text}\n        → {remedy}")
    sys.exit(1)


__all__ = ["doctor"]
