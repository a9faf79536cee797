"""Sparse layers in encoder-decoders of transformers, which keep their class, attention and generation.

Begin with host.py, the record of a host; records.py is their table. Then:

    settings      which feed-forwards are sparse, and how; a key of config.json
    blocks        the sparse layer in a host's block, and how it is told about padding
    model         the host's class with sparse layers: forward, losses, outputs
    upcycle       a dense host into a sparse one
    all_hosts     finds a host by its `model_type`
    parallelize   a host on a mesh
"""
