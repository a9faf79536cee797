"""One file a router; each enters itself into ROUTERS (moe/sparse/router.py)."""
