"""The `kvd` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from kvd import __version__
from kvd.bench.cli import bench
from kvd.cli_common import ensure_model, fail
from kvd.cli_config import config, use_file
from kvd.cli_doctor import doctor
from kvd.cli_gateway import gateway
from kvd.cli_model import model
from kvd.cli_serve import serve
from kvd.cli_service import service
from kvd.config import DEFAULT_MODEL
from kvd.errors import EnvironmentFault, KvdError
from kvd_client import KvdClientError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


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


main.add_command(config)
main.add_command(doctor)
main.add_command(gateway)
main.add_command(model)
main.add_command(serve)
main.add_command(service)
main.add_command(bench)

__all__ = ["main"]
