"""One measurement of a shape, and a program that takes several, one after the other, each a line of JSON.

    python -m trioleg.compare.split.measure DIRECTORY IDS --loop trio|asyncio --tokens N --seed N

Both shapes of the loop are measured for each batch, paced and as fast as they can, in an order that the seed says: what
else goes on in the machine then favours neither. The tokens of a measurement are about N.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from ...tokenizer import Tokenizer
from . import on_asyncio, on_trio
from .work import Load, Measured

__all__ = ["BATCHES", "LOOPS", "ONE", "TWO", "load_of", "main", "measure"]

ONE, TWO = "one task", "two tasks"
LOOPS: dict[str, dict[str, Callable[..., Measured]]] = {
    "trio": {ONE: on_trio.one_task, TWO: on_trio.two_tasks},
    "asyncio": {ONE: on_asyncio.one_task, TWO: on_asyncio.two_tasks},
}
BATCHES = (1, 16, 64, 256, 1024)
# A pace at which every shape keeps up, with a third to a half of its time in use where the batch is big.
_LEAST_PERIOD_S = 0.005
_PERIOD_A_TOKEN_S = 40e-6
_LEAST_MESSAGES, _MOST_MESSAGES = 40, 2000
_MOST_PACED_S = 1.5
# For a machine under load; a measurement takes one or two.
_PATIENCE_S = 60.0


def load_of(batch: int, tokens: int, *, is_paced: bool) -> Load:
    """About ``tokens`` tokens, in messages of ``batch``."""
    messages = min(max(tokens // batch, _LEAST_MESSAGES), _MOST_MESSAGES)
    if not is_paced:
        return Load(batch, messages)
    period = max(_LEAST_PERIOD_S, batch * _PERIOD_A_TOKEN_S)
    return Load(batch, max(_LEAST_MESSAGES, min(messages, round(_MOST_PACED_S / period))), period)


def measure(
    loop: str, shape: str, tokenizer: Tokenizer, token_ids: Sequence[int], load: Load
) -> Measured:
    """Feed it, and wait until it has processed all. Runs an event loop of its own. Raises what the loop's timeout does
    (``trio.TooSlowError``, ``TimeoutError``) after a minute."""
    with tempfile.TemporaryDirectory(prefix="split-") as folder:
        address = f"ipc://{Path(folder) / 'outputs'}"
        messages = load.warm_up + load.messages
        command = [sys.executable, "-m", "trioleg.compare.split.feed", address]
        command += [",".join(map(str, token_ids)), "--batch", str(load.batch)]
        command += ["--messages", str(messages), "--period", str(load.period)]
        with subprocess.Popen(command) as feed:
            try:
                run = LOOPS[loop][shape]
                return run(address, tokenizer, token_ids, load, _PATIENCE_S)
            finally:
                feed.kill()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The split of socket task and handler, measured.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("ids", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--loop", choices=tuple(LOOPS), required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seed", required=True)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_directory(options.directory)
    order = random.Random(options.seed)
    for batch in BATCHES:
        for is_paced in (True, False):
            load = load_of(batch, options.tokens, is_paced=is_paced)
            for shape in order.sample((ONE, TWO), 2):
                measured = measure(options.loop, shape, tokenizer, options.ids, load)
                line = {"batch": batch, "paced": is_paced, "shape": shape, **asdict(measured)}
                sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
