"""Benchmarks. Read: cases, variants, peers, timing, memory, layer; then ranks, transformers_ep,
scaling, exchange.
"""
