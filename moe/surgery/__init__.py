"""Model surgery: makes one model of another by changing its feed-forward layers, without training."""

from moe.surgery.kept_output import Kept, KeptOutput, kept_output
from moe.surgery.upcycle import Upcycling, upcycle_checkpoint

__all__ = ["Kept", "KeptOutput", "Upcycling", "kept_output", "upcycle_checkpoint"]
