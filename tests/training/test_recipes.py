"""Recipes at the door: every mistake is one message that names the key."""

import re
from pathlib import Path

import pytest
import yaml

from eval.task import TASKS
from moe import ConfigError, STMoEConfig
from moe.commands.finetune import finetune_command
from moe.commands.plan import read_workload
from moe.planning.plan import build_model, make_plan
from moe.training.build import check_run_fits
from moe.training.command import RecipeCommand, save_recipe
from moe.training.recipe import FinetuneRecipe, PretrainRecipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
FAMILIES = [
    path
    for path in RECIPES
    if re.search(r"^out:", path.read_text(), re.M) and "finetune" in path.stem
]


def parse(*argv, kind=PretrainRecipe):
    command = finetune_command() if kind is FinetuneRecipe else RecipeCommand(kind, "A test.")
    own = [] if kind is PretrainRecipe else ["--pretrained", "model", "--out", "out"]
    return command.parse([*own, *(str(argument) for argument in argv)])[0]


def header_of(path):
    return "".join(
        line for line in path.read_text().splitlines(keepends=True) if line.startswith("#")
    )


def kind_of(path):
    return (
        FinetuneRecipe
        if "finetune" in path.stem or "stmoe finetune" in header_of(path)
        else PretrainRecipe
    )


def files_of(path):
    """Returns the files of the command in the header of a recipe, up to itself.

    A recipe that names its parent, or that no command names, needs no other file.
    """
    if re.search(r"^extends:", path.read_text(), re.M):
        return ["--config", path]
    files = re.findall(r"--config (recipes/\S+)", header_of(path)) or [f"recipes/{path.name}"]
    own = files.index(f"recipes/{path.name}")
    return [part for file in files[: own + 1] for part in ("--config", path.parents[1] / file)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_says_its_source_and_cost(path):
    recipe = parse(*files_of(path), kind=kind_of(path))
    assert all(word in header_of(path) for word in ("Source:", "Mesh:", "Cost:", "Differs"))
    if isinstance(recipe, PretrainRecipe):
        assert recipe.build_config().num_parameters() > 0


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if kind_of(path) is FinetuneRecipe], ids=lambda p: p.stem
)
def test_the_tasks_of_a_recipe_exist_and_can_be_trained_on_and_scored(path):
    mixture = parse(*files_of(path), kind=FinetuneRecipe).mixture
    tasks = [TASKS.get(name) for name in mixture.tasks]
    assert all("train" in task.source.splits for task in tasks)
    assert mixture.dev_examples == 0 or any("validation" in task.source.splits for task in tasks)


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("kind", "lr", "tokens"), [("sparse", 1e-3, 2**16), ("dense", 1e-4, 2**18)]
)
def test_a_family_of_tasks_is_tuned_with_the_papers_settings_for_sparse_and_dense(
    path, kind, lr, tokens
):
    settings = path.parent / f"finetune_{kind}.yaml"
    for files in ((settings, path), (path, settings)):
        argv = [part for file in files for part in ("--config", file)]
        recipe = parse(*argv, kind=FinetuneRecipe)
        check_family(recipe, lr, tokens)


def check_family(recipe, lr, tokens):
    assert (recipe.optim.lr, recipe.training.batch_size * recipe.data.inputs_length) == (lr, tokens)
    assert recipe.mixture.tasks and recipe.mixture.maximum == 65536


def test_superglue_is_one_recipe_for_sparse_and_one_on_top_for_dense():
    sparse, dense = (
        parse(*files_of(RECIPES[0].parent / f"{name}_base_superglue.yaml"), kind=FinetuneRecipe)
        for name in ("st_moe", "dense")
    )
    assert (sparse.optim.lr, sparse.training.batch_size) == (1e-3, 128)
    assert (dense.optim.lr, dense.training.batch_size) == (1e-4, 512)
    assert sparse.mixture == dense.mixture
    assert sorted(sparse.mixture.tasks) == [
        "boolq",
        "cb",
        "copa",
        "dpr",
        "multirc",
        "record",
        "rte",
        "wic",
        "wsc",
    ]
    assert (sparse.training.steps, sparse.training.evaluate_every, sparse.mixture.dev_examples) == (
        16_000,
        200,
        None,
    )


