"""The experiment: does it pay to read a socket in one task and to process what was read in another?

vLLM has two tasks, a socket task that receives and decodes and a handler that processes, with a queue between
them. trioleg has one. Here both shapes are put on each of the two event loops, in front of the same work (decode, the
processor, mailboxes with a waiting reader each), and fed by a process of its own.

    feed.py         the program that sends steps           work.py      what is done with them, and what is counted
    on_trio.py      both shapes on ``ipc/sockets.py``      on_asyncio.py    both shapes on ``zmq.asyncio``
    measure.py      one measurement, and the program that prints several
"""
