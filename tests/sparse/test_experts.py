"""The experts' products on a CPU, one expert a thread.

The oracle is tests/sparse/expert_loop.py; it is given the dropout mask that the engine drew.
"""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from moe.kernels import cpu_experts, expert_pieces
from tests.processes import run_program
from tests.sparse.expert_loop import (
    KINDS,
    expert_rows,
    form_of,
    problem,
    run_loop,
    tiny,
    weights_of,
)
from tests.sparse.layers import assert_all_close, build_layer, gradients


@pytest.fixture(autouse=True)
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_engine(inputs, rows, config, drop_rate=0.0):
    tokens, weight, *stacked = inputs
    rows = rows._replace(weight=weight)
    weights = weights_of(config, stacked)
    return cpu_experts.fused_feed_forward(tokens, rows, weights, form_of(config, drop_rate))


# ---- the engine of the CPU against the loop ----


@pytest.mark.parametrize(("activation", "gated", "bias"), KINDS)
def test_the_engine_equals_a_loop_over_experts_in_output_and_gradients(
    activation, gated, bias, threads, monkeypatch
):
    config = tiny(activation, gated, bias, d_model=7, d_ff=11)
    for num_threads, drop_rate, rows_per_piece in ((1, 0.0, 512), (2, 0.3, 2)):
        # Few rows a piece: experts are split and summed up again.
        threads(num_threads)
        monkeypatch.setattr(cpu_experts, "_BYTES_PER_PIECE", 8 * rows_per_piece)
        inputs, rows = problem(config, num_tokens=13, num_rows=23)
        output = run_engine(inputs, rows, config, drop_rate)
        saved = [x for x in output.grad_fn.saved_tensors if x is not None]
        kept = next(x for x in saved if x.dtype == torch.bool)
        assert kept.numel() == (23 * 11 if drop_rate else 0)
        expected = run_loop(inputs, rows, config, kept, drop_rate)
        assert_all_close([output], [expected], atol=1e-12)
        cotangent = torch.randn_like(output)
        ours, theirs = (torch.autograd.grad(y, inputs, cotangent) for y in (output, expected))
        assert_all_close(ours, theirs, atol=1e-11)


@pytest.mark.parametrize("frozen", [(0,), (2, 3), (1, 2, 3, 4), range(5)], ids=str)
def test_what_is_frozen_gets_no_gradient_and_the_others_the_same(frozen):
    config = tiny(bias="additive")
    inputs, rows = problem(config, num_tokens=5, num_rows=11)
    loss = run_engine(inputs, rows, config).square().sum()
    expected = torch.autograd.grad(loss, inputs)
    for index in frozen:
        inputs[index].requires_grad_(False)
    output = run_engine(inputs, rows, config)
    assert output.requires_grad == (len(frozen) < 5)
    if output.requires_grad:
        output.square().sum().backward()
    for index, gradient in enumerate(expected):
        if index in frozen:
            assert inputs[index].grad is None
        else:
            assert torch.equal(inputs[index].grad, gradient)


# ---- threads ----


@pytest.mark.parametrize(("expert_of_row", "drop_rate"), [("even", 0.3), ("one", 0.0)])
def test_the_number_of_threads_changes_no_bit_of_the_output_and_gradients_by_rounding_only(
    expert_of_row, drop_rate, threads
):
    config = tiny(bias="multiplicative", d_model=37, d_ff=61)
    inputs, rows = problem(config, num_tokens=997, num_rows=2003)
    if expert_of_row == "one":  # and several pieces of it
        rows = expert_rows([2] * 2003, rows.token.tolist(), 4, 997)
    rows = rows._replace(weight=rows.weight.detach())
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    results = {}
    for num_threads in (1, 2, 4):
        threads(num_threads)
        torch.manual_seed(0)
        output = run_engine(inputs, rows, config, drop_rate)
        results[num_threads] = [output, *torch.autograd.grad(output.square().sum(), inputs)]
        assert torch.get_num_threads() == num_threads
    for num_threads in (2, 4):
        assert torch.equal(results[num_threads][0], results[1][0])
        for ours, theirs in zip(results[num_threads], results[1], strict=True):
            largest = float(theirs.detach().abs().max())
            assert_all_close([ours], [theirs], atol=1e-6 * largest)


