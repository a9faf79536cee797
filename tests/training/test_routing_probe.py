"""The probe of a run: what it records is what `record_routing` sees, and the run does not notice."""

import itertools
import json
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe import ConfigError, DataError, RouterStatsCallback
from moe.commands import finetune as finetune_command
from moe.commands import pretrain
from moe.commands.finetune import FinetuningData
from moe.data.tokenizer import load_tokenizer
from moe.tracing.probe_file import read_probe_text, read_probes
from moe.tracing.recorder import record_routing, traced_batches
from moe.training import router_health
from moe.training.callback import GivenBatches
from moe.training.recipe import TrainingRecipe
from moe.training.routing_probe import RoutingProbe, probe_histograms, probe_values
from tests.models.tiny import DENSE, tiny_batch, tiny_model
from tests.training.test_router_health import with_dead_expert
from tests.training.tiny_checkpoints import content_of
from tests.training.tiny_run import pretrain_arguments, write_inputs
from tests.training.tiny_trainer import HEAVY, examples, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

BATCHES = [tiny_batch(seed=seed) for seed in (3, 5)]
RANDOM = {"router_options": {"eval_second_expert_policy": "random"}}


def routing_probe(model, folder, **options):
    source = GivenBatches(BATCHES)
    probe = RoutingProbe(folder, model, source, len(BATCHES), text="two batches", **options)
    probe.begin(0)
    return probe


# ---- one probe ----


