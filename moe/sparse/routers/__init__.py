"""One file a router; each registers itself in ROUTERS (moe/sparse/router.py), which finds every
file here.
"""
