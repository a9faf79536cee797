"""Small models with routers that decide, and batches with padding, for the tests of this folder."""

from moe.sparse.all_routers import load_routers
from tests.models.tiny import tiny_batch, tiny_model

E = 4


def build_model(router="token_choice", **fields):
    """Returns a model in evaluation mode; its decoder is dense where the router may not be there."""
    kind = load_routers().get(router)
    settings = {
        "num_layers": 4,
        "num_decoder_layers": 2,
        "num_experts": E,
        "num_selected_experts": 1 if kind.single else 2,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1 if kind.causal else 0,
        "sparse_dense_stacking": False,
        "router": router,
        "router_options": None,
    }
    return tiny_model(**{**settings, **fields})


def build_batch(rows=6, length=13, targets=7, seed=0):
    """Returns a batch in which every row has its own length."""
    return tiny_batch(rows, length, targets, seed)


def rows_of(batch, rows):
    """Returns a batch of some rows, in that order."""
    return {name: value[rows] for name, value in batch.items()}
