"""What the asyncio twins share, and what is not their shape: sockets, the engine's process, prompts, answers.

Rules of this folder: it starts no task that outlives a call, and decides nothing about a request's life. Nothing here
imports Trio, so that a twin's memory is its own.
"""
