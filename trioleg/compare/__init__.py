"""The study: one return leg in two concurrency shapes, and what each does when something goes wrong.

The legs are four servers that answer the same requests with the same bytes: trioleg; ``asyncio_twin``, which is the
shape of vLLM's front end, in our words; ``taskgroup_twin``, the same in the asyncio of today; and vLLM's own API
server. All but the last share the pure core (``output/``, ``ipc/codec.py``, ``server/protocol.py``, ``server/sse.py``)
and the wire, so that what differs is the shape alone. ``scenarios`` are small programs that are played against each;
``python -m trioleg compare`` runs them.

    puppet_engine.py    an engine that does what it is told         puppet.py     the scenario's side of it
    legs.py             how each leg is started                     programs/     what is started
    inside/             what runs within a leg: faults, a census of its tasks, a recording of their lanes
    vllm_parts/         what runs within vLLM's interpreter
    scenario.py         what a scenario is                          scenarios/    all of them
    outcome.py          what came of one run                        measured.py   a leg as the benches measure theirs
    split/              an experiment within one process: a task for the socket, and one for the work
"""
