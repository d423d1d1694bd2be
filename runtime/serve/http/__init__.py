"""The HTTP application, the live picture of the engine, and the page."""
