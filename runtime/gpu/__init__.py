"""The engine for a GPU. Importing this needs no Triton."""
