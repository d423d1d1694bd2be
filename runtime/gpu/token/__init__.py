"""Passes of one token, or of a few, as launches that a CUDA graph repeats."""
