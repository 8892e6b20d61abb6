"""`kvd demo`: what kvd does, in half a minute.

May import click, rich, kvd.cli_common, kvd.cli_options, kvd.demo, kvd.errors, kvd.model.paths and kvd_client.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from kvd.cli_common import ensure_model, fail
from kvd.cli_options import json_last_option, model_options
from kvd.errors import EnvironmentFault, KvdError


@click.command()
@model_options
@json_last_option
def demo(model_name: str, model_dir: Path | None, as_json: bool) -> None:
    """Three agents, a kill -9, and warm answers equal to an unbroken run. Half a minute on two idle cores.

    Uses a temporary data folder and leaves nothing behind but the model, which is pulled when it is missing, and
    compiled kernels (in kvd of the user's cache folder). Exits 1 if a promise did not hold.
    """
    from rich.console import Console

    from kvd.demo import report_facts, run_demo
    from kvd.model.paths import model_dir as models
    from kvd_client import KvdClientError

    try:
        folder = ensure_model(model_name, models(model_dir))
        report = run_demo(
            model=str(folder), options=(), console=Console(stderr=as_json, highlight=False, soft_wrap=True)
        )
    except KvdClientError as error:
        fail(EnvironmentFault(f"the demo's daemon refused: {error}"), as_json=as_json)
    except KvdError as error:
        fail(error, as_json=as_json)
    if as_json:
        click.echo(json.dumps(report_facts(report)))
    if not report.held:
        failed = [check.name for check in report.checks if not check.held]
        click.echo(f"kvd: {len(failed)} of {len(report.checks)} promises did not hold: {'; '.join(failed)}", err=True)
        sys.exit(1)


__all__ = ["demo"]
