"""Reports of an evaluation: JSON, Markdown, a page and a card, beside published results."""
