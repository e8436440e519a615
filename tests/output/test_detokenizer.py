"""The incremental detokenizer: every token's text, exactly once, and never the prompt's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiny_tokenizers import PIECES, byte_fallback_tokenizer, ids
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from trioleg.config import DETOKENIZERS
from trioleg.errors import OutputError
from trioleg.output.decoders import Decoder
from trioleg.output.detokenizer import IncrementalDetokenizer, NoDetokenizer
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


@pytest.fixture(params=DETOKENIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every test below holds for both implementations."""
    return str(request.param)


def make(
    kind: str, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, prompt, params, kind=kind)


def pieces(detokenizer: IncrementalDetokenizer, steps: Iterable[list[int]]) -> list[str]:
    out = []
    for step in steps:
        assert detokenizer.update(list(step), False) is None
        out.append(detokenizer.take(everything=False))
    return out


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["text"])
def test_pieces_come_with_the_token_that_finishes_the_character(
    smollm2_tokenizer: Tokenizer, vector: dict, kind: str
) -> None:
    detokenizer = make(kind, smollm2_tokenizer, [1], SamplingParams())
    made = pieces(detokenizer, [[i] for i in vector["ids"]])
    assert made == [piece or "" for piece in vector["pieces"]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_text_does_not_depend_on_the_steps(
    smollm2_tokenizer: Tokenizer, size: int, kind: str
) -> None:
    for case in json.loads((DATA / "smollm2_tokens.json").read_text())["cases"]:
        detokenizer = make(kind, smollm2_tokenizer, [1], SamplingParams())
        token_ids = case["ids"]
        steps = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        text = "".join(pieces(detokenizer, steps))
        detokenizer.flush()
        assert text + detokenizer.take(everything=True) == case["decoded_skip_special"]


def test_no_prompt_text_in_a_delta(smollm2_tokenizer: Tokenizer, kind: str) -> None:
    leak = VECTORS["prompt_leak"]
    detokenizer = make(kind, smollm2_tokenizer, leak["prompt_ids"], SamplingParams())
    assert pieces(detokenizer, [[leak["next_id"]]]) == [leak["right_first_delta"]]


def test_no_prompt_text_when_the_output_is_empty(smollm2_tokenizer: Tokenizer, kind: str) -> None:
    leak = VECTORS["prompt_leak"]
    detokenizer = make(kind, smollm2_tokenizer, leak["prompt_ids"], SamplingParams())
    detokenizer.flush()
    assert detokenizer.take(everything=True) == ""


def test_cafe_on_byte_fallback_is_three_pieces_with_an_empty_middle(
    byte_fallback: Tokenizer, kind: str
) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    assert pieces(detokenizer, [[i] for i in ids("caf", "C3", "A9")]) == ["caf", "", "é"]


def test_the_space_before_a_word_is_kept(byte_fallback: Tokenizer, kind: str) -> None:
    prompt = ids("<s>", "a")
    detokenizer = make(kind, byte_fallback, prompt, SamplingParams())
    assert pieces(detokenizer, [[i] for i in ids("▁Paris", "▁", "▁", "b")]) == [
        " Paris",
        " ",
        " ",
        "b",
    ]


def test_a_character_cut_by_the_end_is_dropped(byte_fallback: Tokenizer, kind: str) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    made = pieces(detokenizer, [[i] for i in ids("a", "E3", "81")])
    detokenizer.flush()
    assert "".join(made) + detokenizer.take(everything=True) == "a"


def test_a_literal_replacement_character_is_text(byte_fallback: Tokenizer, kind: str) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    made = pieces(detokenizer, [[i] for i in ids("a", "EF", "BF", "BD")])
    detokenizer.flush()
    assert "".join(made) + detokenizer.take(everything=True) == "a�"


def test_a_stop_token_is_counted_and_hidden(byte_fallback: Tokenizer, kind: str) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    step = ids("a", "b", "c")
    assert detokenizer.update(step, True) is None
    assert detokenizer.take(everything=True) == "ab"
    assert step == ids("a", "b", "c")
    assert detokenizer.num_output_tokens == 3


def test_a_stop_token_is_shown_where_asked_for(byte_fallback: Tokenizer, kind: str) -> None:
    params = SamplingParams(include_stop_str_in_output=True)
    detokenizer = make(kind, byte_fallback, ids("<s>"), params)
    detokenizer.update(ids("a", "b", "c"), True)
    assert detokenizer.take(everything=True) == "abc"


def test_special_tokens_are_left_out_or_shown(byte_fallback: Tokenizer, kind: str) -> None:
    steps = [[i] for i in ids("a", "</s>", "b")]
    hidden = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    assert "".join(pieces(hidden, steps)) == "ab"
    params = SamplingParams(skip_special_tokens=False)
    shown = make(kind, byte_fallback, ids("<s>"), params)
    assert "".join(pieces(shown, steps)) == "a</s>b"


def test_ids_between_tokenizer_and_model_size_are_silent(
    byte_fallback: Tokenizer, kind: str
) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    assert pieces(detokenizer, [ids("a"), [len(PIECES) + 3], ids("b")]) == ["a", "", "b"]


@pytest.mark.parametrize("bad", [-1, len(PIECES) + 10, 2**40])
def test_ids_outside_the_vocabulary_are_an_error(
    byte_fallback: Tokenizer, bad: int, kind: str
) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    with pytest.raises(OutputError, match=f"token id {bad}; this model's ids are 0 to"):
        detokenizer.update([bad], False)


class FailsOnce:
    """A decoder that raises at one step, with a message that no release has had."""

    def __init__(self, decoder: Decoder, token_id: int) -> None:
        self._decoder = decoder
        self._token_id = token_id
        self.pending: list[int] = []
        self.prefix: list[int] = []

    def step(self, token_id: int) -> str | None:
        if token_id == self._token_id:
            raise RuntimeError("whatever the next release says")
        piece = self._decoder.step(token_id)
        self.pending, self.prefix = list(self._decoder.pending), list(self._decoder.prefix)
        return piece


def test_a_decoder_that_fails_is_replaced_and_no_text_is_lost(
    byte_fallback: Tokenizer, kind: str
) -> None:
    """A2: the fault costs nothing, not even a word's leading space."""
    tokens = ids("a", "▁b", "▁Paris", "c")
    faulty, other = (make(kind, byte_fallback, ids("<s>"), SamplingParams()) for _ in range(2))
    faulty._decoder = FailsOnce(faulty._decoder, tokens[2])
    steps = [[one] for one in tokens]
    assert pieces(faulty, steps) == pieces(other, steps) == ["a", " b", " Paris", "c"]


def test_a_broken_byte_costs_no_character_that_is_out(byte_fallback: Tokenizer, kind: str) -> None:
    """A family of decoders takes a run of bytes back as a whole; what is out stays."""
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    tokens = ids("a", "C3", "A9", "80", "▁b", "c")
    assert byte_fallback.decode(tokens) == "a\ufffd\ufffd\ufffd bc"
    assert pieces(detokenizer, [[one] for one in tokens]) == ["a", "", "é", "", "\ufffd b", "c"]


def test_tokens_without_text_do_not_pile_up(byte_fallback: Tokenizer, kind: str) -> None:
    """What is pending is looked at with every token, so it has a bound."""
    detokenizer = make(kind, byte_fallback, ids("<s>", "a"), SamplingParams())
    silent = ids("</s>") * 1000
    assert "".join(pieces(detokenizer, [silent])) == ""
    assert len(detokenizer.pending()) <= 17
    assert pieces(detokenizer, [ids("▁b")]) == [" b"]


def test_bytes_that_never_become_a_character_come_out(byte_fallback: Tokenizer, kind: str) -> None:
    detokenizer = make(kind, byte_fallback, ids("<s>"), SamplingParams())
    text = "".join(pieces(detokenizer, [ids("80") * 100, ids("C3", "A9", "a")]))
    assert text == "\ufffd" * 100 + "éa" or text == "\ufffd" * 102 + "a"
    assert not detokenizer.pending()


def test_a_prompt_that_ends_in_a_broken_character(byte_fallback: Tokenizer, kind: str) -> None:
    """What the output does not finish is the prompt's, not even a U+FFFD of it is ours."""
    detokenizer = make(kind, byte_fallback, ids("<s>", "a", "C3"), SamplingParams())
    assert pieces(detokenizer, [ids("b"), ids("C3"), ids("A9")]) == ["b", "", "é"]


@pytest.mark.parametrize("length", range(1, 12))
def test_a_prompt_of_nothing_but_bytes(byte_fallback: Tokenizer, kind: str, length: int) -> None:
    """However long it is, what we look at of it begins where a character does."""
    character = ids("E2", "82", "AC")
    prompt = ids("<s>") + character * length
    detokenizer = make(kind, byte_fallback, prompt, SamplingParams())
    assert pieces(detokenizer, [[one] for one in character * 2]) == ["", "", "€"] * 2


def test_a_broken_run_in_the_prompt_is_no_fault(byte_fallback: Tokenizer, kind: str) -> None:
    prompt = ids("<s>", "C3", "A9", "80", "a")
    detokenizer = make(kind, byte_fallback, prompt, SamplingParams())
    assert pieces(detokenizer, [ids("▁b")]) == [" b"]


def test_without_detokenize_there_is_no_text_but_every_id_is_checked() -> None:
    detokenizer = NoDetokenizer(10)
    assert detokenizer.update([1, 9], False) is None
    assert (detokenizer.num_output_tokens, detokenizer.take(everything=True)) == (2, "")
    with pytest.raises(OutputError, match="token id 10; this model's ids are 0 to 9"):
        detokenizer.update([10], False)


@pytest.fixture(scope="module")
def word_piece() -> Tokenizer:
    """A decoder that puts a space before every token that does not go on with a word."""
    vocab = {"[UNK]": 0, "run": 1, "##ning": 2, "a": 3}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.add_special_tokens(["[A]", "[B]"])
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend=backend, vocab_size=10, max_chars_per_token=6)