PRESETS = {
    "st_moe_base": "st-moe-base",
    "st_moe_l": "st-moe-l",
    "st_moe_xl": "st-moe-xl",
    "st_moe_32b": "st-moe-32b",
    "switch_base_8": "switch-base-8",
    "switch_base_128": "switch-base-128",
    "switch_large_128": "switch-large-128",
    "dense_base": "t5-1.1-base",
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_recipe_of_a_published_model_is_the_preset(name):
    config = parse("--config", RECIPES[0].parent / f"{name}_pretrain.yaml").build_config()
    noise = {"noise_density": 0.15, "mean_noise_span_length": 3.0}
    assert config.to_dict() == STMoEConfig.from_preset(PRESETS[name], **noise).to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_the_recipe_of_a_published_model_fits_on_its_mesh_with_the_memory_that_its_header_says(
    name,
):
    path = RECIPES[0].parent / f"{name}_pretrain.yaml"
    recipe = parse("--config", path)
    config = recipe.build_config()
    workload = read_workload(recipe)
    check_run_fits(recipe, config, recipe.mesh.num_ranks, workload.lengths)
    plan = make_plan(build_model(config), workload, recipe.mesh)
    assert plan.memory < 80 * 2**30
    memory = re.search(r"80 GiB: ([\d.]+) GiB", header_of(path).replace("\n# ", " "))
    assert memory is None or float(memory[1]) == pytest.approx(plan.memory / 2**30, abs=0.06)
    assert memory or name == "st_moe_base"


def test_the_tiny_recipes_on_four_ranks_fit_with_experts_balanced_over_groups_or_over_all_ranks():
    scopes = {}
    for name in ("four_ranks", "four_ranks_global_balance"):
        recipe = parse("--config", RECIPES[0].parent / f"{name}.yaml")
        config = recipe.build_config()
        check_run_fits(recipe, config, 4, read_workload(recipe).lengths)
        scopes[name] = config.balance_scope
    assert scopes == {"four_ranks": "group", "four_ranks_global_balance": "global"}


@pytest.mark.parametrize("name", ["bias_balanced", "expert_choice"])
def test_a_recipe_of_a_router_goes_on_top_of_another(name):
    folder = RECIPES[0].parent
    config = parse(
        "--config", folder / "st_moe_tiny_pretrain.yaml", "--config", folder / f"{name}.yaml"
    ).build_config()
    assert config.sparse_config(decoder=False).router == name
    assert config.num_experts == 8


def test_later_files_and_arguments_win_and_a_saved_recipe_reads_back(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 3\noptim:\n  lr: 0.5\n")
    (tmp_path / "b.yaml").write_text("optim:\n  lr: 0.25\n")
    recipe = parse(
        "--config", tmp_path / "a.yaml", "--config", tmp_path / "b.yaml", "--training.steps", 7
    )
    assert (recipe.seed, recipe.optim.lr, recipe.training.steps) == (3, 0.25, 7)
    save_recipe(recipe, tmp_path / "c.yaml")
    assert parse("--config", tmp_path / "c.yaml") == recipe


# ---- extends ----


def write(folder, **texts):
    """Writes recipe files; returns their paths by name."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return {name: folder / f"{name}.yaml" for name in texts}


def test_a_recipe_says_what_differs_from_its_parent_at_any_depth(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "root.yaml").write_text(
        "seed: 3\noptim:\n  lr: 0.5\n  warmup_steps: 7\nmodel:\n  router: switch\n"
        "  num_selected_experts: 1\n  router_options:\n    policy: sample\n    temperature: 2e-1\n"
    )
    (tmp_path / "below" / "parent.yaml").write_text("extends: ../root.yaml\noptim:\n  lr: 0.25\n")
    (tmp_path / "child.yaml").write_text(
        "extends: below/parent.yaml\nmodel:\n  router_options:\n    temperature: 3\n"
    )
    recipe = parse("--config", tmp_path / "child.yaml")
    assert (recipe.seed, recipe.optim.lr, recipe.optim.warmup_steps) == (3, 0.25, 7)
    assert recipe.model["router_options"] == {"policy": "sample", "temperature": 3}


def test_a_list_replaces_that_of_the_parent(tmp_path):
    files = write(
        tmp_path,
        a="mixture:\n  tasks: [boolq, cb]\n  temperature: 2.0\n",
        b="extends: a.yaml\nmixture:\n  tasks: [rte]\n",
    )
    mixture = parse("--config", files["b"], kind=FinetuneRecipe).mixture
    assert (mixture.tasks, mixture.temperature) == (["rte"], 2.0)


def test_later_files_and_arguments_win_over_what_a_recipe_inherits(tmp_path):
    files = write(
        tmp_path,
        a="seed: 3\noptim:\n  lr: 0.5\n",
        b="extends: a.yaml\ntraining:\n  steps: 11\n",
        c="optim:\n  lr: 0.125\n",
    )
    argv = ("--config", files["b"], f"--config={files['c']}", "--training.steps", 7)
    recipe = parse(*argv)
    assert (recipe.seed, recipe.optim.lr, recipe.training.steps) == (3, 0.125, 7)
    assert parse("--optim.lr", 1, "--config", files["b"]).optim.lr == 0.5


def test_numbers_and_texts_that_are_inherited_stay_what_they_were_written_as(tmp_path):
    files = write(
        tmp_path,
        a="out: \"1e3\"\npretrained: '0x10'\noptim: {lr: 1e-3}\n",
        b="extends: a.yaml\nseed: 1\n",
    )
    recipe, arguments = finetune_command().parse(["--config", str(files["b"])])
    assert recipe.optim.lr == 1e-3
    assert (arguments.out, arguments.pretrained) == ("1e3", Path("0x10"))


def test_a_recipe_that_extends_itself_is_refused_with_the_way_it_goes(tmp_path):
    files = write(tmp_path, a="extends: b.yaml\n", b="extends: c.yaml\n", c="extends: a.yaml\n")
    a, b, c = (re.escape(str(files[name])) for name in "abc")
    with pytest.raises(ConfigError, match=f"{a} extends itself: {a} -> {b} -> {c} -> {a}"):
        parse("--config", files["a"])


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        (
            "extends: none.yaml",
            r"child\.yaml: extends is 'none\.yaml', and there is no file .*none\.yaml",
        ),
        (
            "extends: [a.yaml]",
            r"child\.yaml: extends is \['a\.yaml'\]; expected the path of one recipe",
        ),
        ("extends: ''", r"child\.yaml: extends is ''; expected the path of one recipe"),
        (
            "extends: wrong.yaml",
            r"wrong\.yaml: there is no setting 'optim\.lrr'.*Did you mean 'optim\.lr'",
        ),
        (
            "extends: value.yaml",
            r"value\.yaml: training\.precision is float16; expected one of float32",
        ),
        (
            "extends: range.yaml",
            r"range\.yaml: optim\.lr is -1\.0; expected a finite number above 0",
        ),
        (
            "extend: value.yaml",
            r"child\.yaml: there is no setting 'extend'.*Did you mean 'extends'",
        ),
    ],
)
def test_a_mistake_names_the_file_in_which_it_stands(tmp_path, parent, message):
    write(
        tmp_path,
        child=f"{parent}\nseed: 1\n",
        wrong="optim:\n  lrr: 1\n",
        value="training:\n  precision: float16\n",
        range="optim:\n  lr: -1.0\n",
    )
    with pytest.raises(ConfigError, match=message):
        parse("--config", tmp_path / "child.yaml")


def test_a_mistake_on_the_command_line_names_no_file(tmp_path):
    (tmp_path / "a.yaml").write_text("optim:\n  lr: 1.0\n")
    with pytest.raises(ConfigError, match=r"^optim\.lr is -1\.0; expected"):
        parse("--config", tmp_path / "a.yaml", "--optim.lr", -1.0)


def test_print_config_shows_the_whole_recipe(tmp_path, capsys):
    files = write(tmp_path, a="optim:\n  lr: 0.5\n", b="extends: a.yaml\nseed: 5\n")
    with pytest.raises(SystemExit):
        parse("--config", files["b"], "--print_config")
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["seed"], shown["optim"]["lr"], shown["training"]["batch_size"]) == (5, 0.5, 128)
    assert "extends" not in shown


def test_router_options_are_a_mapping_in_a_file_and_dotted_names_or_a_mapping_on_the_command_line(
    tmp_path,
):
    file, again = tmp_path / "a.yaml", tmp_path / "b.yaml"
    file.write_text(
        "model:\n  router: switch\n  num_selected_experts: 1\n"
        "  router_options:\n    policy: sample\n    temperature: 2e-1\n"
    )
    recipe = parse("--config", file)
    assert recipe.model["router_options"] == {"policy": "sample", "temperature": 0.2}
    save_recipe(recipe, again)
    assert parse("--config", again) == recipe
    recipe = parse("--config", file, "--model.router_options.temperature=3")
    assert recipe.model["router_options"] == {"policy": "sample", "temperature": 3}
    recipe = parse("--config", file, "--model.router_options", "{jitter: 0.5}")
    assert recipe.model["router_options"] == {"jitter": 0.5}
    recipe = parse(
        "--model.decoder_router_options.second_expert_policy", "all", kind=FinetuneRecipe
    )
    assert recipe.model["decoder_router_options"] == {"second_expert_policy": "all"}


def test_options_of_an_optimizer_and_a_schedule_read_back_as_they_were_written(tmp_path):
    file, again = tmp_path / "a.yaml", tmp_path / "b.yaml"
    file.write_text(
        "optim:\n  optimizer: lars\n  optimizer_options: {momentum: unscaled, epsilon: 1e-6}\n"
        "  schedule: linear\n  schedule_options: {decay_epochs: 2}\n"
        "  warmup_epochs: 1\n  epoch_examples: 1280\n"
    )
    recipe = parse("--config", file, "--optim.optimizer_options.skip", "[norms]")
    assert recipe.optim.optimizer_options == {
        "momentum": "unscaled",
        "epsilon": 1e-6,
        "skip": ["norms"],
    }
    save_recipe(recipe, again)
    assert parse("--config", again) == recipe

    # 128 sequences an update: an epoch of 10 updates that rise and 20 that fall.
    rate = recipe.build_schedule()
    assert [rate(step) for step in (4, 9, 19, 29)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optim:\n  trust_coefficient: 1\n",
            "Did you mean 'optim.optimizer_options.trust_coefficient'",
        ),
        (
            "optim:\n  optimizer_options: {beta1: 0.5}\n",
            "optim.optimizer_options: adafactor has no option 'beta1'. Known: none.",
        ),
        (
            "optim:\n  optimizer: lamb\n  optimizer_options: {beta_1: 0.5}\n",
            "lamb has no option 'beta_1'. Did you mean 'beta1'?",
        ),
        ("optim:\n  weight_decay: 0.1\n", "but adafactor has none. Set it to 0"),
        (
            "optim:\n  optimizer: lamb\n  clipping_threshold: 0.5\n",
            "optim.clipping_threshold is 0.5, but lamb has none",
        ),
        (
            "model:\n  second_expert_policy: all\n",
            "Did you mean 'model.router_options.second_expert_policy'",
        ),
        (
            "training:\n  steps: 0\n",
            "training.steps is 0; expected an integer from 1 to 99,999,999 (checkpoints are numbered with",
        ),
        (
            "training:\n  batch_size: 4\n  micro_batch_size: 3\n",
            "expected a divisor of training.batch_size, 4",
        ),
        (
            "data:\n  noise_density: 1.5\n",
            "data.noise_density is 1.5; expected a finite number above 0 and of at most 0.99 (with more, hundreds",
        ),
        ("optim:\n  schedule: cosine\n", "no schedule called 'cosine'"),
        (
            "training:\n  steps: 5\noptim:\n  cooldown_steps: 9\n",
            "cooldown_steps is 9; expected 0 to the 5 steps",
        ),
        ("- a\n- b\n", "holds a list; expected settings"),
        ("a: [", "is not YAML"),
        ("# all is commented out\n", "holds nothing; expected settings"),
        ("optimm: {}\n", "no setting 'optimm.' in a PretrainRecipe. Did you mean 'optim.lr'"),
        ("training:\n", "no setting 'training'"),
        ("seed: null\n", "seed is null; expected int"),
        ("seed: 4294967296\n", "seed is 4294967296; expected an integer from 0 to 4,294,967,295"),
        ("optim:\n  lr: .inf\n", "optim.lr is inf; expected a finite number above 0"),
        ("training:\n  steps: true\n", "training.steps"),
    ],
)
def test_a_wrong_recipe_is_one_message(tmp_path, text, message):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        parse("--config", tmp_path / "wrong.yaml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_binary_and_unknown_arguments_are_one_message(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for argv, message in (
        (["--config", tmp_path / "none.yaml"], "No such file"),
        (["--config", tmp_path / "binary.yaml"], "is not UTF-8"),
        (["--optim.lrr", 1], "no option --optim.lrr. Did you mean 'optim.lr'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(*argv)


def test_an_empty_section_and_an_allowed_null_change_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {}\ntraining:\n  micro_batch_size: null\n")
    assert parse("--config", tmp_path / "a.yaml") == parse()


def test_the_recipes_of_fine_tuning_are_the_papers_for_sparse_and_dense():
    sparse, dense = (
        parse("--config", RECIPES[0].parent / f"finetune_{kind}.yaml", kind=FinetuneRecipe)
        for kind in ("sparse", "dense")
    )
    assert (sparse.optim.lr, sparse.training.batch_size * sparse.data.inputs_length) == (
        1e-3,
        2**16,
    )
    assert (dense.optim.lr, dense.training.batch_size * dense.data.inputs_length) == (1e-4, 2**18)
    for recipe in (sparse, dense):
        assert (recipe.model["dropout_rate"], recipe.model["expert_dropout_rate"]) == (0.1, 0.4)
        assert (recipe.optimizer_state, recipe.parameters, recipe.data.sentinels) == (
            "keep",
            "all",
            "none",
        )
    assert FinetuneRecipe().optimizer_state == "reset"  # needs no more than a model


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (
            "--parameters",
            "nonmoe",
            "no subset of parameters called 'nonmoe'. Did you mean 'non_moe'",
        ),
        ("--optimizer_state", "kept", "optimizer_state"),
        ("--data.sentinels", "two", "sentinels"),
    ],
)
def test_a_wrong_setting_of_fine_tuning_is_one_message(argument, value, message):
    with pytest.raises(ConfigError) as error:
        parse(argument, value, kind=FinetuneRecipe)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_fine_tuning_cannot_change_the_architecture():
    with pytest.raises(ConfigError, match=r"model\.d_model"):
        FinetuneRecipe(model={"d_model": 64})
    defaults = FinetuneRecipe()
    assert defaults.model["dropout_rate"] < defaults.model["expert_dropout_rate"]
