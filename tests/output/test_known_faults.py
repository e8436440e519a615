"""What other servers' detokenizers and stop strings got wrong, one test for each kind.

Each test is a reported case (its number only tells the kinds apart), through the whole output processor, for
both detokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_arrays import logprobs_lists
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from trioleg.config import DETOKENIZERS
from trioleg.errors import InvalidRequestError
from trioleg.messages import EngineCoreOutput, FinishReason
from trioleg.output.processor import OutputProcessor, ProcessedOutputs
from trioleg.output.request_state import RequestState
from trioleg.outputs import EndingKind, RequestOutput
from trioleg.sampling_params import SamplingParams, StopHoldBack
from trioleg.tokenizer import Tokenizer

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "detok_vectors.json").read_text())

PIECES = ["<eos>", "a", "b", "c", "d", "e", "x", "y", "z", "STOP", " four", " five", " six"]
PIECES += ["The", " quick", " br", "own", " f", "ox", "UNO", " DUE", " TRE", "TRE", " "]
PIECES += [f"<0x{byte:02X}>" for byte in (0xC3, 0xA9, 0xE3)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every piece is a token, and the text is the pieces in a row."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, "<eos>"))
    backend.add_special_tokens(["<eos>"])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend=backend, vocab_size=len(PIECES), max_chars_per_token=6)


@pytest.fixture(params=DETOKENIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


class Run:
    """One request; ``step`` is one of its engine's, with a logprob for each token where asked for."""

    def __init__(self, tokenizer: Tokenizer, kind: str, params: SamplingParams) -> None:
        self.outputs: list[RequestOutput] = []
        self.processor = OutputProcessor()
        state = RequestState("r", [1], params, tokenizer, self, max_tokens=99, detokenizer=kind)
        self.processor.add_request(state)

    def put(self, output: RequestOutput) -> bool:
        self.outputs.append(output)
        return True

    def step(
        self, *pieces: str, finish: FinishReason | None = None, stop_reason: int | None = None
    ) -> ProcessedOutputs:
        token_ids = ids(*pieces)
        output = EngineCoreOutput("r", token_ids, finish_reason=finish, stop_reason=stop_reason)
        rows = [[(token_id, -1.0)] for token_id in token_ids]
        output.new_logprobs = logprobs_lists(rows, [1] * len(rows)) if rows else None
        return self.processor.process([output])

    @property
    def text(self) -> str:
        return "".join(one.outputs[0].text for one in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [i for one in self.outputs for i in one.outputs[0].token_ids]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a3_an_unfinished_character_is_held_back(smollm2: Path, kind: str, size: int) -> None:
    tokenizer = Tokenizer.from_directory(smollm2)
    for vector in VECTORS["vectors"]:
        run = Run(tokenizer, kind, SamplingParams())
        for start in range(0, len(vector["ids"]), size):
            step = vector["ids"][start : start + size]
            pieces = vector["pieces"][start : start + size]
            run.processor.process([EngineCoreOutput("r", list(step))])
            assert run.outputs[-1].outputs[0].text == "".join(piece or "" for piece in pieces)
        assert run.text == vector["text"]


def test_a8_a_stop_token_that_is_an_ordinary_word(tokenizer: Tokenizer, kind: str) -> None:
    (five,) = ids(" five")
    run = Run(tokenizer, kind, SamplingParams(stop_token_ids=[five]))
    run.step(" four", " five", " six", finish=FinishReason.STOP, stop_reason=five)
    assert run.text == " four"
    assert run.token_ids == ids(" four", " five")
    assert run.outputs[-1].outputs[0].stop_reason == five


def test_a9_a_stop_string_in_the_middle_of_a_step(tokenizer: Tokenizer, kind: str) -> None:
    run = Run(tokenizer, kind, SamplingParams(stop="STOP", logprobs=0))
    processed = run.step("a", "b", "STOP", "x", "y", "z")
    (completion,) = run.outputs[0].outputs
    assert completion.text == "ab"
    assert completion.token_ids == ids("a", "b", "STOP")
    assert len(completion.logprobs or ()) == 3
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")
    assert processed.aborts == ["r"]


@pytest.mark.parametrize("bad", [-1, len(PIECES) + 5, 2**40])
def test_a10_a_bad_id_is_one_requests_fault(tokenizer: Tokenizer, kind: str, bad: int) -> None:
    run = Run(tokenizer, kind, SamplingParams())
    other = Run(tokenizer, kind, SamplingParams())
    both = OutputProcessor()
    for name, one in (("bad", run), ("good", other)):
        both.add_request(
            RequestState(
                name, [1], SamplingParams(), tokenizer, one, max_tokens=9, detokenizer=kind
            )
        )
    processed = both.process([EngineCoreOutput("bad", [bad]), EngineCoreOutput("good", ids("a"))])
    assert [(name, end.kind) for name, end in processed.endings] == [
        ("bad", EndingKind.OUTPUT_ERROR)
    ]
    assert other.text == "a"


def test_a11_a_stop_string_before_min_tokens(tokenizer: Tokenizer, kind: str) -> None:
    run = Run(tokenizer, kind, SamplingParams(stop="b", min_tokens=4))
    for piece in ("a", "b", "c", "d"):
        assert run.step(piece).endings == []
    ((_, ending),) = run.step("b").endings
    assert ending.kind is EndingKind.STOP_STRING
    assert run.text == "abcd"


@pytest.mark.parametrize("hold_back", StopHoldBack)
def test_a12_nothing_of_a_stop_string_is_sent(
    tokenizer: Tokenizer, kind: str, hold_back: StopHoldBack
) -> None:
    params = SamplingParams(stop="own fox", stop_hold_back=hold_back, logprobs=0)
    run = Run(tokenizer, kind, params)
    for piece in ("The", " quick", " br", "own", " f", "ox"):
        run.step(piece)
        assert "The quick br".startswith(run.text)
    assert run.text == "The quick br"
    # B9: a token's entry does not wait for its text.
    assert [len(one.outputs[0].logprobs or ()) for one in run.outputs] == [1] * 6


@pytest.mark.parametrize("hold_back", StopHoldBack)
def test_a13_a_held_back_tail_comes_out_at_the_end(
    tokenizer: Tokenizer, kind: str, hold_back: StopHoldBack
) -> None:
    run = Run(tokenizer, kind, SamplingParams(stop="TRE\nAAAA", stop_hold_back=hold_back))
    for piece in ("UNO", " DUE", " TRE"):
        run.step(piece)
    run.step("<eos>", finish=FinishReason.STOP)
    assert run.text == "UNO DUE TRE"


def test_a15_nothing_behind_a_match_leaks(tokenizer: Tokenizer, kind: str) -> None:
    run = Run(tokenizer, kind, SamplingParams(stop="STOP"))
    run.step("a", "STOP", "<0xC3>", "<0xA9>", "<0xE3>")
    assert (run.text, run.token_ids) == ("a", ids("a", "STOP"))
    assert run.step("b", finish=FinishReason.LENGTH).unknown == ["r"]
    assert run.text == "a"


@pytest.mark.parametrize("stop", ["", ["", "x"]])
def test_a17_an_empty_stop_string(stop: str | list[str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop is .*; allowed: a non-empty string"):
        SamplingParams(stop=stop)


def test_a19_stop_strings_without_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize is False; allowed: true"):
        SamplingParams(stop="x", detokenize=False)


def test_a_stop_string_that_only_the_end_completes(tokenizer: Tokenizer, kind: str) -> None:
    """Bytes that waited for a character become text at the end, and are looked through like any other."""
    run = Run(tokenizer, kind, SamplingParams(stop="\ufffd"))
    run.step("a", "<0xE3>", "<0xC3>")
    processed = run.step(finish=FinishReason.LENGTH)
    assert run.text == "a"
    assert run.outputs[-1].outputs[0].finish_reason == "stop"
    assert [end.kind for _, end in processed.endings] == [EndingKind.STOP_STRING]
    assert processed.aborts == []


def test_a_bad_end_completes_no_stop_string(tokenizer: Tokenizer, kind: str) -> None:
    run = Run(tokenizer, kind, SamplingParams(stop="\ufffd"))
    run.step("a", "<0xE3>", "<0xC3>")
    run.processor.end_request("r")
    assert run.text == "a\ufffd"
