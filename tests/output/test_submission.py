"""What becomes of parameters that only the model can judge: ids, bad words, how many logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_tokenizers import PIECES, byte_fallback_tokenizer, ids
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from trioleg.errors import InvalidRequestError
from trioleg.messages import EngineSamplingParams
from trioleg.output.submission import default_sampling_params, make_submission
from trioleg.sampling_params import SamplingParams

# A space is the beginning of some tokens; there is none at the beginning of a text.
VOCABULARY = {piece: index for index, piece in enumerate(PIECES)}
BACKEND = Backend(models.BPE(VOCABULARY, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
BACKEND.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
TOKENIZER = replace(byte_fallback_tokenizer(), backend=BACKEND)
VOCAB = TOKENIZER.vocab_size


def submit(max_logprobs: int = 20, **params: Any) -> EngineSamplingParams:
    """What the engine is told."""
    submission = make_submission(
        "r",
        [1, 2],
        SamplingParams(**params),
        TOKENIZER,
        max_model_len=100,
        max_logprobs=max_logprobs,
    )
    (request,) = submission.engine_requests
    assert request.sampling_params is not None
    return request.sampling_params


def test_a_bad_word_is_forbidden_with_and_without_a_space_before_it() -> None:
    """The vocabulary has a and ▁a, b and ▁b, but no ▁c: the space is a token more there."""
    words = submit(bad_words=["a", " b", "c"]).bad_words_token_ids
    assert words == [ids("a"), ids("▁a"), ids("b"), ids("▁b"), ids("c")]
    assert submit().bad_words_token_ids is None


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"bad_words holds '  '; allowed: words of"
    ) as caught:
        submit(bad_words=["  "])
    assert caught.value.parameter == "bad_words"


def test_bad_words_have_a_bound_behind_the_tokenizer_too() -> None:
    assert len(submit(bad_words=["a"] * 64).bad_words_token_ids or ()) == 128
    with pytest.raises(InvalidRequestError, match="bad_words become 130 sequences of tokens"):
        submit(bad_words=["a"] * 65)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [VOCAB]),
        ("logit_bias", {VOCAB: 1}),
        ("allowed_token_ids", [3, VOCAB]),
        ("logprob_token_ids", [2**31 - 1]),
    ],
)
def test_ids_are_the_vocabularys(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} holds .*; allowed: 0 to {VOCAB - 1}"):
        submit(**{name: value})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_as_many_logprobs_as_the_engine_is_set_to(name: str) -> None:
    assert getattr(submit(**{name: 20}), name) == 20
    assert getattr(submit(max_logprobs=-1, **{name: -1}), name) == -1
    assert getattr(submit(max_logprobs=VOCAB, **{name: -1}), name) == -1
    for most, k in ((20, 21), (20, -1), (0, 1), (VOCAB - 1, -1)):
        with pytest.raises(InvalidRequestError, match=f"is {k}; allowed: 0 to {most}") as caught:
            submit(max_logprobs=most, **{name: k})
        assert caught.value.parameter == name


def test_a_prompts_logprobs_are_bounded_in_all() -> None:
    """They come at once, and nobody else is served while they are read."""

    def submit_long(length: int, k: int) -> None:
        params = SamplingParams(prompt_logprobs=k)
        limits = {"max_model_len": 100_000, "max_logprobs": -1}
        make_submission("r", [1] * length, params, TOKENIZER, **limits)

    most = 2**18 // (VOCAB + 1)
    submit_long(most, -1)
    submit_long(12_000, 20)
    for length, k in ((most + 1, -1), (13_000, 20)):
        with pytest.raises(InvalidRequestError, match=f"prompt_logprobs is {k}; allowed: at most "):
            submit_long(length, k)


def test_the_number_of_logprob_token_ids_is_not_bounded_by_max_logprobs() -> None:
    """vLLM's rule: they have a bound of their own."""
    wire = submit(max_logprobs=1, logprob_token_ids=[5, 6, 7], logprobs=3)
    assert (wire.logprob_token_ids, wire.logprobs) == ([5, 6, 7], 3)


def test_the_models_own_defaults() -> None:
    recommended = {
        "temperature": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.1,
        "max_new_tokens": 7,
    }
    tokenizer = replace(TOKENIZER, generation_defaults=recommended)
    params = default_sampling_params(tokenizer, min_p=0.0)
    assert params == SamplingParams(
        temperature=0.5, presence_penalty=0.25, frequency_penalty=-0.25, repetition_penalty=1.1
    )
