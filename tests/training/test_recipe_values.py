"""Any value of YAML for any setting of a recipe: it builds at once, or one message names the
setting.
"""

import functools
import itertools
import math
import time

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe import cli
from moe.commands.plan import read_workload
from moe.data.span_corruption import Noise, corrupted_lengths, tokens_length
from moe.distributed.launch import DEFAULT_TIMEOUT
from moe.distributed.mesh import MeshConfig, MeshLimits, check_mesh, divisors, valid_meshes
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.sparse.groups import sequences_per_group
from moe.training.build import check_run_fits
from moe.training.command import RecipeCommand
from moe.training.command_help import recipe_settings
from moe.training.recipe import FinetuneRecipe, PretrainRecipe
from moe.training.step import check_groups
from tests.training.tiny_run import MODEL

TINY = {name: value for name, value in MODEL.items() if name != "sparse_dense_stacking"}
OPTIM = {"lr": 0.2, "warmup_steps": 10, "cooldown_steps": 10}
TRAINING = {"steps": 40, "batch_size": 4}
VALID = {
    PretrainRecipe: {
        "model": TINY,
        "data": {"inputs_length": 16},
        "optim": OPTIM,
        "training": TRAINING,
    },
    FinetuneRecipe: {"model": {"group_size": 64}, "optim": OPTIM, "training": TRAINING},
}
NAMES = {kind: sorted(setting.name for setting in recipe_settings(kind)) for kind in VALID}
OWN = {
    "resume": {"action": "store_true"},
    "out": {"type": cli.path},
    "seeds": {"type": int, "nargs": "+"},
}
SECONDS = 1.0

brief = settings(max_examples=25)

INTEGERS = [10**6, 10**9, 10**12, 2**31, 2**63, 2**64, 10**30, 1_000_000_007, 2**20]
FLOATS = [1e308, -1e308, 5e-324, 0.999999, 1 - 1e-16, math.inf, -math.inf, math.nan, 1e-300]
TEXTS = ["yes", "no", "perhaps", "1e3", "0x10", "", "all", "adamw", "token_choice", "a" * 5000]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=30)
    | st.dates()
    | st.sampled_from([*INTEGERS, *FLOATS, *TEXTS])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@functools.cache
def command(kind):
    made = RecipeCommand(kind, "A test.")
    for name, options in OWN.items():
        made.add_argument(f"--{name}", **options)
    return made


def build(kind, path):
    """Builds all that a recipe says before a model is made."""
    recipe, _ = command(kind).parse(["--config", str(path)])
    schedule = recipe.build_schedule()
    assert all(math.isfinite(schedule(step)) for step in (0, recipe.training.steps - 1))
    if kind is FinetuneRecipe:
        STMoEConfig(**{**TINY, **recipe.model})
        return
    config, workload = recipe.build_config(), read_workload(recipe)
    check_run_fits(recipe, config, recipe.mesh.num_ranks, workload.lengths)


def with_setting(kind, name, value):
    """Returns the content of the valid recipe with one other setting."""
    content = {section: dict(values) for section, values in VALID[kind].items()}
    section, _, key = name.rpartition(".")
    place = content.setdefault(section, {}) if section else content
    place[key] = value
    return content


def build_or_name(kind, name, value, path):
    """Builds a recipe with one other setting, or makes sure that the error names it."""
    path.write_text(
        yaml.safe_dump(with_setting(kind, name, value), allow_unicode=True), encoding="utf-8"
    )
    start = time.process_time()
    try:
        build(kind, path)
    except ConfigError as error:
        key = name.rpartition(".")[2]
        named = key in str(error) or (
            key.endswith(("router", "router_options"))
            and ("no router called" in str(error) or "has no option" in str(error))
        )
        assert named, (name, value, str(error))
        assert "\n" not in str(error) and len(str(error)) < 2000
    assert time.process_time() - start < SECONDS, (name, value)


def names_and_kinds():
    return st.sampled_from(
        [(kind, name) for kind, names in NAMES.items() for name in [*names, *OWN]]
    )


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names_and_kinds(), VALUES)
@example((PretrainRecipe, "training.batch_size"), 10**12)
@example((PretrainRecipe, "data.inputs_length"), 10**9)
@example((PretrainRecipe, "data.noise_density"), 0.999999)
@example((PretrainRecipe, "optim.lr"), 1e308)
@example((PretrainRecipe, "model.group_size"), 10**30)
@example((FinetuneRecipe, "data.inputs_length"), math.inf)
@example((FinetuneRecipe, "data.pack"), "perhaps")
@example((FinetuneRecipe, "resume"), "perhaps")
@example((FinetuneRecipe, "seeds"), 3)
@example((FinetuneRecipe, "out"), "")
@example((PretrainRecipe, "model.decoder_router"), "")
def test_any_value_of_a_setting_builds_at_once_or_is_one_message_that_names_it(
    tmp_path, kind_and_name, value
):
    build_or_name(*kind_and_name, value, tmp_path / "recipe.yaml")


