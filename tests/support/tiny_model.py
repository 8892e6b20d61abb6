"""A complete, tiny, seeded llama folder for tests: random weights, a real byte-level BPE, ChatML and a context of 4096.

The folder is what any mlx-lm folder is, so the code under test takes the same path as with a real model. It imports
neither mlx nor kvd and is written in well under a second. Equal arguments give equal bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

CONTROL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; `<|im_end|>` ends a turn, as in SmolLM2."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny model.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS_TEXT: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which you
were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most
made after also did many off before must well back through years much where your way down should because long each
just state people those too mr how little good world make very year still see own work men day get here old life both
between being under three never know same last another while us might great go come since against right came take
used himself few house use place during without again home around small however found part school thought went say
general once upon high does every got left number course war until always away something fact water though less
public put think almost hand enough far took yet better head asked system token memory page agent user assistant
class return import self print value string list object function method argument expression statement
"""


def _byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with (GPT-2's table, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + i) for i, byte in enumerate(rest)})
    return [letters[byte] for byte in range(256)]


def build_tokenizer(vocab: int | None) -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary and merges: bytes, then each word of `_WORDS_TEXT` (with its space) merged from the left.

    Words that begin alike share their first merges, so the merges form a prefix tree and every word ends as one token.
    """
    ids = {token: i for i, token in enumerate((*CONTROL_TOKENS, *_byte_letters()))}
    limit = len(ids) + 10_000 if vocab is None else vocab
    if limit < len(ids):
        raise ValueError(f"vocab must be at least {len(ids)}")
    merges: list[list[str]] = []
    for word in ("Ġ" * 2, "Ġ" * 4, *("Ġ" + w for w in _WORDS_TEXT.split())):
        left = word[0]
        for right in word[1:]:
            if left + right not in ids and len(ids) < limit:
                ids[left + right] = len(ids)
                merges.append([left, right])
            left += right
    for spare in range(limit - len(ids) if vocab is not None else 0):
        ids[f"<|spare_{spare}|>"] = len(ids)
    return ids, merges


def write_tokenizer(
    folder: Path, ids: dict[str, int], merges: list[list[str]], *, bos: str = "<|im_start|>", add_bos: bool = False
) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, with ChatML; `add_bos`: a text starts with the token `bos`."""
    special = [t for t in ids if t.startswith("<|")]
    added = [
        {
            "id": ids[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in special
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _weights(
    rng: np.random.Generator,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ids: dict[str, int],
    intermediate: int,
) -> dict[str, np.ndarray]:
    """Random float32 weights, scaled so that attention is neither flat nor a single spike and logits spread by about 3.

    Rows of control tokens in the output projection are zero: their logit is 0, so greedy text goes on until
    `max_tokens`; a positive logit bias makes a turn end.
    """
    hidden, vocab = heads * head_dim, len(ids)

    def normal(rows: int, columns: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    weights: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": normal(vocab, hidden, 3.0),
    }
    weights["lm_head.weight"][[i for token, i in ids.items() if token.startswith("<|")]] = 0.0
    for i in range(layers):
        base = f"model.layers.{i}"
        weights |= {
            f"{base}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{base}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{base}.self_attn.q_proj.weight": normal(heads * head_dim, hidden, 1.6),
            f"{base}.self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden, 1.6),
            f"{base}.self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden, 2.0),
            f"{base}.self_attn.o_proj.weight": normal(hidden, heads * head_dim, 2.0),
            f"{base}.mlp.gate_proj.weight": normal(intermediate, hidden, 1.0),
            f"{base}.mlp.up_proj.weight": normal(intermediate, hidden, 1.0),
            f"{base}.mlp.down_proj.weight": normal(hidden, intermediate, 2.0),
        }
    return weights


def make_tiny_model(
    path: str | Path,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int | None = None,
    intermediate: int = 512,
    context: int = 4096,
) -> Path:
    """Write a complete model folder and return it.

    Args:
        path: folder to make (may exist; its model files are replaced).
        seed: of the weights. Equal shapes with another seed are "another checkpoint of the same shape".
        layers: decoder layers.
        heads: query heads; the hidden size is `heads * head_dim`.
        kv_heads: key and value heads, a divisor of `heads`.
        head_dim: width of a head, a multiple of 32.
        vocab: rows of the vocabulary, at least 259; None: as many as the words need (about 800).
        intermediate: width of the MLP.
        context: `max_position_embeddings`.

    Raises:
        ValueError: the shape is impossible.
    """
    if heads % kv_heads or head_dim % 32:
        raise ValueError("kv_heads must divide heads, and head_dim must be a multiple of 32")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    ids, merges = build_tokenizer(vocab)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": heads * head_dim,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(ids),
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    weights = _weights(
        np.random.default_rng(seed),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ids=ids,
        intermediate=intermediate,
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    write_tokenizer(folder, ids, merges)
    return folder
