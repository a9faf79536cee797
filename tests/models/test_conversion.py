"""T5 and Switch as they load: what is computed equals transformers' own classes, and every tensor
is accounted for.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, T5EncoderModel, T5ForConditionalGeneration

from moe import (
    CheckpointError,
    ConfigError,
    STMoEConfig,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    STMoEModel,
    conversion_report,
    load_complete,
    load_model_on_mesh,
    lora_config,
)
from tests.models.hf_models import (
    KINDS,
    assert_equal_to_rounding,
    every_kind,
    needs_a_right_switch,
    their_inputs,
    their_model,
)
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


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- what is computed ----


@every_kind
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_encoder_and_logits_equal_transformers_where_capacity_drops_tokens(
    folders, kind, attention
):
    theirs, inputs = their_model(kind), their_inputs()
    ours = load(folders(kind), attn_implementation=attention)
    expected, actual = theirs(**inputs), ours(**inputs)
    assert_equal_to_rounding(actual.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert_equal_to_rounding(actual.logits, expected.logits)
    routers = (*(actual.encoder_router_outputs or ()), *(actual.decoder_router_outputs or ()))
    assert (sum(int(router.stats.dropped_tokens) for router in routers) > 0) == kind.startswith(
        "Switch"
    )


@every_kind
def test_right_padding_leaves_real_tokens_equal_to_transformers(folders, kind):
    theirs, ours, inputs = their_model(kind), load(folders(kind)), their_inputs()
    mask = torch.arange(17) < torch.tensor([[17], [11], [5]])
    inputs = {**inputs, "attention_mask": mask.long(), "input_ids": inputs["input_ids"] * mask}
    expected, actual = theirs(**inputs), ours(**inputs)
    assert_equal_to_rounding(
        actual.encoder_last_hidden_state[mask], expected.encoder_last_hidden_state[mask]
    )
    assert_equal_to_rounding(actual.logits, expected.logits)


@every_kind
def test_cached_decoding_equals_transformers_step_by_step(folders, kind):
    theirs, ours, inputs = their_model(kind), load(folders(kind)), their_inputs()
    with torch.no_grad():
        encoded = [model.get_encoder()(inputs["input_ids"]) for model in (theirs, ours)]
        caches, token = [None, None], torch.zeros(3, 1, dtype=torch.int64)
        for _ in range(7):
            steps = [
                model(
                    encoder_outputs=memory,
                    decoder_input_ids=token,
                    past_key_values=cache,
                    use_cache=True,
                )
                for model, memory, cache in zip((theirs, ours), encoded, caches, strict=True)
            ]
            assert_equal_to_rounding(steps[1].logits, steps[0].logits)
            caches, token = [step.past_key_values for step in steps], steps[0].logits.argmax(-1)


@every_kind
def test_generation_equals_transformers(tmp_path, kind):
    theirs = their_model(
        kind, num_layers=6
    )  # with fewer layers than its decoder, their generate has no cache for it
    theirs.save_pretrained(tmp_path)
    ids = their_inputs()["input_ids"]
    expected, actual = (
        model.generate(ids, max_new_tokens=11, num_beams=1) for model in (theirs, load(tmp_path))
    )
    assert torch.equal(actual, expected)


# ---- files ----


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["T5 1.0", "T5 1.1", "Switch"])
@pytest.mark.parametrize("form", [".bin", ".bin of old torch", "safetensors shards", ".bin shards"])
def test_every_form_of_files_gives_the_same_weights_bit_for_bit(folders, tmp_path, kind, form):
    if form == "safetensors shards":
        their_model(kind).save_pretrained(tmp_path, max_shard_size="50KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    else:
        shutil.copy(folders(kind) / "config.json", tmp_path)
        weights = dict(their_model(kind).state_dict())  # the embedding under each of its names
        parts = {"pytorch_model.bin": weights}
        if form == ".bin shards":
            names = sorted(weights)
            parts = {f"pytorch_model-0000{i + 1}-of-00003.bin": names[i::3] for i in range(3)}
            parts = {file: {name: weights[name] for name in some} for file, some in parts.items()}
            index = {
                "metadata": {},
                "weight_map": {name: file for file, some in parts.items() for name in some},
            }
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        for file, some in parts.items():
            torch.save(
                some, tmp_path / file, _use_new_zipfile_serialization=form != ".bin of old torch"
            )
    expected, actual = load(folders(kind)).state_dict(), load(tmp_path).state_dict()
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


def test_dtype_device_map_and_settings_are_those_asked_for(folders):
    settings = {
        "expert_capacity": 5,
        "attn_implementation": "eager",
        "dtype": torch.bfloat16,
        "device_map": "cpu",
    }
    model, info = load(folders("Switch"), output_loading_info=True, **settings)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.expert_capacity == model.sparse_layers()[0].config.expert_capacity == 5
    assert model.config._attn_implementation == "eager"
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with pytest.raises(
        ConfigError, match=r"from_pretrained got variant 'fp16' .* Leave variant out"
    ):
        load(folders("Switch"), variant="fp16")


def test_the_dtype_of_the_files_is_kept(folders, tmp_path):
    their_model("T5 1.0").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.bfloat16
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


@pytest.mark.parametrize("kind", KINDS)
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
            lambda w: w.pop("encoder.final_layer_norm.weight"),
            r"1 missing: encoder\.final_layer_norm\.weight\. Downl",
        ),
        (
            lambda w: w.pop("encoder.block.1.layer.1.mlp.experts.expert_6.wo.weight"),
            r"1 missing: .*expert_6\.wo",
        ),
        (lambda w: w.update(adapter=torch.zeros(3)), r"1 unexpected: adapter\."),
        (
            lambda w: w.update({"shared.weight": torch.zeros(129, 29)}),
            r"1 of another shape: shared\.weight \(129, 29\) instead of \(131, 29\)\.",
        ),
        (
            lambda w: w.update(
                {"encoder.block.1.layer.1.mlp.router.classifier.bias": torch.zeros(7)}
            ),
            r"1 unexpected: .*classifier\.bias",
        ),
    ],
)
def test_a_tensor_that_is_not_accounted_for_is_an_error(folder, change, message):
    change_weights(folder, change)
    for door in (load, lambda folder: load(folder, ignore_mismatched_sizes=True)):
        with pytest.raises(CheckpointError, match=message):
            door(folder)
    with pytest.raises(CheckpointError, match=message):
        load_complete(STMoEForConditionalGeneration, folder)


def test_a_missing_head_of_its_own_is_not_made_up(folders, tmp_path):
    folder = shutil.copytree(folders("T5 1.1"), tmp_path / "model")
    change_config(folder, tie_word_embeddings=False)
    path = folder / "config.json"
    path.write_text(
        json.dumps(
            {k: v for k, v in json.loads(path.read_text()).items() if k != "scale_decoder_outputs"}
        )
    )
    assert load(folder).config.tie_word_embeddings is False  # config.json as of the hub
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load(folder)


def test_folders_without_weights_or_torn_ones_are_one_message(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        CheckpointError, match=r"The weights in .*model\.safetensors cannot be read: "
    ):
        load(folder)
    weights.unlink()
    with pytest.raises(
        CheckpointError, match=r"has no weights: expected one of model\.safetensors, model.*\.bin"
    ):
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
    change_config(
        folder, **HUB_EXTRAS, router_jitter_noise=0.03, dropout_rate=0.2, router_z_loss_coef=0.5
    )
    config = STMoEConfig.from_pretrained(folder)
    expected = {
        "router": "switch",
        "router_options": {"policy": "input_jitter", "jitter": 0.03},
        "num_selected_experts": 1,
        "expert_capacity": 2,
        "capacity_scope": "sequence",
        "sparse_position": "second",
        "load_balance_loss_weight": 0.001,
        "router_z_loss_weight": 0.5,
        "z_loss_weight": 0.0,
        "dropout_rate": 0.2,
        "feed_forward_proj": "relu",
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
        ({"dense_act_fn": "gelu"}, "plain feed-forward layers with the activation 'gelu'"),
        (
            {"is_gated_act": True, "dense_act_fn": "silu"},
            "gated feed-forward layers with the activation 'silu'",
        ),
        (
            {"scalable_attention": True},
            "has scalable_attention True, which changes what the model computes",
        ),
        (
            {"num_sparse_encoder_layers": 3, "encoder_sparse_step": 3},
            r"4 layers in the encoder, of which every 3th",
        ),
        (
            {"eos_token_id": [1, 500]},
            r"eos_token_id is \[1, 500\]; expected a token id below vocab_size, 131",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (
            {"num_layers": 10**12},
            "num_layers is 1000000000000; expected an integer from 1 to 1,024",
        ),
        ({"d_model": 29.0}, "d_model.*29.0"),
        ({"encoder_sparse_step": "two"}, "encoder_sparse_step is 'two'; expected an integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings.*'no'"),
        ({"initializer_factor": 1e300}, "initializer_factor is 1e.300; expected a finite number"),
        ({"dropout_rate": None}, "dropout_rate.*None"),
        ({"pad_token_id": []}, "pad_token_id"),
        ({"feed_forward_proj": "nothing"}, "feed_forward_proj is 'nothing'; expected"),
        (
            {"feed_forward_proj": "gated-gelu"},
            "feed_forward_proj is 'gated-gelu'; expected 'relu': the model has plain",
        ),
        ({"dtype": "float7"}, "float7"),
        (
            {"tie_encoder_decoder": True},
            "has tie_encoder_decoder True, which changes what the model computes",
        ),
        ({"to_dict": 3}, "no field 'to_dict'"),
        ({"model_type": ["t5"]}, r"of a model of type \['t5'\]; expected st_moe"),
        (
            {"model_type": "bert"},
            "of a model of type 'bert'; expected st_moe, or switch_transformers or t5",
        ),
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
    }
    change_config(folder, **kept, tokenizer_class="T5Tokenizer", lab_tag="a", rope_theta=None)
    with pytest.warns(UserWarning, match=r"fields that STMoEConfig does not read: lab_tag \('a'\)"):
        config = STMoEConfig.from_pretrained(folder)
    assert config.lab_tag == "a"
    assert {name: getattr(config, name) for name in kept} == kept
    assert config.tokenizer_class == "T5Tokenizer"


def test_several_end_tokens_are_kept(folder):
    change_config(folder, eos_token_id=[1, 5])
    assert load(folder).config.eos_token_id == [1, 5]


def test_the_first_token_of_the_decoder_is_kept(folder):
    change_config(folder, decoder_start_token_id=3)
    assert load(folder).config.decoder_start_token_id == 3


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


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (
            "Switch, untied",
            "decoder.embed_tokens.weight",
            "the encoder with encoder.* and the decoder with decoder",
        ),
        (
            "Switch",
            "shared.weight",
            "the stacks with encoder.* and the head with shared.weight, whose numbers differ",
        ),
    ],
)
def test_two_embeddings_that_both_matter_are_refused(folders, tmp_path, kind, changed, message):
    folder = shutil.copytree(folders(kind), tmp_path / "model")

    def change(weights):
        for stack in ("encoder", "decoder"):
            weights.setdefault(f"{stack}.embed_tokens.weight", weights["shared.weight"].clone())
        weights[changed].add_(1)

    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


# ---- memory ----

PEAK = """
import re, sys, torch
from pathlib import Path
def peak():  # of this program alone; getrusage starts from the peak of the parent
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
"""

MEMORY = """
from moe import STMoEForConditionalGeneration
STMoEForConditionalGeneration.from_pretrained(sys.argv[1])
before = peak()
model = STMoEForConditionalGeneration.from_pretrained(sys.argv[2])
print(peak() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", ".bin"])
def test_loading_takes_the_model_and_one_shard(folders, tmp_path, form):
    sizes = {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "vocab_size": 2003}
    their_model(**sizes).save_pretrained(tmp_path, max_shard_size="32MB")
    if form == ".bin":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        for file in tmp_path.glob("*.safetensors"):
            torch.save(load_file(file), file.with_suffix(".bin"))
            file.unlink()
        index["weight_map"] = {
            k: v.replace(".safetensors", ".bin") for k, v in index["weight_map"].items()
        }
        (tmp_path / "model.safetensors.index.json").unlink()
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    ended = run_program(tmp_path, PEAK + MEMORY, folders("Switch"), tmp_path)
    assert ended.returncode == 0, ended.stderr
    taken, model = map(int, ended.stdout.split()[-2:])
    assert model > 300e6
    assert taken < model + 32e6 + 40e6, f"{taken / 1e6:.0f} MB for a model of {model / 1e6:.0f} MB"


BASE_8 = """
import sys, torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
sizes = {"d_ff": 3072, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "decoder_start_token_id": 0}
config = SwitchTransformersConfig(**sizes, expert_capacity=8)
with torch.device("meta"):
    model = SwitchTransformersForConditionalGeneration(config)
model = model.to_empty(device="cpu").eval()
model.tie_weights()
block = torch.randn(5_000_011, generator=torch.Generator().manual_seed(0))  # a prime: no two rows alike
for name, parameter in model.named_parameters():
    std = 1.0 if "norm" in name or "shared" in name else parameter.shape[-1] ** -0.5
    flat = parameter.data.view(-1)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()]).mul_(std)
    if "norm" in name:
        parameter.data.abs_()
model.save_pretrained(sys.argv[1] + "/model", max_shard_size="300MB")
generator = torch.Generator().manual_seed(1)
inputs = {
    "input_ids": torch.randint(2, 32000, (2, 61), generator=generator),
    "decoder_input_ids": torch.randint(2, 32000, (2, 31), generator=generator),
}
with torch.no_grad():
    output = model(**inputs)
torch.save([inputs, output.encoder_last_hidden_state, output.logits], sys.argv[1] + "/expected.pt")
"""

OURS_8 = """
from moe import STMoEForConditionalGeneration
model = STMoEForConditionalGeneration.from_pretrained(sys.argv[1] + "/model")
inputs, encoded, logits = torch.load(sys.argv[1] + "/expected.pt")
with torch.no_grad():
    output = model(**inputs)
dropped = sum(int(router.stats.dropped_tokens) for router in output.encoder_router_outputs)
error = max((a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in (
    (output.encoder_last_hidden_state, encoded), (output.logits, logits)))
model_bytes = sum(parameter.nbytes for parameter in model.parameters())
print(error, dropped, peak(), model_bytes)
"""


@pytest.mark.slow
@needs_a_right_switch
def test_at_the_size_of_switch_base_8_logits_are_equal_and_memory_is_the_model_and_one_shard(
    tmp_path,
):
    try:
        written = run_program(tmp_path, BASE_8, tmp_path)
        assert written.returncode == 0, written.stderr
        arguments = [sys.executable, "-c", PEAK + OURS_8, str(tmp_path)]
        answer = subprocess.run(
            arguments, check=True, capture_output=True, text=True, timeout=900
        ).stdout
    finally:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)  # 2.5 GB
    error, dropped, peak, model = map(float, answer.split()[-4:])
    assert error < 1e-5
    assert dropped > 0
    assert model > 2.4e9
    assert peak < model + 300e6 + 800e6, (
        f"{peak / 1e9:.2f} GB"
    )  # the rest is Python with torch and transformers


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_can_be_that_of_the_weights(folder, name):
    their_model().to(torch.bfloat16).save_pretrained(folder)
    assert (
        STMoEForConditionalGeneration.from_pretrained(folder, **{name: "auto"}).dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b""], ids=["pointer", "empty"]
)
def test_a_bin_file_that_holds_something_else_is_one_message(folder, content):
    their_model().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"The weights in .*pytorch_model.bin cannot be read"):
        STMoEForConditionalGeneration.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_a_converted_model_name_their_base_and_are_not_loaded_onto_a_random_one(
    folder, tmp_path
):
    their_model().save_pretrained(folder)
    model = STMoEForConditionalGeneration.from_pretrained(folder)
    get_peft_model(model, lora_config(model)).save_pretrained(tmp_path / "adapters")
    with pytest.raises(
        ConfigError, match=r"holds adapters of .*, a model of another library. Load the base by"
    ):
        STMoEForConditionalGeneration.from_pretrained(tmp_path / "adapters")
