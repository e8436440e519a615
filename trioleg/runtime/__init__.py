"""Hop 4: mailboxes, streams, engine links and open_llm, the tree of nurseries itself."""
