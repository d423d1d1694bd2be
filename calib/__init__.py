"""Measures models on text, layer by layer in bounded memory, for the planner and the runtime."""
