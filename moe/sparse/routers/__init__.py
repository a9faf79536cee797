"""The routers, one file each; each registers itself in ROUTERS (moe/sparse/router.py)."""
