"""The table of checks, and running it: one check that fails never hides the others.

Imports kvd.errors, kvd.model.progress and this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvd.doctor.context import Context, Options
from kvd.doctor.findings import Check, Report, problem
from kvd.doctor.folder_checks import (
    check_data_folder,
    check_disk,
    check_foreign,
    check_lock,
    check_modes,
    check_quarantine,
    check_record,
)
from kvd.doctor.machine_checks import check_attention, check_blas, check_device, check_model, check_versions
from kvd.doctor.repair import repair
from kvd.doctor.socket_checks import check_socket
from kvd.doctor.store_checks import check_constants, check_deep, check_stores
from kvd.errors import KvdError
from kvd.model.progress import Reporter

CheckFunction = Callable[[Context], Iterable[Check]]

CHECKS: Final[tuple[tuple[str, CheckFunction], ...]] = (
    ("versions", check_versions),
    ("device", check_device),
    ("blas", check_blas),
    ("model", check_model),
    ("attention", check_attention),
    ("data folder", check_data_folder),
    ("modes", check_modes),
    ("lock", check_lock),
    ("socket", check_socket),
    ("disk", check_disk),
    ("engine record", check_record),
    ("constants", check_constants),
    ("store", check_stores),
    ("deep", check_deep),
    ("quarantine", check_quarantine),
    ("foreign files", check_foreign),
)
"""Every check with the name that stands for it when it fails itself."""


def examine(
    options: Options,
    *,
    repairing: bool = False,
    rebuild: bool = False,
    reporter: Reporter | None = None,
    checks: tuple[tuple[str, CheckFunction], ...] = CHECKS,
) -> Report:
    """Run all checks, after a repair if one is asked for. Without one the data folder stays as it is (P8).

    Args:
        options: what to examine.
        repairing: heal what can be healed first.
        rebuild: make the catalogs anew first; includes `repairing`.
        reporter: told about long reads.
        checks: the table.
    """
    done: list[str] = []
    refused = None
    if repairing or rebuild:
        try:
            refused = repair(Context(options, reporter), done.append, rebuild=rebuild)
        except Exception as error:  # the checks below say what is wrong
            refused = f"the repair stopped: {_words(error)}"
    context = Context(options, reporter)
    found = [check for name, function in checks for check in _guarded(name, function, context)]
    if refused is not None:
        found.append(problem("repair", refused, "see above; nothing was forced", refused=refused))
    return Report(tuple(found), tuple(done), refused)


def _guarded(name: str, function: CheckFunction, context: Context) -> Iterator[Check]:
    try:
        yield from function(context)
    except Exception as error:  # whatever it is, the other checks are wanted too
        yield problem(
            name, f"cannot be examined: {_words(error)}", "heal what the line names", error=type(error).__name__
        )


def _words(error: Exception) -> str:
    if isinstance(error, KvdError):
        return error.message
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


__all__ = ["CHECKS", "CheckFunction", "examine"]
