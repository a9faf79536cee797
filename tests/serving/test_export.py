"""Exported graphs: onnxruntime, torch.export and CTranslate2 generate what the model does."""

import json
from typing import get_args

import ctranslate2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from moe import ConfigError, MoEError
from moe.commands.export import main
from moe.convert.graphs import ExportedLayer
from moe.sparse.config import Activation
from tests.models.tiny import DENSE, UL2_AND_UMT5, tiny_model
from tests.serving.tiny_words import texts, word_tokenizer
from tests.sparse.layers import build_layer

STEPS = 9
# Experts of the encoder are a node of onnxruntime, those of the decoder are unrolled.
TOP_1 = {"num_selected_experts": 1, "feed_forward_proj": "relu", "num_decoder_layers": 1}
TOP_1 |= {"num_experts": 23, "decoder_experts": [3], "decoder_router": "bias_balanced"}
TOP_1 |= {"num_shared_experts": 1, "decoder_router_options": {"score": "sigmoid"}}
SWIGLU = {"num_selected_experts": 2, "num_experts": 3, "num_layers": 2, "num_decoder_layers": 1}
SWIGLU |= UL2_AND_UMT5
pytestmark = pytest.mark.slow


def export(folder, *options, **fields):
    model = tiny_model(
        **{"eval_capacity_factor": None, "num_layers": 1, "num_decoder_layers": 2, **fields}
    )
    model.save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    main(["--model", str(folder / "model"), "--to", str(folder / "out"), *options])
    return model


def batch():
    encoded = word_tokenizer()(texts(5), padding=True, return_tensors="pt")
    assert encoded["attention_mask"].min() == 0
    return encoded["input_ids"], encoded["attention_mask"]


def answers_of(model, ids, mask):
    model.generation_config.eos_token_id = None
    return model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False).numpy()


def cache_names(prefix, kinds, num_layers):
    return [
        f"{prefix}.{layer}.{kind}.{part}"
        for layer in range(num_layers)
        for kind in kinds
        for part in ("key", "value")
    ]


def generate(run, ids, mask, num_layers):
    """Returns greedy tokens <int64>[B, 1 + STEPS] of three graphs, by optimum's names."""
    (memory,) = run("encoder_model", {"input_ids": ids, "attention_mask": mask}).values()
    tokens = np.zeros((len(ids), 1), dtype=np.int64)
    given = {"encoder_attention_mask": mask}
    first = {**given, "input_ids": tokens, "encoder_hidden_states": memory}
    output = run("decoder_model", first)
    past = {}
    while tokens.shape[1] <= STEPS:
        chosen = output.pop("logits")[:, -1].argmax(-1, keepdims=True)
        tokens = np.concatenate([tokens, chosen], axis=1)
        past |= {name.replace("present", "past_key_values"): x for name, x in output.items()}
        names = cache_names("past_key_values", ("decoder", "encoder"), num_layers)
        ordered = {name: past[name] for name in names}
        output = run("decoder_with_past_model", {**given, "input_ids": chosen, **ordered})
    return tokens


def test_onnxruntime_generates_the_tokens_of_the_model(tmp_path, capsys):
    model = export(tmp_path, **TOP_1)
    assert "differ by at most" in capsys.readouterr().out
    sessions = {
        path.stem: onnxruntime.InferenceSession(str(path))
        for path in (tmp_path / "out").glob("*.onnx")
    }

    def run(name, inputs):
        names = [output.name for output in sessions[name].get_outputs()]
        return dict(zip(names, sessions[name].run(None, inputs), strict=True))

    ids, mask = batch()
    num_layers = model.config.num_decoder_layers
    tokens = generate(run, ids.numpy(), mask.numpy(), num_layers)
    np.testing.assert_array_equal(tokens, answers_of(model, ids, mask))

    for name, nodes in (("encoder_model", ["MoE"]), ("decoder_with_past_model", [])):
        graph = onnx.load(tmp_path / f"out/{name}.onnx", load_external_data=False).graph
        assert [node.op_type for node in graph.node if node.domain == "com.microsoft"] == nodes
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["d_model"] == model.config.d_model


