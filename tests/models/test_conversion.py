"""T5 and Switch as they load: what is computed equals transformers' own classes, and every tensor
is accounted for.
"""

import json
import shutil

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, T5EncoderModel, T5ForConditionalGeneration

from moe import (
    CheckpointError,
    ConfigError,
    STMoEConfig,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    STMoEModel,
    lora_config,
)
from moe.checkpoint import load_model, load_model_on_mesh
from moe.convert import conversion_report
from tests.models.folders import change_config, change_weights
from tests.models.hf_models import (
    assert_equal_to_rounding,
    every_kind,
    needs_a_right_switch,
    their_inputs,
    their_model,
)
from tests.models.tiny import tiny_batch
from tests.processes import run_program


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, saved once; not to be changed."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("theirs") / "model"
            their_model(kind).save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture
def folder(folders, tmp_path):
    """A Switch folder to change."""
    return shutil.copytree(folders("Switch"), tmp_path / "model")


def load(folder, **options):
    return STMoEForConditionalGeneration.from_pretrained(folder, **options)


# ---- what is computed ----

a_kind_of_each = pytest.mark.parametrize(
    "kind", ["T5 1.1", pytest.param("Switch", marks=needs_a_right_switch)]
)


@every_kind
def test_encoder_and_logits_equal_transformers_where_capacity_drops_tokens(folders, kind):
    theirs, inputs = their_model(kind), their_inputs()
    expected = theirs(**inputs)
    for attention in ("eager", "sdpa"):
        actual = load(folders(kind), attn_implementation=attention)(**inputs)
        for name in ("encoder_last_hidden_state", "logits"):
            assert_equal_to_rounding(actual[name], expected[name])
        routers = (*(actual.encoder_router_outputs or ()), *(actual.decoder_router_outputs or ()))
        drops = any(router.stats.dropped_tokens for router in routers)
        assert drops == kind.startswith("Switch")


@a_kind_of_each
@torch.no_grad()
def test_greedy_decoding_through_a_cache_equals_transformers_step_by_step(folders, kind):
    ids, steps = their_inputs()["input_ids"], {}
    for model in (their_model(kind), load(folders(kind))):
        given = {"encoder_outputs": model.get_encoder()(ids), "use_cache": True}
        cache, token, steps[model] = None, torch.zeros(3, 1, dtype=torch.int64), []
        for _ in range(7):
            step = model(decoder_input_ids=token, past_key_values=cache, **given)
            cache, token = step.past_key_values, step.logits.argmax(-1)
            steps[model].append(step.logits)
    for theirs, ours in zip(*steps.values(), strict=True):
        assert_equal_to_rounding(ours, theirs)


@needs_a_right_switch
@torch.no_grad()
def test_a_switch_loads_with_new_weights_that_its_checkpoint_does_not_have(folders):
    model = load(folders("Switch"), expert_bias="multiplicative")
    expected = load(folders("Switch"))(**their_inputs()).logits
    torch.testing.assert_close(model(**their_inputs()).logits, expected)


# ---- files ----


def save_in_form(form, folder):
    """Writes the Switch to a folder with its weights in another form of files."""
    model = their_model()
    if form == "safetensors shards":
        model.save_pretrained(folder, max_shard_size="50KB")
        return

    model.config.save_pretrained(folder)
    weights = dict(model.state_dict())  # the embedding under each of its names
    parts = {"pytorch_model.bin": weights}
    if form == ".bin shards":
        names = sorted(weights)
        parts = {}
        for part in range(3):
            file = f"pytorch_model-0000{part + 1}-of-00003.bin"
            parts[file] = {name: weights[name] for name in names[part::3]}
        weight_map = {name: file for file, some in parts.items() for name in some}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    is_new = form != ".bin of old torch"
    for file, some in parts.items():
        torch.save(some, folder / file, _use_new_zipfile_serialization=is_new)


