"""``trioleg bench``: what endings and tokens cost, on real processes and sockets.

Rules of this package: nothing imports it but the command line, and nothing of ours is patched. A measurement is what
a client, an engine or an operator would see; only ``hops`` takes the way apart, and what it knows of our insides is in
``hop_parts``. The engine is the scripted one, or one that the bench plays; so figures are of the way between engine and
client, and no model's speed is in them. (``engine`` is the reverse: real engines, with a head of the bench's own in
place of the front end's server.) Every
program that is started here belongs to a block, under a guardian (``ipc/guardian.py``), so that it ends however the
bench does.
A figure is printed beside its goal; nothing here passes or fails by speed.

    endings ──► disconnects, deaths ──► servers ──► processes
    churn ──► churn_client; churn ────► servers
    stalled ──► stalled_report ──► stalled_client;   stalled ──► servers
    disconnects ──► played_engine;   churn, stalled ──► metrics;   all ──► client, measurement
    load ──► load_streams (a program of its own), servers
    leg ──► leg_saturation, leg_figures ──► leg_streams ──► leg_subjects;   leg ──► report, machine
        programs of their own: leg_engine, leg_client, leg_floor, vllm_api_server; leg_control tells them what to do
    engine ──► engine_subjects ──► engine_head;   engine ──► report, machine;   engine, leg ──► vllm_python
    sampler ──► hops ──► hop_parts ──► hop_leg ──► hop_engine ──► played_engine;   hop_leg ──► load_streams
    hops, sampler ──► report, machine;   report ──► machine, plots
"""
