"""Benchmarks; read: cases, variants, peers, timing, memory, layer. The command is python -m scripts.benchmark."""
