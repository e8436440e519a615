"""What is read of a pooling model's directory, and a real one: a WordPiece tokenizer that adds [CLS] and [SEP]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from minilm import all_minilm, without_weights

from trioleg import model_store
from trioleg.errors import InvalidRequestError, ModelStoreError
from trioleg.pooling_model import PoolingModel
from trioleg.prompts import TokenizeParams, Tokenizing, prepare_prompt
from trioleg.tokenizer import Tokenizer

CLS, SEP, UNKNOWN = 101, 102, 100


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = without_weights(all_minilm(), tmp_path_factory.mktemp("minilm") / "model")
    return Tokenizer.from_directory(model_store.resolve(str(directory), weights=False))


def test_a_bert_is_read(minilm: Tokenizer) -> None:
    # The lengths that a text is cut and filled up to in this tokenizer.json are not ours.
    assert minilm.encode("The sea is blue.") == [CLS, 1996, 2712, 2003, 2630, 1012, SEP]
    assert minilm.encode("The sea is blue.", add_special_tokens=False)[0] == 1996
    assert minilm.encode("été 🌶") == [*minilm.encode("ETE")[:-1], UNKNOWN, SEP]
    assert len(minilm.encode("sea " * 300)) == 302
    assert (minilm.vocab_size, minilm.max_model_len) == (30522, 512)
    assert (minilm.eos_token_id, minilm.chat_template) == (None, None)
    assert minilm.pooling == PoolingModel(use_activation=True)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        minilm.apply_chat_template([{"role": "user", "content": "a"}])


def read(tokenizer: Tokenizer, prompt: Any, **how: Any) -> list[int]:
    prepared = prepare_prompt(prompt, tokenizer, 16, TokenizeParams(room=0, **how))
    return prepared.run() if isinstance(prepared, Tokenizing) else prepared


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("length", [3, 4, 9, 16, -1])
def test_what_is_cut_keeps_its_special_tokens(
    minilm: Tokenizer, side: str | None, length: int
) -> None:
    text = " ".join(str(number) for number in range(30))
    whole = minilm.encode(text, add_special_tokens=False)
    kept = (16 if length == -1 else length) - 2
    part = whole[-kept:] if side == "left" else whole[:kept]
    how = {"truncate_prompt_tokens": length, "truncation_side": side}
    assert read(minilm, text, **how) == [CLS, *part, SEP]
    bare = whole[-kept - 2 :] if side == "left" else whole[: kept + 2]
    assert read(minilm, text, add_special_tokens=False, **how) == bare
    assert read(minilm, whole, **how) == bare


def test_what_fits_is_not_cut(minilm: Tokenizer) -> None:
    assert read(minilm, "the sea", truncate_prompt_tokens=9) == minilm.encode("the sea")


def test_a_text_needs_one_token_of_its_own(minilm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="is 2; allowed: at least 3") as caught:
        read(minilm, "the sea", truncate_prompt_tokens=2)
    assert caught.value.parameter == "truncate_prompt_tokens"


def test_the_tokenizers_own_side(tmp_path: Path) -> None:
    directory = without_weights(all_minilm(), tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["truncation_side"] = "left"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_directory(directory)
    assert read(tokenizer, "the sea", truncate_prompt_tokens=3) == [CLS, 2712, SEP]
    assert read(tokenizer, [1996, 2712], truncate_prompt_tokens=1) == [2712]


def module(name: str) -> dict[str, Any]:
    return {"type": f"sentence_transformers.models.{name}", "path": name}


CHAIN = [module("Transformer"), module("Pooling")]


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({}, {}, PoolingModel()),
        ({"modules.json": CHAIN}, {}, PoolingModel(use_activation=False)),
        ({"modules.json": [*CHAIN, module("Normalize")]}, {}, PoolingModel()),
        ({"modules.json": [module("Transformer"), "odd"]}, {}, PoolingModel()),
        (
            {"sentence_bert_config.json": {"max_seq_length": 9, "do_lower_case": True}},
            {},
            PoolingModel(do_lower_case=True),
        ),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, {}, PoolingModel()),
        ({}, {"is_matryoshka": True}, PoolingModel(is_matryoshka=True)),
        (
            {},
            {"matryoshka_dimensions": [64, 128]},
            PoolingModel(is_matryoshka=True, matryoshka_dimensions=(64, 128)),
        ),
    ],
)
def test_what_the_directory_says(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], expected: PoolingModel
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert PoolingModel.from_directory(tmp_path, config) == expected


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"config\.json: matryoshka_dimensions is \[0\]"):
        PoolingModel.from_directory(tmp_path, {"matryoshka_dimensions": [0]})
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelStoreError, match=r"modules\.json: holds no JSON array"):
        PoolingModel.from_directory(tmp_path, {})
