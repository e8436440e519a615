"""A tokenizer whose tokens are the 256 bytes, made in memory: any text can be said in any split.

Rules of this file: pure. A byte's id is the byte; ``END_ID`` is the end-of-sequence token.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ..chat_template import ChatTemplate
from ..token_pieces import byte_level_alphabet
from ..tokenizer import Tokenizer

__all__ = ["END_ID", "byte_tokenizer"]

END_ID = 256
_END = "<|end|>"
_TEMPLATE = (
    "{% for one in messages %}<|{{ one.role }}|>{{ one.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer for ``open_scripted_llm`` that needs no file: ``list("é".encode())`` are the ids of "é", so a
    script's step is ``list(b"Hello")``. 256 is the end-of-sequence token.

    Its chat template has the usual shape, so that prompts are as long as they look.
    """
    vocabulary = byte_level_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_END])
    return Tokenizer(
        backend=backend,
        vocab_size=END_ID + 1,
        eos_token_id=END_ID,
        max_chars_per_token=len(_END),
        chat_template=ChatTemplate(_TEMPLATE, {"eos_token": _END}, origin="trioleg.testing"),
    )
