"""What runs within a leg's own process, whichever it is.

Rules of this folder: modules that vLLM's interpreter loads too import the standard library alone, and never each other
or anything of trioleg; what is for one runtime alone says so in its name.
"""
