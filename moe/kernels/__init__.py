"""Matrix products by device; nothing here knows what a router, a plan or a configuration is."""
