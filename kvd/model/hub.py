"""Models of the hub: which names are hub ids, which lie in the hub's own cache, and fetching one into it.

Only the files that kvd reads are fetched, by the hub's own client, which goes on after an interruption. Every look at
the cache asks for the same files: the client calls a snapshot incomplete when a file that was asked for is not there.
May import kvd.errors and this package; huggingface_hub only inside functions (it is slow and rarely needed).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from kvd.errors import KvdError
from kvd.model.cache_spec import check_supported
from kvd.model.errors import (
    DownloadFailed,
    HubUnreachable,
    ModelCorrupt,
    ModelGated,
    ModelIncomplete,
    ModelNotFound,
    UnsupportedModel,
)
from kvd.model.folder import INDEX, ModelFolder, check_files
from kvd.model.progress import Reporter

HUB_FILES: Final = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    INDEX,
    "model*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Patterns of the files that are fetched: configuration, weights, tokenizer, chat template."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_UNREACHABLE: Final = frozenset(
    {"ConnectionError", "NetworkError", "ProxyError", "Timeout", "TimeoutException", "TimeoutError", "gaierror"}
)
"""Class names by which the client's HTTP libraries (of several versions) say that nobody answered."""

_SHOWN_FILES: Final = 3


def is_hub_id(text: str) -> bool:
    """Whether `text` can be the id of a hub repository, such as `org/name`."""
    return _HUB_ID.fullmatch(text) is not None and not text.lower().endswith(".gguf")


def hub_snapshot(model_id: str) -> ModelFolder | None:
    """The model of a hub id in the hub's cache, if it is there and none of its files is missing; nothing is fetched.

    Raises:
        ModelCorrupt: it is there with a damaged file.
    """
    if not is_hub_id(model_id):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(model_id, local_files_only=True, allow_patterns=list(HUB_FILES))
        folder = ModelFolder(model_id, Path(path))
        check_files(folder)
    except (LocalEntryNotFoundError, HFValidationError, ModelIncomplete):
        return None
    return folder


def fetch_snapshot(model_id: str, reporter: Reporter) -> ModelFolder:
    """Fetch a hub repository in mlx-lm's layout into the hub's cache; what is there already is not fetched again.

    The configuration comes first: of a model that kvd cannot run nothing else is fetched.

    Raises:
        HubUnreachable: the hub does not answer, or offline mode is set.
        ModelNotFound, ModelGated: no such repository, or one whose terms have to be accepted first.
        UnsupportedModel: a repository without safetensors weights or without a configuration, or of a model that kvd
            cannot run.
        DownloadFailed: fetching broke off; the same call goes on.
        ModelCorrupt: what was fetched is damaged.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        reporter.stage(f"asking the model hub for {model_id}")
        siblings = HfApi().model_info(model_id, files_metadata=True).siblings or []
        sizes = {file.rfilename: int(file.size or 0) for file in siblings}
        _check_layout(model_id, sizes)
        front = ModelFolder(model_id, Path(snapshot_download(model_id, allow_patterns=["config.json"])))
        check_supported(front.config())
        wanted_bytes = sum(size for name, size in sizes.items() if _is_wanted(name))
        reporter.stage(f"downloading {model_id} ({wanted_bytes / 1e6:.0f} MB)")
        path = snapshot_download(model_id, allow_patterns=list(HUB_FILES))
    except KvdError:
        raise
    except Exception as error:  # the client raises what its HTTP and transfer libraries raise
        raise _explained(model_id, error) from error
    folder = ModelFolder(model_id, Path(path))
    check_files(folder)
    return folder


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in HUB_FILES)


def _check_layout(model_id: str, sizes: Mapping[str, int]) -> None:
    """Refuse a repository that is no mlx-lm folder before anything of it is fetched."""
    if any(fnmatch(name, "model*.safetensors") and "/" not in name for name in sizes):
        if "config.json" not in sizes:
            raise UnsupportedModel(f"{model_id} has no config.json: it is no repository in mlx-lm's layout")
        return
    gguf = sorted(name for name in sizes if name.lower().endswith(".gguf"))
    if gguf:
        shown = ", ".join(gguf[:_SHOWN_FILES]) + (", …" if len(gguf) > _SHOWN_FILES else "")
        raise UnsupportedModel(
            f"{model_id} holds GGUF files only ({shown}): download one of them and run `kvd model import FILE`",
            files=gguf,
        )
    raise UnsupportedModel(
        f"{model_id} holds no model*.safetensors file: kvd loads repositories in mlx-lm's layout", files=sorted(sizes)
    )


def _explained(model_id: str, error: Exception) -> Exception:
    """kvd's error for one of the hub's client, in one clause and with what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelGated(
            f"{model_id} is gated: accept its terms at {constants.ENDPOINT}/{model_id} and log in with "
            "`hf auth login`, then pull it again",
            model=model_id,
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"the model hub has no repository {model_id}, or it is private: check the name, or log in with "
            "`hf auth login`",
            model=model_id,
        )
    if isinstance(error, HFValidationError):
        return ModelNotFound(f"{model_id} is no valid name of a hub repository", model=model_id)
    causes = list(_chain(error))
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return HubUnreachable("the model hub cannot be reached: offline mode is set (HF_HUB_OFFLINE)", model=model_id)
    kinds = {base.__name__ for cause in causes for base in type(cause).__mro__}
    if kinds & _UNREACHABLE or isinstance(error, LocalEntryNotFoundError):
        return HubUnreachable(f"the model hub cannot be reached ({_reason(causes[-1])})", model=model_id)
    if isinstance(error, HfHubHTTPError):
        return DownloadFailed(
            f"the model hub refused to give {model_id} ({_reason(error)}); try again later", model=model_id
        )
    return DownloadFailed(f"{model_id} could not be fetched ({_reason(error)}); the same command goes on")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, the first cause last."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _reason(error: BaseException) -> str:
    """The first line of an error's text, or the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def cached_models() -> Iterator[ModelFolder]:
    """The whole models in the hub's cache, by id, of any architecture; damaged and incomplete ones are left out."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser()
    for path in sorted(cache.glob("models--*--*")):
        model_id = path.name.removeprefix("models--").replace("--", "/", 1)
        with suppress(ModelCorrupt):
            folder = hub_snapshot(model_id)
            if folder is not None:
                yield folder
