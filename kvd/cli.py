"""The `kvd` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from kvd import __version__
from kvd.bench.cli import bench
from kvd.cli_config import came_from_file, config, use_file
from kvd.cli_doctor import doctor
from kvd.cli_gateway import gateway, http_address, http_option
from kvd.cli_model import model
from kvd.cli_options import memory_options
from kvd.cli_service import service
from kvd.cli_types import SIZE, AutoOrCount, WriteLimit
from kvd.config import (
    ATTENTION,
    DEFAULT_BUDGET_BYTES,
    DEFAULT_MODEL,
    DEFAULT_QUOTA_BYTES,
    EVICTION,
    MAX_BATCH,
    PREFETCH,
    SHARING,
    SWAP,
    Settings,
)
from kvd.errors import EnvironmentFault, KvdError
from kvd.ops.logs import LEVELS
from kvd.ops.sizes import format_size
from kvd.quant.spec import NAMED_FORMATS
from kvd.record import follow_recorded_threads
from kvd_client import KvdClientError
from kvd_client.paths import default_data_dir, default_socket

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
DATA_DIR_DEFAULT = "[default: kvd in the user's data folder]"


@click.group(
    context_settings=CONTEXT,
    epilog="Exit codes: 0 done, 1 failed (a problem that doctor found, a promise of the demo that did not hold), "
    "2 wrong usage, 130 interrupted.",
)
@click.version_option(__version__, prog_name="kvd")
@click.option(
    "--config",
    "config_path",
    envvar="KVD_CONFIG",
    show_envvar=True,
    metavar="FILE",
    callback=use_file,
    expose_value=False,
    is_eager=True,
    help="Settings in TOML; an empty name means none [default: kvd.toml in the user's configuration folder, if there].",
)
def main() -> None:
    """Virtual memory for agents' attention state.

    `kvd serve` runs the daemon, `kvd model` manages models, `kvd demo` shows what it does in half a minute,
    `kvd bench` measures it. `kvd config` says what is set. Talk to a running daemon with `kvd-client`.
    """


@main.command()
@click.option(
    "--data-dir",
    envvar="KVD_DATA_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help=f"Swap, logs, catalog (0700) {DATA_DIR_DEFAULT}.",
)
@click.option(
    "--socket",
    envvar="KVD_SOCKET",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Unix socket to listen on [default: kvd.sock in the data folder].",
)
@click.option(
    "--model",
    "model_name",
    envvar="KVD_MODEL",
    show_envvar=True,
    default=DEFAULT_MODEL,
    show_default=True,
    help="Installed model's name, or a folder in mlx-lm's layout.",
)
@click.option(
    "--model-dir",
    envvar="KVD_MODEL_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Folder of installed models [default: kvd-models in the user's data folder].",
)
@click.option(
    "--budget",
    type=SIZE,
    envvar="KVD_BUDGET",
    show_envvar=True,
    default=DEFAULT_BUDGET_BYTES,
    help=f"RAM for KV [default: {format_size(DEFAULT_BUDGET_BYTES)}].",
)
@memory_options
@click.option(
    "--quota",
    type=SIZE,
    envvar="KVD_QUOTA",
    show_envvar=True,
    default=DEFAULT_QUOTA_BYTES,
    help=f"Disk for everything [default: {format_size(DEFAULT_QUOTA_BYTES)}].",
)
@click.option(
    "--kv-format",
    type=click.Choice(["auto", *NAMED_FORMATS]),
    envvar="KVD_KV_FORMAT",
    show_envvar=True,
    default="auto",
    show_default=True,
    help="Page format; auto takes the calibrated one.",
)
@click.option(
    "--attention",
    type=click.Choice(ATTENTION),
    envvar="KVD_ATTENTION",
    show_envvar=True,
    default="auto",
    show_default=True,
    help="Attention backend.",
)
@click.option(
    "--sharing",
    type=click.Choice(SHARING),
    envvar="KVD_SHARING",
    show_envvar=True,
    default="namespace",
    show_default=True,
    help="Who maps pages of the same text once: agents of a namespace, or each agent for itself.",
)
@click.option(
    "--chunk",
    "chunk_tokens",
    type=click.IntRange(1),
    envvar="KVD_CHUNK",
    show_envvar=True,
    default=512,
    show_default=True,
    help="Tokens of a prefill step.",
)
@click.option(
    "--max-queued",
    type=click.IntRange(1),
    envvar="KVD_MAX_QUEUED",
    show_envvar=True,
    default=256,
    show_default=True,
    help="Requests that may wait.",
)
@click.option(
    "--max-batch",
    type=AutoOrCount(MAX_BATCH),
    envvar="KVD_MAX_BATCH",
    show_envvar=True,
    default="auto",
    show_default=True,
    help="Requests that run at once, of different agents; auto: what memory holds and the device gains by.",
)
@click.option(
    "--decode-share",
    type=click.FloatRange(0),
    envvar="KVD_DECODE_SHARE",
    show_envvar=True,
    default=0.5,
    show_default=True,
    help="Part of the time decoding gets at least while others prefill.",
)
@click.option(
    "--prefetch",
    type=click.Choice(PREFETCH),
    envvar="KVD_PREFETCH",
    show_envvar=True,
    default="predict",
    show_default=True,
    help="Load pages ahead: for turns that wait and agents likely to be next, for turns that wait, or not at all.",
)
@click.option(
    "--eviction",
    type=click.Choice(EVICTION),
    envvar="KVD_EVICTION",
    show_envvar=True,
    default="lru",
    show_default=True,
    help="Whose pages go first: the least recently used agent's, or that whose next turn seems farthest (reuse).",
)
@click.option(
    "--swap",
    type=click.Choice(SWAP),
    envvar="KVD_SWAP",
    show_envvar=True,
    default="on",
    show_default=True,
    help="off: KV in RAM only: nothing is durable, what is evicted is computed again, the data folder stays as is.",
)
@click.option(
    "--write-limit",
    type=WriteLimit(),
    envvar="KVD_WRITE_LIMIT",
    show_envvar=True,
    default="off",
    show_default=True,
    help="Bytes to disk in a minute, such as 500MB/min, beyond which pages wait; a reply says if its turn does.",
)
@click.option(
    "--trace",
    envvar="KVD_TRACE",
    show_envvar=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what agents do to pages there, without text or names, for `kvd bench eviction`.",
)
@click.option(
    "--warm-from",
    type=click.Path(path_type=Path),
    multiple=True,
    envvar="KVD_WARM_FROM",
    show_envvar=True,
    help="Folder of exported agents, imported when their names are first used; may be given several times.",
)
@click.option(
    "--drain-grace",
    "drain_grace_s",
    type=click.FloatRange(0),
    envvar="KVD_DRAIN_GRACE",
    show_envvar=True,
    default=30.0,
    show_default=True,
    help="Seconds a stop lets requests finish.",
)
@http_option
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    envvar="KVD_LOG_LEVEL",
    show_envvar=True,
    default="info",
    show_default=True,
    help="Least level logged.",
)
@click.option(
    "--log-file",
    envvar="KVD_LOG_FILE",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="JSON lines go here instead of stderr.",
)
@click.option(
    "--check",
    is_flag=True,
    envvar="KVD_CHECK",
    show_envvar=True,
    help="Verify the pager's laws after every request (slow).",
)
def serve(
    data_dir: Path | None,
    socket: Path | None,
    model_name: str,
    model_dir: Path | None,
    budget: int,
    pin_limit: int | float,
    footprint_limit: int | None,
    branch_limit: int | None,
    namespace_quotas: tuple[tuple[str, int], ...],
    quota: int,
    kv_format: str,
    attention: str,
    sharing: str,
    chunk_tokens: int,
    max_queued: int,
    max_batch: int | Literal["auto"],
    decode_share: float,
    prefetch: str,
    eviction: str,
    swap: str,
    write_limit: int | None,
    trace: Path | None,
    warm_from: tuple[Path, ...],
    drain_grace_s: float,
    http: str | None,
    log_level: str,
    log_file: Path | None,
    check: bool,
) -> None:
    """Run the daemon in the foreground. A missing default model is pulled first.

    SIGTERM or Ctrl-C drains: running requests finish, nothing is lost; a second one forces.

    Example: kvd serve --budget 8GB --data-dir ~/kvd
    """
    from kvd.daemon import make_private_folders
    from kvd.daemon import serve as run
    from kvd.model.paths import model_dir as models

    # links are followed: a data folder on another disk is common, and its real path is what is locked and checked
    data = (Path(data_dir) if data_dir else default_data_dir()).expanduser().resolve()
    follow_recorded_threads(data)
    ctx = click.get_current_context()
    if came_from_file(ctx, "socket") and data_dir and not came_from_file(ctx, "data_dir"):
        socket = None  # another folder was named on the spot: its daemon is meant
    try:
        settings = Settings(
            data_dir=data,
            socket=Path(socket).expanduser().absolute() if socket else default_socket(data_dir),
            model=model_name,
            model_dir=models(model_dir),
            budget_bytes=budget,
            pin_limit=pin_limit,
            footprint_limit_bytes=footprint_limit,
            branch_limit_bytes=branch_limit,
            namespace_quotas=namespace_quotas,
            quota_bytes=quota,
            kv_format=kv_format,
            attention=attention,
            sharing=sharing,
            chunk_tokens=chunk_tokens,
            max_queued=max_queued,
            max_batch=max_batch,
            decode_share=decode_share,
            prefetch=prefetch,
            eviction=eviction,
            swap=swap,
            write_limit_bytes=write_limit,
            trace=Path(trace).expanduser().absolute() if trace else None,
            warm_from=tuple(Path(folder).expanduser().absolute() for folder in warm_from),
            drain_grace_s=drain_grace_s,
            http=http_address(http),
            log_level=log_level,
            log_file=log_file,
            check=check,
        )
        # only now: a wrong setting, or a data folder that cannot be made, must not cost the minutes of a pull
        make_private_folders(data)
        run(replace(settings, model=str(ensure_model(model_name, settings.model_dir))))
    except KvdError as error:
        fail(error)
    except OSError as error:  # a folder that cannot be made or written: the operator's to heal, no bug of ours
        fail(EnvironmentFault(unusable(error, data)))


@main.command()
@click.option(
    "--model",
    "model_name",
    envvar="KVD_MODEL",
    show_envvar=True,
    default=DEFAULT_MODEL,
    show_default=True,
    help="Installed model's name, or a folder in mlx-lm's layout.",
)
@click.option(
    "--model-dir",
    envvar="KVD_MODEL_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Folder of installed models [default: kvd-models in the user's data folder].",
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object; progress goes to stderr.")
def demo(model_name: str, model_dir: Path | None, as_json: bool) -> None:
    """Three agents, a kill -9, and warm answers equal to an unbroken run. Half a minute on two idle cores.

    Uses a temporary data folder and leaves nothing behind but the model, which is pulled when it is missing, and
    compiled kernels (in kvd of the user's cache folder). Exits 1 if a promise did not hold.
    """
    from rich.console import Console

    from kvd.demo import report_facts, run_demo
    from kvd.model.paths import model_dir as models

    try:
        folder = ensure_model(model_name, models(model_dir))
        report = run_demo(
            model=str(folder), options=(), console=Console(stderr=as_json, highlight=False, soft_wrap=True)
        )
    except KvdClientError as error:
        fail(EnvironmentFault(f"the demo's daemon refused: {error}"), as_json=as_json)
        return
    except KvdError as error:
        fail(error, as_json=as_json)
        return
    if as_json:
        click.echo(json.dumps(report_facts(report)))
    if not report.held:
        failed = [check.name for check in report.checks if not check.held]
        click.echo(f"kvd: {len(failed)} of {len(report.checks)} promises did not hold: {'; '.join(failed)}", err=True)
        sys.exit(1)


@main.command()
@click.argument("name", default=DEFAULT_MODEL)
@click.option(
    "--model-dir",
    envvar="KVD_MODEL_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Folder of installed models [default: kvd-models in the user's data folder].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(name: str, model_dir: Path | None, as_json: bool) -> None:
    """Measure the page formats on the model NAME and keep the smallest within 2 % of its perplexity.

    `kvd model pull` does this once; do it again after changing the model's files. One to four minutes on two cores.

    Example: kvd calibrate smollm2-135m
    """
    from kvd.model.paths import model_dir as models
    from kvd.model.progress import reporter_for
    from kvd.model.registry import resolve
    from kvd.quant.calibrate import calibrate_model

    reporter = reporter_for(sys.stderr)
    try:
        calibration = calibrate_model(resolve(name, models(model_dir)), reporter)
    except KvdError as error:
        fail(error, as_json=as_json)
        return
    finally:
        reporter.close()
    facts = calibration.facts()
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{name}: {calibration.chosen} (perplexity {calibration.ppl_fp:.3f} in FP, {calibration.scored_tokens} tokens)"
    )
    for score in calibration.scores:
        click.echo(f"  {score.format:6} ratio {score.ratio:.4f}  {score.bytes_per_token:.0f} bytes a token")


def ensure_model(name: str, directory: Path) -> Path:
    """Folder of a model; the default one is pulled and calibrated when it is missing.

    Raises:
        KvdError: no such model, or the pull failed (its own output says why).
    """
    from kvd.model.errors import ModelNotFound
    from kvd.model.registry import resolve

    try:
        return resolve(name, directory).path
    except ModelNotFound:
        if name != DEFAULT_MODEL:
            raise
    # a process of its own: what the conversion and the calibration took in memory is gone when the daemon starts
    command = [sys.executable, "-m", "kvd", "model", "pull", name, "--model-dir", str(directory)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise EnvironmentFault(f"model {name} could not be pulled; `kvd model pull {name}` says why")
    return resolve(name, directory).path


def unusable(error: OSError, data: Path) -> str:
    """A refusal of the system while a daemon starts, in words: what was refused, why, and what to do."""
    reason, path = error.strerror or str(error), Path(os.fsdecode(error.filename)) if error.filename else data
    if path == data or data in path.parents or path in data.parents:
        return f"the data folder {data} cannot be made or used: {reason}: {path}; give another one with --data-dir"
    return f"{reason}: {path}"


def fail(error: KvdError, *, as_json: bool = False) -> None:
    """Report an error as people or programs want it and exit: 2 for a wrong call, 1 otherwise."""
    if as_json:
        click.echo(json.dumps({"error": {"name": error.name, "message": error.message, "data": error.data}}))
    click.echo(f"kvd: {error.message}", err=True)
    sys.exit(2 if error.name in ("invalid_params", "config_error") else 1)


main.add_command(config)
main.add_command(doctor)
main.add_command(gateway)
main.add_command(model)
main.add_command(service)
main.add_command(bench)

__all__ = ["SIZE", "fail", "format_size", "main"]
