"""The engine of a pack: its options, the three ways to build it, and the report of a run."""
