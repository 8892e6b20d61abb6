"""Gemma 3 270M, converted, computes what its GGUF file says: against a plain numpy pass of its own weights."""

from __future__ import annotations

from pydoc_data.topics import topics

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from kvd.model.tokenizer import TextCodec
from tests.support.gemma3 import gemma3_folder, gemma3_gguf
from tests.support.reference_transformer import PlainTransformer

LONG_TOKENS = 544
"""More than the window of 512, so that sliding layers have forgotten the front."""

LONG_LAYERS = 6
"""Five sliding layers and one of full attention; all 18 would take a minute."""

STATE_TOLERANCE = 2e-4
LOGIT_TOLERANCE = 1e-3
"""Largest differences, relative and absolute. Both sides are float32 and sum in another order."""


@pytest.mark.real_model
def test_gemma_is_what_its_own_weights_say() -> None:
    """Logits of a short prompt through all layers, and states beyond the window: blocks of four types come through."""
    path, folder = gemma3_gguf(), gemma3_folder()
    if folder.config()["torch_dtype"] != "float32" or mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("the tolerance is stated for float32 on the CPU")
    codec = TextCodec.from_folder(folder.path)
    plain = PlainTransformer(path)
    model, _ = load_model(folder.path)
    body = model.model
    ids = [*codec.bos_ids, *codec.encode_content("The capital of France is Paris. The capital of Italy is")]
    logits = np.array(body.embed_tokens.as_linear(body(mx.array([ids]))[0, -4:]))
    expected = plain.logits(plain.final(ids)[-4:])
    assert np.abs(logits - expected).max() < LOGIT_TOLERANCE
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
    assert codec.token_bytes(int(expected[-1].argmax())) == b" Rome"
    body.layers = body.layers[:LONG_LAYERS]
    ids = [*codec.bos_ids, *codec.encode_content(topics["assignment"])][:LONG_TOKENS]
    assert len(ids) == LONG_TOKENS
    states = plain.final(ids, layers=LONG_LAYERS)
    assert np.abs(np.array(body(mx.array([ids]))[0]) - states).max() < STATE_TOLERANCE * np.abs(states).max()