def test_without_gradients_the_output_is_the_same(threads):
    threads(2)
    config = tiny(bias="multiplicative")
    inputs, rows = problem(config, num_tokens=5, num_rows=11)
    expected = run_engine(inputs, rows, config)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = run_engine(inputs, rows, config)
        assert torch.equal(output, expected)
        assert not output.requires_grad


def test_two_python_threads_may_use_layers_at_once(threads):
    threads(2)
    layers = [build_layer(seed=seed, expert_dropout_rate=0.0) for seed in range(2)]
    x = torch.randn(3, 13, 7, dtype=torch.float64)

    def step(layer):
        y, router = layer(x)
        return [y, *gradients(y.square().sum() + router.losses.load_balance_loss, layer)]

    expected, failures = [step(layer) for layer in layers], []

    def work(index):
        try:
            for _ in range(7):
                assert_all_close(step(layers[index]), expected[index], atol=1e-11)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=300)
        assert not worker.is_alive()
    assert not failures


def _in_a_child(layer, x, answers):
    torch.set_num_threads(1)  # torch's own products hang with more of them after a fork
    y, _ = layer(x)
    (gate, *_) = gradients(y.square().sum(), layer)
    torch.set_num_threads(2)
    ran = []
    expert_pieces.run_pieces(ran.append, expert_pieces.split_rows([3, 5], most=2))
    answers.put((y.detach().numpy(), gate.numpy(), len(ran)))


@pytest.mark.slow
@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="the platform cannot fork"
)
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_that_forks_after_the_engine_was_used_goes_on_in_the_child(threads):
    threads(2)
    layer, x = build_layer(), torch.randn(3, 13, 7, dtype=torch.float64)
    y, _ = layer(x)
    (gate, *_) = gradients(y.square().sum(), layer)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_a_child, args=(layer, x, answers), daemon=True)
    child.start()
    try:
        y_child, gate_child, pieces = answers.get(timeout=300)
    finally:
        child.kill()
    assert torch.equal(torch.from_numpy(y_child), y)
    torch.testing.assert_close(torch.from_numpy(gate_child), gate, rtol=0, atol=1e-12)
    assert pieces == 2 + 3
    assert torch.equal(layer(x)[0], y)  # and in the parent


def test_workers_run_torch_on_one_core_each(threads):
    threads(2)
    seen = []

    def run(piece):
        torch.zeros(2**20).add(1)  # large enough to be split
        seen.append(torch.get_num_threads())

    expert_pieces.run_pieces(run, expert_pieces.split_rows([3, 5], most=1))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


# ---- borders ----


