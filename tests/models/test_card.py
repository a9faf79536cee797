"""The model card: what it says is true of the model, nothing is invented, and nobody's own
README.md is touched.
"""

import re
import shutil

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.hf_api import RepoUrl

import moe.models.card
from moe import (
    ConfigError,
    RouterStats,
    STMoEConfig,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    STMoEModel,
)
from moe.data.tokenizer import train_tokenizer
from moe.models.card import model_card
from tests.models.tiny import tiny_batch, tiny_model
from tests.training.tiny_run import write_texts

SHORT = {"eval_capacity_factor": 0.05, "min_expert_capacity": 1}
OWN = "---\nlicense: mit\n---\n# What I wrote\n"


def card_of(folder):
    return ModelCard.load(folder / "README.md")


def row(card, name):
    return re.search(rf"^\| {name} \| (.*) \|$", card.text, re.MULTILINE).group(1)


def test_header_and_table_say_what_the_model_is(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    total, active = model.num_parameters(), model.config.num_active_parameters()
    assert card.data.to_dict() == {
        "library_name": "moe",
        "pipeline_tag": "text-generation",
        "tags": ["moe", "st-moe", "mixture-of-experts", "encoder-decoder"],
        "parameters": {"total": total, "active": active},
        "capacity_factor": {"training": 1.25, "evaluation": 2.0},
        "drop_rate": "not measured",
    }
    assert row(card, "parameters") == f"{total:,}; a token uses {active:,}"
    assert row(card, "experts") == "7 in each, at most 2 for a token"
    assert row(card, "router").endswith("`token_choice` in the decoder; computed in float32")
    assert row(card, "capacity").startswith("factor 1.25 in training, 2 in evaluation")
    assert row(card, "tokens dropped in evaluation") == "not measured"
    assert model_card(model.config) == (tmp_path / "README.md").read_text()


def test_what_is_given_and_measured_stands_in_it(tmp_path):
    model, batch = tiny_model(**SHORT), tiny_batch()
    out = model(**batch)
    stats = {
        "encoder": RouterStats.sum(router.stats for router in out.encoder_router_outputs),
        "decoder": RouterStats.sum(router.stats for router in out.decoder_router_outputs),
    }
    given = {
        "license": "apache-2.0",
        "datasets": ["a/b"],
        "metrics": ["accuracy"],
        "language": "en",
        "tags": ["mine"],
    }
    model.save_pretrained(tmp_path, card={**given, "base_model": "org/model", "stats": stats})
    data = card_of(tmp_path).data
    for name in ("license", "datasets", "metrics", "language"):
        assert data[name] == given[name]
    assert data.tags[-1] == "mine"
    assert data.base_model == "org/model"
    shares = {name: int(s.dropped_tokens) / int(s.num_tokens) for name, s in stats.items()}
    assert data["drop_rate"] == pytest.approx(shares, abs=1e-6)
    expected = f"{100 * shares['encoder']:.2f} % in the encoder, {100 * shares['decoder']:.2f} % in the decoder"
    assert row(card_of(tmp_path), "tokens dropped in evaluation") == expected


def test_an_absolute_capacity_stands_in_it_in_place_of_the_factors():
    card = ModelCard(model_card(tiny_model(expert_capacity=5, convention="switch").config))
    assert card.data["expert_capacity"] == 5
    assert "capacity_factor" not in card.data.to_dict()
    assert card.data["drop_rate"] == "not measured"
    assert row(card, "capacity").startswith("5 slots of an expert in each sequence;")
    assert "With a capacity in evaluation" in card.text


def test_a_model_without_a_capacity_or_without_experts_says_so():
    dropless = ModelCard(model_card(tiny_model(eval_capacity_factor=None).config))
    assert dropless.data["drop_rate"] == 0
    assert row(dropless, "tokens dropped in evaluation") == "0, there is no capacity"
    assert "may depend on padding" not in dropless.text

    dense = ModelCard(model_card(STMoEConfig()))
    assert not {"drop_rate", "capacity_factor"} & dense.data.to_dict().keys()
    assert "experts |" not in dense.text


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_what_was_saved(tmp_path, tied):
    whole = tiny_model(tie_word_embeddings=tied, expert_bias="multiplicative")
    whole.save_pretrained(tmp_path / "whole")
    for model_class in (STMoEEncoderModel, STMoEForConditionalGeneration):
        model = model_class.from_pretrained(tmp_path / "whole")
        model.save_pretrained(tmp_path / model_class.__name__)
        card = card_of(tmp_path / model_class.__name__)
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        total = sum(p.numel() for p in model.parameters())
        assert card.data["parameters"] == {"total": total, "active": total - experts * 5 // 7}
        assert row(card, "class") == f"`{model_class.__name__}` of the library `moe`"
        is_whole = model_class is STMoEForConditionalGeneration
        assert card.data.pipeline_tag == ("text-generation" if is_whole else "feature-extraction")
    assert card.data["parameters"]["active"] == model.config.num_active_parameters()


def test_its_snippet_runs_in_its_folder(tmp_path, monkeypatch, capsys):
    tiny_model(vocab_size=230).save_pretrained(tmp_path)
    texts = [file.read_text() for file in sorted(write_texts(tmp_path / "texts").iterdir())]
    train_tokenizer(texts, 230, tmp_path / "tokenizer")
    for model_class in (STMoEModel, STMoEForConditionalGeneration):
        folder = tmp_path / model_class.__name__
        model_class.from_pretrained(tmp_path).save_pretrained(folder)
        shutil.copytree(tmp_path / "tokenizer", folder, dirs_exist_ok=True)
        code = re.search(r"```python\n(.*?)```", card_of(folder).text, re.DOTALL).group(1)
        monkeypatch.chdir(folder)
        exec(code, {})
        said = capsys.readouterr().out
        assert said.startswith("['") == (model_class is STMoEForConditionalGeneration)


# ---- whose card it is ----


def test_a_card_of_ours_is_brought_up_to_date_and_keeps_its_tags(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    card = card_of(tmp_path)
    card.data.tags.append("mine")
    card.save(tmp_path / "README.md")
    for factor in (1.5, 1.7):
        tiny_model(capacity_factor=factor).save_pretrained(tmp_path)
        assert card_of(tmp_path).data["capacity_factor"]["training"] == factor
        assert card_of(tmp_path).data.tags[-1] == "mine"


def test_a_card_that_somebody_wrote_or_changed_stays_byte_for_byte(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    ours = (tmp_path / "README.md").read_text()
    changed = [
        OWN,
        ours.replace("library_name: moe", "library_name: moe\nlicense: mit"),
        ours.replace("## Limits", "It is good at nothing.\n\n## Limits"),
        ours.replace("library_name: moe", "library_name: [moe"),  # cannot be read
        ours.split("---\n")[-1],  # has no header
    ]
    for text in changed:
        assert text != ours
        (tmp_path / "README.md").write_text(text)
        model.save_pretrained(tmp_path)
        assert (tmp_path / "README.md").read_text() == text


# ---- where it comes from ----


def test_the_base_model_is_the_name_on_the_hub_and_lasts(tmp_path):
    revision = "a" * 40
    cached = tmp_path / "hub" / "models--org--tiny"
    tiny_model().save_pretrained(cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    options = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    model = STMoEForConditionalGeneration.from_pretrained("org/tiny", **options)
    for folder in ("first", "second"):
        model.save_pretrained(tmp_path / folder)
        assert card_of(tmp_path / folder).data.base_model == "org/tiny"
        model = STMoEForConditionalGeneration.from_pretrained(tmp_path / folder)


# ---- the hub ----


class Hub:
    """Stands in for the hub, which no test reaches: repositories are folders."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.commits = folder, []
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "create_commit", self.create_commit)
        monkeypatch.setattr(moe.models.card, "hf_hub_download", self.download)

    def create_repo(self, repo_id, **_):
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id, operations, **options):
        self.commits.append(options)
        for operation in operations:
            shutil.copyfile(
                operation.path_or_fileobj, self.folder / repo_id / operation.path_in_repo
            )

    def download(self, repo_id, name, **_):
        if not (self.folder / repo_id / name).exists():
            raise EntryNotFoundError(name)
        return str(self.folder / repo_id / name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return Hub(tmp_path / "hub", monkeypatch)


def push(how, model, tmp_path, **arguments):
    if how == "push_to_hub":
        model.push_to_hub("org/tiny", **arguments)
    else:
        model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="org/tiny", **arguments)


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_a_push_brings_the_card_and_later_ones_bring_it_up_to_date(hub, tmp_path, how):
    repo, model = hub.folder / "org" / "tiny", tiny_model()
    options = {"commit_message": "First", "private": True}
    push(how, model, tmp_path, card={"license": "mit"}, tags=["mine"], **options)
    assert hub.commits[0]["commit_message"] == "First"
    names = {path.name for path in repo.iterdir()}
    assert names >= {"README.md", "config.json", "model.safetensors", "modeling_st_moe.py"}
    assert card_of(repo).data.license == "mit"
    assert card_of(repo).data.tags[-1] == "mine"
    loaded = STMoEForConditionalGeneration.from_pretrained(repo)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)

    model.config.capacity_factor = 1.5
    model.add_model_tags("further")
    push(how, model, tmp_path)
    assert card_of(repo).data["capacity_factor"]["training"] == 1.5
    assert card_of(repo).data.tags[-2:] == ["mine", "further"]


@pytest.mark.parametrize(
    ("on_the_hub", "how"),
    [
        (None, "save_pretrained"),
        ("---\nlicense: mit\n---\n# Another\n", "save_pretrained"),
        ("---\nlicense: mit\n---\n# Another\n", "push_to_hub"),
    ],
    ids=["none", "another", "pushed"],
)
def test_a_card_that_was_written_stays_and_is_uploaded_where_there_is_none(
    hub, tmp_path, on_the_hub, how
):
    repo, local = hub.folder / "org" / "tiny", tmp_path / "local"
    for folder, text in ((local, OWN), (repo, on_the_hub)):
        folder.mkdir(parents=True)
        if text:
            (folder / "README.md").write_text(text)
    push(how, tiny_model(), tmp_path)
    assert (local / "README.md").read_text() == OWN
    assert (repo / "README.md").read_text() == (on_the_hub or OWN)


def test_a_misspelt_entry_of_a_card_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="licence"):
        tiny_model().save_pretrained(tmp_path / "a", card={"licence": "mit"})
    for other in ("mit", ["mit"]):
        with pytest.raises(ConfigError, match=r"card is .*expected a mapping"):
            tiny_model().save_pretrained(tmp_path / "a", card=other)
    assert not list(tmp_path.iterdir())
    tiny_model().save_pretrained(tmp_path, card={"tags": "mine"})
    assert card_of(tmp_path).data.tags[-1] == "mine"


def test_sections_say_what_a_card_cannot_know(tmp_path):
    sections = {"Training": "On 7M tokens.", "Results": "| a |\n|---|\n| 3.5 |"}
    model = tiny_model(eval_capacity_factor=None)
    model.save_pretrained(tmp_path, card={"sections": sections})
    text = card_of(tmp_path).text
    assert "## Training\n\nOn 7M tokens.\n\n## Results\n\n| a |" in text
    assert "does not know" not in text

    # A card of ours is replaced, and says again that it knows nothing.
    model.save_pretrained(tmp_path)
    assert "does not know" in card_of(tmp_path).text
    assert "7M tokens" not in card_of(tmp_path).text
