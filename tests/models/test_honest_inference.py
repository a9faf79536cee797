"""Without an evaluation capacity a sequence's output is its own: batch mates, padding, cache and
ranks change nothing.

The oracle is the sequence alone, whole, in one process. In float64, where rounding cannot turn a
router's choice.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MeshConfig, build_mesh
from moe.checkpoint import load_model_on_mesh
from moe.sparse.all_routers import load_routers
from tests.distributed.ranks import run_ranks
from tests.models.tiny import tiny_model

ROUTERS = load_routers()
every_router = pytest.mark.parametrize("router", ROUTERS.names())


@functools.cache
def model_of(router, **fields):
    """Returns a model with this router in the encoder, and in the decoder too if it may stand
    there.
    """
    kind = ROUTERS.get(router)
    model = tiny_model(
        router=router,
        **{"router_options": None, **fields},
        decoder_router=router if kind.causal else "switch" if kind.single else "token_choice",
        num_selected_experts=1 if kind.single else 2,
        eval_capacity_factor=None,
        group_size=29,
    ).double()
    for buffer in model.buffers():
        buffer.random_(-99, 100)
    return model


def sequences(seed, lengths, first=None):
    """Returns one row of token ids <int64>[1, length] for each length; `first` is the first token
    of all.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, 131, (1, length), generator=generator) for length in lengths]
    return [row if first is None else row.index_fill(1, torch.tensor([0]), first) for row in rows]


def side_by_side(rows, lefts, right=0, padding=99):
    """Returns ids and mask <int64>[B, L] of rows that start after `lefts` paddings each; padding
    has any ids.
    """
    width = max(left + row.shape[1] for left, row in zip(lefts, rows, strict=True)) + right
    ids, mask = (
        torch.full((len(rows), width), padding),
        torch.zeros(len(rows), width, dtype=torch.int64),
    )
    for number, (left, row) in enumerate(zip(lefts, rows, strict=True)):
        ids[number, left : left + row.shape[1]] = row
        mask[number, left : left + row.shape[1]] = 1
    return ids, mask


def padded_left(rows, padding=99):
    width = max(row.shape[1] for row in rows)
    return side_by_side(rows, [width - row.shape[1] for row in rows], padding=padding)


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


lengths = st.lists(st.integers(1, 11), min_size=3, max_size=3)
paddings = st.lists(st.integers(0, 5), min_size=3, max_size=3)


@every_router
@settings(max_examples=10)
@given(lengths, lengths, paddings, paddings, st.integers(0, 5), st.integers(0, 99))
@torch.no_grad()
def test_logits_depend_on_no_batch_mate_and_no_padding(
    router, sources, targets, lefts, target_lefts, right, seed
):
    model = model_of(router)
    inputs, prompts = sequences(seed, sources), sequences(seed + 1, targets, first=0)
    ids, mask = side_by_side(inputs, lefts, right)
    decoder_ids, decoder_mask = side_by_side(prompts, target_lefts, right)
    decoder = {"decoder_input_ids": decoder_ids, "decoder_attention_mask": decoder_mask}
    batch = model(ids, mask, **decoder)
    for row in range(3):
        alone = model(inputs[row], decoder_input_ids=prompts[row])
        same(batch.logits[row][decoder_mask[row] == 1], alone.logits[0])
        encoded = batch.encoder_last_hidden_state[row][mask[row] == 1]
        same(encoded, alone.encoder_last_hidden_state[0])