def test_torch_export_keeps_the_mask_of_the_encoder(tmp_path):
    model = export(tmp_path, "--format", "torch", **SWIGLU)
    programs = {
        path.stem: torch.export.load(path).module() for path in (tmp_path / "out").glob("*.pt2")
    }

    def run(name, inputs):
        tensors = {key: torch.as_tensor(x) for key, x in inputs.items()}
        past = [tensors.pop(key) for key in list(tensors) if key.startswith("past")]
        outputs = programs[name](**tensors, **({"past": past} if past else {}))
        kinds = ("decoder", "encoder") if name == "decoder_model" else ("decoder",)
        names = ["logits", *cache_names("present", kinds, num_layers=1)][: len(outputs)]
        return dict(zip(names, [x.numpy() for x in outputs], strict=True))

    ids, mask = batch()
    wanted = answers_of(model, ids, mask)
    np.testing.assert_array_equal(generate(run, ids.numpy(), mask.numpy(), 1), wanted)
    assert (generate(run, ids.numpy(), np.ones_like(mask.numpy()), 1) != wanted).any()


def test_an_exported_layer_computes_activations_and_biases_of_the_layer():
    for activation in get_args(Activation):
        layer = build_layer(activation=activation, product_bias=True, eval_capacity_factor=None)
        x = torch.randn(2, 5, 7, dtype=torch.float64)
        exported = ExportedLayer(layer, nodes=True)
        torch.testing.assert_close(exported(x)[0], layer(x)[0], rtol=0, atol=1e-12)


def test_what_has_no_graph_is_refused_with_the_reason(tmp_path):
    by_tokens = {"router": "expert_choice", "router_options": {}, "num_sparse_decoder_layers": 0}
    for name, options, fields, message in [
        ("a", [], {"num_experts": 17}, "17 experts cannot be exported"),
        ("b", [], by_tokens, "experts choose among the tokens"),
        ("c", ["--quantization", "int8"], DENSE, "--quantization cannot be combined"),
        ("d", ["--format", "ctranslate2"], SWIGLU, "experts"),
    ]:
        with pytest.raises(ConfigError, match=message):
            export(tmp_path / name, *options, **fields)
        assert not (tmp_path / name / "out").exists()
    tiny_model(**DENSE).save_pretrained(tmp_path / "e")
    for source, error in ((tmp_path / "e", "no tokenizer"), (tmp_path / "f", "There is no folder")):
        with pytest.raises(MoEError, match=error):
            main(["--model", str(source), "--to", str(tmp_path / "o"), "--format", "ctranslate2"])


@pytest.mark.parametrize("tied", [True, False])
def test_ctranslate2_generates_the_tokens_and_scores_of_a_dense_student(tmp_path, tied):
    fields = {**DENSE, "tie_word_embeddings": tied, "num_layers": 2}
    if not tied:
        fields |= UL2_AND_UMT5
    model = export(tmp_path, "--format", "ctranslate2", **fields)
    translator = ctranslate2.Translator(str(tmp_path / "out"), compute_type="float32")
    tokenizer = word_tokenizer()
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts(20)]
    options = {"beam_size": 1, "max_decoding_length": STEPS, "return_scores": True}
    answers = translator.translate_batch(inputs, **options)
    for words, answer in zip(inputs, answers, strict=True):
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(words)])
        tokens = model.generate(ids, max_new_tokens=STEPS, do_sample=False)
        wanted = tokenizer.convert_ids_to_tokens(tokens[0, 1:].tolist())
        assert answer.hypotheses[0] == [word for word in wanted if word != "</s>"]
        loss = model(input_ids=ids, labels=tokens[:, 1:]).ce_loss  # the mean over tokens
        assert -answer.scores[0] == pytest.approx(loss.item(), rel=0.01)
