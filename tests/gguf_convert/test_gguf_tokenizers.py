"""Tokenizers: through a GGUF file and back, text becomes the same tokens, and tokens the same text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
from gguf_writing import SMALL, Vocabulary, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import tokenizer_directory

from trioleg.errors import ModelStoreError
from trioleg.gguf_convert import convert
from trioleg.gguf_convert.splits import SPLITS
from trioleg.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces, a trailing one ",
    "tabs\tand\t\ttabs\n\n\nlines\r\n\r\n  indented\n ",
    "It's we've I'll they'D SHE'S 'quoted' don''t",
    "0 12 123 1234 12345678 3.14159 1,000,000 ²³ ½ Ⅷ ٣٤٥ १२३",
    "def f(x):\n    return {**x, 'a': [1, 2]}  # why?\n\n\tif a<=b && c!=d || ~e^f: pass",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file.txt",
    "Ünïcödé naïve café Straße ŒUVRE ﬁn İstanbul",
    "e\u0301 decomposed, n\u0303, \u1100\u1161\u11a8",
    "Русский язык, Ελληνικά, עברית, العربية, فارسی",
    "हिन्दी की वर्णमाला, ไทยไม่มีเว้นวรรค, ქართული, አማርኛ",
    "中文字符没有空格。日本語のかな漢字カタカナ、한국어 띄어쓰기",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ✈️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "zero\u200bwidth \u00a0nbsp\u3000ideographic \u2028line \ufeffbom",
    "control \x00\x01\x07\x1b[0m \x7f",
    "ＦＵＬＬ－ｗｉｄｔｈ １２３, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛, ℵ∀∃∑∞≈, ±§¶†‡…—–",
    "<s>system</s> <unk> <0x41> <|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<think>\n\n</think> <tool_call>{}</tool_call><|fim_prefix|> [PAD151669] <|begin_of_text|>",
    "▁metaspace ▁▁ ĠĊ",
    "a" * 300 + " " * 50 + "!" * 70 + "\n" * 20,
]

# Each real tokenizer, and what its GGUF says of it.
REAL: dict[str, dict[str, Any]] = {
    "smollm2": {"pre": "smollm"},
    "llama2": {"model": "llama", "pre": "default", "ids": {"bos": 1, "eos": 2, "unknown": 0}},
    "llama3": {"pre": "llama-bpe", "ids": {"bos": 128000, "eos": 128009}},
    "qwen3": {"pre": "qwen2", "size": 151936, "flags": {"add_bos_token": False}},
}


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> Path:
    """The smallest model with this vocabulary: no layer but one, two numbers wide."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(2)
    writer.add_feed_forward_length(2)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary.write(writer)
    square, vector = np.ones((2, 2), np.float32), np.ones(2, np.float32)
    writer.add_tensor("token_embd.weight", np.ones((len(vocabulary.tokens), 2), np.float32))
    writer.add_tensor("output_norm.weight", vector)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(folder: Path, vocabulary: Vocabulary) -> Tokenizer:
    source, directory = write_vocabulary(folder / "a.gguf", vocabulary), folder / "made"
    directory.mkdir()
    convert([source], directory, lambda done, total: None)
    return Tokenizer.from_directory(directory)


@functools.cache
def original(name: str) -> Tokenizer:
    return Tokenizer.from_directory(tokenizer_directory(name))


@pytest.fixture(scope="module", params=REAL)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    """The original, and what came of it by way of a GGUF."""
    name = request.param
    vocabulary = vocabulary_of(tokenizer_directory(name) / "tokenizer.json", **REAL[name])
    return original(name), converted(tmp_path_factory.mktemp(name), vocabulary)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_becomes_the_same_tokens(
    pair: tuple[Tokenizer, Tokenizer], text: str, special: bool
) -> None:
    there, again = (one.encode(text, add_special_tokens=special) for one in pair)
    assert again == there
    assert [one.decode(there) for one in pair] == [pair[0].decode(there)] * 2


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_text_becomes_the_same_tokens(
    pair: tuple[Tokenizer, Tokenizer], data: st.DataObject
) -> None:
    pieces = st.sampled_from([text[i : i + 9] for text in TEXTS for i in range(0, len(text), 7)])
    text = data.draw(st.lists(pieces | st.text(max_size=5), max_size=6).map("".join))
    assert pair[1].encode(text) == pair[0].encode(text)


def test_what_a_token_stands_for_is_the_same(pair: tuple[Tokenizer, Tokenizer]) -> None:
    there, again = (one.pieces for one in pair)
    assert again.added_token_ids == there.added_token_ids
    assert again.special_token_ids == there.special_token_ids
    ids = range(0, pair[1].vocab_size, 97)
    assert [again.bytes_of(i) for i in ids] == [there.bytes_of(i) for i in ids]


# Each family's own pattern as its authors print it (openai/gpt-2, src/encoder.py; the pattern in Mistral's
# tekken.json), and llama.cpp's for models that it does not know.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNKNOWN = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def words(patterns: tuple[str, ...], text: str) -> list[str]:
    """Pattern by pattern, what matches and what lies between."""
    pieces = [text]
    for pattern in patterns:
        cut = [regex.split(f"({pattern})", piece) for piece in pieces]
        pieces = [piece for some in cut for piece in some if piece]
    return pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("pre", "patterns"), [("gpt-2", (_GPT2,)), ("tekken", (_TEKKEN,)), ("default", _UNKNOWN)]
)
def test_text_is_cut_where_its_pattern_cuts_it(
    pre: str, patterns: tuple[str, ...], text: str
) -> None:
    cut = SPLITS[pre].pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words(patterns, text)


def test_ends_of_a_text_are_added_as_the_file_says(tmp_path: Path) -> None:
    vocabulary = Vocabulary(
        SMALL.tokens,
        [3, 3, 3, *SMALL.types[3:]],
        merges=SMALL.merges,
        ids={"bos": 1, "eos": 2, "eot": 0},
        flags={"add_bos_token": True, "add_eos_token": True},
    )
    tokenizer = converted(tmp_path, vocabulary)
    ids = tokenizer.encode("hello")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:-1]
    assert (tokenizer.eos_token_id, tokenizer.other_eos_token_ids) == (2, (0,))


def test_templates_beside_the_main_one_are_kept(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "main"},
        {"name": "tool_use", "template": "tools"},
    ]
    vocabulary = Vocabulary(SMALL.tokens, SMALL.types, merges=SMALL.merges, templates=templates)
    tokenizer = converted(tmp_path, vocabulary)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "main"
    config = json.loads((tmp_path / "made/tokenizer_config.json").read_text())
    assert config["chat_template"] == templates


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; .*gpt2, llama"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"flags": {"add_space_prefix": True}}, "add_space_prefix is True"),
        ({"flags": {"add_sep_token": True}}, "add_sep_token is True"),
        ({"flags": {"add_bos_token": True}}, "there is no bos_token_id"),
        ({"flags": {"lower_case": True}}, "settings tokenizer.ggml.lower_case"),
        ({"ids": {"bos": 999}}, "bos_token_id is 999"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "1 scores for 263 tokens"),
        ({"merges": ["h nonsense"]}, "no tokenizer can be made of it: .*nonsense"),
    ],
)
def test_a_tokenizer_that_is_not_translated_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    usual = {"tokens": SMALL.tokens, "types": SMALL.types, "merges": SMALL.merges}
    with pytest.raises(ModelStoreError, match=rf"a\.gguf.*{named}"):
        converted(tmp_path, Vocabulary(**{**usual, **changes}))