@every_router
@torch.no_grad()
def test_logits_through_a_cache_are_those_without_one_token_by_token_or_after_a_prompt(router):
    model = model_of(router)
    ids, mask = padded_left(sequences(0, (5, 11, 7)))
    decoder_ids, decoder_mask = padded_left(sequences(1, (10, 9, 3), first=0))
    masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
    whole = model(ids, decoder_input_ids=decoder_ids, **masks).logits
    memory, real = model.get_encoder()(ids, mask), decoder_mask == 1
    for prompt in (1, 7):
        cache, steps = None, []
        for start, end in [(0, prompt), *((step, step + 1) for step in range(prompt, 10))]:
            step = model(
                encoder_outputs=memory,
                attention_mask=mask,
                decoder_input_ids=decoder_ids[:, start:end],
                decoder_attention_mask=decoder_mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = step.past_key_values
            steps.append(step.logits)
        same(torch.cat(steps, dim=1)[real], whole[real])


@pytest.mark.parametrize(
    ("router", "num_beams"), [("token_choice", 1), ("token_choice", 3), ("hash", 1)]
)
def test_generated_tokens_depend_on_no_batch_mate_and_no_padding(router, num_beams):
    model = model_of(router)
    inputs, prompts = sequences(0, (5, 11, 7)), sequences(1, (3, 4, 1), first=0)
    new = {"num_beams": num_beams, "do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    alone = [
        model.generate(row, decoder_input_ids=prompt, **new)[0, -5:].tolist()
        for row, prompt in zip(inputs, prompts, strict=True)
    ]
    assert len(set(map(tuple, alone))) == 3

    # `generate` looks whether the prompts start with 0.
    decoder_ids, decoder_mask = padded_left(prompts, padding=0)
    decoder = {"decoder_input_ids": decoder_ids, "decoder_attention_mask": decoder_mask}
    for ids, mask in (padded_left(inputs), side_by_side(inputs, [0, 0, 0], 2)):
        tokens = model.generate(ids, attention_mask=mask, **decoder, **new)
        assert tokens[:, -5:].tolist() == alone


# ---- rows of nothing but padding ----


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        (torch.float16, "eager"),
        (torch.float16, "sdpa"),
        (torch.bfloat16, "sdpa"),
        (torch.float32, "eager"),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_sequence_of_padding_alone_gives_finite_numbers(dtype, attention):
    model = tiny_model(eval_capacity_factor=None, attn_implementation=attention).to(dtype)
    ids, mask = side_by_side(sequences(0, (5, 7, 3)), [0, 0, 0])
    mask[1] = 0
    out = model(ids, mask, decoder_input_ids=ids, decoder_attention_mask=mask)
    assert out.logits.isfinite().all()
    assert out.encoder_last_hidden_state.isfinite().all()
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, mask, labels=labels)
    for name in ("loss", "ce_loss", "load_balance_loss"):
        assert out[name].isfinite()
    assert model(ids, mask * 0, labels=labels * 0 - 100).loss.isfinite()


# ---- several ranks ----

SPREAD = {"num_experts": 8, "num_heads": 4, "d_ff": 34, "eval_capacity_factor": None}
MESHES = {"ep": MeshConfig(ep=2), "tp": MeshConfig(tp=2)}


def inputs_on_ranks():
    """Returns the arguments of two calls; in the second one rank has nothing but padding."""
    ids, mask = padded_left(sequences(0, (5, 11, 7, 3)))
    decoder_ids, decoder_mask = padded_left(sequences(1, (3, 4, 1, 5), first=0), padding=0)
    masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
    first = {"input_ids": ids, "decoder_input_ids": decoder_ids, **masks}
    second = {name: value.clone() for name, value in first.items()}
    for name in masks:
        second[name][2:] = 0
    return first, second


@torch.no_grad()
def serve(rank, num_ranks, folder):
    """Returns logits of this rank's rows and its generated tokens, by mesh."""
    answers = {}
    for name, sizes in MESHES.items():
        mesh = build_mesh(sizes, "cpu")
        model, _ = load_model_on_mesh(folder, mesh, gather=False)
        calls = [
            {key: value[mesh.rows(4)] for key, value in call.items()} for call in inputs_on_ranks()
        ]
        tokens = model.generate(
            **calls[0], do_sample=False, max_new_tokens=3, min_new_tokens=3, synced_gpus=True
        )
        answers[name] = [model(**call).logits for call in calls], tokens
    return answers


@pytest.mark.slow
@torch.no_grad()
def test_two_ranks_give_the_logits_and_tokens_of_one(tmp_path):
    model = tiny_model(**SPREAD)
    model.save_pretrained(tmp_path / "model")
    calls = inputs_on_ranks()
    answers = run_ranks(serve, 2, tmp_path, tmp_path / "model")
    for row in range(4):
        first = {key: value[row : row + 1] for key, value in calls[0].items()}
        expected = model.generate(**first, do_sample=False, max_new_tokens=3, min_new_tokens=3)
        for name in MESHES:
            rank, here = (row // 2, row % 2) if name == "ep" else (0, row)
            logits, tokens = answers[rank][name]
            assert tokens[here].tolist() == expected[0].tolist()
            for call, batch_logits in zip(calls, logits, strict=True):
                if not call["attention_mask"][row].any():
                    continue
                alone = {}
                for key, value in call.items():
                    real = call[mask_of(key)][row] == 1
                    alone[key] = value[row : row + 1][:, real]
                real = call["decoder_attention_mask"][row] == 1
                ours, theirs = batch_logits[here][real], model(**alone).logits[0]
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def mask_of(name):
    """Returns the name of the mask that belongs to an argument."""
    return "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
