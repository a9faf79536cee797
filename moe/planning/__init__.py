"""Requirements of a run, computed before any rank exists: memory, traffic, arithmetic, and possible
meshes.
"""
