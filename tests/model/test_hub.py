"""Models of the hub: fetched into the hub's own cache, found there, and refused with one clause when they cannot be.

The hub's client is replaced at two functions (`model_info`, `snapshot_download`); its look-up in the cache is real.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from kvd.errors import InvalidParams, KvdError
from kvd.model.errors import (
    DownloadFailed,
    HubUnreachable,
    ModelCorrupt,
    ModelGated,
    ModelIncomplete,
    ModelNotFound,
    UnsupportedModel,
)
from kvd.model.hub import HUB_FILES, cached_models, hub_snapshot, is_hub_id
from kvd.model.loader import load
from kvd.model.pull import pull
from kvd.model.registry import resolve

NAME = "some-org/tiny-4bit"
REVISION = "a" * 40
REAL_DOWNLOAD = huggingface_hub.snapshot_download


@dataclass
class FakeHub:
    """A hub with one repository, and its client: what it was asked for is recorded.

    Attributes:
        cache: the hub's cache folder.
        files: the repository's files by name.
        info_error: raised instead of a description.
        download_error: raised in the middle of a download, after `files_before_error` files.
        asked: the patterns of each download and each look into the cache.
    """

    cache: Path
    files: dict[str, bytes]
    info_error: Exception | None = None
    download_error: BaseException | None = None
    files_before_error: int = 0
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def model_info(self, model_id: str, **_: object) -> Any:
        """`HfApi.model_info`."""
        if self.info_error is not None:
            raise self.info_error
        siblings = [SimpleNamespace(rfilename=name, size=len(data)) for name, data in self.files.items()]
        return SimpleNamespace(id=model_id, sha=REVISION, siblings=siblings)

    def snapshot_download(
        self, model_id: str, *, local_files_only: bool = False, allow_patterns: list[str] | None = None
    ) -> str:
        """`huggingface_hub.snapshot_download`; files that are there already are not written again."""
        patterns = tuple(allow_patterns or ())
        self.asked.append(("look" if local_files_only else "fetch", patterns))
        if local_files_only:
            return str(REAL_DOWNLOAD(model_id, local_files_only=True, allow_patterns=allow_patterns))
        home = self.cache / f"models--{model_id.replace('/', '--')}"
        snapshot = home / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(REVISION)
        wanted = [name for name in self.files if any(fnmatch(name, pattern) for pattern in patterns)]
        for number, name in enumerate(wanted):
            if self.download_error is not None and number == self.files_before_error:
                raise self.download_error
            (snapshot / name).write_bytes(self.files[name])
        return str(snapshot)


def model_files(folder: Path) -> list[Path]:
    """The files of the tiny model, without what loading it may have left there."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub that has the tiny model and files that nobody needs."""
    files = {path.name: path.read_bytes() for path in model_files(tiny_folder)}
    others = {"README.md": b"read me", "pytorch_model.bin": b"x" * 99, "original/consolidated.safetensors": b"x" * 9}
    fake = FakeHub(tmp_path / "hub", {**files, **others})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(fake.cache))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda _, model_id, **options: fake.model_info(model_id))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake.snapshot_download)
    monkeypatch.setenv("KVD_MODEL_DIR", str(tmp_path / "models"))
    return fake


