"""DeepSeek V3's attention over paged KV: all heads share one latent vector per token, and the latent is what is cached.

mlx-lm's class does arithmetic on the arrays that a cache returns and makes scores of the rotated part over the whole
context as a mask, so it cannot run over pages. This is the same attention in its absorbed form, for any number of
tokens. With the latent c of a token, its rotated key r, and the matrices U and W of a head that unfold c to the rest of
the key and to the value,

    score = q_rest (U c) + q_rotated r = (q_rest U, q_rotated) (c, r)        output = sum_p p (W c) = W (sum_p p c)

So a layer caches one KV head, with keys (c, r) and values c, and any attention backend computes it as multi-query
attention. The latent lies there twice (a backend takes keys and values from two tensors); for V3's 128 heads that is
still a 37th of the unfolded keys and values. A chunk costs more products than the unfolded form: scores are as wide as
the latent.

The published description: DeepSeek-V2 (arXiv 2405.04434), section 2.1. May import mlx.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

_MODULE: Final = "mlx_lm.models.deepseek_v3"
_CLASS: Final = "DeepseekV3Attention"


def attention_classes(model: Any) -> list[type]:  # noqa: ANN401  the mlx-lm door
    """Classes of the model's submodules whose calls `attending` must replace: none, or DeepSeek V3's."""
    kinds = {type(part) for part in model.modules()}
    return [kind for kind in kinds if (kind.__module__, kind.__name__) == (_MODULE, _CLASS)]


def attending(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A `__call__` for the class: over caches that can attend themselves absorbed, else as mlx-lm wrote it."""

    @functools.wraps(original)
    def call(
        attention: Any,  # noqa: ANN401
        x: mx.array,
        mask: Any = None,  # noqa: ANN401
        cache: Any = None,  # noqa: ANN401
    ) -> mx.array:
        if not hasattr(cache, "attend"):
            return original(attention, x, mask, cache)
        return _attend(attention, x, mask, cache)

    return call


def _attend(attention: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:  # noqa: ANN401
    """Absorbed attention of mx [1, n, hidden] over the cache; returns mx [1, n, hidden]."""
    batch, tokens, _ = x.shape
    if attention.q_lora_rank is None:
        queries = attention.q_proj(x)
    else:
        queries = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    queries = queries.reshape(batch, tokens, attention.num_heads, attention.q_head_dim).transpose(0, 2, 1, 3)
    rest, rotated = mx.split(queries, [attention.qk_nope_head_dim], axis=-1)
    latent, key = mx.split(attention.kv_a_proj_with_mqa(x), [attention.kv_lora_rank], axis=-1)
    latent = attention.kv_a_layernorm(latent)[:, None]
    rotated, key = (attention.rope(part, cache.offset) for part in (rotated, key[:, None]))
    cache.update_and_fetch(mx.concatenate([latent, key], axis=-1), latent)
    queries = mx.concatenate([attention.embed_q(rest), rotated], axis=-1)
    seen = attention.unembed_out(cache.attend(queries, scale=attention.scale, mask=mask))
    out: mx.array = attention.o_proj(seen.transpose(0, 2, 1, 3).reshape(batch, tokens, -1))
    return out


__all__ = ["attending", "attention_classes"]
