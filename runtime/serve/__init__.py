"""Serves packs: requests, the scheduler that runs them, sessions, grammars, and parsers of answers."""
