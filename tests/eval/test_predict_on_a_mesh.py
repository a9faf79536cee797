"""Ranks together make the predictions of one process, which is the oracle: same lines, same order,
each once.

The model drops tokens by group, so that other batches, or a padding batch that took capacity, would
change its answers.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stmoe_eval.answers.predict
from moe import ConfigError, MeshConfig
from moe.distributed.launch import World
from stmoe_eval.answers.data_ranks import arrange_ranks
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.task import Decoding
from tests.distributed.ranks import run_ranks
from tests.eval.conftest import colour_task
from tests.eval.rows import predictions_by_id
from tests.eval.test_predict import requests_of
from tests.models.tiny import tiny_model

ASKED = {
    "generate": Decoding(max_tokens=7),
    "rank": Decoding(),
    "beams": Decoding(max_tokens=7, num_beams=3, alpha=0.6),
}
ROWS = 4  # 25 requests: 6 batches and one of a single request
FIELDS = {
    "num_experts": 8,
    "num_heads": 4,
    "d_ff": 34,
    "eval_capacity_factor": 0.5,
    "min_expert_capacity": 1,
}
STATIC = {**FIELDS, "dispatch": "static", "group_size": 16}
MESHES = {  # (model, ep, tp) by ranks
    3: [("t5", 1, 1), ("ragged", 1, 1)],
    4: [("ragged", 2, 2), ("static", 2, 1)],
}


@pytest.fixture(scope="module")
def models(folders, tokenizer, tmp_path_factory):
    made = {"t5": folders["t5"]}
    for name, fields in (("ragged", FIELDS), ("static", STATIC)):
        made[name] = tmp_path_factory.mktemp(name)
        tiny_model(**fields).save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Returns the folder of MODEL.MODE.jsonl of one process."""
    folder, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has
    for name, path in models.items():
        for mode in ASKED:
            ask(load_seq2seq(path), mode, folder / f"{name}.{mode}.jsonl")
    torch.set_num_threads(threads)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", MESHES)
def test_ranks_together_make_the_predictions_of_one_process(models, alone, num_ranks, tmp_path):
    answers = run_ranks(predict_on_a_rank, num_ranks, tmp_path, models, str(tmp_path))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["resumed"] == len(MESHES[num_ranks]) * len(ASKED)
    for name, ep, tp in MESHES[num_ranks]:
        for mode in ASKED:
            one = (alone / f"{name}.{mode}.jsonl").read_text()
            path = tmp_path / f"{name}.{ep}.{tp}.{mode}.jsonl"
            assert_same_lines(path.read_text(), one, is_exact=ep * tp == 1)
            made, router = answers[0][f"{name} {ep} {tp} {mode}"]
            kept = predictions_by_id(path)
            assert made == [kept[request.id][:3] for request in requests_of(colour_task())]
            assert (router is None) == (name == "t5")


def assert_same_lines(found, expected, *, is_exact):
    """Compares the header, the predictions and the routers; sharded sums may differ in a digit."""
    header, *lines = found.splitlines()
    expected_header, *expected_lines = expected.splitlines()
    assert header == expected_header
    if is_exact:
        assert lines == expected_lines
        return
    for ours, theirs in zip(map(json.loads, lines), map(json.loads, expected_lines), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("routers", "id", "output"):
            assert ours.get(name) == theirs.get(name)
        scores = theirs.get("scores")
        assert ours.get("scores") == (scores and pytest.approx(scores, abs=1e-4))


def ask(system, mode, path):
    """Returns what is predicted of the colours, and writes it to `path`; beams are few rows at once
    as well.
    """
    task = replace(colour_task(), decoding=ASKED[mode])
    at_once = {"generate": ROWS * task.decoding.num_beams, "rank": ROWS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stmoe_eval.answers.predict, "_MAX_ROWS", at_once)
        return predict(system, task, requests_of(task), mode.replace("beams", "generate"), path)


def predict_on_a_rank(rank, num_ranks, models, out):
    """Writes out/MODEL.EP.TP.MODE.jsonl; returns all predictions, and how many files went on to the
    same bytes.
    """
    answers, resumed = {}, 0
    for name, ep, tp in MESHES[num_ranks]:
        ranks = arrange_ranks(World(rank, num_ranks, rank, "cpu"), ep, tp, [models[name]])
        system = load_seq2seq(models[name], ranks)
        for mode in ASKED:
            path = Path(out, f"{name}.{ep}.{tp}.{mode}.jsonl")
            made = ask(system, mode, path)
            routers = made.router and {name: total._asdict() for name, total in made.router.items()}
            predictions = [prediction[:3] for prediction in made.predictions]
            answers[f"{name} {ep} {tp} {mode}"] = predictions, routers

            # As kill -9 leaves it: two batches, one line of the third, and a torn one.
            whole = path.read_bytes()
            dist.barrier()
            if rank == 0:
                kept = whole.splitlines(keepends=True)[: 1 + 2 * (ROWS + 1) + 1]
                path.write_bytes(b"".join(kept) + b'{"id": "se')
            dist.barrier()
            again = ask(system, mode, path)
            resumed += again == made and path.read_bytes() == whole
    return {**answers, "resumed": resumed}


@pytest.mark.parametrize(
    ("name", "ep", "tp", "message"),
    [
        ("ragged", 2, 1, r"it has 2 ranks, but there are 3.*Choose --ep and --tp from one"),
        ("ragged", 3, 1, r"8 experts cannot be spread evenly over ep 3"),
        ("t5", 1, 3, r"model of type t5, which cannot be sharded over --ep 1 and --tp 3"),
    ],
)
def test_ranks_that_cannot_be_divided_so_are_refused_before_a_model_is_loaded(
    models, name, ep, tp, message
):
    with pytest.raises(ConfigError, match=message):
        arrange_ranks(World(0, 3, 0, "cpu"), ep, tp, [models[name]])


def test_every_batch_is_dealt_once_and_ranks_of_one_tp_have_the_same(models):
    batches = [[number] for number in range(7)]
    for size, tp in ((1, 1), (3, 1), (4, 2), (8, 1), (9, 1)):
        parts = []
        for rank in range(size):
            ranks = arrange_ranks(World(rank, size, rank, "cpu"), 1, 1, [])
            ranks = ranks._replace(mesh_config=MeshConfig(dp_replicate=size // tp, tp=tp))
            parts.append([ranks.own_batch(dealt) for dealt in ranks.rounds(batches)])
        assert all(part == parts[rank // tp * tp] for rank, part in enumerate(parts))
        dealt_in_turn = []
        for dealt in zip(*parts[::tp], strict=True):
            dealt_in_turn += [batch for batch in dealt if batch]
        assert dealt_in_turn == batches


def test_ranks_in_lockstep_keep_whole_rounds_and_others_every_batch():
    alone = arrange_ranks(World(0, 4, 0, "cpu"), 1, 1, [])
    in_lockstep = alone._replace(mesh_config=MeshConfig(ep=2, dp_replicate=2))
    assert [alone.num_reusable(made, 7) for made in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [in_lockstep.num_reusable(made, 7) for made in range(8)] == [0, 0, 0, 0, 4, 4, 4, 7]
