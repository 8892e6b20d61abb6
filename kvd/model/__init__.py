"""Everything from a model's files to a model in memory with exact text handling.

- `spec`: the model-independent boundary, `ModelCacheSpec`.
- `families`: which layers of a model cache what, by family, from a `config.json`.
- `cache_spec`: builds the spec from it, with the scratch bytes of a step.
- `paths`, `registry`, `sources`: where models live, which are installed, which can be pulled.
- `pull`, `install`, `progress`: fetch, verify, convert and put in place, whole or not at all.
- `gguf_file`, `gguf_import`, `gguf_tokenizer`, `weights_file`: from GGUF to safetensors, config and tokenizer.
- `vocabulary`, `tokenizer`, `incremental`: `TextCodec`, the only door between text and token ids.
- `template`: chat messages to typed text.
- `fingerprint`: the digest that keys every cached page.
- `loader`: the only door to mlx_lm.
- `cache`, `dispatch`, `forward`: the cache object and the attention hook that models meet, and the step that runs them.
- `probes`: the shapes that an attention backend is tested with at start.
- `errors`: the package's errors.

May import kvd.ids, kvd.errors, kvd.quant.spec and kvd.vm.text; mlx only inside `loader`, `pull`, `cache`, `forward`,
`dispatch` and `probes`. This file imports nothing heavy: `kvd.model.spec` is used by packages without mlx.
"""

from __future__ import annotations

from kvd.model.spec import CacheGroup, LayerSpec, ModelCacheSpec

__all__ = ["CacheGroup", "LayerSpec", "ModelCacheSpec"]