@pytest.mark.parametrize("form", [".bin", ".bin of old torch", "safetensors shards", ".bin shards"])
def test_every_form_of_files_gives_the_same_weights_bit_for_bit(folders, tmp_path, form):
    save_in_form(form, tmp_path)
    assert form != "safetensors shards" or len(list(tmp_path.glob("*.safetensors"))) > 2
    expected, actual = load(folders("Switch")).state_dict(), load(tmp_path).state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(weight, actual[name]) for name, weight in expected.items())


def test_a_name_of_the_hub_loads_from_its_cache(folders, tmp_path):
    revision = "0" * 40
    repository = tmp_path / "models--google--switch-base-8"
    shutil.copytree(folders("Switch"), repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    inputs, name = their_inputs(), "google/switch-base-8"
    model = load(name, cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(model(**inputs).logits, load(folders("Switch"))(**inputs).logits)
    assert model.config.name_or_path == name
    assert conversion_report(name, cache_dir=tmp_path, local_files_only=True).source == name


def test_dtype_device_map_and_settings_are_those_asked_for_else_those_of_the_files(
    folders, tmp_path
):
    settings = {"expert_capacity": 5, "attn_implementation": "eager", "device_map": "cpu"}
    model, info = load(
        folders("Switch"), output_loading_info=True, dtype=torch.bfloat16, **settings
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.expert_capacity == model.sparse_layers()[0].config.expert_capacity == 5
    assert model.config._attn_implementation == "eager"
    assert not info["missing_keys"] and not info["unexpected_keys"]

    their_model("T5 1.0").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == load(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_what_is_saved_after_a_conversion_is_in_our_names(folders, tmp_path):
    model = load(folders("Switch"))
    model.save_pretrained(tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(
        model.state_dict().keys() - {"lm_head.weight"}
    )
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "st_moe"
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(again, STMoEForConditionalGeneration)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_an_auto_class_with_our_config_converts_and_without_is_transformers(folders):
    folder = folders("T5 1.1")
    config = STMoEConfig.from_pretrained(folder)
    assert isinstance(
        AutoModelForSeq2SeqLM.from_pretrained(folder, config=config), STMoEForConditionalGeneration
    )
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(folder), T5ForConditionalGeneration)


def test_a_part_of_the_model_loads_alone(folders, tmp_path):
    whole, ids = load(folders("Switch")), their_inputs()["input_ids"]
    for part in (STMoEEncoderModel, STMoEModel):
        loaded = part.from_pretrained(folders("Switch"))
        encoder = loaded.encoder if part is STMoEEncoderModel else loaded.get_encoder()
        assert torch.equal(
            encoder(ids).last_hidden_state, whole.get_encoder()(ids).last_hidden_state
        )
    theirs = T5EncoderModel.from_pretrained(folders("T5 1.1"))
    theirs.save_pretrained(tmp_path)
    encoder = STMoEEncoderModel.from_pretrained(tmp_path)
    assert_equal_to_rounding(encoder(ids).last_hidden_state, theirs(ids).last_hidden_state)
    with pytest.raises(CheckpointError, match=r"missing: .*decoder\.block"):
        load(tmp_path)


def test_generation_settings_come_from_their_file_or_from_config_json(folders, tmp_path):
    theirs = their_model()
    theirs.generation_config.num_beams = 3
    theirs.save_pretrained(tmp_path)
    assert load(tmp_path).generation_config.num_beams == 3
    (tmp_path / "generation_config.json").unlink()
    loaded = load(tmp_path).generation_config
    assert (loaded.num_beams, loaded.eos_token_id, loaded.decoder_start_token_id) == (None, 1, 0)


# ---- every tensor is accounted for ----


@pytest.mark.parametrize("kind", ["T5 1.0", "T5 1.1", "Switch", "Switch, untied"])
def test_every_tensor_is_mapped_or_ignored_with_a_reason(folders, kind):
    report, model = conversion_report(folders(kind)), load(folders(kind))
    theirs = set(load_file(folders(kind) / "model.safetensors"))
    mapped = {name for parts in report.mapped.values() for name in parts}
    assert theirs <= mapped | set(report.ignored)
    own = {name for name, _ in model.named_parameters()}
    assert set(report.mapped) == own
    assert not report.missing + report.unexpected + report.reshaped
    assert f"{folders(kind)}: " in str(report)


def test_copies_of_the_embedding_and_t5s_unused_bias_are_explained(folders, tmp_path):
    folder = shutil.copytree(folders("T5 1.0"), tmp_path / "model")
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def add(weights):
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
            weights[f"{name}.weight"] = weights["shared.weight"].clone()
        weights[unused] = torch.zeros(32, 3)

    change_weights(folder, add)
    ignored = conversion_report(folder).ignored
    assert ignored[unused].startswith("is not used: T5 1.0 stored it")
    assert (
        ignored["decoder.embed_tokens.weight"]
        == ignored["lm_head.weight"]
        == "is a copy of shared.weight"
    )
    assert torch.equal(load(folder).lm_head.weight, load(folders("T5 1.0")).lm_head.weight)
    change_weights(folder, lambda weights: weights.pop("shared.weight"))
    assert torch.equal(load(folder).lm_head.weight, load(folders("T5 1.0")).lm_head.weight)
    change_weights(folder, lambda weights: weights["decoder.embed_tokens.weight"].add_(1))
    with pytest.raises(
        CheckpointError,
        match=r"encoder with encoder\.embed_tokens\.weight and the decoder with decoder",
    ):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("encoder.block.1.layer.1.mlp.experts.expert_6.wo.weight"),
            r"1 missing: .*expert_6\.wo",
        ),
        (lambda w: w.update(adapter=torch.zeros(3)), r"1 unexpected: adapter\."),
        (
            lambda w: w.update({"shared.weight": torch.zeros(129, 29)}),
            r"1 of another shape: shared\.weight \(129, 29\) instead of \(131, 29\)\.",
        ),
    ],
)
def test_a_tensor_that_is_not_accounted_for_is_an_error(folder, change, message):
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder, ignore_mismatched_sizes=True)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_missing_head_of_its_own_is_not_made_up(folders, tmp_path):
    folder = shutil.copytree(folders("T5 1.1"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"tie_word_embeddings": False}
    raw.pop("scale_decoder_outputs", None)  # as config.json of the hub
    (folder / "config.json").write_text(json.dumps(raw))
    assert load(folder).config.tie_word_embeddings is False
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load(folder)


def test_folders_without_weights_or_torn_ones_are_one_message(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: .*model\.safetensors"):
        load(folder)
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b""):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read"):
            load(folder)


def test_a_mesh_wants_a_folder_that_was_converted_once_and_for_all(folder):
    with pytest.raises(CheckpointError, match=r"of type 'switch_transformers'.*stmoe convert"):
        load_model_on_mesh(folder, None)


# ---- config.json ----

HUB_EXTRAS = {
    "n_positions": 512,
    "output_past": True,
    "router_type": "tokens_masked",
    "num_selected_experts": 1,
    "is_gated_act": False,
    "feed_forward_proj": "relu",
    "gradient_checkpointing": False,
    "task_specific_params": {"summarization": {"num_beams": 4}},
}


def test_config_json_of_the_hub_becomes_ours(folder):
    changes = {"router_jitter_noise": 0.03, "dropout_rate": 0.2, "router_z_loss_coef": 0.5}
    change_config(folder, **HUB_EXTRAS, **changes, decoder_start_token_id=3)
    config = STMoEConfig.from_pretrained(folder)
    expected = {
        "router": "switch",
        "router_options": {"policy": "input_jitter", "jitter": 0.03},
        "num_selected_experts": 1,
        "expert_capacity": 2,
        "convention": "switch",
        "sparse_position": "second",
        "load_balance_loss_weight": 0.001,
        "router_z_loss_weight": 0.5,
        "z_loss_weight": 0.0,
        "dropout_rate": 0.2,
        "feed_forward_proj": "relu",
        "decoder_start_token_id": 3,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert "ignored, relative positions have no such limit: n_positions of config.json" in str(
        conversion_report(folder)
    )
    assert STMoEConfig.from_pretrained(folder, expert_capacity=11).expert_capacity == 11


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_bias": True}, "router_bias True; expected False"),
        ({"num_selected_experts": 2}, "num_selected_experts 2; expected 1"),
        ({"dense_act_fn": "gelu"}, "plain feed-forward .* 'gelu'"),
        ({"is_gated_act": True, "dense_act_fn": "mish"}, "gated feed-forward .* 'mish'"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder True, which changes"),
        (
            {"num_sparse_encoder_layers": 3, "encoder_sparse_step": 3},
            r"4 layers in the encoder, of which every 3th",
        ),
        ({"encoder_sparse_step": "two"}, "encoder_sparse_step is 'two'"),
        ({"to_dict": 3}, "'to_dict'"),
        ({"model_type": "longt5"}, "'longt5', which is not .*st_moe, or one of mt5, switch_tr"),
    ],
)
def test_a_config_json_that_cannot_be_represented_is_refused_with_the_reason(
    folder, changes, message
):
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_what_transformers_does_not_read_either_is_kept_with_a_warning(folder):
    kept = {
        "task_specific_params": {"summarization": {"prefix": "summarize: "}},
        "prefix": "x ",
        "bos_token_id": None,
        "eos_token_id": [1, 5],
        "tokenizer_class": "T5Tokenizer",
        "lab_tag": "a",
    }
    change_config(folder, **kept, rope_theta=None)
    with pytest.warns(UserWarning, match=r"does not read: lab_tag \('a'\)"):
        config = STMoEConfig.from_pretrained(folder)
    assert {name: getattr(config, name) for name in kept} == kept


@needs_a_right_switch
def test_an_untied_switch_computes_with_the_tables_of_its_stacks(tmp_path):
    theirs = their_model("Switch, untied")
    theirs.encoder.embed_tokens.weight.data.mul_(2)
    theirs.decoder.embed_tokens.weight.data.mul_(2)
    theirs.save_pretrained(tmp_path)
    inputs = their_inputs()
    assert_equal_to_rounding(load(tmp_path).eval()(**inputs).logits, theirs(**inputs).logits)
    reason = conversion_report(tmp_path).ignored["shared.weight"]
    assert reason == "is not used: both stacks compute with tables of their own"


def test_a_head_that_differs_from_the_stacks_is_refused(folder):
    def change(weights):
        for stack in ("encoder", "decoder"):
            weights[f"{stack}.embed_tokens.weight"] = weights["shared.weight"] + 1

    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=r"the stacks with encoder.* the head with shared"):
        load(folder)


