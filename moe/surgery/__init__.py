"""Model surgery: makes one model of another without training, and packs weights for inference."""

from moe.surgery.packing import pack_weights

__all__ = ["pack_weights"]
