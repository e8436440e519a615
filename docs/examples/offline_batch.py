"""Many prompts through a model in this process: no server, no event loop.

trioleg pull smollm2-135m
python docs/examples/offline_batch.py
"""

import trioleg.offline

PROMPTS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "What is 2 plus 2?"}],
    "",
]

greedy = trioleg.SamplingParams(temperature=0, max_tokens=8)

# Results come in the order of the prompts, while the engine works on all of them at once. One that
# fails stands in its place and ends no other.
for output in trioleg.offline.generate("smollm2-135m", PROMPTS, greedy):
    if output.error is None:
        print(output.outputs[0].text)
    else:
        print("failed:", output.error)
