"""Matrix products by device; nothing here depends on routers, plans or configurations."""