def hub_error(kind: type[Exception], text: str = "no") -> Exception:
    """An error of the client without the HTTP response that some of its versions insist on."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("text", "expected"),
    [("org/name", True), ("mlx-community/Qwen3-0.6B-4bit", True)]
    + [(text, False) for text in ("name", "a/b/c", "./a/b", "/a", "a/", "~/a", "../b", "a/b.gguf", "a b/c", "a/b\n")],
)
def test_a_hub_id_is_told_from_a_path(text: str, expected: bool) -> None:
    """Two names with a slash between them; no path that starts at a dot, home or root, no file."""
    assert is_hub_id(text) == expected


def test_a_pulled_model_is_found_by_its_id_and_loads(hub: FakeHub, tiny_folder: Path) -> None:
    """`kvd model pull ORG/NAME`, then `kvd serve --model ORG/NAME`: the same files, nothing else fetched."""
    with pytest.raises(ModelNotFound, match=rf"`kvd model pull {NAME}` fetches it from the model hub"):
        resolve(NAME)
    result = pull(NAME)
    assert (result.fresh, result.folder.name) == (True, NAME)
    assert sorted(path.name for path in result.folder.path.iterdir()) == [p.name for p in model_files(tiny_folder)]
    assert resolve(NAME) == result.folder
    assert load(resolve(NAME)).spec.context_tokens == 4096
    again = pull(NAME)
    assert (again.fresh, again.folder) == (False, result.folder)
    assert [patterns for kind, patterns in hub.asked if kind == "fetch"] == [("config.json",), HUB_FILES]
    assert [folder.name for folder in cached_models()] == [NAME]


def test_the_cache_is_asked_for_the_files_that_were_fetched(hub: FakeHub) -> None:
    """The client calls a snapshot incomplete if a file of the repository that was asked for is not there."""
    pull(NAME)
    resolve(NAME)
    assert {patterns for kind, patterns in hub.asked if kind == "look"} == {HUB_FILES}
    assert hub.asked[-2] == ("fetch", HUB_FILES)


def test_an_interrupted_download_is_no_model_and_goes_on(hub: FakeHub) -> None:
    """Stopped before the weights, or between two weight files: not resolved, not listed; the same call finishes."""
    whole = hub.files.pop("model.safetensors")
    hub.files |= {f"model-0000{number}-of-00002.safetensors": whole for number in (1, 2)}
    for files in (1, len([name for name in hub.files if "/" not in name]) - 3):
        hub.download_error, hub.files_before_error = KeyboardInterrupt(), files
        with pytest.raises(KeyboardInterrupt):
            pull(NAME)
        assert hub_snapshot(NAME) is None
        assert list(cached_models()) == []
        with pytest.raises(ModelNotFound, match="kvd model pull"):
            resolve(NAME)
    hub.download_error = None
    assert pull(NAME).fresh
    assert resolve(NAME).name == NAME


class NetworkError(Exception):
    """As an HTTP library names it, without being one of Python's own."""


def chained(outer: Exception, inner: Exception) -> Exception:
    """`outer`, raised from `inner`."""
    outer.__cause__ = inner
    return outer


def refused() -> Exception:
    """What the system says when nobody listens."""
    return ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


UNREACHABLE: list[tuple[Callable[[], Exception], str]] = [
    (refused, r"cannot be reached \(connection refused\)"),
    (lambda: chained(NetworkError("x"), refused()), r"cannot be reached \(connection refused\)"),
    (lambda: NetworkError("no route\nmore"), r"cannot be reached \(no route\)"),
    (lambda: TimeoutError("the read operation timed out"), r"cannot be reached \(the read operation timed out\)"),
    (lambda: LocalEntryNotFoundError("not here"), r"cannot be reached \(not here\)"),
]


@pytest.mark.parametrize(("make", "words"), UNREACHABLE)
@pytest.mark.parametrize("during", ["info", "download"])
def test_a_hub_that_cannot_be_reached_says_so_and_what_there_is(
    hub: FakeHub, tiny_folder: Path, tmp_path: Path, make: Callable[[], Exception], words: str, during: str
) -> None:
    """One clause with the reason, then the models that need no hub: installed and pullable."""
    shutil.copytree(tiny_folder, tmp_path / "models" / "mine")
    setattr(hub, f"{during}_error", make())
    with pytest.raises(HubUnreachable, match=words) as caught:
        pull(NAME)
    assert "installed: mine; `kvd model pull` knows: smollm2-135m, gemma3-270m" in caught.value.message
    assert "\n" not in caught.value.message
    assert hub_snapshot(NAME) is None


def test_offline_mode_is_said_to_be_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`HF_HUB_OFFLINE` is a setting of the user's; the real client refuses before it opens a connection."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(HubUnreachable, match=r"offline mode is set \(HF_HUB_OFFLINE\); installed: none"):
        pull(NAME, directory=tmp_path / "models")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (hub_error(RepositoryNotFoundError), ModelNotFound, f"has no repository {NAME}, or it is private"),
        (hub_error(GatedRepoError), ModelGated, rf"gated: accept its terms at .*/{NAME} and log in"),
        (
            hub_error(HfHubHTTPError, "503 Server Error\nmore"),
            DownloadFailed,
            r"refused to give .* \(503 Server Error\)",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), DownloadFailed, r"\(no space left on device\)"),
        (RuntimeError("transfer broke"), DownloadFailed, r"could not be fetched \(transfer broke\)"),
    ],
)
def test_what_the_hub_refuses_has_a_message_of_its_own(
    hub: FakeHub, error: Exception, kind: type[KvdError], words: str
) -> None:
    """No such repository, a gated one, a hub in trouble, a full disk: told apart, and none is called unreachable."""
    hub.info_error = error
    with pytest.raises(kind, match=words) as caught:
        pull(NAME)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message


