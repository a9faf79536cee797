"""Runs many requests through an encoder-decoder: continuous batching."""

from moe.serving.batch_generator import BatchGenerator, Request
from moe.serving.engine import Answer, Engine
from moe.serving.sampling import Sampling

__all__ = ["Answer", "BatchGenerator", "Engine", "Request", "Sampling"]
