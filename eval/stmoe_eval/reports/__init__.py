"""Reports of an evaluation: JSON, Markdown, a page and a card, next to published results."""
