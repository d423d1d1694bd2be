"""The command `moe-pack`: one file a command."""
