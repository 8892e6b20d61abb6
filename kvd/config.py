"""Settings of the daemon: validated once, here, at the edge; frozen ever after.

Sources, strongest first: command line flags, environment variables (click reads both), defaults. May import kvd.errors,
kvd.ops.levels, kvd.quant.spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvd.errors import CallerError
from kvd.ops.levels import LEVELS as LOG_LEVELS
from kvd.quant.spec import NAMED_FORMATS

DEFAULT_BUDGET_BYTES = 10_200_000_000
DEFAULT_QUOTA_BYTES = 100_000_000_000
DEFAULT_MODEL = "smollm2-135m"
SHARING = ("namespace", "agent")
ATTENTION = ("auto", "metal", "cuda", "cpu", "mlx", "reference")
"""Backends of all machines; which of them this one has is known when mlx is there (`select_backend` refuses others)."""
PREFETCH = ("predict", "hints", "off")
EVICTION = ("lru", "reuse")
SWAP = ("on", "off")
MIN_WRITE_LIMIT_BYTES = 1_000_000
"""In a minute: less would hold back the pages of a single turn for minutes with most models."""
MIN_BUDGET_BYTES = 1_000_000
DEFAULT_PIN_LIMIT = 0.5
MAX_PIN_LIMIT = 0.9
"""Somebody beside the pinned agents has to run."""
MAX_NAME_CHARACTERS = 128
"""Of agents and namespaces."""
MAX_CHUNK_TOKENS = 512
"""What the scratch memory of a step is counted for (`ModelCacheSpec.scratch_bytes`)."""
MAX_BATCH = 64
MAX_DECODE_SHARE = 0.95
"""Beyond this a prefill would hardly get on while somebody decodes."""
MAX_DRAIN_GRACE_S = 86_400


class ConfigError(CallerError):
    """A setting is wrong; the message names it and the allowed values."""

    name = "config_error"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything `kvd serve` can be told.

    Attributes:
        data_dir: swap files, logs, catalog, lock; 0700.
        socket: path of the Unix socket.
        model: installed name, or a folder in mlx-lm's layout.
        model_dir: installed models and their calibrations.
        budget_bytes: RAM for KV pages, tails and copies in flight.
        pin_limit: what pinned agents may hold together, in bytes (int) or as a part of what the budget leaves to
            requests (float), at most `MAX_PIN_LIMIT` of that in both cases.
        footprint_limit_bytes: memory of the whole process above which new requests are refused; None: what
            `kvd.ops.device` says of the machine.
        branch_limit_bytes: what pages of an agent's branches beside its current one may take; None: any.
        namespace_quotas: names of namespaces, and what their pages should take of the budget at most.
        namespace_disk_quotas: names of namespaces, and what their files may take of the disk at most.
        quota_bytes: disk for everything under `data_dir`.
        kv_format: `auto` (the calibrated one) or a name of `NAMED_FORMATS`.
        attention: `auto` or a backend's name.
        sharing: who may map whose pages: agents of one `namespace` those with the text that their prompts begin with,
            or each `agent` its own (and what it was forked from).
        chunk_tokens: tokens of a prefill step, at most `MAX_CHUNK_TOKENS`.
        max_queued: requests that may wait.
        max_batch: requests that run at once, of different agents; their decode steps run together. `auto`: as many as
            memory holds and the device gains by (`kvd.scheduler.batch_size`).
        decode_share: part of the time that decode steps get at least while others prefill.
        prefetch: what is loaded before it is demanded: for turns that wait and for agents whose turn is likely to come
            (`predict`), for turns that wait (`hints`), nothing (`off`); clients may always ask for it.
        eviction: whose pages go first when room is short: of the agent used least recently (`lru`), or of the one whose
            next turn is estimated to be farthest away (`reuse`).
        swap: pages and logs go to disk (`on`), or KV is kept in RAM only (`off`): nothing is durable, what is evicted
            is computed again, and what the data folder holds is left as it is.
        write_limit_bytes: what may be written in a minute before pages wait; None: any amount.
        trace: what agents do to pages is written there, for `kvd bench eviction` (None: nowhere).
        warm_from: folders of exported agents, imported when somebody first uses their names; never written.
        drain_grace_s: how long a drain lets requests finish before it cancels them.
        http: HOST:PORT where a gateway serves HTTP, a child process of the daemon (None: nowhere).
        log_level: of `LOG_LEVELS`.
        log_file: JSON lines go here (None: standard error).
        check: run `check_integrity()` after every turn.
    """

    data_dir: Path
    socket: Path
    model: str
    model_dir: Path
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    pin_limit: int | float = DEFAULT_PIN_LIMIT
    footprint_limit_bytes: int | None = None
    branch_limit_bytes: int | None = None
    namespace_quotas: tuple[tuple[str, int], ...] = ()
    namespace_disk_quotas: tuple[tuple[str, int], ...] = ()
    quota_bytes: int = DEFAULT_QUOTA_BYTES
    kv_format: str = "auto"
    attention: str = "auto"
    sharing: str = "namespace"
    chunk_tokens: int = 512
    max_queued: int = 256
    max_batch: int | Literal["auto"] = "auto"
    decode_share: float = 0.5
    prefetch: str = "predict"
    eviction: str = "lru"
    swap: str = "on"
    write_limit_bytes: int | None = None
    trace: Path | None = None
    warm_from: tuple[Path, ...] = ()
    drain_grace_s: float = 30.0
    http: str | None = None
    log_level: str = "info"
    log_file: Path | None = None
    check: bool = False

    def __post_init__(self) -> None:
        _one_of("kv-format", self.kv_format, ("auto", *NAMED_FORMATS))
        _one_of("attention", self.attention, ATTENTION)
        _one_of("sharing", self.sharing, SHARING)
        _one_of("prefetch", self.prefetch, PREFETCH)
        _one_of("eviction", self.eviction, EVICTION)
        _one_of("swap", self.swap, SWAP)
        if self.write_limit_bytes is not None:
            _at_least("write-limit", self.write_limit_bytes, MIN_WRITE_LIMIT_BYTES, "bytes a minute")
        if self.swap == "off" and self.namespace_disk_quotas:
            raise ConfigError("namespace-disk-quota needs --swap on: nothing is on disk without it", setting="swap")
        if self.swap == "off" and self.warm_from:
            raise ConfigError("warm-from needs --swap on: an agent that is imported is written to disk", setting="swap")
        _one_of("log-level", self.log_level, LOG_LEVELS)
        _at_least("budget", self.budget_bytes, MIN_BUDGET_BYTES, "bytes")
        if not (isinstance(self.pin_limit, int) and self.pin_limit >= 0) and not 0 <= self.pin_limit <= MAX_PIN_LIMIT:
            raise ConfigError(
                f"pin-limit must be a size, or from 0% to {MAX_PIN_LIMIT:.0%}, not {self.pin_limit:.0%}",
                setting="pin-limit",
            )
        if self.footprint_limit_bytes is not None:
            _at_least("footprint-limit", self.footprint_limit_bytes, MIN_BUDGET_BYTES, "bytes")
        if self.branch_limit_bytes is not None:
            _at_least("branch-limit", self.branch_limit_bytes, 0, "bytes")
        _check_namespaces("namespace-quota", self.namespace_quotas)
        _check_namespaces("namespace-disk-quota", self.namespace_disk_quotas)
        _at_least("quota", self.quota_bytes, MIN_BUDGET_BYTES, "bytes")
        _at_least("chunk", self.chunk_tokens, 1, "tokens")
        if self.chunk_tokens > MAX_CHUNK_TOKENS:
            raise ConfigError(
                f"chunk must be at most {MAX_CHUNK_TOKENS} tokens, not {self.chunk_tokens}", setting="chunk"
            )
        _at_least("max-queued", self.max_queued, 1, "requests")
        if self.max_batch != "auto" and not 1 <= self.max_batch <= MAX_BATCH:
            raise ConfigError(
                f"max-batch must be auto or from 1 to {MAX_BATCH} requests, not {self.max_batch}", setting="max-batch"
            )
        if not 0 <= self.decode_share <= MAX_DECODE_SHARE:
            raise ConfigError(
                f"decode-share must be from 0 to {MAX_DECODE_SHARE}, not {self.decode_share}", setting="decode-share"
            )
        if not 0 <= self.drain_grace_s <= MAX_DRAIN_GRACE_S:
            raise ConfigError(
                f"drain-grace must be from 0 to {MAX_DRAIN_GRACE_S} seconds, not {self.drain_grace_s}",
                setting="drain-grace",
            )


def _check_namespaces(setting: str, quotas: tuple[tuple[str, int], ...]) -> None:
    for name, quota_bytes in quotas:
        if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            raise ConfigError(
                f"{setting} must name a namespace of 1 to {MAX_NAME_CHARACTERS} printable characters, not "
                f"{name[:40]!r}",
                setting=setting,
            )
        if quota_bytes < MIN_BUDGET_BYTES:
            raise ConfigError(
                f"{setting} {name} must be at least {MIN_BUDGET_BYTES} bytes, not {quota_bytes}",
                setting=setting,
            )
    if len({name for name, _ in quotas}) != len(quotas):
        raise ConfigError(f"{setting} must name each namespace once", setting=setting)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}", setting=name)


def _at_least(name: str, value: int, low: int, unit: str) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low} {unit}, not {value}", setting=name)