@pytest.mark.parametrize(("spaces", "text"), [(True, "run [A] [B] a"), (False, "run [A][B] a")])
def test_spaces_between_special_tokens(
    word_piece: Tokenizer, kind: str, spaces: bool, text: str
) -> None:
    """A7: both implementations write, or leave out, the space between two added tokens."""
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    detokenizer = make(kind, word_piece, [3], params)
    assert "".join(pieces(detokenizer, [[1], [4], [5], [3]])) == f" {text}"


@pytest.mark.parametrize("text", ["a    b", " x. y", "\n\n  a", "ab  "])
def test_runs_of_spaces_survive_one_token_a_step(
    smollm2_tokenizer: Tokenizer, kind: str, text: str
) -> None:
    """Byte-level pieces: no space is lost, doubled or moved, as by tokenizers that clean up (A6)."""
    detokenizer = make(kind, smollm2_tokenizer, [1], SamplingParams())
    assert "".join(pieces(detokenizer, [[i] for i in smollm2_tokenizer.encode(text)])) == text


@pytest.mark.parametrize("text", ["a    b", " a. b", "  a"])
def test_metaspaces_survive_one_token_a_step(
    byte_fallback: Tokenizer, kind: str, text: str
) -> None:
    """Metaspace pieces, which a decoder strips at the beginning of each text that it sees (A6)."""
    tokens = [PIECES.index("▁" if one == " " else one) for one in text.replace(".", "c")]
    detokenizer = make(kind, byte_fallback, ids("<s>", "a"), SamplingParams())
    assert "".join(pieces(detokenizer, [[i] for i in tokens])) == text.replace(".", "c")
