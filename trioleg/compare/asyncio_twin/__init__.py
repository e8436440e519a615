"""The asyncio twin: the shape of vLLM's front end (``v1/engine``, as of 0.32), in our words.

Good asyncio as it is written where nothing owns a task: a socket task that feeds a queue, in which errors are values;
a handler task that is started by the first request; neither holds the client, so that a finalizer can find it unused;
a mailbox with an event; a request that is an async generator, whose ``except`` clauses are the abort; a flag for a
dead engine, set by whoever notices. What makes outputs, frames and answers is the core that trioleg has, too.

    here             runtime/ and server/      vLLM
    mailbox.py       mailbox.py                RequestOutputCollector
    engine_link.py   engine_link.py            BackgroundResources, AsyncMPClient
    llm.py           llm.py, requests.py       AsyncLLM
    stream.py        server/stream.py          chat_completion_stream_generator
    app.py           server/app.py, routes.py  the routes, and their exception handlers
    serve.py         server/serve.py           launcher.serve_http

There is no deadline, no bound on what is unread, no drain: vLLM's shape has none in this place.
"""
