"""The engines on a GPU. None has run on one yet."""
