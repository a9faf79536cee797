"""One update of a model, from a whole batch or a rank's rows of it."""

from moe.training.step import Share, StepMetrics, StepRanks, take_step


def train_step(model, optimizer, recipe, batch, step, mesh=None) -> StepMetrics:
    """Updates the weights once; on a mesh the batch is the rows of this rank."""
    share = Share(mesh.data_rank if mesh else 0, batch)
    return take_step(model, optimizer, recipe, [share], step, StepRanks(mesh))
