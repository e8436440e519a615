"""Shipped fakes: the scripted engine in process, for tests of programs that embed trioleg."""
