"""Hop 1, an own process: the scheduler, the model, the sampler, and the Trio shell that sends what they make."""

import os

# PyTorch's OpenMP threads wait for each other by spinning, for milliseconds. With the front end on the same
# cores the thread that spins keeps off the one it waits for: on two busy cores 28 tokens a second over 32
# streams became 123 with this bound (in loop turns). It is read when torch is loaded, hence here.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
