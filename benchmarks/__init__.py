"""Benchmarks of the sparse layer, of whole models, of ranks and of evaluation.

Read cases, variants, peers, timing, layer; then ranks, transformers_ep, scaling, exchange;
model and evaluation stand alone.
"""
