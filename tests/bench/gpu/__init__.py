"""The parts of `make gpu-check`."""
