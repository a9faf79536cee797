"""Loads other libraries' checkpoints into our models, and writes them back."""

from moe.convert.formats import conversion_report, convert_checkpoint

__all__ = ["conversion_report", "convert_checkpoint"]
