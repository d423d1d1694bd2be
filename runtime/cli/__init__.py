"""The command `moe-run`."""
