"""Hosts under the Trainer, `stmoe upcycle --from` a host, and what is refused with a number."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5GemmaModel
from transformers.modeling_outputs import Seq2SeqLMOutput

from moe.checkpoint.loading import load_model
from moe.commands.upcycle import main
from moe.errors import ConfigError
from moe.hosts.all_hosts import find_host
from moe.hosts.upcycle import upcycle_host
from moe.surgery.upcycle import Upcycling
from tests.hosts.tiny_hosts import dense_host, sparse_host
from tests.models.tiny import tiny_batch, tiny_model
from tests.training.tiny_trainer import make_trainer, tokenizer

HEAVY = {"group_size": 1, "load_balance_loss_weight": 3.0, "router_z_loss_weight": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m2m_100", "t5gemma"])
def test_accumulated_steps_of_the_trainer_are_those_of_the_whole_batch(name, tmp_path):
    states = []
    for accumulated in (1, 4):
        model = sparse_host(name, fields=HEAVY)
        settings = {
            "per_device_train_batch_size": 8 // accumulated,
            "gradient_accumulation_steps": accumulated,
        }
        trainer = make_trainer(tmp_path / str(accumulated), model, **settings)
        trainer.train()
        states.append(model.state_dict())
    moved = 0.0
    for key, tensor in sparse_host(name, fields=HEAVY).state_dict().items():
        torch.testing.assert_close(states[0][key], states[1][key], atol=1e-5, rtol=1e-4)
        if key.endswith("gate"):
            moved = max(moved, float((states[0][key] - tensor).abs().max()))
    assert moved > 1e-3

    # Predictions are those of the host, without what the routers did.
    logits, *_ = trainer.predict(trainer.train_dataset).predictions
    assert logits.shape[-1] == 131
    model.train()
    with pytest.raises(ConfigError, match=r"load_balance_loss_weight 3\.0"):
        model(
            input_ids=tiny_batch()["input_ids"],
            decoder_input_ids=torch.ones(4, 3).long(),
            num_items_in_batch=5,
        )


def test_the_output_is_the_hosts_and_what_the_routers_did():
    output = sparse_host("t5gemma")(**tiny_batch())
    assert isinstance(output, Seq2SeqLMOutput)
    assert output.encoder_router_outputs is None
    assert float(output.load_balance_loss) > 0


def test_images_reach_the_sparse_encoder_of_t5gemma2():
    batch = tiny_batch()
    batch["input_ids"][:, 2:6] = 129
    outputs = []
    for build in (dense_host, sparse_host):
        model = build("t5gemma2")
        generator = torch.Generator().manual_seed(0)
        projector = model.model.encoder.multi_modal_projector.mm_input_projection_weight
        projector.data.normal_(generator=generator)
        for scale in (1, 2):
            pixels = scale * torch.ones(4, 3, 4, 4).cumsum(-1)
            output = model(**batch, pixel_values=pixels)
            outputs.append(output.get("ce_loss", output.loss))
    torch.testing.assert_close(outputs[:2], outputs[2:], atol=1e-5, rtol=1e-5)
    assert outputs[0] != outputs[1]


def test_the_command_cuts_the_experts_of_a_host_and_refuses_it_once_it_is_sparse(tmp_path):
    dense = dense_host("t5gemma")
    dense.save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    arguments = ["--from", str(tmp_path / "dense"), "--experts", "3", "--granularity", "2"]
    main([*arguments, "--to", str(tmp_path / "sparse")])
    assert (tmp_path / "sparse" / "tokenizer.json").is_file()
    real = tiny_batch()["labels"] != -100
    ours = load_model(tmp_path / "sparse")(**tiny_batch()).logits
    torch.testing.assert_close(ours[real], dense(**tiny_batch()).logits[real], atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="sparse already"):
        main(["--from", str(tmp_path / "sparse"), "--to", str(tmp_path / "again")])


def test_an_unknown_host_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5gema", "d_model": 8}')
    with pytest.raises(ConfigError, match=r"'t5gema'.*one of bart, .*whisper. Did you mean"):
        main(["--from", str(tmp_path), "--to", str(tmp_path / "x")])
    with pytest.raises(ConfigError, match="st_moe"):
        upcycle_host(tiny_model(), Upcycling())
    dense = dense_host("t5gemma")
    with pytest.raises(ConfigError, match="T5GemmaModel"):
        upcycle_host(T5GemmaModel(dense.config), Upcycling())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granularity": 13}, "granularity is 13.*14 in the decoder"),
        ({"num_sparse_encoder_layers": 3}, "num_sparse_encoder_layers is 3.*2 blocks"),
        (
            {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
            "at least one in either stack",
        ),
        ({"num_selected_experts": 9}, "num_selected_experts is 9.*5"),
        ({"num_selected_experts": 1, "fields": {"router": "hash"}}, "hash.*switch"),
        ({"fields": {"router_input": "concat"}}, "router_input is 'concat'"),
        ({"fields": {"d_ff": 28}}, "d_ff cannot be set"),
        ({"fields": {"capacity_facto": 2}}, "capacity_factor"),
    ],
)
def test_settings_that_do_not_fit_the_host_are_refused(settings, message):
    dense = dense_host("t5gemma")
    upcycling = Upcycling(**{"num_experts": 5, **settings})
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        upcycle_host(dense, upcycling)
    assert type(dense) is find_host("t5gemma").host.dense_class
    dense.config.encoder.hidden_activation = "mish"
    with pytest.raises(ConfigError, match="mish"):
        upcycle_host(dense, Upcycling())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "sparse_layers is None"),
        ({"experts": 3}, "sparse_layers.*'experts'"),
        ({"encoder_blocks": [7]}, "encoder_blocks is 7.*from 0 to 1"),
        ({"encoder_experts": [3, 3]}, "encoder_experts is .*each of the 1 sparse blocks"),
        ({"decoder_experts": [1]}, "num_selected_experts is 2.*1"),
    ],
)
def test_a_damaged_config_is_refused(change, message, tmp_path):
    sparse = sparse_host("t5gemma")
    sparse.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    saved = config["sparse_layers"]
    config["sparse_layers"] = None if change is None else {**saved, **change}
    path.write_text(json.dumps(config))
    for load in (load_model, AutoModelForSeq2SeqLM.from_pretrained):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            load(tmp_path)
