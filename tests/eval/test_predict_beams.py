"""Beam search against Mesh-TensorFlow's loop written with plain lists, and greedy answers against
transformers.
"""

from dataclasses import replace

import pytest
import torch

from stmoe_eval.answers.beam import beam_search
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.task import Decoding
from tests.eval.test_predict import requests_of
from tests.eval.test_predict_rank import make_folder

EOS, V = 1, 7


def random_logits(prefix, seed):
    """The logits after a prefix: a table drawn for each, in which the end is likelier than others."""
    generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
    logits = torch.randn(V, generator=generator) * (1 + seed % 3)
    logits[EOS] += 1
    return logits


def search(logits_of, num_inputs, **options):
    """Returns the answers of `beam_search` for a function (input, prefix) -> logits."""
    num_beams = options["num_beams"]
    prefixes = [() for _ in range(num_inputs * num_beams)]

    def step(tokens, beams):
        prefixes[:] = [
            (*prefixes[b], t) for b, t in zip(beams.tolist(), tokens.tolist(), strict=True)
        ]
        return torch.stack(
            [logits_of(row // num_beams, prefix) for row, prefix in enumerate(prefixes)]
        )

    first = torch.stack([logits_of(row, ()) for row in range(num_inputs)])
    answers, scores = beam_search(first, step, eos=[EOS], **options)
    cut = [tuple(a[: a.index(EOS) + 1] if EOS in a else a) for a in answers.tolist()]
    return cut, scores.tolist()


def mesh_tensorflow(logits_of, *, num_beams, alpha, max_tokens):
    """Returns the answer and its score as Mesh-TensorFlow's description has it, for one input, with
    lists.

    Each step extends every alive sequence by every token and keeps the 2 K of best score. Of these
    the K best without an end stay alive; those with an end and the K best that ended before are
    ranked by score, and K remain. It stops at the most tokens, or when the lowest finished score
    exceeds the best alive log-probability over the largest penalty. Without a finished sequence the
    best alive one is the answer.
    """
    alive, finished = [(0.0, ())], []
    for length in range(1, max_tokens + 1):
        penalty = ((5 + length) / 6) ** alpha
        grown = [
            (log_prob + p, (*ids, token))
            for log_prob, ids in alive
            for token, p in enumerate(logits_of(ids).log_softmax(-1).tolist())
        ]
        grown = sorted(grown, reverse=True)[: 2 * num_beams]
        alive = [one for one in grown if one[1][-1] != EOS][:num_beams]
        finished += [(log_prob / penalty, ids) for log_prob, ids in grown if ids[-1] == EOS]
        finished = sorted(finished, reverse=True)[:num_beams]
        if finished and finished[-1][0] > alive[0][0] / ((5 + max_tokens) / 6) ** alpha:
            break
    return (finished or alive)[0][::-1]


@pytest.mark.parametrize(("num_beams", "alpha"), [(2, 0.0), (2, 2.0), (3, 1.3), (4, 0.6)])
def test_beams_end_where_mesh_tensorflows_loop_ends(num_beams, alpha):
    """Beside other inputs, whose search may be longer, and alone."""
    options = {"num_beams": num_beams, "alpha": alpha, "max_tokens": 6}
    answers, scores = search(lambda row, ids: random_logits(ids, row), 31, **options)
    expected, alone = [], []
    for row in range(31):
        expected.append(mesh_tensorflow(lambda ids, row=row: random_logits(ids, row), **options))
        alone += search(lambda _, ids, row=row: random_logits(ids, row), 1, **options)[0]
    assert answers == alone == [ids for ids, _ in expected]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-5)
    assert len({len(ids) for ids in answers}) > 2


def test_an_answer_that_never_ends_is_the_best_beam():
    logits = torch.tensor([0.0, -90.0, 3, 0, 0, 0, 0])
    answers, _ = search(lambda row, ids: logits, 1, num_beams=2, alpha=0.6, max_tokens=4)
    assert answers == [(2, 2, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "moe", "bart"])
def test_a_model_with_a_cache_finds_what_the_loop_finds_without(tokenizer, task, tmp_path, kind):
    system = load_seq2seq(make_folder(kind, tokenizer, tmp_path))
    task = replace(task, decoding=Decoding(max_tokens=5, num_beams=3, alpha=0.6))
    requests = requests_of(task)[::6]
    made = predict(system, task, requests, "generate", tmp_path / "p.jsonl").predictions
    for request, prediction in zip(requests, made, strict=True):
        inputs = system.tokenizer(request.inputs, return_tensors="pt")

        def logits_of(ids, inputs=inputs):
            start = torch.tensor([[*system.start, *ids]])
            with torch.no_grad():
                return system.model(**inputs, decoder_input_ids=start).logits[0, -1]

        expected, _ = mesh_tensorflow(logits_of, num_beams=3, alpha=0.6, max_tokens=5)
        assert prediction.output == system.tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "moe", "switch", "bart"])
def test_greedy_answers_are_those_of_transformers(tokenizer, task, tmp_path, kind):
    system = load_seq2seq(make_folder(kind, tokenizer, tmp_path))
    requests = requests_of(task)
    made = predict(system, task, requests, "generate", tmp_path / "p.jsonl").predictions
    most = task.decoding.max_tokens + len(system.start) - 1
    for request, prediction in zip(requests, made, strict=True):
        inputs = system.tokenizer(request.inputs, return_tensors="pt")
        tokens = system.model.generate(**inputs, max_new_tokens=most, do_sample=False)[0]
        assert prediction.output == system.tokenizer.decode(tokens, skip_special_tokens=True)
