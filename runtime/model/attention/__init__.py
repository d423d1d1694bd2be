"""Kinds of attention, a module each: the forward pass of new tokens, and what a layer caches."""
