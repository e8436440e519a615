"""Hop 3, pure: from an EngineCoreOutput to the text, ids and endings that a client sees."""
