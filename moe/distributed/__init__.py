"""Meshes, collectives and sharding; nothing here depends on models."""

from moe.distributed.launch import launch
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.distributed.sharding import clip_gradient

__all__ = ["MeshConfig", "build_mesh", "clip_gradient", "launch"]
