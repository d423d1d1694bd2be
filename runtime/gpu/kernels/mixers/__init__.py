"""Kernels of mixers: layers with states in place of attention."""
