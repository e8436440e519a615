"""Random requests for the comparison with vLLM's output processor, the same ones in every run.

A case is plain JSON, so that one that fails can be printed, kept and played again. Every choice that
matters for text is in it: where the ids come from, how an engine puts them into steps, what ends them,
and every parameter that decides what a reader gets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from random import Random
from typing import Any

from real_tokenizers import real_tokenizer
from scripts_of_the_world import SAMPLES

from trioleg.tokenizer import Tokenizer

Json = dict[str, Any]

# One step brings one token, or, with speculative decoding, a few.
STEP_SIZES = (1, 1, 1, 2, 3, 6)
MAX_IDS = 40


def cases(tokenizer_name: str, count: int) -> Iterator[Json]:
    """``count`` cases for one tokenizer, half of them for each of vLLM's two detokenizers."""
    tokenizer = real_tokenizer(tokenizer_name)
    for number in range(count):
        maker = CaseMaker(Random(f"{tokenizer_name} {number}"), tokenizer)
        detokenizer = ("fast", "slow")[number % 2]
        head = {"tokenizer": tokenizer_name, "number": number, "detokenizer": detokenizer}
        yield head | maker.make()


class CaseMaker:
    """Makes one case; the order of its questions to ``random`` is what makes it repeatable."""

    def __init__(self, random: Random, tokenizer: Tokenizer) -> None:
        self._random = random
        self._tokenizer = tokenizer
        self._single_bytes, self._added = _unusual_ids(tokenizer)

    def make(self) -> Json:
        prompt, ids = self._prompt_and_ids()
        params = self._params(ids)
        finish = self._random.choice(("stop", "stop", "length", "length", "abort"))
        steps = self._steps(ids, params.get("logprobs"))
        if finish == "abort":
            # An engine that gives a request up has no token for it.
            steps.append({"ids": [], "logprobs": None, "finish": "abort", "stop_reason": None})
        else:
            steps[-1] |= self._ending(finish, ids[-1], params)
        interval = self._random.choice((1, 1, 1, 3))
        return {"prompt": prompt, "params": params, "steps": steps} | {
            "engine_stream_interval": interval
        }

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    # ------------------------------------------------------------------ ids

    def _prompt_and_ids(self) -> tuple[list[int], list[int]]:
        """A text cut in two between any two of its tokens, or text behind random ids, or the reverse."""
        ids = self._any_ids() + self._any_ids()
        cut = self._random.randrange(1, len(ids))
        prompt = ids[:cut]
        if self._chance(0.7):
            # Mostly, a prompt ends where a character does.
            prompt = self._text_ids()
        bos = self._tokenizer.encode("")
        return bos + prompt, ids[cut:][: self._random.randint(1, MAX_IDS)]

    def _any_ids(self) -> list[int]:
        kind = self._random.choice(("text", "text", "mixed", "random", "bytes"))
        if kind == "text":
            return self._text_ids()
        if kind == "random":
            return [self._random_id() for _ in range(self._random.randint(1, 25))]
        if kind == "bytes":
            return [self._random.choice(self._single_bytes) for _ in range(4)] + self._text_ids()
        ids = self._text_ids()
        for _ in range(self._random.randint(1, 5)):
            ids.insert(self._random.randint(0, len(ids)), self._random_id())
        return ids

    def _text_ids(self) -> list[int]:
        text = "".join(self._piece_of_text() for _ in range(self._random.randint(1, 4)))
        return self._tokenizer.encode(text, add_special_tokens=False) or [self._random_id()]

    def _piece_of_text(self) -> str:
        sample = self._random.choice(SAMPLES)
        start = self._random.randrange(len(sample))
        return sample[start : start + self._random.randint(1, 20)]

    def _random_id(self) -> int:
        if self._chance(0.1):
            return self._random.choice(self._added)
        return self._random.randrange(self._tokenizer.vocab_size)

    # ------------------------------------------------------------------ parameters

    def _params(self, ids: list[int]) -> Json:
        random = self._random
        detokenize = not self._chance(0.05)
        return {
            "max_tokens": len(ids),
            "min_tokens": random.choice((0, 0, 0, random.randint(0, len(ids)))),
            "stop": self._stop(ids) if detokenize else [],
            "include_stop_str_in_output": self._chance(0.3),
            "detokenize": detokenize,
            "skip_special_tokens": self._chance(0.6),
            "spaces_between_special_tokens": self._chance(0.6),
            "output_kind": random.choice((0, 1, 1, 1, 2)),
            "stream_interval": random.choice((None, None, None, 2, 5)),
            "logprobs": random.choice((None, None, None, 0, 1, 3)),
        }

    def _stop(self, ids: list[int]) -> list[str]:
        """Stop strings that occur, that nearly do, that overlap each other, and that do not occur."""
        text = self._tokenizer.decode(ids).strip("�") or "x"
        stops = []
        for _ in range(self._random.choice((0, 0, 1, 2, 3))):
            start = self._random.randrange(len(text))
            stop = text[start : start + self._random.choice((1, 2, 3, 8))]
            if self._chance(0.3):
                stop += self._random.choice(("x", "�", " ", "\n", "ё"))
            if stops and self._chance(0.3):
                stop = self._random.choice((stops[0][:-1], stops[0] + "a", "b" + stops[0])) or stop
            stops.append(stop)
        return stops

    # ------------------------------------------------------------------ steps

    def _steps(self, ids: list[int], num_logprobs: int | None) -> list[Json]:
        steps = []
        while ids:
            size = self._random.choice(STEP_SIZES)
            new, ids = ids[:size], ids[size:]
            rows = None if num_logprobs is None else self._logprobs(new, num_logprobs)
            steps.append({"ids": new, "logprobs": rows, "finish": None, "stop_reason": None})
        return steps

    def _logprobs(self, ids: list[int], k: int) -> Json:
        """Rows as a sampler makes them: the chosen token, then the best k, which may have it again."""
        rows: Json = {"token_ids": [], "logprobs": [], "ranks": []}
        for token_id in ids:
            best = self._random.sample(range(self._tokenizer.backend.get_vocab_size()), k)
            values = sorted((self._random.uniform(-9.0, 0.0) for _ in best), reverse=True)
            if k and self._chance(0.5):
                best[0] = token_id
                chosen, rank = values[0], 1
            else:
                chosen, rank = -self._random.uniform(9.0, 20.0), self._random.randint(k + 1, 100)
            rows["token_ids"].append([token_id, *best])
            rows["logprobs"].append([chosen, *values])
            rows["ranks"].append(rank)
        return rows

    def _ending(self, finish: str, last_id: int, params: Json) -> Json:
        """How the engine ends it. A stop token is the model's own or one of the user's."""
        stop_reason = None
        if finish == "stop" and self._chance(0.5):
            params["stop_token_ids"] = [last_id]
            stop_reason = last_id
        return {"finish": finish, "stop_reason": stop_reason}


@functools.cache
def _unusual_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that are one byte each, of which random runs are rarely text; and added tokens."""
    backend = tokenizer.backend
    fallback = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    single = [one for one in fallback if one is not None]
    if not single:
        single = sorted(i for token, i in backend.get_vocab().items() if len(token) == 1)
    return single, sorted(backend.get_added_tokens_decoder())
