"""Everything that writes weights to disk and reads them back."""

from moe.checkpoint.final_model import save_model_on_mesh
from moe.checkpoint.loading import load_model, load_model_on_mesh

__all__ = ["load_model", "load_model_on_mesh", "save_model_on_mesh"]
