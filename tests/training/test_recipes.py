"""Recipes at the door: every mistake is one message that names the key."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from moe import ConfigError, STMoEConfig
from moe.commands.distill import DistillPairsRecipe, DistillRecipe, distill_command
from moe.commands.finetune import finetune_command
from moe.commands.plan import read_workload
from moe.planning.plan import build_model, make_plan
from moe.training.build import check_run_fits
from moe.training.command import RecipeCommand, save_recipe
from moe.training.recipe import FinetuneRecipe, PretrainRecipe
from stmoe_eval.task import TASKS

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@cache
def command(kind):
    if kind in (DistillRecipe, DistillPairsRecipe):
        return distill_command(is_pairs=kind is DistillPairsRecipe)
    return finetune_command() if kind is FinetuneRecipe else RecipeCommand(kind, "A test.")


def parse(*argv, kind=PretrainRecipe):
    option = "--pretrained" if kind is FinetuneRecipe else "--teacher"
    paths = [] if kind is PretrainRecipe else [option, "model", "--out", "out"]
    return command(kind).parse([*paths, *(str(argument) for argument in argv)])[0]


def parse_files(*paths, kind=PretrainRecipe):
    return parse(*(f"--config={path}" for path in paths), kind=kind)


def header_of(path):
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def kind_of(path):
    if "stmoe distill" in header_of(path):
        return DistillPairsRecipe if "--train" in header_of(path) else DistillRecipe
    is_finetuning = "finetune" in path.stem or "stmoe finetune" in header_of(path)
    return FinetuneRecipe if is_finetuning else PretrainRecipe


def files_of(path):
    """Returns the files of the command in the header of a recipe, up to itself.

    A recipe that names its parent, or that no command names, needs no other file.
    """
    if re.search(r"^extends:", path.read_text(), re.M):
        return [path]
    names = re.findall(r"--config (\S+)", header_of(path)) or [path.stem]
    return [FOLDER / f"{name}.yaml" for name in names[: names.index(path.stem) + 1]]


def test_every_recipe_parses_says_its_source_and_cost_and_names_tasks_with_the_splits_it_needs():
    for path in RECIPES:
        recipe = parse_files(*files_of(path), kind=kind_of(path))
        for word in ("Source:", "Mesh:", "Cost:", "Differs"):
            assert word in header_of(path), path
        if isinstance(recipe, PretrainRecipe):
            assert recipe.build_config().num_parameters() > 0
            continue

        tasks = [TASKS.get(name) for name in recipe.mixture.tasks]
        assert all("train" in task.source.splits for task in tasks), path
        has_dev = any("validation" in task.source.splits for task in tasks)
        assert has_dev or recipe.mixture.dev_examples == 0, path


PAPER = {"sparse": (1e-3, 2**16), "dense": (1e-4, 2**18)}
"""Learning rate and tokens in a batch."""


def rate_and_tokens(recipe):
    return recipe.optim.lr, recipe.training.batch_size * recipe.data.inputs_length


def test_a_family_of_tasks_is_tuned_with_the_papers_settings_for_sparse_and_dense():
    families = [
        path
        for path in RECIPES
        if "finetune" in path.stem and re.search(r"^out:", path.read_text(), re.M)
    ]
    assert families
    for family in families:
        for kind, expected in PAPER.items():
            files = [FOLDER / f"finetune_{kind}.yaml", family]
            for order in (files, files[::-1]):
                recipe = parse_files(*order, kind=FinetuneRecipe)
                assert rate_and_tokens(recipe) == expected, order
                assert recipe.mixture.tasks and recipe.mixture.maximum == 65536


def test_the_recipes_of_fine_tuning_are_the_papers_for_sparse_and_dense():
    for kind, expected in PAPER.items():
        recipe = parse_files(FOLDER / f"finetune_{kind}.yaml", kind=FinetuneRecipe)
        assert rate_and_tokens(recipe) == expected
        assert (recipe.model["dropout_rate"], recipe.model["expert_dropout_rate"]) == (0.1, 0.4)
        assert (recipe.optimizer_state, recipe.parameters) == ("keep", "all")
        assert recipe.data.sentinels == "none"
    assert FinetuneRecipe().optimizer_state == "reset"  # needs no more than a model


def test_superglue_is_one_recipe_for_sparse_and_one_on_top_for_dense():
    sparse, dense = (
        parse_files(*files_of(FOLDER / f"{name}_base_superglue.yaml"), kind=FinetuneRecipe)
        for name in ("st_moe", "dense")
    )
    assert (sparse.optim.lr, sparse.training.batch_size) == (1e-3, 128)
    assert (dense.optim.lr, dense.training.batch_size) == (1e-4, 512)
    assert sparse.mixture == dense.mixture
    tasks = "boolq cb copa dpr multirc record rte wic wsc"
    assert sorted(sparse.mixture.tasks) == tasks.split()
    assert (sparse.training.steps, sparse.training.evaluate_every) == (16_000, 200)
    assert sparse.mixture.dev_examples is None


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
def test_the_recipe_of_a_published_model_is_the_preset_and_has_the_memory_that_its_header_says(
    name,
):
    path = FOLDER / f"{name}_pretrain.yaml"
    recipe = parse_files(path)
    config = recipe.build_config()
    noise = {"noise_density": 0.15, "mean_noise_span_length": 3.0}
    assert config.to_dict() == STMoEConfig.from_preset(PRESETS[name], **noise).to_dict()

    workload = read_workload(recipe)
    check_run_fits(recipe, config, recipe.mesh.num_ranks, workload.lengths)
    plan = make_plan(build_model(config), workload, recipe.mesh)
    assert plan.memory < 80 * 2**30
    memory = re.search(r"80 GiB: ([\d.]+) GiB", header_of(path).replace("\n# ", " "))
    assert memory is None or float(memory[1]) == pytest.approx(plan.memory / 2**30, abs=0.06)
    assert memory or name == "st_moe_base"


def test_the_tiny_recipes_on_four_ranks_fit_with_experts_balanced_over_groups_or_over_all_ranks():
    scopes = {"four_ranks": "group", "four_ranks_global_balance": "global"}
    for name, scope in scopes.items():
        recipe = parse_files(FOLDER / f"{name}.yaml")
        config = recipe.build_config()
        check_run_fits(recipe, config, 4, read_workload(recipe).lengths)
        assert config.balance_scope == scope


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_the_numbers():
    message = r"training\.batch_size is 4; expected a multiple of 12: 3 data ranks"
    with pytest.raises(ConfigError, match=message):
        parse("--mesh.ep", 3, "--training.batch_size", 4, "--training.micro_batch_size", 4)


def test_a_recipe_of_a_router_goes_on_top_of_another():
    for name in ("bias_balanced", "expert_choice"):
        files = (FOLDER / "st_moe_tiny_pretrain.yaml", FOLDER / f"{name}.yaml")
        config = parse_files(*files).build_config()
        assert config.sparse_config(decoder=False).router == name
        assert config.num_experts == 8


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


def test_later_files_win_and_arguments_win_over_files_wherever_they_stand(tmp_path):
    files = write(
        tmp_path,
        a="seed: 3\noptim:\n  lr: 0.5\n",
        b="extends: a.yaml\ntraining:\n  steps: 11\n",
        c="optim:\n  lr: 0.125\n",
    )
    argv = ("--config", files["b"], f"--config={files['c']}", "--training.steps", 7)
    recipe = parse(*argv)
    assert (recipe.seed, recipe.optim.lr, recipe.training.steps) == (3, 0.125, 7)
    for argv in (
        ("--optim.lr", 1, "--config", files["b"]),
        (f"--config={files['b']}", "--optim.lr=1"),
    ):
        assert (parse(*argv).seed, parse(*argv).optim.lr) == (3, 1)

    save_recipe(recipe, tmp_path / "saved.yaml")
    assert parse_files(tmp_path / "saved.yaml") == recipe


def test_a_cooldown_of_a_file_keeps_its_share_of_the_steps(tmp_path):
    files = write(
        tmp_path,
        a="optim: {cooldown_steps: 400}\ntraining: {steps: 800}\n",
        child="extends: a.yaml\ntraining: {steps: 80}\n",
        both="extends: a.yaml\noptim: {cooldown_steps: 3}\ntraining: {steps: 80}\n",
        alone="optim: {cooldown_steps: 5}\n",
    )

    def cooldown(*argv):
        return parse(*argv).optim.cooldown_steps

    a = ("--config", files["a"])
    steps = ("--training.steps", 150)
    typed = ("--optim.cooldown_steps", 31)
    assert cooldown(*a) == 400
    assert cooldown(*a, *steps) == cooldown(*a, "--training.steps=150") == 75
    assert cooldown("--config", files["child"]) == 40
    assert cooldown("--config", files["child"], *steps) == 75
    assert cooldown("--config", files["both"]) == 3
    assert cooldown(*a, "--config", files["alone"], *steps) == 5 * 150 // 800

    # What the command line says is kept, and so is a cooldown without a length.
    assert cooldown(*a, *steps, *typed) == cooldown(*a, *typed, *steps) == 31
    assert cooldown(*steps, *a) == 75
    assert cooldown("--config", files["alone"], *steps) == 5
    with pytest.raises(ConfigError, match="cooldown_steps is 31; expected 0 to the 30 steps"):
        parse(*a, *typed, "--training.steps", 30)


def test_a_number_may_have_an_exponent_alone_and_a_text_that_looks_like_one_stays_a_text(tmp_path):
    argv = ("--optim.lr", "1e-3", "--mixture.folder", "1e3", "--mixture.train_examples", "null")
    recipe = parse(*argv, kind=FinetuneRecipe)
    assert (recipe.optim.lr, recipe.mixture.folder) == (1e-3, "1e3")
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert parse("--config", tmp_path / "saved.yaml", kind=FinetuneRecipe) == recipe

    # A whole number is the number that a run which was saved before has.
    assert repr(parse("--optim.lr", 2).optim.lr) == "2.0"


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


def test_a_mistake_names_the_file_in_which_it_stands(tmp_path):
    files = write(
        tmp_path,
        wrong="optim:\n  lrr: 1\n",
        value="training:\n  precision: float16\n",
        range="optim:\n  lr: -1.0\n",
        good="optim:\n  lr: 1.0\n",
    )
    for parent, message in (
        ("extends: none.yaml", r"child\.yaml: .*there is no file .*none\.yaml"),
        ("extends: [a.yaml]", r"child\.yaml: extends is \['a\.yaml'\]; expected the path"),
        ("extends: ''", r"child\.yaml: extends is ''; expected the path"),
        ("extends: wrong.yaml", r"wrong\.yaml: .*'optim\.lrr'.*Did you mean 'optim\.lr'"),
        ("extends: value.yaml", r"value\.yaml: training\.precision is 'float16'; expected one of"),
        ("extends: range.yaml", r"range\.yaml: optim\.lr is -1\.0; expected a finite number"),
        ("extend: value.yaml", r"child\.yaml: there is no setting 'extend'.*mean 'extends'"),
    ):
        (tmp_path / "child.yaml").write_text(f"{parent}\nseed: 1\n")
        with pytest.raises(ConfigError, match=message):
            parse_files(tmp_path / "child.yaml")

    # One on the command line names no file.
    with pytest.raises(ConfigError, match=r"^optim\.lr is -1\.0; expected"):
        parse("--config", files["good"], "--optim.lr", -1.0)


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
        "  schedule: linear\n  schedule_options: {decay_steps: 20}\n"
        "  warmup_steps: 10\n"
    )
    recipe = parse("--config", file, "--optim.optimizer_options.skip", "[norms]")
    assert recipe.optim.optimizer_options == {
        "momentum": "unscaled",
        "epsilon": 1e-6,
        "skip": ["norms"],
    }
    save_recipe(recipe, again)
    assert parse("--config", again) == recipe

    # 10 updates rise and 20 fall.
    rate = recipe.build_schedule()
    assert [rate(step) for step in (4, 9, 19, 29)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


WRONG = {
    "optim: {trust_coefficient: 1}": "Did you mean 'optim.optimizer_options.trust_coefficient'",
    "optim: {optimizer_options: {beta1: 0.5}}": "adafactor has no option 'beta1'. Known: none.",
    "optim: {optimizer: lamb, optimizer_options: {beta_1: 0.5}}": "Did you mean 'beta1'?",
    "optim: {weight_decay: 0.1}": "but adafactor has none. Leave it at 0",
    "optim: {optimizer: lamb, clipping_threshold: 0.5}": "is 0.5, but lamb has none",
    "optim: {optimizer: adamw, clipping_threshold: 0.5}": "is 0.5, but adamw has none",
    "model: {second_expert_policy: all}": "mean 'model.router_options.second_expert_policy'",
    "training: {steps: 0}": "training.steps is 0; expected an integer of at least 1",
    "training: {batch_size: 4, micro_batch_size: 3}": "a divisor of training.batch_size, 4",
    "data: {noise_density: 1.5}": "data.noise_density is 1.5; expected a finite number above 0",
    "optim: {schedule: cosine}": "no schedule called 'cosine'",
    "{training: {steps: 5}, optim: {cooldown_steps: 9}}": "is 9; expected 0 to the 5 steps",
    "- a\n- b": "expected settings",
    "a: [": "is not YAML",
    "# all is commented out": "expected settings",
    "optimm: {}": "no setting 'optimm' in a PretrainRecipe. Did you mean 'optim.lr'",
    "training: 5": "no setting 'training'",
    "seed: null": "seed is None; expected an integer",
    "seed: 4294967296": "seed is 4294967296; expected an integer from 0 to 4,294,967,295",
    "optim: {lr: .inf}": "optim.lr is inf; expected a finite number above 0",
}


def test_a_wrong_recipe_is_one_message(tmp_path):
    for text, message in WRONG.items():
        (tmp_path / "wrong.yaml").write_text(text + "\n")
        with pytest.raises(ConfigError) as error:
            parse_files(tmp_path / "wrong.yaml")
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_missing_binary_and_unknown_arguments_are_one_message(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for argv, message in (
        (["--config", tmp_path / "none.yaml"], "No such file"),
        (["--config", tmp_path / "binary.yaml"], "is UTF-16"),
        (["--optim.lrr", 1], "no option --optim.lrr. Did you mean 'optim.lr'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(*argv)


def test_an_empty_section_and_an_allowed_null_change_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {}\nmesh:\ntraining:\n  micro_batch_size: null\n")
    assert parse("--config", tmp_path / "a.yaml") == parse()


def test_a_wrong_setting_of_fine_tuning_is_one_message():
    for argument, value, message in (
        ("--parameters", "nonmoe", "called 'nonmoe'. Did you mean 'non_moe'"),
        ("--optimizer_state", "kept", "optimizer_state"),
        ("--data.sentinels", "two", "sentinels"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            parse(argument, value, kind=FinetuneRecipe)
        assert "\n" not in str(error.value)


def test_fine_tuning_cannot_change_the_architecture():
    with pytest.raises(ConfigError, match=r"model\.d_model"):
        FinetuneRecipe(model={"d_model": 64})
    defaults = FinetuneRecipe()
    assert defaults.model["dropout_rate"] < defaults.model["expert_dropout_rate"]
