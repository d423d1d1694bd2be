"""The container: a pack's layout, codecs, manifest and plan, its reader and its writers."""