@pytest.mark.parametrize(
    ("name", "dispatch", "shape"),
    [
        ("token_choice", "ragged", (0, 13, 7)),
        ("token_choice", "static", (3, 0, 7)),
        ("expert_choice", "ragged", (3, 0, 7)),
        ("hash", "static", (0, 13, 7)),
    ],
)
def test_an_empty_batch_has_an_empty_output_and_gradients_of_zeros(name, dispatch, shape):
    layer = build_layer(name, dispatch=dispatch, expert_dropout_rate=0.3).train()
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y, router = layer(x, token_ids=torch.zeros(shape[:2], dtype=torch.int64))
    total = y.square().sum() + router.losses.load_balance_loss + router.losses.router_z_loss
    assert y.shape == x.shape
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients(total, layer, x))
    assert int(router.stats.num_tokens) == 0


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
def test_strides_of_input_and_weights_do_not_matter(dispatch):
    layer = build_layer(dispatch=dispatch, expert_bias="multiplicative")
    plain = torch.randn(3, 13, 7, dtype=torch.float64)
    strided = plain.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    mask = (torch.rand(13, 3) > 0.2).T
    y, _ = layer(plain, mask.contiguous())
    expected = gradients(y.square().sum(), layer)
    y_strided, _ = layer(strided, mask)
    torch.testing.assert_close(y_strided, y, rtol=0, atol=1e-12)
    for parameter in layer.experts.parameters():
        parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)
    y_strided, _ = layer(strided, mask)
    torch.testing.assert_close(y_strided, y, rtol=0, atol=1e-12)
    assert_all_close(gradients(y_strided.square().sum(), layer), expected)

    # The cotangent of a sum has a stride of 0.
    for_sum = torch.autograd.grad(layer(plain)[0].sum(), layer.router.gate)
    for_ones = torch.autograd.grad((layer(plain)[0] * torch.ones(7)).sum(), layer.router.gate)
    assert_all_close(for_sum, for_ones)


def test_pieces_cover_every_row_once_and_every_expert():
    pieces = expert_pieces.split_rows([5, 0, 13, 1], most=3)
    rows = [row for piece in pieces for row in range(piece.start, piece.end)]
    assert sorted(rows) == list(range(19))
    sizes = [piece.end - piece.start for piece in pieces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 3
    assert sorted((piece.expert, piece.part) for piece in pieces) == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (3, 0),
    ]  # fmt: skip
    assert expert_pieces.split_rows([5, 0, 13, 1], 3, 0) == [p for p in pieces if p.expert != 1]


def test_after_an_error_no_piece_begins_and_none_is_running(threads):
    threads(2)
    failed, begun, ended = threading.Event(), [], []

    def run(piece):
        begun.append(piece)
        if len(begun) == 2:
            failed.set()
            raise ZeroDivisionError
        assert failed.wait(timeout=300)
        time.sleep(0.1)
        ended.append(piece)

    with pytest.raises(ZeroDivisionError):
        expert_pieces.run_pieces(run, expert_pieces.split_rows([5] * 13, most=1))
    assert (len(begun), len(ended)) == (2, 1)


def test_ctrl_c_leaves_no_piece_running(threads):
    threads(2)
    # A shell's background jobs ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun, ended, sent = [], [], []

    def run(piece):
        begun.append(piece)
        # Python can miss a signal in the moment before its main thread waits.
        if len(begun) > 4 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        time.sleep(0.1)
        ended.append(piece)

    try:
        with pytest.raises(KeyboardInterrupt):
            expert_pieces.run_pieces(run, expert_pieces.split_rows([5] * 31, most=1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(begun) == len(ended) < 100


def test_other_numbers_of_threads_do_not_leave_workers_behind(threads):
    for number in range(2, 14):
        threads(number)
        expert_pieces.run_pieces(lambda piece: None, expert_pieces.split_rows([3], most=1))
    for _ in range(200):
        workers = [thread for thread in threading.enumerate() if thread.name.startswith("experts")]
        if len(workers) <= 10 + 11 + 12 + 13:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(workers)} workers are alive")


@pytest.mark.slow
def test_a_process_that_gets_no_threads_ends_with_the_error(tmp_path):
    program = (
        "import threading, torch\n"
        "from moe.kernels import expert_pieces\n"
        "torch.set_num_threads(3)\n"
        "start, started = threading.Thread.start, []\n"
        "def refuse(self):\n"
        "    started.append(self)\n"
        '    if len(started) == 2: raise RuntimeError("can\'t start new thread")\n'
        "    start(self)\n"
        "threading.Thread.start = refuse\n"
        "expert_pieces.run_pieces(print, expert_pieces.split_rows([3], most=1))\n"
    )
    done = run_program(tmp_path, program)
    assert done.returncode == 1
    assert "can't start new thread" in done.stderr
