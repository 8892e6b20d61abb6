"""Which shapes the attention self-test tries: each geometry with each format in use, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvd.attention import AttentionOutput, MlxBackend, ReferenceBackend, Row
from kvd.attention.select import select_backend
from kvd.model.probes import probes_for
from kvd.quant.spec import LayerFormat, PageFormat, SideFormat
from tests.model.paged import DIM, HEADS, KV_HEADS, small_spec


class WrongAt8Bits(MlxBackend):
    """A kernel that is right for 4-bit keys alone."""

    name = "wrong"

    def attend(self, pages: Any, queries: mx.array, *, rows: Sequence[Row], **other: Any) -> AttentionOutput:
        """Halve what 8-bit keys give."""
        out, lse = super().attend(pages, queries, rows=rows, **other)
        return AttentionOutput(out / 2 if rows[0].segments[0].layer_format.k.bits == 8 else out, lse)


def test_each_format_in_use_is_probed_once() -> None:
    """Equal layers of many formats and agents give one probe per geometry and layer format; constants do not count."""
    spec = small_spec(3, window=300)
    sliding, full = spec.groups
    used = [
        (group, group.format(name, digest))
        for group in (sliding, full, full)
        for name, digest in (("q4", None), ("k8v4", None), ("q4c", "a"), ("q4c", "b"))
    ]
    probes = probes_for(spec, iter(used))
    assert [(probe.window, probe.layer_format.k.bits, probe.layer_format.v.bits) for probe in probes] == [
        (window, *bits) for window in (300, None) for bits in ((4, 4), (8, 4), (4, 4))
    ]
    conditioned = [probe.layer_format.k.conditioning is not None for probe in probes]
    assert conditioned == [False, False, True] * 2
    assert {(p.query_heads, p.kv_heads, p.k_dim, p.v_dim) for p in probes} == {(HEADS, KV_HEADS, DIM, DIM)}


def test_every_layer_of_a_mixed_format_is_probed() -> None:
    """A page format whose layers differ is probed with each of its layer formats, not with the first alone."""
    spec = small_spec(3)
    fine, coarse = SideFormat(8), SideFormat(4)
    layers = (LayerFormat(coarse, coarse), LayerFormat(fine, coarse), LayerFormat(coarse, coarse))
    probes = probes_for(spec, [(spec.groups[0], PageFormat("q4", layers))])
    assert [probe.layer_format for probe in probes] == [layers[0], layers[1]]


def test_a_backend_wrong_for_a_restored_format_does_not_serve() -> None:
    """A kernel that only a restored agent's format reaches is compared as well: wrong there, it is passed over."""
    spec = small_spec()
    group = spec.groups[0]
    backends = {"wrong": WrongAt8Bits, "reference": ReferenceBackend}
    default = [(group, group.format("q4"))]
    assert select_backend("auto", probes_for(spec, default), backends).backend.name == "wrong"
    choice = select_backend("auto", probes_for(spec, [*default, (group, group.format("k8v4"))]), backends)
    assert choice.backend.name == "reference"
    assert "8-bit keys of 64, 4-bit values of 64" in choice.notices[0]


def test_probes_compute_in_the_models_dtype() -> None:
    """A kernel is another one for each dtype: what is compared is what will serve, and the message says in which."""
    spec = small_spec()
    used = [(spec.groups[0], spec.groups[0].format("k8v4"))]
    (probe,) = probes_for(spec, used, dtype="bfloat16")
    assert probe.dtype == "bfloat16"
    backends = {"wrong": WrongAt8Bits, "mlx": MlxBackend, "reference": ReferenceBackend}
    choice = select_backend("auto", [probe], backends)
    assert choice.backend.name == "mlx"
    assert "4-bit values of 64, bfloat16) differs" in choice.notices[0]
