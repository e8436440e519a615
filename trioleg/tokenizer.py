"""What the front end knows of a model: its tokenizer, chat template, end tokens and limits.

Rules of this file: pure and synchronous; imports only ``errors``, ``model_files``, ``chat_template``,
``pooling_model`` and ``token_pieces``. It reads the JSON files of a Hugging Face directory, never the weights.

Everything is read once, by ``Tokenizer.from_directory``; a value that a later hop would trip over is
refused there, with the file's name. After that an object does not change, and threads may share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from .chat_template import ChatTemplate
from .errors import InvalidRequestError, ModelStoreError
from .model_files import LARGEST_INTEGER, read_json_object
from .pooling_model import PoolingModel
from .token_pieces import TokenPieces

__all__ = ["Tokenizer"]

# The settings of generation_config.json that vLLM takes as defaults for sampling.
_GENERATION_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenizer:
    """A model's tokenizer and what its directory says about prompts and endings.

    vocab_size: the model's own; ids at or above it are bad, whatever the tokenizer knows.
    eos_token_id: the tokenizer's end token; other_eos_token_ids: further ones, which vLLM treats as
    stop tokens. max_model_len: tokens, prompt and answer together, None if the model does not say.
    generation_defaults: temperature, top_p, … as far as the model's author recommends any.
    max_chars_per_token: characters of the longest vocabulary entry, so a text of n characters has at
    least n / max_chars_per_token tokens. That holds for byte-level vocabularies and for metaspace ones
    with byte fallback (their entries are never shorter than the text they stand for), added tokens
    included. It does not for vocabularies with an unknown token, which can swallow a whole word, nor
    for characters that a vocabulary leaves out (in SmolLM2's, a few control characters).
    truncation_side: which end of a text goes, where one is to be shortened. pooling: of its vectors, if it makes any.
    pieces: what each token stands for by itself, and which tokens are added or special.
    model_dir: where it was read; None for one that was made in memory.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    eos_token_id: int | None = None
    other_eos_token_ids: tuple[int, ...] = ()
    max_model_len: int | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_chars_per_token: int
    chat_template: ChatTemplate | None = None
    truncation_side: str = "right"
    pooling: PoolingModel = field(default_factory=PoolingModel)
    model_dir: Path | None = None
    pieces: TokenPieces = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", TokenPieces(self.backend))

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json and config.json and, where there are any, tokenizer_config.json,
        generation_config.json and chat_template.jinja.

        Raises ``ModelStoreError`` naming the file that is missing or that cannot be used.
        """
        backend = _load_backend(path / "tokenizer.json")
        config_file = path / "config.json"
        config = _language_model(read_json_object(config_file), config_file)
        generation_file = path / "generation_config.json"
        generation = read_json_object(generation_file, optional=True)
        tokenizer_config = read_json_object(path / "tokenizer_config.json", optional=True)
        vocab_size = _positive(config, "vocab_size", config_file)
        if vocab_size is None:
            raise ModelStoreError(f"{config_file} has no vocab_size")
        eos_ids = _token_ids(generation, generation_file) or _token_ids(config, config_file)
        eos_token_id = _own_eos(backend, tokenizer_config)
        if eos_token_id is None and eos_ids:
            eos_token_id = eos_ids[0]
        return cls(
            backend=backend,
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            other_eos_token_ids=tuple(one for one in eos_ids if one != eos_token_id),
            max_model_len=_positive(config, "max_position_embeddings", config_file),
            generation_defaults=_generation_defaults(generation, generation_file),
            max_chars_per_token=max(map(len, backend.get_vocab()), default=1),
            chat_template=ChatTemplate.from_directory(path, tokenizer_config),
            truncation_side="left"
            if tokenizer_config.get("truncation_side") == "left"
            else "right",
            pooling=PoolingModel.from_directory(path, config),
            model_dir=path,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; special tokens that it spells out are recognised.

        Takes about half a second for 1 MB, so text of unknown size belongs in a thread. Raises
        ``InvalidRequestError`` for a lone surrogate.
        """
        return self.tokenize(text, add_special_tokens=add_special_tokens).ids

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """The same before it is a list: ``len()`` of it is free, its ``ids`` are made anew by every look, which
        for a million of them stops the whole process for 40 ms."""
        _check_characters(text, "prompt")
        # Only the batch calls release the interpreter's lock: with ``encode``, 5 MB in a thread stop the
        # whole process for 4 s.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def tokenize_beginning(
        self, text: str, length: int, *, side: str | None = None, add_special_tokens: bool = True
    ) -> tokenizers.Encoding:
        """At most ``length`` tokens, special ones included: of a longer text its beginning, or its end, if the
        ``side`` that goes is "left" (None: the tokenizer's own). Raises ``InvalidRequestError``."""
        num_added = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        if length <= num_added:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {length}; allowed: at least {num_added + 1}, since the tokenizer adds "
                f"{num_added} to every text",
                parameter="truncate_prompt_tokens",
            )
        encoding = self.tokenize(text, add_special_tokens=False)
        encoding.truncate(length - num_added, direction=side or self.truncation_side)
        return self.backend.post_process(encoding, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a whole; ids that the tokenizer does not know have none."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as one text, to be encoded without adding special tokens again.

        ``messages`` have a role and a content that is a string. Raises ``InvalidRequestError``
        (parameter "messages") if the model has no template or its template rejects them.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "messages cannot be used: the model has no chat template; allowed: text or token ids",
                parameter="messages",
            )
        text = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        _check_characters(text, "messages")
        return text


