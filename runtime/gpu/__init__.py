"""Engines for a GPU: the graph engine and the staged engine. Importing this needs no Triton."""
