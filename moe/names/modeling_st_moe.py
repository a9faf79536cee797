"""Finds the classes of this model in the library `moe`, for transformers with trust_remote_code=True."""

try:  # transformers would advise to install a package called moe, which is another one
    from moe import STMoEConfig, STMoEForConditionalGeneration, STMoEModel
except ImportError as error:
    raise ImportError(
        f"This model needs the library `moe`: pip install stmoe. ({error})"
    ) from error

__all__ = ["STMoEConfig", "STMoEForConditionalGeneration", "STMoEModel"]
