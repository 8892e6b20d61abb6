"""Choosing a backend: the first right one; a wrong one is passed over loudly."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from kvd.attention import (
    AttentionBackend,
    AttentionOutput,
    BackendDisagrees,
    BackendUnavailable,
    MlxBackend,
    ReferenceBackend,
    Row,
    Run,
)
from kvd.attention.select import (
    ATTENTION_CHOICES,
    BACKENDS,
    ShapeProbe,
    select_backend,
    self_test,
    suitable_backends,
    times_ms,
)
from kvd.native import KernelUnavailable
from kvd.quant.spec import named_format


def _cpu_kernels_run() -> bool:
    """Whether compiled kernels can run in this process."""
    try:
        BACKENDS["cpu"]()
    except KernelUnavailable:
        return False
    return True


ON_LINUX_CPU = "cpu" in suitable_backends() and _cpu_kernels_run()


def probe(name: str = "q4", window: int | None = None) -> ShapeProbe:
    """A small shape."""
    digest = "x" if name == "q4c" else None
    layer = named_format(name, k_dim=64, v_dim=64, layer_count=1, conditioning=digest).layers[0]
    return ShapeProbe(query_heads=4, kv_heads=2, k_dim=64, v_dim=64, layer_format=layer, window=window)


class Wrong(MlxBackend):
    """Almost right: slightly off, as a kernel with a bug at its last tile would be."""

    name = "wrong"

    def attend(self, *args, **options) -> AttentionOutput:
        """Add a little to one value."""
        out, lse = super().attend(*args, **options)
        bump = mx.zeros(out.shape)
        bump[0, 0, -1, -1] = 0.01
        return AttentionOutput(out + bump, lse)


class NotANumber(MlxBackend):
    """Returns NaN."""

    name = "nan"

    def attend(self, *args, **options) -> AttentionOutput:
        """NaN everywhere."""
        out, lse = super().attend(*args, **options)
        return AttentionOutput(out * mx.nan, lse)


class Crashing(MlxBackend):
    """Cannot run here."""

    name = "crashing"

    def attend(self, *args, **options) -> AttentionOutput:
        """Fail as a kernel that does not compile."""
        raise RuntimeError("no such instruction")


def test_auto_takes_the_fastest_right_one_silently() -> None:
    """Auto picks, of those that pass on all shapes, the one that took least time, with no notice."""
    choice = select_backend("auto", [probe(), probe("q4c"), probe("k8v4", window=100)])
    assert choice.notices == ()
    assert set(choice.timings_ms) == ({"cpu", "mlx"} if ON_LINUX_CPU else set())
    assert choice.backend.name == min(choice.timings_ms, key=choice.timings_ms.get, default="mlx")


class Slow(MlxBackend):
    """Right, and slower than any other: each call does its work many times."""

    name = "slow"

    def attend(self, *args, **options) -> AttentionOutput:
        """The same answer, forty times."""
        for _ in range(40):
            out = super().attend(*args, **options)
        return out


def test_order_of_preference_does_not_beat_speed() -> None:
    """A right backend that stands first and is slow is not taken; asked for by name, it is, and nothing is timed."""
    slow_first = {"slow": Slow, "mlx": MlxBackend, "reference": ReferenceBackend}
    choice = select_backend("auto", [probe()], slow_first)
    assert (choice.backend.name, choice.notices) == ("mlx", ())
    assert choice.timings_ms["slow"] > choice.timings_ms["mlx"]
    named = select_backend("slow", [probe()], slow_first)
    assert (named.backend.name, named.timings_ms) == ("slow", {})


def test_backends_take_turns_while_they_are_timed() -> None:
    """What else the machine does for a while meets all of them: the choice is kept for good."""
    turns: list[str] = []

    class Noted(MlxBackend):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def attend(self, *args, **options) -> AttentionOutput:
            turns.append(self.name)
            return super().attend(*args, **options)

    found = times_ms({"one": Noted("one"), "other": Noted("other")}, probe())
    assert turns == ["one", "other"] * (len(turns) // 2)
    assert len(turns) >= 12
    assert set(found) == {"one", "other"}
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    "name", [name for name in ATTENTION_CHOICES if name != "auto" and (name != "cpu" or ON_LINUX_CPU)]
)
def test_a_named_backend_is_taken(name: str) -> None:
    """A flag names any of the registry."""
    assert select_backend(name, [probe()]).backend.name == name


@pytest.mark.parametrize("broken", [Wrong, NotANumber, Crashing])
@pytest.mark.parametrize("requested", ["auto", "broken"])
def test_a_broken_backend_never_serves(broken: type[MlxBackend], requested: str) -> None:
    """A backend that is wrong, returns NaN or fails is passed over, and the notice says which and why."""
    choice = select_backend(requested, [probe()], {"broken": broken, "reference": ReferenceBackend})
    assert choice.backend.name == "reference"
    assert len(choice.notices) == 1
    assert "broken" in choice.notices[0]


def test_the_fallback_is_the_next_right_one() -> None:
    """After a broken one the next in order of preference is tried, not the slowest."""
    choice = select_backend("auto", [probe()], {"broken": Wrong, **BACKENDS})
    assert choice.backend.name in ("cpu", "mlx")
    assert len(choice.notices) == 1


def _unavailable() -> AttentionBackend:
    raise KernelUnavailable("no BLAS was loaded for this process")


@pytest.mark.parametrize("requested", ["auto", "absent"])
def test_a_backend_that_cannot_be_made_is_passed_over(requested: str) -> None:
    """No BLAS, no llvmlite, a folder recorded elsewhere: the next one runs and the notice says why."""
    choice = select_backend(requested, [probe()], {"absent": _unavailable, "mlx": MlxBackend})
    assert choice.backend.name == "mlx"
    assert "absent is not used: no BLAS" in choice.notices[0]


def test_when_nothing_passes_the_reference_runs_with_a_warning() -> None:
    """A registry of broken backends still ends at the reference, said loudly."""
    choice = select_backend("auto", [probe()], {"a": Wrong, "b": Crashing})
    assert isinstance(choice.backend, ReferenceBackend)
    assert len(choice.notices) == 3


def test_an_unknown_name_is_refused_with_the_list() -> None:
    """The error names what is allowed."""
    with pytest.raises(BackendUnavailable, match="auto, cpu, mlx, reference"):
        select_backend("gpu", [probe()])


def test_the_self_test_says_what_differs() -> None:
    """The error carries the difference; right backends pass for conditioned and windowed shapes."""
    with pytest.raises(BackendDisagrees) as caught:
        self_test(Wrong(), probe())
    assert caught.value.data["difference"] == pytest.approx(0.01, abs=1e-3)
    for shape in (probe("q4c"), probe("q2", window=64)):
        self_test(MlxBackend("device"), shape)


class IgnoresTheTail(MlxBackend):
    """Right for frames, wrong for an open tail in arrays of its own."""

    name = "ignores-tail"

    def attend(self, pages, queries, *, rows, **options) -> AttentionOutput:
        """Attend over what is in frames."""
        segment = rows[0].segments[0]
        if segment.tail is not None:
            segment = replace(segment, tail=None, runs=(Run(0, segment.paged_tokens),))
        return super().attend(pages, queries, rows=(Row((segment,), rows[0].query_start),), **options)


class CountsPositions(MlxBackend):
    """Takes a segment's tokens to follow each other."""

    name = "counts-positions"

    def attend(self, pages, queries, *, rows, **options) -> AttentionOutput:
        """Attend as if there were one run."""
        segment = replace(rows[0].segments[0], runs=(Run(0, rows[0].segments[0].tokens),))
        return super().attend(pages, queries, rows=(Row((segment,), rows[0].query_start),), **options)


@pytest.mark.parametrize("broken", [IgnoresTheTail, CountsPositions])
def test_tails_and_runs_are_tried(broken: type[MlxBackend]) -> None:
    """A backend that is right for uniform segments in frames alone is passed over."""
    with pytest.raises(BackendDisagrees):
        self_test(broken(), probe())
