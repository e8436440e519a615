"""Thousands of random requests through vLLM's own output processor and through ours.

Both get the same ids in the same steps with the same parameters, and ours the ``fixed`` hold-back. Every
output must be the same: text, token ids, finish_reason, stop_reason, logprobs, and what the engine is
told to abort. Where they differ, the case must show a difference that is known: ``known_differences.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from known_differences import KNOWN, explanations
from our_outputs import play
from output_cases import cases
from real_tokenizers import NAMES, tokenizer_directory
from vllm_place import VLLM_PYTHON

from trioleg.config import DETOKENIZERS

Json = dict[str, Any]

PEER = Path(__file__).with_name("vllm_output_peer.py")
CASES_PER_TOKENIZER = 2000
# Known differences take what they explain; all the rest, and that is most, must be the same.
LEAST_SHARE_OF_EQUALS = 0.8

CUMULATIVE, DELTA = 0, 1


@cache
def compared(name: str) -> tuple[tuple[Json, Json], ...]:
    """Each case with vLLM's answer to it."""
    played = list(cases(name, CASES_PER_TOKENIZER))
    return tuple(zip(played, their_answers(name, played), strict=True))


def their_answers(name: str, played: list[Json]) -> list[Json]:
    lines = "".join(json.dumps(case) + "\n" for case in played)
    command = (str(VLLM_PYTHON), str(PEER), f"{name}={tokenizer_directory(name)}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def whole(case: Json, answer: Json) -> Json:
    """What a reader has in the end, however it came."""
    outputs = answer["outputs"]
    parts = outputs if case["params"]["output_kind"] == DELTA else outputs[-1:]
    last = outputs[-1] if outputs else {"finish_reason": None, "stop_reason": None}
    # Where vLLM finishes with "abort", ours is an ending, which the runtime tells.
    finish = None if last["finish_reason"] == "abort" else last["finish_reason"]
    return {
        "error": answer["error"],
        "text": "".join(part["text"] for part in parts),
        "token_ids": [token_id for part in parts for token_id in part["token_ids"]],
        "logprobs": [entry for part in parts for entry in part["logprobs"] or ()],
        "cumulative_logprob": last.get("cumulative_logprob"),
        "finish_reason": finish,
        "stop_reason": last["stop_reason"],
        "aborts": answer["aborts"],
    }


def pieces(case: Json, answer: Json) -> list[Json]:
    """Output by output."""
    outputs = answer["outputs"]
    if case["params"]["output_kind"] == CUMULATIVE:
        # vLLM hands these over with every step, whatever the interval.
        return outputs[-1:] if case["steps"][-1]["finish"] != "abort" else []
    if case["steps"][-1]["finish"] == "abort":
        # Its last output may have nothing in it but "abort".
        outputs = [one | {"finished": False, "finish_reason": None} for one in outputs]
        return [one for one in outputs if one["text"] or one["token_ids"]]
    return outputs


def is_same(case: Json, ours: Json, theirs: Json) -> bool:
    return whole(case, ours) == whole(case, theirs) and pieces(case, ours) == pieces(case, theirs)


def known(case: Json, ours: Json, theirs: Json) -> list[str]:
    return explanations(case, whole(case, ours), whole(case, theirs))


@pytest.mark.parametrize("detokenizer", DETOKENIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_output_is_the_same_or_the_difference_is_known(name: str, detokenizer: str) -> None:
    num_equal = 0
    for case, theirs in compared(name):
        ours = play(case, detokenizer)
        if is_same(case, ours, theirs):
            num_equal += 1
        else:
            shown = {"case": case, "ours": ours, "theirs": theirs}
            assert known(case, ours, theirs), json.dumps(shown, ensure_ascii=False)
    assert num_equal > LEAST_SHARE_OF_EQUALS * CASES_PER_TOKENIZER


def test_every_known_difference_is_really_there() -> None:
    """Visible, and alone in its case: else vLLM has mended it, or it was never one."""
    seen: Counter[str] = Counter()
    for name in NAMES:
        for case, theirs in compared(name):
            ours = play(case, "fast")
            if not is_same(case, ours, theirs):
                found = known(case, ours, theirs)
                seen.update(found if len(found) == 1 else ())
    assert set(seen) == {one.__name__ for one in KNOWN}, seen
