"""What an evaluation says: Markdown, a page, a card, beside published results."""
