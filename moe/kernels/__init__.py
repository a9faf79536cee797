"""Matrix products by device; nothing here knows what a router is."""