def test_a_probe_is_what_record_routing_sees_in_its_precision(tmp_path):
    model = tiny_model()
    gates = []
    for bfloat16 in (False, True):
        folder = tmp_path / str(bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            trace = record_routing(model, traced_batches(BATCHES))
        gates.append(trace.layers[0].gate)
        result = routing_probe(model, folder, bfloat16=bfloat16).record(7)
        (kept,) = read_probes(folder)
        assert kept.step == 7
        for layer in trace.layers:
            assert torch.equal(result.choices[layer.key], layer.choices)
            assert torch.equal(kept.choices[layer.key], layer.choices)
            assert torch.equal(kept.choices[layer.key][:, 0], layer.first)
    assert not torch.equal(*gates)


def test_where_experts_choose_the_first_choice_stands_in_front(tmp_path):
    model = tiny_model(router="expert_choice", router_options=None, num_sparse_decoder_layers=0)
    trace = record_routing(model, traced_batches(BATCHES))
    routing_probe(model, tmp_path).record(0)
    (kept,) = read_probes(tmp_path)
    for layer in trace.layers:
        choices = kept.choices[layer.key]
        assert choices.shape == layer.choices.shape
        assert torch.equal(choices[:, 0], layer.first)
        assert torch.equal(choices.sort(dim=1).values, layer.choices.sort(dim=1).values)
        assert not ((choices[:, :-1] < 0) & (choices[:, 1:] >= 0)).any()


def test_a_probe_moves_no_generator_and_no_mode_and_draws_the_same_each_time(tmp_path):
    model = tiny_model(**RANDOM).train()
    model.model.encoder.eval()
    modes = [part.training for part in model.modules()]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    probe = routing_probe(model, tmp_path)
    for step in range(3):
        probe.record(step)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert not model._forward_hooks

    first, *others = read_probes(tmp_path)
    for key, choices in first.choices.items():
        assert (choices[:, 1] < 0).any() and (choices[:, 1] >= 0).any()
        assert all(torch.equal(other.choices[key], choices) for other in others)


def test_numbers_and_histograms_are_those_of_the_logits(tmp_path):
    model = tiny_model()
    seen = []
    hook = model.register_forward_hook(lambda _, __, output: seen.append(output))
    scores = routing_probe(model, tmp_path).record(0).scores
    hook.remove()
    values = probe_values(scores)
    histograms = probe_histograms(scores)

    for stack in ("encoder", "decoder"):
        logits, loads = [], 0
        for output in seen:
            (router,) = getattr(output, f"{stack}_router_outputs")
            logits.append(router.router_logits[router.plan.token_mask])
            loads = loads + router.stats.expert_load
        logits = torch.cat(logits)
        entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
        name = f"probe/{stack}/0"
        assert values[f"{name}/max_logit"] == pytest.approx(float(logits.abs().max()))
        assert values[f"{name}/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-6)
        assert histograms[f"{name}/load"].counts == loads.tolist()

        largest = logits.abs().amax(dim=1).double()
        for part, numbers in (("token_entropy", entropy), ("token_max_logit", largest)):
            edges, counts = histograms[f"{name}/{part}"]
            expected = torch.histogram(numbers, torch.tensor(edges, dtype=torch.float64)).hist
            assert counts == expected.long().tolist()
            assert sum(counts) == len(numbers)


def test_a_router_that_saturates_is_warned_of_in_a_run(inputs, tmp_path, caplog):
    probes = ("--training.probe_every", 1, "--model.router_initializer_std", 300)
    steps = ("--training.steps", 2, "--optim.cooldown_steps", 0)
    pretrain.main(pretrain_arguments(inputs, tmp_path / "run", *probes, *steps))
    ours = [record for record in caplog.records if record.name == router_health.__name__]
    texts = [record.getMessage() for record in ours]
    routers = [f"The router of {stack} 1" for stack in ("encoder", "decoder")]
    assert [text.split(" saturates")[0] for text in texts] == routers
    assert all("after step 0, above 128" in text for text in texts)


# ---- runs ----


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


STEPS = ("--training.steps", 14)
PROBED = ("--training.probe_every", 5, "--training.probe_batches", 2)


@pytest.fixture(scope="module")
def probed(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("probed") / "run"
    pretrain.main(pretrain_arguments(inputs, out, *STEPS, *PROBED))
    return out


@pytest.fixture
def stopped(probed, tmp_path):
    """Copies the run as it was after seven steps, but for what it had written since."""
    out = tmp_path / "stopped"
    shutil.copytree(probed, out)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / "step_00000014")
    return out


def lines(out):
    """Returns the lines of metrics without speeds; those of probes apart."""
    training, probes = [], []
    for text in (out / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for speed in ("train/tokens_per_second", "train/data_wait_seconds"):
            line.pop(speed, None)
        is_probe = any(name.startswith("probe/") for name in line)
        (probes if is_probe else training).append(line)
    return training, probes


@pytest.mark.slow
def test_a_run_with_probes_equals_one_without_bit_for_bit(inputs, probed, tmp_path):
    out = tmp_path / "run"
    pretrain.main(pretrain_arguments(inputs, out, *STEPS))
    assert not (out / "probe").exists()
    weights = "model/model.safetensors"
    assert (out / weights).read_bytes() == (probed / weights).read_bytes()
    training, probes = lines(probed)
    assert (training, []) == lines(out)
    assert [line["step"] for line in probes] == [0, 5, 10, 14]


@pytest.mark.slow
def test_the_board_shows_histograms_of_each_layer(probed):
    board = EventAccumulator(str(probed / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    names = set(board.Tags()["histograms"])
    parts = ("load", "token_max_logit", "token_entropy")
    assert names == {f"probe/{s}/0/{part}" for s in ("encoder", "decoder") for part in parts}
    events = board.Histograms("probe/encoder/0/load")
    assert [event.step for event in events] == [0, 5, 10, 14]
    text = read_probe_text(probed / "probe")
    loads = events[0].histogram_value
    assert loads.num == 2 * text.encoder.ids.numel() == sum(loads.bucket)
    assert loads.bucket_limit == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_probes(inputs, probed, stopped):
    # A probe that it was to write later is stale, and one of another step has been left.
    probes = stopped / "probe"
    shutil.copy(probes / "step_00000005.safetensors", probes / "step_00000010.safetensors")
    shutil.copy(probes / "step_00000005.safetensors", probes / "step_00000013.safetensors")
    pretrain.main(pretrain_arguments(inputs, stopped, *STEPS, *PROBED, "--resume"))
    assert content_of(probes) == content_of(probed / "probe")
    assert lines(stopped) == lines(probed)


@pytest.mark.slow
def test_a_resumed_run_may_begin_to_probe_but_not_change_the_text(inputs, stopped, tmp_path):
    before = content_of(stopped / "probe")
    words = pretrain_arguments(inputs, stopped, *STEPS, "--resume", "--training.probe_every", 5)
    with pytest.raises(DataError, match="holds probes of a different text"):
        pretrain.main(words)
    assert content_of(stopped / "probe") == before

    (stopped / "probe").rename(tmp_path / "earlier")
    pretrain.main(words)
    assert [probe.step for probe in read_probes(stopped / "probe")] == [10, 14]


def pairs(number, words):
    return [(f"ba {'ko ' * n}{words}", "su ver" if n % 2 else "ti on al") for n in range(number)]


def tune(inputs, pretrained, out, *more, dev_pairs):
    """Fine-tunes on a made-up task."""
    data = FinetuningData({"made up": pairs(17, "lan")}, dev_pairs)
    paths = ("--pretrained", pretrained / "model", "--out", out, "--task", "made up")
    argv = ("--config", inputs["finetune.yaml"], *paths, *PROBED, *more)
    finetune_command.main([str(part) for part in argv], read_tasks=lambda mixture: data)


@pytest.mark.slow
def test_fine_tuning_probes_the_dev_split_one_example_a_row_though_it_packs(
    inputs, probed, tmp_path
):
    dev_pairs = pairs(13, "ter")
    tune(inputs, probed, tmp_path / "run", dev_pairs=dev_pairs)
    text = read_probe_text(tmp_path / "run" / "probe")
    assert text.encoder.starts.numel() == 8 + 1
    tokenizer = load_tokenizer(tmp_path / "run" / "model")
    known = {inputs for inputs, _ in dev_pairs}
    for start, end in itertools.pairwise(text.encoder.starts.tolist()):
        read = tokenizer.decode(text.encoder.ids[start:end], skip_special_tokens=True)
        assert read.strip() in known
    assert [probe.step for probe in read_probes(tmp_path / "run" / "probe")] == [0, 5, 9]


@pytest.mark.slow
def test_there_must_be_something_to_probe(inputs, probed, tmp_path):
    with pytest.raises(ConfigError, match="probe_every is 5, but there is no held-out text"):
        tune(inputs, probed, tmp_path / "run", dev_pairs=[])
    dense = [f"--model.{name}={json.dumps(value)}" for name, value in DENSE.items()]
    with pytest.raises(ConfigError, match="probe_every is 5, but the model has no sparse layer"):
        pretrain.main(pretrain_arguments(inputs, tmp_path / "run", *PROBED, *dense))
    assert not (tmp_path / "run").exists()


def test_wrong_settings_are_refused():
    for name, value, expected in (
        ("probe_every", -1, "an integer from 0 to 99,999,999"),
        ("probe_batches", 0, "an integer from 1 to 10,000"),
        ("probe_batches", 10_001, "every probe keeps the routing of each token"),
    ):
        with pytest.raises(ConfigError, match=rf"\.{name} is {value}; expected .*{expected}"):
            TrainingRecipe(**{name: value})


# ---- with transformers' Trainer ----


def trainer(out, callback, **settings):
    model = tiny_model(**HEAVY, dropout_rate=0.1, **RANDOM)
    return make_trainer(out, model, callbacks=[callback], **settings)


@pytest.mark.slow
def test_a_trainer_with_probes_equals_one_without_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    plain = trainer(tmp_path / "plain", RouterStatsCallback(), max_steps=3)
    plain.train()
    torch.manual_seed(0)
    callback = RouterStatsCallback(probe_every=2, probe_batches=BATCHES)
    probed = trainer(tmp_path / "probed", callback, max_steps=3)
    probed.train()
    weights = plain.model.state_dict()
    for name, value in probed.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert not probed.model._forward_hooks

    # Lines of the log differ by the numbers of probes alone, which are of step 2 and the last.
    of_probes = []
    for line, expected in zip(probed.state.log_history, plain.state.log_history, strict=True):
        names = [name for name in line if name.startswith("probe/")]
        of_probes.append({name: line.pop(name) for name in names})
        if "loss" in line:
            assert line == expected
    steps = [line.get("probe/step") for line in of_probes]
    assert steps == [None, 2, 3, None]
    assert of_probes[1]["probe/decoder/0/max_logit"] > 0

    probes = read_probes(tmp_path / "probed" / "probe")
    assert [probe.step for probe in probes] == [0, 2, 3]
    again = routing_probe(probed.model, tmp_path / "again").record(3)
    for key, choices in probes[-1].choices.items():
        assert torch.equal(choices, again.choices[key])


@pytest.mark.slow
def test_a_resumed_trainer_goes_on_with_the_same_probes_and_a_new_one_does_not_mix(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def probing():
        callback = RouterStatsCallback(probe_every=1, probe_batches=BATCHES)
        return trainer(tmp_path, callback, **settings)

    probing().train()
    folder = tmp_path / "probe"
    alone = content_of(folder)
    (folder / "step_00000002.safetensors").replace(folder / "step_00000003.safetensors")
    (folder / "step_00000002.safetensors").write_bytes(alone["step_00000002.safetensors"])
    probing().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert content_of(folder) == alone

    with pytest.raises(DataError, match=r"holds the probes of another training run\. Resume it"):
        probing().train()
    assert content_of(folder) == alone


def test_the_callback_warns_of_an_expert_that_is_dead(tmp_path, caplog):
    model = tiny_model(**HEAVY)
    with_dead_expert(model.sparse_layers()[0].router.gate)
    settings = {"learning_rate": 0.0, "max_steps": 12, "data": examples(96)}
    make_trainer(tmp_path, model, callbacks=[RouterStatsCallback()], **settings).train()
    texts = [record.getMessage() for record in caplog.records]
    dead = [text for text in texts if "are dead" in text]
    assert len(dead) == 1 and "1 of 7 experts of encoder 1" in dead[0]


def test_the_callback_refuses_half_of_a_probe_and_a_model_without_routers(tmp_path):
    for arguments, message in (
        ({"probe_every": 5}, "probe_every is 5, and there are 0 probe_batches; expected both"),
        ({"probe_batches": BATCHES}, "probe_every is 0, and there are 2 probe_batches"),
        ({"probe_every": -1, "probe_batches": BATCHES}, "probe_every is -1; expected an integer"),
        ({"probe_every": 5, "probe_batches": ["a sentence"]}, "is 'a sentence'; expected whole"),
    ):
        with pytest.raises(ConfigError, match=message):
            RouterStatsCallback(**arguments)

    callback = RouterStatsCallback(probe_every=5, probe_batches=BATCHES)
    with pytest.raises(ConfigError, match="probe_every is 5; expected 0 for a model without"):
        make_trainer(tmp_path, tiny_model(**DENSE), callbacks=[callback]).train()
