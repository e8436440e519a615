"""``trioleg bench``: what the endings cost, measured from outside, on real processes and sockets.

Rules of this package: nothing imports it but the command line, and nothing of ours is patched or looked into: a
measurement is what a client, an engine or an operator would see. The engine is the scripted one, or the bench
itself; so figures are of the way between engine and client, and no model's speed is in them. Every program that is
started here belongs to a block, under a guardian (``ipc/guardian.py``), so that it ends however the bench does.
A figure is printed beside its goal; nothing here passes or fails by speed.

    endings ──► disconnects, deaths ──► servers ──► processes
    churn ──► churn_client; churn ────► servers
    stalled ──► stalled_report ──► stalled_client;   stalled ──► servers
    disconnects ──► played_engine;   churn, stalled ──► metrics;   all ──► client, measurement
    load ──► load_streams (a program of its own), servers
"""