def test_a_gated_repository_may_refuse_the_files_only(hub: FakeHub) -> None:
    """The hub describes it to everybody and refuses the download."""
    hub.download_error = hub_error(GatedRepoError)
    with pytest.raises(ModelGated, match="accept its terms"):
        pull(NAME)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["a-Q4_K_M.gguf", "b.gguf", "README.md"], r"GGUF files only \(a-Q4_K_M\.gguf, b\.gguf\): .*kvd model import"),
        ([f"{number}.GGUF" for number in range(5)], r"\(0\.GGUF, 1\.GGUF, 2\.GGUF, …\)"),
        (["config.json", "pytorch_model.bin"], r"no model\*\.safetensors"),
        (["model.safetensors", "README.md"], r"no config\.json"),
        (["config.json", "model-x/a.safetensors"], r"no model\*\.safetensors"),
        ([], r"no model\*\.safetensors"),
    ],
)
def test_a_repository_of_another_layout_is_refused_before_it_is_fetched(
    hub: FakeHub, files: list[str], words: str
) -> None:
    """GGUF-only, other weights, no configuration: the message says which, and nothing is downloaded."""
    hub.files = dict.fromkeys(files, b"x")
    with pytest.raises(UnsupportedModel, match=words):
        pull(NAME)
    assert [kind for kind, _ in hub.asked] == ["look"]


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (
            b'{"model_type": "mamba"}',
            UnsupportedModel,
            "'mamba' is not supported .*recurrent state.*; supported: llama",
        ),
        (b'{"model_type": "llama"}', ModelCorrupt, "lacks a figure"),
    ],
    ids=["architecture", "figures"],
)
def test_a_model_that_kvd_cannot_run_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, config: bytes, kind: type[KvdError], words: str
) -> None:
    """Another architecture or a senseless configuration costs one small file, and is no model here."""
    hub.files["config.json"] = config
    with pytest.raises(kind, match=words):
        pull(NAME)
    assert [path.name for path in hub.cache.rglob("*") if path.suffix] == ["config.json"]
    assert hub_snapshot(NAME) is None
    assert list(cached_models()) == []


def test_a_damaged_snapshot_is_corrupt_and_not_missing(hub: FakeHub) -> None:
    """A weight file of the cache that was cut is named; it is not fetched around."""
    file = pull(NAME).folder.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelCorrupt, match=rf"cut short.*; remove it with `hf cache rm model/{NAME}`, then pull"):
        pull(NAME)
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors is cut short") as caught:
        resolve(NAME)
    assert not isinstance(caught.value, ModelIncomplete)
    assert list(cached_models()) == []


def test_options_of_the_catalogue_do_not_apply(hub: FakeHub, tmp_path: Path) -> None:
    """A wheel or a dtype for a hub id is a wrong call, not silently dropped."""
    for options in ({"dtype": "float16"}, {"wheels": [tmp_path / "x.whl"]}):
        with pytest.raises(InvalidParams, match="do not apply"):
            pull(NAME, **options)  # type: ignore[arg-type]
    assert hub.asked == []


def test_a_model_of_the_hub_is_listed_and_its_removal_explained(hub: FakeHub, tmp_path: Path) -> None:
    """`kvd model list --json` has it apart from kvd's own; `rm` leaves the hub's cache to the hub's tool."""
    from click.testing import CliRunner

    from kvd import cli_model

    run = CliRunner().invoke
    pulled = run(cli_model.model, ["pull", NAME, "--no-calibration", "--json"])
    assert json.loads(pulled.stdout)["name"] == NAME
    assert f"downloading {NAME} (" in pulled.stderr
    listed = json.loads(run(cli_model.model, ["list", "--json"]).stdout)
    assert [entry["name"] for entry in listed["hub"]] == [NAME]
    assert listed["installed"] == []
    refused = run(cli_model.model, ["rm", NAME, "--yes"])
    assert (refused.exit_code, f"`hf cache rm model/{NAME}`" in refused.stderr) == (1, True)
    assert hub_snapshot(NAME) is not None
