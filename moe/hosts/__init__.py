"""Sparse layers in encoder-decoders of transformers, which keep their class, attention and generation.

Begin with host.py, the record of a host; records/ has one file for each. Then:

    settings      which feed-forwards are sparse, and how; a key of config.json
    blocks        the sparse layer in a host's block, and how it is told about padding
    model         the host's class with sparse layers: forward, losses, outputs
    upcycle       a dense host into a sparse one
    loading       a folder of `save_pretrained` into a model
    parallelize   a host on a mesh
"""