def test_a_wrong_argument_is_one_message_with_name_and_value():
    for argument, message in (
        ("--training.steps=many", r"^training\.steps is 'many'; expected an integer of at least 1"),
        ("--training.micro_batch_size=[1]", r"is \[1\]; expected an integer .*or null"),
        ("--training.precision=float16", r"is 'float16'; expected one of float32, bfloat16\.$"),
        ("--resume=perhaps", "resume"),
    ):
        with pytest.raises(ConfigError, match=message):
            command(PretrainRecipe).parse([argument])


COMMAND_VALUES = {
    "resume: perhaps": "resume is 'perhaps'; expected true or false",
    "resume: null": "resume is None; expected true or false",
    "seeds: 3": r"seeds is 3; expected a list, e\.g\. \[0, 1\]",
    "out: ''": "--out is empty",
    "seed: 1\nseed: 2": "the key 'seed' is given twice",
    "optim: {lr: 1, lr: 2}": "the key 'lr' is given twice",
    "training: {steps: !!timestamp x}": "is not YAML",
    "training: {steps: !!bool x}": "is not YAML",
    "training: {steps: 2024-99-99}": "is not YAML",
    "model: &m {d_ff: 8}\noptim: *m": r"optim\.d_ff",
}


def test_what_a_file_says_of_the_command_itself_is_checked_too(tmp_path):
    file = tmp_path / "recipe.yaml"
    for line, message in COMMAND_VALUES.items():
        file.write_text(line + "\n", encoding="utf-8")
        for argv in (["--config", str(file)], [f"--config={file}"]):
            with pytest.raises(ConfigError, match=message):
                command(PretrainRecipe).parse(argv)


def test_ranks_wait_as_long_as_a_command_or_its_recipe_says(tmp_path):
    made = RecipeCommand(PretrainRecipe, "A test.")
    made.add_run_options()
    (tmp_path / "recipe.yaml").write_text("timeout: 17\n", encoding="utf-8")
    file = ["--config", str(tmp_path / "recipe.yaml")]
    timeouts = []
    for argv in ([], file, [*file, "--timeout", "0.5"]):
        with made.launch(["--out", "run", *argv]) as (world, recipe, _):
            timeouts.append(world.timeout)
            assert recipe == PretrainRecipe()
    assert timeouts == [DEFAULT_TIMEOUT, 17, 0.5]

    with (
        pytest.raises(ConfigError, match=r"^timeout is 0\.0"),
        made.launch(["--out=run", "--timeout=0"]),
    ):
        pass


# ---- what took minutes is the same number as before ----


@brief
@given(st.integers(1, 3000))
def test_divisors_are_all_numbers_that_divide(number):
    assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


@brief
@given(
    st.sampled_from([1, 2, 4, 6, 12]),
    st.sampled_from([(), (4,), (6,), (8,), (4, 6), (4, 8)]),
    st.sampled_from([4, 6]),
    st.sampled_from([6, 12]),
)
def test_fitting_meshes_are_all_that_fit(num_ranks, num_experts, num_heads, d_ff):
    limits = MeshLimits(num_ranks, num_experts, num_heads, d_ff, num_groups=24)
    fitting = []
    for sizes in itertools.product(range(1, num_ranks + 1), repeat=4):
        if math.prod(sizes) == num_ranks and fits(MeshConfig(*sizes), limits):
            fitting.append(MeshConfig(*sizes))
    found = valid_meshes(limits)
    assert len(found) == len(fitting) and set(found) == set(fitting)


def fits(mesh, limits):
    try:
        check_mesh(mesh, limits)
    except ConfigError:
        return False
    return True


SMALL = st.integers(1, 9)


@brief
@given(SMALL, SMALL, SMALL, SMALL, st.integers(1, 120))
def test_the_group_size_that_an_error_names_is_the_largest_that_fits(
    parts, rows, length, targets, group_size
):
    batch = parts * rows

    def groups_alike(size):
        return all(
            sequences_per_group(batch, n, size) == sequences_per_group(rows, n, size)
            for n in (length, targets)
        )

    largest = min(group_size, rows * max(length, targets))
    fitting = [size for size in range(1, largest + 1) if groups_alike(size)]
    try:
        check_groups((length, targets), batch, rows, group_size)
    except ConfigError as error:
        assert f"model.group_size to {max(fitting)}, the largest that fits" in str(error)
    else:
        assert groups_alike(group_size)


@brief
@given(st.integers(4, 300), st.floats(0.01, 0.9), st.floats(1, 40))
def test_the_length_that_is_found_by_halving_is_that_of_counting_up(inputs_length, density, span):
    noise = Noise(density, span)
    length = max(2, inputs_length // 2)
    while corrupted_lengths(length + 1, noise)[0] <= inputs_length:
        length += 1
    if corrupted_lengths(length, noise)[0] <= inputs_length and density != 0.5:
        assert tokens_length(inputs_length, noise, num_sentinels=10**6) == length
