"""Routing written down token by token, and carried out again."""
