"""The warm tier: folders of exported agents, imported when somebody first uses their names.

At start only headers are read. What cannot be used is named once and left alone; nothing in the folders is ever
written. A name is taken from the tier once: who deletes an agent must not find it back at its next use.

Owner: the engine thread. May import kvd.errors, kvd.ids and kvd.store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.errors import KvdError
from kvd.ids import AgentId, Namespace
from kvd.scheduler.requests import AgentRef
from kvd.store.agent_file import read_header
from kvd.store.fs import FileSystem


@dataclass(slots=True)
class WarmTier:
    """Which agents can be had from where.

    Attributes:
        paths: exported file by agent.
    """

    paths: dict[AgentRef, Path] = field(default_factory=dict)

    def scan(
        self,
        fs: FileSystem,
        folders: Iterable[Path],
        *,
        fingerprint: str,
        numerics: str,
        log: Callable[..., None],
    ) -> None:
        """Read the headers of all files in some folders, not below them; the first file of a name counts.

        Args:
            fs: the disk they are on.
            folders: where to look; names that begin with a dot are not looked at.
            fingerprint: of the served model.
            numerics: of the served arithmetic.
            log: told once of each file and folder that is no use here, and of how many are.
        """
        for folder in folders:
            try:
                names = [name for name in fs.listdir(folder) if not name.startswith(".")]
            except OSError as error:
                log("warm_folder_unreadable", path=str(folder), reason=error.strerror or str(error))
                continue
            found = 0
            for name in names:
                reason = self._look(fs, folder / name, fingerprint, numerics)
                if reason is None:
                    found += 1
                else:
                    log("warm_file_skipped", path=str(folder / name), reason=reason)
            log("warm_folder", level="info", path=str(folder), agents=found)

    def _look(self, fs: FileSystem, path: Path, fingerprint: str, numerics: str) -> str | None:
        """Take a file into the tier, or say why not."""
        try:
            header, _ = read_header(fs, path)
        except KvdError as error:
            return error.message
        except OSError as error:
            return error.strerror or str(error)
        if header.fingerprint != fingerprint:
            return f"it is of model {header.model} ({header.fingerprint})"
        if header.numerics != numerics:
            return f"its numerics are {header.numerics}, here {numerics}"
        ref = AgentRef(Namespace(header.namespace), AgentId(header.agent))
        if ref in self.paths:
            return f"agent {ref} comes from {self.paths[ref]}"
        self.paths[ref] = path
        return None


__all__ = ["WarmTier"]
