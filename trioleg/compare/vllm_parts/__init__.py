"""vLLM's leg, in parts: what ``programs/vllm_leg.py`` puts together, with an engine of ours, within vLLM's interpreter.

Rules of this folder: the standard library and vLLM alone. Nothing is changed in vLLM but what each file says: it is the
same server that people run. It calls, and replaces, names of vLLM 0.32 that are vLLM's to change.
"""
