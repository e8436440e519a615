"""The asyncio of today: what ``TaskGroup``, ``timeout`` and plain blocks make of the same leg.

File names are ``runtime/``'s and ``server/``'s, so that the two can be read side by side: ``mailbox``, ``request_stream``,
``engine_link``, ``llm``; ``app``, ``stream``, ``serve``. As there, one task reads, decodes and processes; a request's end
is state; a stream is a block whose exit aborts it. Nothing of Trio is imported.

What asyncio has no way to say stays visible, each where it matters:

- A cancel is an edge. It is delivered once, as an exception at the next wait, and whoever swallows that goes on
  uncancelled (``serve.py``).
- There is one channel. A timeout, a group that gives up its tasks, and the caller's own ``cancel`` all arrive as the
  same ``CancelledError``; who sent it is found out by counting (``Timeout``, ``TaskGroup``).
- A group cannot be told to stop; one of its tasks has to raise (``engine_link.py``, ``app.py``).
- To await is not to let others run: what is there already comes back at once (``engine_link.py``).
- A cancel that meets a result on its way drops the result (``engine_link.py``).
"""
