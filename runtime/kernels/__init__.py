"""Triton kernels: one operation a file, each with its twin in plain torch. Importing them needs triton."""