# ---- memory ----

MEMORY = """
import re
import sys
from pathlib import Path

import torch

from moe import STMoEForConditionalGeneration


def peak():
    # Of this program alone; getrusage starts from the peak of the parent.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024


STMoEForConditionalGeneration.from_pretrained(sys.argv[1])
before = peak()
model = STMoEForConditionalGeneration.from_pretrained(sys.argv[2])
print(peak() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
def test_loading_takes_the_model_and_one_shard(folders, tmp_path):
    sizes = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 8, "vocab_size": 2003}
    their_model(**sizes).save_pretrained(tmp_path / "shards", max_shard_size="10MB")
    ended = run_program(tmp_path, MEMORY, folders("Switch"), tmp_path / "shards")
    assert ended.returncode == 0, ended.stderr
    taken, model = map(int, ended.stdout.split()[-2:])
    assert model > 75e6
    assert taken < model + 10e6 + 25e6, f"{taken / 1e6:.0f} MB for {model / 1e6:.0f} MB"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_a_converted_model_load_with_their_base(folder, tmp_path):
    their_model().save_pretrained(folder)
    model = STMoEForConditionalGeneration.from_pretrained(folder)
    adapted = get_peft_model(model, lora_config(model))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapters")
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path / "adapters")
    logits = loaded(**tiny_batch()).logits
    torch.testing.assert_close(logits, adapted.eval()(**tiny_batch()).logits)
    with adapted.disable_adapter():
        assert not torch.allclose(logits, adapted(**tiny_batch()).logits)
