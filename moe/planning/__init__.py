"""What a run needs, counted before any rank exists: memory, traffic, arithmetic, and meshes to
choose from.
"""
