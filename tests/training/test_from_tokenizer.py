"""Fresh weights from a tokenizer alone: the recipe gives the architecture.

Oracle: the recipe's file.
"""

import json

import pytest
import yaml

from moe import CheckpointError, ConfigError, STMoEConfig
from moe.commands import finetune
from moe.data.tokenizer import load_tokenizer, train_byte_tokenizer
from moe.training.recipe_files import find_recipe

PAIRS = [(f"el: Greece {number}", f"Ελλάδα {number}") for number in range(23)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    train_byte_tokenizer([target for _, target in PAIRS], 367, folder / "tokenizer")
    lines = [json.dumps({"inputs": one, "targets": other}) for one, other in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return ["--pretrained", folder / "tokenizer", "--train", folder / "pairs.jsonl"]


def tune(paths, out, *more):
    finetune.main([str(word) for word in (*paths, "--out", out, *more)])


def test_the_recipe_of_names_trains_a_step_from_a_tokenizer(paths, tmp_path):
    few = ("--training.steps", 1, "--optim.warmup_steps", 1, "--optim.cooldown_steps", 0)
    tune(paths, tmp_path / "run", "--config", "names", *few)
    config = STMoEConfig.from_pretrained(tmp_path / "run/model")
    architecture = yaml.safe_load(find_recipe("names").read_text())["model"]
    assert architecture.items() <= config.to_dict().items()
    assert (config.vocab_size, config.num_experts, config.noise_density) == (367, 32, None)

    tokenizer = load_tokenizer(tmp_path / "run/model")
    (ids,) = tokenizer(["Ελλάδα 日本"])["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Ελλάδα 日本"


def test_weights_or_an_architecture_that_a_tokenizer_lacks_are_asked_for(paths, tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer and no model.*--init scratch"):
        tune(paths, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"architecture.*model\.d_model is missing"):
        tune(paths, tmp_path / "run", "--init", "scratch")
    assert not (tmp_path / "run").exists()
