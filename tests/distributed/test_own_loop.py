"""The loop of the guide, as two ranks of torchrun run it, gives what one process without a mesh gives."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from moe import ConfigError, MeshConfig, build_mesh, shard_model
from moe.checkpoint import load_model
from moe.data.tokenizer import train_tokenizer
from moe.distributed import launch
from tests.distributed.ranks import run_ranks, whole
from tests.hosts.tiny_hosts import sparse_host
from tests.models.tiny import tiny_batch, tiny_model
from tests.processes import start_torchrun
from tests.test_docs import DOCS, blocks
from tests.training.tiny_run import write_texts

MODEL, SAVED = "runs/demo/model", "runs/own_loop/model"


def on_a_rank(folder):
    """Runs the program of the guide, and keeps the gradients of each update and all that it computes last."""
    os.chdir(folder)
    torch.set_num_threads(1)
    gradients = []

    def keep_gradients(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.append([whole(parameter.grad) for parameter in parameters])

    register_optimizer_step_pre_hook(keep_gradients)
    (program,) = blocks(DOCS / "guides/own_loop.md", "python")
    names = {"__name__": "program"}
    exec(compile(program, "own_loop.md", "exec"), names)
    answer = {name: names[name] for name in ("total", "norm", "tokens", "pairs")}
    torch.save({**answer, "gradients": gradients}, f"{names['world'].rank}.pt")


def in_one_process(folder, pairs):
    """Returns the same of one process, the model, and the inputs of each rank."""
    tokenizer = AutoTokenizer.from_pretrained(folder / MODEL)
    examples = [tokenizer(text, text_target=target) for text, target in pairs]
    batch = DataCollatorForSeq2Seq(tokenizer)(examples)
    model = load_model(folder / MODEL).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    gradients = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    inputs = [
        {name: batch[name][rows] for name in ("input_ids", "attention_mask")}
        for rows in (slice(0, 2), slice(2, 4))
    ]
    return {"total": loss, "norm": norm, "gradients": gradients}, model.eval(), inputs


@pytest.mark.slow
def test_the_loop_of_the_guide_on_two_ranks_equals_one_process(tmp_path):
    texts = [file.read_text() for file in sorted(write_texts(tmp_path / "texts").iterdir())]
    train_tokenizer(texts, 230, tmp_path / MODEL)
    model = tiny_model(vocab_size=230, num_experts=8, group_size=1)
    model.double().save_pretrained(tmp_path / MODEL)
    ended = start_torchrun(2, "tests.distributed.test_own_loop", tmp_path).finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answers = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    expected, oracle, inputs = in_one_process(tmp_path, answers[0]["pairs"])
    assert expected["norm"] > 1
    saved = load_model(tmp_path / SAVED)
    for rank, answer in enumerate(answers):
        for name in ("total", "norm"):
            torch.testing.assert_close(answer[name], expected[name].detach(), rtol=1e-9, atol=0)
        for ours, theirs in zip(answer["gradients"], expected["gradients"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a.reshape(b.shape), b, rtol=0, atol=1e-9)
        assert torch.equal(answer["tokens"], oracle.generate(**inputs[rank], max_new_tokens=8))
        assert f"rank {rank}: [" in ended.stdout
    for name, weight in oracle.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=0, atol=1e-9)
    assert ended.stdout.count("step 2: loss") == 1
    assert AutoTokenizer.from_pretrained(tmp_path / SAVED)("digit one").input_ids


def losses_with_evaluations(rank, num_ranks):
    """Returns the losses of some updates, with an evaluation before each update, after it, or none."""
    mesh = build_mesh(MeshConfig(dp_shard=num_ranks), "cpu")
    rows = {name: x[mesh.rows(4)] for name, x in tiny_batch().items()}
    losses = {}
    for moment in ("never", "before", "after"):
        model = tiny_model(eval_capacity_factor=None).double()
        shard_model(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[moment] = []
        for _ in range(2):
            loss = model.train()(**rows, loss_counts=model.loss_counts(rows, mesh)).loss
            loss.backward()
            losses[moment].append(loss.item())
            for step in ("before", "update", "after"):
                if step == "update":
                    optimizer.step()
                    optimizer.zero_grad()
                elif step == moment:
                    with torch.no_grad():
                        model.eval()(**rows)
    return losses


@pytest.mark.slow
def test_an_evaluation_between_gradients_and_update_leaves_no_old_weights(tmp_path):
    for losses in run_ranks(losses_with_evaluations, 2, tmp_path):
        assert losses["never"][0] != losses["never"][1]
        assert losses["before"] == losses["after"] == losses["never"]


@pytest.mark.parametrize("build", [tiny_model, lambda: sparse_host("t5gemma", num_experts=4)])
def test_gradients_that_are_summed_need_the_counts_of_all_ranks(build, tmp_path):
    model, batch = build().train(), tiny_batch()
    model.mesh_config = MeshConfig(dp_shard=2, tp=3)
    with pytest.raises(ConfigError, match=r"2 data ranks.*num_items_in_batch.*loss_counts"):
        model(**batch)
    with pytest.raises(ConfigError, match="save_model_on_mesh"):
        model.save_pretrained(tmp_path)
    assert model(**batch, num_items_in_batch=99).loss.requires_grad
    with torch.no_grad():
        assert model(**batch).loss.isfinite()
    model.mesh_config = MeshConfig(tp=6)
    assert model(**batch).loss.requires_grad


def test_counts_do_not_replace_the_choices_of_other_ranks():
    with launch():
        mesh = build_mesh(MeshConfig(), "cpu")._replace(config=MeshConfig(ep=2))
        with pytest.raises(ConfigError, match="balance_scope is 'ranks'"):
            tiny_model(balance_scope="ranks").loss_counts(tiny_batch(), mesh)


if __name__ == "__main__":
    on_a_rank(Path(sys.argv[1]))
