"""Serves packs over HTTP: several requests at once, the protocols of OpenAI and Anthropic, and a page."""
