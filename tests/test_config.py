"""Settings: validated once, at the edge; a refusal names the setting and what it may be."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from kvd.attention.select import ATTENTION_CHOICES
from kvd.config import ATTENTION, DEFAULT_BUDGET_BYTES, EVICTION, LOG_LEVELS, ConfigError, Settings
from kvd.ops.logs import LEVELS
from kvd.quant.spec import NAMED_FORMATS
from kvd.vm.eviction import POLICIES

GOOD = Settings(data_dir=Path("/d"), socket=Path("/d/s"), model="m", model_dir=Path("/m"))


def test_the_defaults_are_valid_and_frozen() -> None:
    """10.2 GB, the calibrated format, a chunk of 512; nothing can be changed afterwards."""
    assert GOOD.budget_bytes == DEFAULT_BUDGET_BYTES == 10_200_000_000
    assert (GOOD.kv_format, GOOD.chunk_tokens) == ("auto", 512)
    with pytest.raises(FrozenInstanceError):
        GOOD.budget_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        ((("", 2_000_000),), "namespace-quota must name a namespace of 1 to 128 printable characters, not ''"),
        ((("a\n", 2_000_000),), "printable characters"),
        ((("a", 2_000_000), ("a", 3_000_000)), "namespace-quota must name each namespace once"),
    ],
)
def test_wrong_namespaces_are_refused(quotas: tuple[tuple[str, int], ...], words: str) -> None:
    """A quota is for a namespace that can exist, and each has one."""
    with pytest.raises(ConfigError, match=words) as caught:
        replace(GOOD, namespace_quotas=quotas)
    assert caught.value.data["setting"] == "namespace-quota"


def test_allowed_values_are_those_of_the_packages_that_use_them() -> None:
    """Every backend (those of GPUs everywhere), policy, named format and log level can be chosen, and nothing else."""
    assert sorted(EVICTION) == sorted(POLICIES)
    assert {*ATTENTION_CHOICES, "metal", "cuda"} == set(ATTENTION)
    for name in ATTENTION:
        assert replace(GOOD, attention=name).attention == name
    assert tuple(LOG_LEVELS) == tuple(LEVELS)
    for name in ("auto", *NAMED_FORMATS):
        assert replace(GOOD, kv_format=name).kv_format == name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_format": "q5"}, "kv-format must be one of auto, q4, q4c, k8v4, q8, q2, not 'q5'"),
        ({"attention": "cuda9"}, "attention must be one of auto, "),
        ({"sharing": "everybody"}, "sharing must be one of namespace, agent, not 'everybody'"),
        ({"prefetch": "always"}, "prefetch must be one of predict, hints, off, not 'always'"),
        ({"eviction": "fifo"}, "eviction must be one of lru, reuse, not 'fifo'"),
        ({"swap": "ram"}, "swap must be one of on, off, not 'ram'"),
        ({"swap": "off", "warm_from": (Path("/x"),)}, "warm-from needs --swap on"),
        ({"write_limit_bytes": 10}, "write-limit must be at least 1000000 bytes a minute, not 10"),
        ({"log_level": "loud"}, "log-level must be one of debug, info, warning, error, not 'loud'"),
        ({"budget_bytes": 10}, "budget must be at least 1000000 bytes, not 10"),
        ({"budget_bytes": -1}, "budget must be at least"),
        ({"quota_bytes": 0}, "quota must be at least 1000000 bytes, not 0"),
        ({"pin_limit": 0.91}, "pin-limit must be a size, or from 0% to 90%, not 91%"),
        ({"pin_limit": -1}, "pin-limit must be a size"),
        ({"footprint_limit_bytes": 10}, "footprint-limit must be at least 1000000 bytes, not 10"),
        ({"branch_limit_bytes": -1}, "branch-limit must be at least 0 bytes, not -1"),
        ({"namespace_quotas": (("a", 10),)}, "namespace-quota a must be at least 1000000 bytes, not 10"),
        ({"namespace_disk_quotas": (("a", 10),)}, "namespace-disk-quota a must be at least 1000000 bytes, not 10"),
        (
            {"swap": "off", "namespace_disk_quotas": (("a", 2_000_000),)},
            "namespace-disk-quota needs --swap on: nothing is on disk without it",
        ),
        ({"chunk_tokens": 0}, "chunk must be at least 1 tokens, not 0"),
        ({"chunk_tokens": 513}, "chunk must be at most 512 tokens, not 513"),
        ({"max_queued": 0}, "max-queued must be at least 1 requests"),
        ({"max_batch": 0}, "max-batch must be auto or from 1 to 64 requests, not 0"),
        ({"max_batch": 65}, "max-batch must be auto or from 1 to 64 requests, not 65"),
        ({"decode_share": 1.0}, "decode-share must be from 0 to 0.95, not 1.0"),
        ({"drain_grace_s": -1.0}, "drain-grace must be from 0 to 86400 seconds, not -1.0"),
        ({"drain_grace_s": float("nan")}, "drain-grace must be"),
        ({"drain_grace_s": float("inf")}, "drain-grace must be"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict[str, object], words: str) -> None:
    """The message names the setting as the command line does, and the allowed values."""
    with pytest.raises(ConfigError, match=words) as caught:
        replace(GOOD, **change)  # type: ignore[arg-type]
    assert str(caught.value.data["setting"]).replace("-", "_") in next(iter(change))
