"""How text is cut into words before byte-level BPE: ``tokenizer.ggml.pre``, by name.

Rules of this file: imports tokenizers alone. A table, and what its rows are made of.

The patterns are those of each family's own tokenizer.json; "default" is llama.cpp's, for a model of which
it knows no better. A name that is not here is refused: with other words the same merges give other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["SPLITS", "Split"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """``ignore_merges``: a word that is a token is that token, whatever the merges. ``adds_bos``: where
    the file does not say it, texts begin with bos."""

    pre_tokenizer: Any
    normalizer: Any = None
    ignore_merges: bool = False
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _by_patterns(*patterns: str) -> Any:
    """Each pattern cuts what those before it left in one piece; what lies between matches is a word too."""
    splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_only])


# GPT-2's own pattern is built into the library's class.
_WORDS_OF_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGIT_BY_DIGIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), _WORDS_OF_GPT2]
)

_OF_LLAMA3 = Split(pre_tokenizer=_by_patterns(_LLAMA3), ignore_merges=True, adds_bos=True)

SPLITS = {
    "default": Split(pre_tokenizer=_by_patterns(*_DEFAULT)),
    "gpt-2": Split(pre_tokenizer=_WORDS_OF_GPT2),
    "smollm": Split(pre_tokenizer=_DIGIT_BY_DIGIT),
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama-bpe": _OF_LLAMA3,
    "qwen2": Split(pre_tokenizer=_by_patterns(_QWEN2), normalizer=normalizers.NFC()),
    "tekken": Split(pre_tokenizer=_by_patterns(_TEKKEN), ignore_merges=True, adds_bos=True),
}
