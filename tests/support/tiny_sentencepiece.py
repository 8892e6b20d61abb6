"""A small SentencePiece-style vocabulary with byte fallback, and as many control tokens as a test wants."""

from __future__ import annotations

from kvd.model.tokenizer import TextCodec

END = "</s>"


def sentencepiece(*more: str) -> TextCodec:
    """A small SentencePiece-style vocabulary: bytes, words with their space mark, and further control tokens."""
    words = ["▁", "▁the", "▁of", '":', '▁"', "true", "name", '"', "{", "}", "[", "]", ",", ":", *"0123456789abcdef-"]
    control = ["<unk>", "<s>", END, *more]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    added = [{"id": i, "content": t, "special": True, "normalized": False} for i, t in enumerate(control)]
    model = {"type": "BPE", "byte_fallback": True, "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []}
    spec = {
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "ByteFallback"},
        "model": model,
    }
    return TextCodec(spec, eos_ids=[tokens.index(END)])
