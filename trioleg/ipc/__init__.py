"""Hop 2: the engine-core wire between engine and front end, and the processes at its ends."""
