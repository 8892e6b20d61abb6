"""The dispatcher: in the module that defines the attention class, for kvd caches only, and reversible."""

from __future__ import annotations

import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, gemma3, gemma3_text, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from kvd.model.dispatch import attention_modules, dispatching, install
from kvd.model.errors import UnsupportedModel
from kvd.store.frame_pool import FramePool
from tests.model.paged import ids_of, plain_logits, relative_error, sequence_over, small_llama, small_spec, step


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts and ends with mlx-lm's own functions; a daemon never takes its dispatcher out again."""
    for module in (llama, gemma3_text):
        monkeypatch.setattr(module, "scaled_dot_product_attention", base.scaled_dot_product_attention)


def test_kvd_caches_are_asked_and_others_pass_through() -> None:
    """With the dispatcher in place mlx-lm's own caches give exactly what they gave without it."""
    model = small_llama()
    x = mx.array([ids_of(20)])

    def run(make: type) -> np.ndarray:
        return np.array(model(x, cache=[make() for _ in model.layers]))

    before = [run(KVCache), run(QuantizedKVCache), plain_logits(model, ids_of(20))]
    assert install(model) == ("mlx_lm.models.llama",)
    after = [run(KVCache), run(QuantizedKVCache), plain_logits(model, ids_of(20))]
    paged = step(model, sequence_over(FramePool(1 << 26), small_spec(), pages=1), ids_of(20))
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)
    assert relative_error(paged, before[2]) < 0.02


def test_installing_twice_is_installing_once() -> None:
    """Idempotent: one dispatcher, however often it is installed."""
    model = small_llama()
    install(model)
    first = llama.scaled_dot_product_attention
    assert first is not base.scaled_dot_product_attention
    install(model)
    assert llama.scaled_dot_product_attention is first


def test_the_block_restores_what_was_there() -> None:
    """`dispatching` leaves an installed dispatcher installed and a plain module plain, also after an error."""
    model = small_llama()
    with dispatching(model):
        assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention

    def failing() -> None:
        with dispatching(model):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    install(model)
    with dispatching(model):
        pass
    assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention


def test_the_defining_module_is_found_behind_a_wrapper() -> None:
    """Gemma 3 is loaded as `gemma3`, its attention lives in `gemma3_text`: only that module is changed."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    }
    wrapper = gemma3.Model(gemma3.ModelArgs(model_type="gemma3", text_config=text, vocab_size=64))
    with dispatching(wrapper):
        assert [module.__name__ for module in attention_modules(wrapper)] == ["mlx_lm.models.gemma3_text"]
        assert gemma3_text.scaled_dot_product_attention is not base.scaled_dot_product_attention
        assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
        assert base.scaled_dot_product_attention.__module__ == "mlx_lm.models.base"


def test_inherited_attention_counts_where_it_is_written() -> None:
    """A subclass in another module without a `__call__` of its own still leads to the module with the code."""

    class Derived(llama.Attention):
        """Adds nothing."""

    class Wrapped(nn.Module):
        """A model that uses it."""

        def __init__(self) -> None:
            super().__init__()
            self.part = Derived(small_llama().args)

    assert not hasattr(sys.modules[__name__], "scaled_dot_product_attention")
    assert attention_modules(Wrapped()) == [llama]


def test_a_model_without_the_function_is_refused() -> None:
    """A model whose code does not call the function would never reach kvd's caches: an error, nothing changed."""
    with pytest.raises(UnsupportedModel):
        install(nn.Sequential(nn.Linear(4, 4)))
