"""What the checks look at, found out once and only when a check asks.

Imports kvd.config, kvd.errors, kvd.model, kvd.store, kvd_client.paths and this package.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvd.config import DEFAULT_MODEL, DEFAULT_QUOTA_BYTES
from kvd.doctor.folder_state import (
    FolderState,
    Inventory,
    LockState,
    fingerprints,
    folder_state,
    lock_state,
    take_inventory,
)
from kvd.doctor.model_state import Layouts, ModelState, model_state, names_by_fingerprint
from kvd.errors import EnvironmentFault, KvdError
from kvd.model.paths import model_dir
from kvd.model.progress import Reporter, SilentReporter
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from kvd_client.paths import default_data_dir, default_socket


@dataclass(frozen=True, slots=True)
class Options:
    """What to examine.

    Attributes:
        data_dir: the data folder; a real path.
        socket: the daemon's socket.
        model_dir: folder of installed models.
        model: the model that `kvd serve` would run.
        quota_bytes: the configured disk quota.
        deep: verify the checksum of every page file and log record.
    """

    data_dir: Path
    socket: Path
    model_dir: Path
    model: str = DEFAULT_MODEL
    quota_bytes: int = DEFAULT_QUOTA_BYTES
    deep: bool = False

    def repair(self, *flags: str) -> str:
        """The command that repairs this folder, `kvd doctor --repair` with what it needs besides."""
        words = ["kvd", "doctor", *(flags or ("--repair",))]
        if self.data_dir != default_data_dir().resolve():
            words += ["--data-dir", str(self.data_dir)]
        return shlex.join(words)

    def model_command(self, verb: str) -> str:
        """`kvd model rm` or `kvd model pull` of the examined model, in the folder of models that was examined."""
        words = ["kvd", "model", verb, self.model]
        if self.model_dir != model_dir():
            words += ["--model-dir", str(self.model_dir)]
        return shlex.join(words)

    def shutdown(self) -> str:
        """The command that stops the daemon at the socket."""
        return shlex.join(
            ["kvd-client", "shutdown", *(() if self.socket == default_socket() else ("--socket", str(self.socket)))]
        )


class Context:
    """Everything checks may look at; each property is computed once. Nothing here writes.

    Args:
        options: what to examine.
        reporter: told about long reads.
    """

    def __init__(self, options: Options, reporter: Reporter | None = None) -> None:
        self.options = options
        self.reporter: Reporter = reporter if reporter is not None else SilentReporter()
        self.fs = RealFileSystem()
        self.folder = DataFolder(options.data_dir, self.fs)

    @cached_property
    def state(self) -> FolderState:
        """The data folder's outside."""
        return folder_state(self.options.data_dir)

    @cached_property
    def inventory(self) -> Inventory:
        """Every file of the data folder; none when it cannot be looked into."""
        return take_inventory(self.options.data_dir) if self.state.may_be_searched else Inventory((), ())

    @cached_property
    def lock(self) -> LockState:
        """Who holds the data folder."""
        try:
            return lock_state(self.options.data_dir)
        except OSError:
            return LockState(False, None)

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Models that have a folder in the data folder."""
        return fingerprints(self.options.data_dir) if self.state.may_be_searched else ()

    @cached_property
    def model_or_error(self) -> ModelState | KvdError:
        """The model, or why it cannot be run."""
        constants = self.options.data_dir / "conditioning"
        if any(entry.path.parent == constants and entry.file_type != "file" for entry in self.inventory.entries):
            constants = constants / "none"  # something that is no file would be waited for
        try:
            return model_state(self.options.model, self.options.model_dir, constants)
        except KvdError as error:
            return error
        except OSError as error:
            return EnvironmentFault(f"the model's files cannot be read: {error}")

    @property
    def model(self) -> ModelState | None:
        """The model if it can be run."""
        found = self.model_or_error
        return None if isinstance(found, KvdError) else found

    @cached_property
    def _names(self) -> dict[str, str]:
        return names_by_fingerprint(self.options.model_dir)

    def knows(self, fingerprint: str) -> bool:
        """Whether the layouts of a model's pages are known."""
        return self.model is not None and self.model.spec.fingerprint == fingerprint

    def title(self, fingerprint: str) -> str:
        """What a models' folder is called in messages."""
        if self.model is not None and self.model.spec.fingerprint == fingerprint:
            return self.model.spec.model_name
        return f"{self._names.get(fingerprint, 'another model')} ({fingerprint[:8]})"

    def layouts(self, fingerprint: str) -> Layouts:
        """Page layouts of a model; for any but the examined one none is known."""
        if self.model is not None and self.knows(fingerprint):
            return self.model.layout
        return lambda _group, _format_id: None

    def full_groups(self, fingerprint: str) -> frozenset[int] | None:
        """Groups whose pages must hold every computed token; None: all. Of an unknown model nothing is demanded."""
        return None if self.knows(fingerprint) else frozenset()


__all__ = ["Context", "Options"]
