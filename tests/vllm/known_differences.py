"""Where our text and vLLM's may differ, and how that is seen from a case itself.

Each function looks at a case (``output_cases.py``), its prompt, ids and parameters, and says whether the
difference it is named after can show in it. docs/differences-from-vllm.md tells each one. A difference that no
function explains is a fault, here or there. What the two made of the case is looked at only to narrow it:
where the difference can but take text off the end, it explains no other text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from real_tokenizers import real_tokenizer

Json = dict[str, Any]

REPLACEMENT = "\ufffd"

# vLLM's detokenizer in Python looks at so many of a prompt's tokens, and decodes from so many.
SLOW_WINDOW, SLOW_PREFIX = 7, 5


def explanations(case: Json, ours: Json, theirs: Json) -> list[str]:
    """The names of the known differences that this case shows."""
    return [known.__name__ for known in KNOWN if known(case, ours, theirs)]


def prompt_ends_inside_a_character(case: Json, ours: Json, theirs: Json) -> bool:
    """vLLM's fast one waits for the prompt's character, and then gives out the whole prompt."""
    return case["detokenizer"] == "fast" and _text(case, case["prompt"]).endswith(REPLACEMENT)


def prompt_is_cut_inside_a_character(case: Json, ours: Json, theirs: Json) -> bool:
    """vLLM's slow one starts a fixed number of tokens before the prompt's end, or leaves the prompt's
    unfinished character out of the output that finishes it."""
    if case["detokenizer"] != "slow":
        return False
    tail = _text(case, _shown(case, case["prompt"][-SLOW_WINDOW:])[-SLOW_PREFIX:])
    return tail.startswith(REPLACEMENT) or tail.endswith(REPLACEMENT)


def end_is_dropped(case: Json, ours: Json, theirs: Json) -> bool:
    """vLLM drops all that waits at the end; we drop the bytes of an unfinished character only."""
    return (
        _text(case, case["prompt"] + _decoded_ids(case)).endswith(REPLACEMENT)
        and ours["text"].startswith(theirs["text"])
        and ours["token_ids"] == theirs["token_ids"]
    )


def stop_string_is_completed_by_the_end(case: Json, ours: Json, theirs: Json) -> bool:
    """What waits at the end is text for us, so a stop string may end there: with the space of a token
    that is a space and the first byte of a character."""
    stops, text = case["params"]["stop"], _text(case, _decoded_ids(case))
    return (
        text.endswith(REPLACEMENT)
        and theirs["stop_reason"] not in stops
        and any(stop in text and stop not in theirs["text"] for stop in stops)
        and ours["token_ids"] == theirs["token_ids"]
    )


def characters_are_taken_back(case: Json, ours: Json, theirs: Json) -> bool:
    """Byte fallback: a broken byte behind a complete character, in one run of bytes. The whole run then
    decodes to U+FFFD. vLLM's fast one starts afresh and loses what waited; its slow one cuts anywhere."""
    ids = case["prompt"] + _decoded_ids(case)
    certain = ""
    for end in range(1, len(ids) + 1):
        text = _text(case, ids[:end])
        if not text.startswith(certain):
            return True
        if not text.endswith(REPLACEMENT):
            certain = text
    return False


def step_goes_on_behind_the_stop_token(case: Json, ours: Json, theirs: Json) -> bool:
    """A stop token in the middle of a step: ours ends there, vLLM's at the step's end."""
    last = case["steps"][-1]
    return last["finish"] == "stop" and last["stop_reason"] in last["ids"][:-1]


def added_tokens_are_spelled_raw(case: Json, ours: Json, theirs: Json) -> bool:
    """spaces_between_special_tokens=False: of two added tokens in a row, vLLM's fast one gives out the
    second as the vocabulary spells it, metaspaces and all; ours only leaves a space between them out."""
    params, tokenizer = case["params"], real_tokenizer(case["tokenizer"])
    if params["spaces_between_special_tokens"] or params["skip_special_tokens"]:
        return False
    added = tokenizer.pieces.added_token_ids
    return case["detokenizer"] == "fast" and any(
        one in added and other in added and "▁" in (tokenizer.backend.id_to_token(other) or "")
        for one, other in itertools.pairwise(_decoded_ids(case))
    )


KNOWN: Sequence[Callable[[Json, Json, Json], bool]] = (
    prompt_ends_inside_a_character,
    prompt_is_cut_inside_a_character,
    end_is_dropped,
    stop_string_is_completed_by_the_end,
    characters_are_taken_back,
    step_goes_on_behind_the_stop_token,
    added_tokens_are_spelled_raw,
)


def _decoded_ids(case: Json) -> list[int]:
    """The ids that become text: all but a stop token that is not to be shown."""
    ids = [token_id for step in case["steps"] for token_id in step["ids"]]
    hides = not case["params"]["include_stop_str_in_output"]
    return ids[:-1] if case["steps"][-1]["finish"] == "stop" and hides else ids


def _shown(case: Json, ids: list[int]) -> list[int]:
    """``ids`` without the special tokens, if the case leaves them out."""
    if not case["params"]["skip_special_tokens"]:
        return ids
    special = real_tokenizer(case["tokenizer"]).pieces.special_token_ids
    return [token_id for token_id in ids if token_id not in special]


def _text(case: Json, ids: list[int]) -> str:
    skip = case["params"]["skip_special_tokens"]
    return real_tokenizer(case["tokenizer"]).decode(ids, skip_special_tokens=skip)
