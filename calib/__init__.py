"""Runs a model over text, layer by layer in bounded memory, and measures what planner and runtime need to know."""

__all__: list[str] = []
