"""Growth over a daemon's life: a planted leak is named, noise and a warm-up are not (P23)."""

from __future__ import annotations

import random

import pytest

from kvd.bench.soak_watch import ALLOWED_BYTES, Sample, growth_of, longest_life, trouble_at_rest

MB = 1_000_000


def life(*, seconds: int, leak_bytes_s: float = 0.0, warm_bytes: int = 0, noise_bytes: int = 4 * MB) -> list[Sample]:
    """A daemon of 100 MB and pages that come and go, one sample a second."""
    chance = random.Random(5)
    samples = []
    for second in range(seconds):
        frames = chance.randrange(60 * MB)
        own = 100 * MB + int(leak_bytes_s * second) + chance.randrange(noise_bytes)
        own += warm_bytes if second > seconds * 0.2 else 0
        samples.append(Sample(float(second), own + frames, frames, 20, 8))
    return samples


def test_noise_pages_and_a_warm_up_are_no_leak() -> None:
    """What pages take is taken off, the first third of a life does not count."""
    growth = growth_of(life(seconds=300, warm_bytes=200 * MB))
    assert growth is not None
    assert growth.trouble == ""
    assert abs(growth.bytes_grown) < 2 * MB


def test_buffers_that_pages_are_read_into_are_no_leak() -> None:
    """They are kept for the next reads, up to a bound of their own: they come late in a soak, and are taken off."""
    figures = {"footprint_bytes": 500, "frame_bytes": 200, "packed_bytes": 30, "read_buffer_bytes": 60}
    assert Sample.of({**figures, "open_files": 1, "threads": 1}, 0.0).own_bytes == 500 - 200 - 30 - 60


def test_a_planted_leak_is_named_with_its_rate() -> None:
    """P23: 400 kB a second over 200 seconds."""
    growth = growth_of(life(seconds=300, leak_bytes_s=400_000))
    assert growth is not None
    assert growth.bytes_per_minute == pytest.approx(24 * MB, rel=0.05)
    assert "grew by" in growth.trouble
    assert "24." in growth.trouble or "23." in growth.trouble


def test_a_longer_soak_finds_a_smaller_leak() -> None:
    """What is allowed is a sum, not a rate."""
    small = {"leak_bytes_s": 20_000.0}
    short, long = growth_of(life(seconds=300, **small)), growth_of(life(seconds=6000, **small))
    assert short is not None
    assert long is not None
    assert not short.trouble
    assert long.trouble
    assert long.bytes_grown > ALLOWED_BYTES


def test_a_short_life_says_nothing() -> None:
    """Fewer than 45 seconds after the warm-up are not judged, however steep."""
    assert growth_of(life(seconds=40, leak_bytes_s=5 * MB)) is None
    assert growth_of([]) is None


def test_the_longest_life_is_judged() -> None:
    """Of several daemons the one that lived longest, in seconds."""
    lives = [life(seconds=10), life(seconds=90), [], life(seconds=20)]
    assert longest_life(lives) is lives[1]
    assert longest_life([]) == ()


def test_descriptors_and_threads_that_stay_open_are_named() -> None:
    """A few that are opened once are allowed, more are a leak."""
    before = Sample(0.0, 0, 0, open_files=12, threads=8)
    assert trouble_at_rest(before, Sample(9.0, 0, 0, 14, 12), allowed_threads=6) == []
    troubles = trouble_at_rest(before, Sample(9.0, 0, 0, 40, 30), allowed_threads=6)
    assert [line.split()[0] for line in troubles] == ["descriptors", "threads"]
    assert "12 open at first, 40" in troubles[0]
