"""Stop strings: which one, where, and what has to wait for it."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.output.detokenizer import IncrementalDetokenizer
from trioleg.output.stop import StopChecker, StopMatch
from trioleg.sampling_params import SamplingParams, StopHoldBack

TOKENIZER = byte_fallback_tokenizer()


def characters(text: str) -> list[list[int]]:
    return [ids(f"{byte:02X}") for byte in text.encode()]


def run(
    steps: list[list[int]], params: SamplingParams
) -> tuple[list[str], str | None, list[list[int]]]:
    """Deltas, the matched stop string, and the steps as they were cut."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, ids("<s>"), params)
    steps = [list(step) for step in steps]
    deltas = []
    for step in steps:
        stop = detokenizer.update(step, False)
        deltas.append(detokenizer.take(everything=stop is not None))
        if stop is not None:
            return deltas, stop, steps
    detokenizer.flush()
    deltas.append(detokenizer.take(everything=True))
    return deltas, None, steps


@pytest.mark.parametrize(
    ("stop", "text", "new", "match"),
    [
        (["bc"], "abcd", 4, StopMatch("bc", 1, 3)),
        (["bc"], "abc", 1, StopMatch("bc", 1, 3)),
        (["bc"], "abcd", 1, None),
        (["cd", "bc"], "abcd", 4, StopMatch("bc", 1, 3)),
        (["abc", "c"], "abc", 3, StopMatch("abc", 0, 3)),
        (["c", "abc"], "abc", 3, StopMatch("c", 2, 3)),
        (["aa"], "aaa", 1, StopMatch("aa", 1, 3)),
    ],
)
def test_the_first_completed_wins_and_ties_go_by_the_list(
    stop: list[str], text: str, new: int, match: StopMatch | None
) -> None:
    assert StopChecker(stop, StopHoldBack.OVERLAP).find(text, new) == match


@pytest.mark.parametrize(
    ("text", "overlap", "fixed"), [("The", 0, 3), ("The o", 1, 5), ("x own", 3, 5), ("", 0, 0)]
)
def test_hold_back(text: str, overlap: int, fixed: int) -> None:
    stop = ["own fox"]
    assert StopChecker(stop, StopHoldBack.OVERLAP).held_back(text) == overlap
    assert StopChecker(stop, StopHoldBack.FIXED).held_back(text) == fixed


@pytest.mark.parametrize("hold_back", list(StopHoldBack))
def test_nothing_of_a_stop_string_gets_out(hold_back: StopHoldBack) -> None:
    text = "The quick brown fox jumps"
    params = SamplingParams(stop=["own fox"], stop_hold_back=hold_back)
    deltas, stop, steps = run(characters(text), params)
    assert "".join(deltas) == "The quick br"
    assert stop == "own fox"
    assert len(deltas) == len("The quick brown fox")
    assert steps[-1] != []


def test_a_partial_stop_string_is_flushed_at_the_end() -> None:
    deltas, stop, _ = run(characters("UNO DUE TRE"), SamplingParams(stop="TRE\nAAAA"))
    assert (stop, "".join(deltas)) == (None, "UNO DUE TRE")


def test_inside_a_step_tokens_behind_the_match_are_cut() -> None:
    step = ids("a", "b", "C3", "A9", "c", "a", "E3")
    deltas, stop, steps = run([step], SamplingParams(stop="é"))
    assert (deltas, stop) == (["ab"], "é")
    assert steps == [ids("a", "b", "C3", "A9")]


def test_the_stop_string_is_kept_where_asked_for() -> None:
    params = SamplingParams(stop="own", include_stop_str_in_output=True)
    deltas, stop, _ = run(characters("brown fox"), params)
    assert ("".join(deltas), stop) == ("brown", "own")
    # Nothing has to wait when nothing will be taken back.
    assert deltas[:4] == ["b", "r", "o", "w"]


def test_min_tokens_hide_earlier_stop_strings_for_good() -> None:
    params = SamplingParams(stop="b", min_tokens=4)
    deltas, stop, _ = run(
        [ids(one) for one in "abcdbe".replace("d", "c").replace("e", "a")], params
    )
    assert ("".join(deltas), stop) == ("abcc", "b")
