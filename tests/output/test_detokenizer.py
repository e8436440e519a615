"""The incremental detokenizer: every token's text, exactly once, and never the prompt's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiny_tokenizers import PIECES, byte_fallback_tokenizer, ids

from trioleg.errors import OutputError
from trioleg.output.detokenizer import IncrementalDetokenizer
from trioleg.sampling_params import SamplingParams
from trioleg.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
VECTORS = json.loads((DATA / "detok_vectors.json").read_text())


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return byte_fallback_tokenizer()


def pieces(detokenizer: IncrementalDetokenizer, steps: Iterable[list[int]]) -> list[str]:
    out = []
    for step in steps:
        assert detokenizer.update(list(step), False) is None
        out.append(detokenizer.take(everything=False))
    return out


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["text"])
def test_pieces_come_with_the_token_that_finishes_the_character(
    smollm2_tokenizer: Tokenizer, vector: dict
) -> None:
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, [1], SamplingParams())
    made = pieces(detokenizer, [[i] for i in vector["ids"]])
    assert made == [piece or "" for piece in vector["pieces"]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_text_does_not_depend_on_the_steps(smollm2_tokenizer: Tokenizer, size: int) -> None:
    for case in json.loads((DATA / "smollm2_tokens.json").read_text())["cases"]:
        detokenizer = IncrementalDetokenizer(smollm2_tokenizer, [1], SamplingParams())
        token_ids = case["ids"]
        steps = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        text = "".join(pieces(detokenizer, steps))
        detokenizer.flush()
        assert text + detokenizer.take(everything=True) == case["decoded_skip_special"]


def test_no_prompt_text_in_a_delta(smollm2_tokenizer: Tokenizer) -> None:
    leak = VECTORS["prompt_leak"]
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, leak["prompt_ids"], SamplingParams())
    assert pieces(detokenizer, [[leak["next_id"]]]) == [leak["right_first_delta"]]


def test_no_prompt_text_when_the_output_is_empty(smollm2_tokenizer: Tokenizer) -> None:
    leak = VECTORS["prompt_leak"]
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, leak["prompt_ids"], SamplingParams())
    detokenizer.flush()
    assert detokenizer.take(everything=True) == ""


def test_cafe_on_byte_fallback_is_three_pieces_with_an_empty_middle(
    byte_fallback: Tokenizer,
) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    assert pieces(detokenizer, [[i] for i in ids("caf", "C3", "A9")]) == ["caf", "", "é"]


def test_the_space_before_a_word_is_kept(byte_fallback: Tokenizer) -> None:
    prompt = ids("<s>", "a")
    detokenizer = IncrementalDetokenizer(byte_fallback, prompt, SamplingParams())
    assert pieces(detokenizer, [[i] for i in ids("▁Paris", "▁", "▁", "b")]) == [
        " Paris",
        " ",
        " ",
        "b",
    ]


def test_a_character_cut_by_the_end_is_dropped(byte_fallback: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    made = pieces(detokenizer, [[i] for i in ids("a", "E3", "81")])
    detokenizer.flush()
    assert "".join(made) + detokenizer.take(everything=True) == "a"


def test_a_literal_replacement_character_is_text(byte_fallback: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    made = pieces(detokenizer, [[i] for i in ids("a", "EF", "BF", "BD")])
    detokenizer.flush()
    assert "".join(made) + detokenizer.take(everything=True) == "a�"


def test_a_stop_token_is_counted_and_hidden(byte_fallback: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    step = ids("a", "b", "c")
    assert detokenizer.update(step, True) is None
    assert detokenizer.take(everything=True) == "ab"
    assert step == ids("a", "b", "c")
    assert detokenizer.num_output_tokens == 3


def test_a_stop_token_is_shown_where_asked_for(byte_fallback: Tokenizer) -> None:
    params = SamplingParams(include_stop_str_in_output=True)
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), params)
    detokenizer.update(ids("a", "b", "c"), True)
    assert detokenizer.take(everything=True) == "abc"


def test_special_tokens_are_left_out_or_shown(byte_fallback: Tokenizer) -> None:
    steps = [[i] for i in ids("a", "</s>", "b")]
    hidden = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    assert "".join(pieces(hidden, steps)) == "ab"
    params = SamplingParams(skip_special_tokens=False)
    shown = IncrementalDetokenizer(byte_fallback, ids("<s>"), params)
    assert "".join(pieces(shown, steps)) == "a</s>b"


def test_ids_between_tokenizer_and_model_size_are_silent(byte_fallback: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    assert pieces(detokenizer, [ids("a"), [len(PIECES) + 3], ids("b")]) == ["a", "", "b"]


@pytest.mark.parametrize("bad", [-1, len(PIECES) + 10, 2**40])
def test_ids_outside_the_vocabulary_are_an_error(byte_fallback: Tokenizer, bad: int) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())
    with pytest.raises(OutputError, match=f"token id {bad}; this model's ids are 0 to"):
        detokenizer.update([bad], False)


def test_a_decoder_that_fails_once_goes_on_afresh(
    byte_fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, ids("<s>"), SamplingParams())

    class Faulty:
        def step(self, backend: object, token_id: int) -> str:
            raise RuntimeError("whatever the next release says")

    assert pieces(detokenizer, [ids("a")]) == ["a"]
    monkeypatch.setattr(detokenizer, "_stream", Faulty())
    assert pieces(detokenizer, [ids("b"), ids("c")]) == ["b", "c"]
