"""``trioleg bench leg`` beside vLLM's own API server: the same frames, all of them, and no process left."""

from __future__ import annotations

import json

from programs import TRIOLEG, descendants, running, wait_until
from vllm_place import VLLM_PYTHON, VLLM_START_S


def test_vllm_streams_what_our_engine_of_the_bench_says(smollm2) -> None:
    small = ("--streams", "8", "--rate", "20", "--runs", "1", "--seconds", "1", "--json")
    parts = ("--only", "cost", "--only", "start")
    peer = ("--peer", "vllm", "--vllm-python", str(VLLM_PYTHON))
    with running(*TRIOLEG, "bench", "leg", *small, *parts, *peer) as program:
        # Twice: once for its start, once for its streams.
        code = program.wait(2 * VLLM_START_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    series = {one["what"]: one for one in json.loads(program.stdout)["series"]}
    for what in ("processor a token, 8 streams", "memory, ready", "first frame, p50, 8 streams"):
        assert series[what]["against"] == "vllm"
        assert series[what]["ratio"]["median"] > 0
    for subject in ("trioleg", "vllm"):
        assert series["frames of tokens, 8 streams"]["runs"][subject][0] > 50
