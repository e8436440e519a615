"""The ``tokenizer.*`` settings, as tokenizer.json and tokenizer_config.json have them.

Rules of this file: imports tokenizers, ``reader`` and ``errors``.

A GGUF names its tokenizer in two words. ``model`` is the kind: "gpt2" (byte-level BPE, with its merges)
or "llama" (SentencePiece's BPE, with a score for each piece and a token for each byte). For "gpt2",
``pre`` is how text is cut into words first, which decides as much as the merges do: the patterns are in
``splits``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from ..errors import ModelStoreError
from .reader import Model
from .splits import SPLITS, Split

__all__ = ["make_tokenizer", "token_ids", "tokenizer_config"]

# GGUF's token types (gguf.TokenType).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_TYPES = {
    "gpt2": {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED},
    "llama": {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE},
}
_METASPACE = "▁"

# Settings that say nothing which a tokenizer.json or an engine needs: marks for filling in the middle of a
# text (prompts spell them out), and a copy of the whole tokenizer.json that some converters add.
_IGNORED = (
    *(
        f"ggml.{name}_token_id"
        for name in ("prefix", "suffix", "middle", "seperator", "cls", "mask")
    ),
    *(f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    "huggingface.json",
)


def make_tokenizer(model: Model) -> Tokenizer:
    """The tokenizer, ready to be saved. Raises ``ModelStoreError`` for one that is not translated."""
    model.ignore(*(f"tokenizer.{name}" for name in _IGNORED))
    kind = model.take("tokenizer.ggml.model", str)
    if kind not in _TYPES:
        model.refuse("tokenizer.ggml.model", ", ".join(_TYPES))
    tokens = _strings(model, "tokens")
    types = _checked_types(model, _TYPES[kind], len(tokens))
    try:
        tokenizer = (_byte_level if kind == "gpt2" else _sentence_piece)(model, tokens, types)
    except (ModelStoreError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises the bare type
        raise ModelStoreError(f"{model.name}: no tokenizer can be made of it: {error}") from error
    tokenizer.add_tokens(_added_tokens(tokens, types))
    _add_ends(model, tokenizer, tokens, add_bos=_adds_bos(model, kind))
    return tokenizer


def token_ids(model: Model) -> dict[str, Any]:
    """bos, eos and pad as config.json and generation_config.json name them; ends of a turn or of a
    message, where the file has them too, are further eos."""
    ids: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (value := _token_id(model, theirs)) is not None:
            ids[f"{ours}_token_id"] = value
    ends = [ids.get("eos_token_id"), _token_id(model, "eot"), _token_id(model, "eom")]
    different = list(dict.fromkeys(one for one in ends if one is not None))
    if len(different) > 1:
        ids["eos_token_id"] = different
    return ids


def tokenizer_config(model: Model, max_length: int) -> dict[str, Any]:
    tokens = model.settings["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {ours: _token_id(model, theirs) for ours, theirs in names.items()}
    special = {f"{ours}_token": tokens[value] for ours, value in ids.items() if value is not None}
    return {
        **_chat_template(model),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        # The class that takes tokenizer.json as it is; a model's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }


def _chat_template(model: Model) -> dict[str, Any]:
    """The one template; with others beside it (of tools, say), the list of all."""
    key = "tokenizer.chat_template"
    template = model.take(key, str, None)
    model.ignore(f"{key}s")
    prefix = f"{key}."
    named = {
        name.removeprefix(prefix): model.take(name, str)
        for name in model.settings
        if name.startswith(prefix)
    }
    if template is None and not named:
        return {}
    if not named:
        return {"chat_template": template}
    templates = ({"default": template} if template is not None else {}) | named
    return {"chat_template": [{"name": name, "template": templates[name]} for name in templates]}


def _byte_level(model: Model, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    split = _split(model)
    merges = [_pair(merge) for merge in _strings(model, "merges")]
    model.ignore("tokenizer.ggml.scores")
    if model.take("tokenizer.ggml.add_space_prefix", bool, False):
        model.refuse("tokenizer.ggml.add_space_prefix", "False")
    vocabulary = _vocabulary(model, tokens, types)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.ignore_merges))
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    tokenizer.pre_tokenizer = split.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _split(model: Model) -> Split:
    pre = model.take("tokenizer.ggml.pre", str, None)
    if pre not in SPLITS:
        model.refuse("tokenizer.ggml.pre", ", ".join(SPLITS))
    return SPLITS[pre]


def _sentence_piece(model: Model, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Spaces are metaspaces, one goes before every stretch of text, and a character that is no piece
    is spelled in bytes."""
    model.ignore("tokenizer.ggml.pre")
    if model.take("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        model.refuse("tokenizer.ggml.remove_extra_whitespaces", "False")
    scores = model.take("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ModelStoreError(f"{model.name} has {len(scores)} scores for {len(tokens)} tokens")
    has_prefix = model.take("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = _token_id(model, "unknown")
    vocabulary = _vocabulary(model, tokens, types)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _METASPACE)
    prefix = [normalizers.Prepend(_METASPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    back = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence([*back, *strip])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that make the piece with the best score: each way to make a
    piece is a merge, and the better piece's come first; of equals, the earlier in the vocabulary."""

    def ways() -> Iterator[tuple[float, int, int, int, str, str]]:
        for piece, token_id in vocabulary.items():
            for cut in range(1, len(piece)):
                left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
                if left is not None and right is not None:
                    yield -scores[token_id], token_id, left, right, piece[:cut], piece[cut:]

    return [(left, right) for *_, left, right in sorted(ways())]


def _vocabulary(model: Model, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """What is unused only fills the embedding's last rows: a text never has it, nor is it shown."""
    used = [(token, i) for i, token in enumerate(tokens) if types[i] != _UNUSED]
    vocabulary = dict(used)
    if len(vocabulary) != len(used):
        raise ModelStoreError(f"{model.name}: tokenizer.ggml.tokens names a token twice")
    return vocabulary


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Tokens that are matched in the text before BPE: the special ones and the user-defined ones."""
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]


def _adds_bos(model: Model, kind: str) -> bool:
    """Where the file does not say it, it is as llama.cpp takes it to be."""
    default = True if kind == "llama" else _split(model).adds_bos
    return bool(model.take("tokenizer.ggml.add_bos_token", bool, default))


def _add_ends(model: Model, tokenizer: Tokenizer, tokens: Sequence[str], *, add_bos: bool) -> None:
    """The tokens that go round every text, unless its caller says otherwise."""
    if model.take("tokenizer.ggml.add_sep_token", bool, False):
        model.refuse("tokenizer.ggml.add_sep_token", "False")
    add_eos = model.take("tokenizer.ggml.add_eos_token", bool, False)
    bos = _end(model, tokens, "bos") if add_bos else []
    eos = _end(model, tokens, "eos") if add_eos else []
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{token}:0" for token in (*(t for t, _ in bos), "$A", *(t for t, _ in eos))],
            special_tokens=[*bos, *eos],
        )


def _end(model: Model, tokens: Sequence[str], name: str) -> list[tuple[str, int]]:
    token_id = _token_id(model, name)
    if token_id is None:
        raise ModelStoreError(
            f"{model.name}: tokenizer.ggml.add_{name}_token is True, but there is no {name}_token_id"
        )
    return [(tokens[token_id], token_id)]


def _token_id(model: Model, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = model.take(key, int, None)
    if value is not None and not 0 <= value < len(model.settings["tokenizer.ggml.tokens"]):
        model.refuse(key, "the id of a token")
    return value


def _checked_types(model: Model, allowed: set[int], count: int) -> list[int]:
    """All are normal if there is no such setting."""
    types = model.take("tokenizer.ggml.token_type", list, None) or [_NORMAL] * count
    if len(types) != count:
        raise ModelStoreError(f"{model.name} has {len(types)} token types for {count} tokens")
    if not set(types) <= allowed:
        raise ModelStoreError(
            f"{model.name}: token types are {sorted(set(types))}; allowed here: {sorted(allowed)}"
        )
    return types


def _strings(model: Model, name: str) -> list[str]:
    values = model.take(f"tokenizer.ggml.{name}", list)
    if not all(type(value) is str for value in values):
        model.refuse(f"tokenizer.ggml.{name}", "strings")
    return values
