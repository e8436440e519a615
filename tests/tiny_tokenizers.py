"""Small tokenizers with the decoders of real families, built in place."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from trioleg.tokenizer import Tokenizer

# As in the Llama and Mistral families: a word's beginning is spelled with a metaspace, and bytes that
# have no token of their own are spelled <0xNN>.
PIECES = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
PIECES += ["▁", "caf", "▁caf", "▁Paris", "a", "b", "c", "▁a", "▁b", "�"]


def byte_fallback_tokenizer() -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(
        backend=backend, vocab_size=len(PIECES) + 10, eos_token_id=2, max_chars_per_token=6
    )


def ids(*pieces: str) -> list[int]:
    """Ids by piece; a piece that is a byte may be written as "C3"."""
    return [PIECES.index(p if p in PIECES else f"<0x{p}>") for p in pieces]