def _check_characters(text: str, parameter: str) -> None:
    r"""JSON can spell half of a surrogate pair ("\ud800"); UTF-8, and so the tokenizer, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{parameter} holds the lone surrogate U+{ord(text[error.start]):04X}; "
            "allowed: Unicode characters",
            parameter=parameter,
        ) from None


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ModelStoreError(f"{file} is missing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises the bare type
        raise ModelStoreError(f"{file} cannot be read: {error}") from error
    # Some files were saved with the settings of a training run.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _language_model(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """A model of text and images keeps its language model's settings one level down."""
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise ModelStoreError(f"{file}: text_config is {_shown(nested)}; allowed: a JSON object")
    return config | nested


def _positive(settings: Mapping[str, Any], name: str, file: Path) -> int | None:
    value = settings.get(name)
    if value is None or (_is_number(value, int) and 0 < value <= LARGEST_INTEGER):
        return value
    allowed = f"an integer from 1 to {LARGEST_INTEGER}"
    raise ModelStoreError(f"{file}: {name} is {_shown(value)}; allowed: {allowed}")


def _token_ids(settings: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    value = settings.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(_is_number(one, int) and 0 <= one <= LARGEST_INTEGER for one in ids):
        shown = _shown(value)
        raise ModelStoreError(f"{file}: eos_token_id is {shown}; allowed: a token id or a list")
    return tuple(dict.fromkeys(ids))


def _own_eos(backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any]) -> int | None:
    """The id of the end token that the tokenizer itself names; it is the one that ends a chat turn."""
    token = tokenizer_config.get("eos_token")
    content = token.get("content") if isinstance(token, Mapping) else token
    return backend.token_to_id(content) if isinstance(content, str) else None


def _generation_defaults(generation: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    found = {}
    for name in _GENERATION_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        if not _is_number(value, int | float) or not abs(value) <= LARGEST_INTEGER:
            allowed = f"a number from -{LARGEST_INTEGER} to {LARGEST_INTEGER}"
            raise ModelStoreError(f"{file}: {name} is {_shown(value)}; allowed: {allowed}")
        found[name] = value
    return MappingProxyType(found)


def _shown(value: Any) -> str:
    """For one line of a person's."""
    text = repr(value)
    return f"{text[:200]}…" if len(text) > 200 else text


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
