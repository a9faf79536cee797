"""stmoe distill: trains a student, dense or smaller, on the probabilities of a sparse teacher.

    stmoe distill --config distill_pretrain --teacher runs/pretrain/model \
        --corpus runs/corpus --out runs/student [--resume]
    stmoe distill --config distill_finetune --teacher runs/finetune/best/model \
        --train pairs.jsonl --out runs/student

The student is made of the teacher: each layer of experts becomes a dense one. With `--student
MODEL` it is another model with the same vocabulary, such as a pruned teacher.
"""

import dataclasses
import shlex
import time
from argparse import Namespace
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from transformers.utils import logging

from moe.checkpoint.loading import check_model_folder
from moe.checks import check
from moe.checksums import write_sums
from moe.cli import path
from moe.commands import finetune, pretrain
from moe.commands.surgery_report import REPORT_FILE, compare, measure, write_report
from moe.data.corpus import load_corpus
from moe.data.pipeline import BatchSource
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.launch import World
from moe.distributed.replica_groups import find_replica_groups
from moe.errors import ConfigError
from moe.files import check_kind, find_model, output_path, whole_folder
from moe.models.configuration import STMoEConfig
from moe.surgery.dense_student import (
    dense_obstacles,
    dense_student_checkpoint,
    mean_gates,
    student_config,
)
from moe.surgery.distillation import (
    Distillation,
    DistillationSettings,
    TaughtSource,
    load_teacher,
    teacher_config,
)
from moe.tracing.recorder import traced_batches, unpacked
from moe.training.command import RecipeCommand, typed_settings
from moe.training.finetuning import choose_data
from moe.training.heldout_loss import to_device
from moe.training.loop import refuse_to_overwrite, train
from moe.training.recipe import FinetuneRecipe, PretrainRecipe
from moe.training.run import TRAINING_RUN, Run

STUDENT_FOLDER = "student"
"""Folder in the run with the student before training, unless `--student` gives one."""

_REPORT_BATCHES = 8  # of held-out text, which both models also answer
_CALIBRATION_BATCHES = 8  # of the training text, on which the gates are measured


@dataclass(frozen=True)
class DistillRecipe(PretrainRecipe):
    """Distillation by span corruption; the architecture is that of the student.

    Attributes:
        distillation: The student's first weights, and its loss.
    """

    distillation: DistillationSettings = field(default_factory=DistillationSettings)


@dataclass(frozen=True)
class DistillPairsRecipe(FinetuneRecipe):
    """Distillation on pairs of texts; the architecture is that of the student.

    Attributes:
        distillation: The student's first weights, and its loss.
    """

    distillation: DistillationSettings = field(default_factory=DistillationSettings)


@cache
def distill_command(*, is_pairs: bool) -> RecipeCommand[DistillRecipe | DistillPairsRecipe]:
    """Returns the command with its options, for pairs or for a corpus."""
    command: RecipeCommand[DistillRecipe | DistillPairsRecipe] = RecipeCommand(
        DistillPairsRecipe if is_pairs else DistillRecipe,
        "Trains a student on the probabilities of a sparse teacher.",
        prog="stmoe distill",
    )
    command.add_argument("--teacher", type=path, required=True, help="folder of the teacher")
    command.add_argument(
        "--student", type=path, help="model to train (a dense one made of the teacher)"
    )
    command.add_argument("--corpus", type=path, help="folder made by stmoe corpus")
    finetune.add_pair_options(command, instead="--corpus")
    command.add_run_options()
    return command


def main(argv: list[str], *, process_start: float | None = None) -> None:
    """Reads the recipe, makes the student, trains it, and compares it with its teacher.

    Args:
        argv: The command line, without the program.
        process_start: When this process started, in seconds since 1970, if it serves only this
            command.
    """
    start = time.perf_counter()
    logging.disable_progress_bar()  # of models that are loaded
    typed = typed_settings(argv)
    with distill_command(is_pairs="train" in typed).launch(argv) as (world, recipe, arguments):
        # Reject invalid options before reading any data.
        arguments.teacher = find_model(arguments.teacher)
        inputs = [arguments.teacher, arguments.student, arguments.corpus, arguments.train]
        out = output_path(arguments.out, inputs=inputs)
        check_kind(out, TRAINING_RUN)
        find_replica_groups(recipe.mesh, world)
        broadcast_from_rank_zero(lambda: refuse_to_overwrite(out, arguments.resume))
        check_options(arguments)
        check_models(arguments)

        # The student's run beside its teacher.
        if isinstance(recipe, DistillPairsRecipe):
            recipe = choose_data(recipe, None, arguments.train, typed)
            run = build_pairs_run(recipe, arguments, out, world)
        else:
            run = build_corpus_run(recipe, arguments, out, world, argv)
        run = with_teacher(run, recipe.distillation, arguments.teacher, world)
        model = train(
            run, resume=arguments.resume, description="distill", process_start=process_start
        )
        world.print_on_rank_zero(f"The model is in {model}.")

        def finish() -> None:
            if not (model / REPORT_FILE).exists():
                command = shlex.join(["stmoe", "distill", *argv])
                print(report_on(run, arguments.teacher, model, command, start))

        broadcast_from_rank_zero(finish)


def check_options(arguments: Namespace) -> None:
    """Raises a ConfigError unless there is one source of examples."""
    if (arguments.corpus is None) == (arguments.train is None):
        given = "both" if arguments.corpus else "none"
        raise ConfigError(
            f"Expected one of --corpus and --train to train on, got {given}. Give one of them."
        )


def check_models(arguments: Namespace) -> None:
    """Raises a ConfigError for a teacher and student that do not fit each other."""
    folder, student = arguments.teacher, arguments.student
    check_model_folder(folder)
    teacher = teacher_config(folder)
    if student is None:
        student_config(teacher)
    else:
        check_model_folder(student)
        config = STMoEConfig.from_pretrained(student)
        if config.vocab_size != teacher.vocab_size:
            raise ConfigError(
                f"The student in {student} has {config.vocab_size} tokens (vocab_size), the teacher in {folder} has "
                f"{teacher.vocab_size}. Give models with the same vocabulary."
            )
        if load_tokenizer(folder).get_vocab() != load_tokenizer(student).get_vocab():
            raise ConfigError(
                f"The tokenizers in {folder} and {student} differ; expected the same one. "
                "Give models with the same tokenizer."
            )


# ---------------------------------------------------------------------------
# The student and its run


def build_corpus_run(
    recipe: DistillRecipe, arguments: Namespace, out: Path, world: World, argv: list[str]
) -> Run:
    """Returns the run of the student on a corpus, without its teacher."""
    teacher = arguments.teacher
    tokenizer = load_tokenizer(teacher)
    tokens = tokenize_corpus(load_corpus(arguments.corpus).train, tokenizer)
    source = pretrain.build_source(recipe, tokens, SpecialIds.of(tokenizer))
    student = prepare_student(recipe, arguments, out, source, world)
    recipe = pretrain.with_architecture(recipe, student, argv)
    return pretrain.build_run(recipe, [arguments.corpus], teacher, out, world, student)


def build_pairs_run(
    recipe: DistillPairsRecipe, arguments: Namespace, out: Path, world: World
) -> Run:
    """Returns the run of the student on pairs, without its teacher."""
    check(recipe.parameters != "lora", "parameters", recipe.parameters, "a subset of weights")
    data = finetune.read_own_pairs(recipe, arguments, world)
    data_recipe = dataclasses.replace(recipe.data, pack=False)
    unpacked_recipe = dataclasses.replace(recipe, data=data_recipe)
    tokenizer = load_tokenizer(arguments.teacher)
    source = finetune.build_training_source(unpacked_recipe, data, tokenizer)
    student = prepare_student(recipe, arguments, out, source, world)
    return finetune.build_run(recipe, student, data, out, world)


def prepare_student(
    recipe: DistillRecipe | DistillPairsRecipe,
    arguments: Namespace,
    out: Path,
    source: BatchSource,
    world: World,
) -> Path:
    """Returns the folder of the student before training; makes it, unless it is there.

    Args:
        recipe: All settings.
        arguments: Folders of the teacher and, if given, of the student.
        out: Folder of the run.
        source: Batches on which the gates of the teacher are measured.
        world: The ranks.
    """
    if arguments.student is not None:
        return arguments.student
    folder = out / STUDENT_FOLDER
    init = recipe.distillation.init

    if broadcast_from_rank_zero(lambda: not (arguments.resume and folder.exists())):
        # Every rank reads all batches: sums over ranks give the same means.
        gates = {}
        if init != "random":
            batches = map(source.batch, range(_CALIBRATION_BATCHES))
            gates = mean_gates(load_teacher(arguments.teacher, "cpu"), batches)

        def write() -> None:
            with whole_folder(folder, kind="model") as unfinished:
                dense_student_checkpoint(arguments.teacher, unfinished, init, gates, recipe.seed)
                write_sums(unfinished)

        broadcast_from_rank_zero(write)
    world.print_on_rank_zero(f"The student's layers in place of experts start as {init!r}.")
    obstacles = dense_obstacles(teacher_config(arguments.teacher))
    if obstacles:
        world.print_on_rank_zero(f"They are sparse, of one expert: {'; '.join(obstacles)}.")
    return folder


def with_teacher(run: Run, settings: DistillationSettings, teacher: Path, world: World) -> Run:
    """Returns a run whose loss includes the teacher's probabilities."""
    model = load_teacher(teacher, world.device_type, run.built.mesh)
    source = TaughtSource(run.source, teacher)
    return run._replace(source=source, forward=Distillation(settings, model))


# ---------------------------------------------------------------------------
# The report


def report_on(run: Run, teacher: Path, model: Path, command: str, start: float) -> str:
    """Writes into the folder of the trained student how it compares with its teacher.

    Args:
        run: The run; without held-out batches, or with packed rows, sizes alone are compared.
        teacher: Folder of the teacher.
        model: Folder of the trained student.
        command: The command line.
        start: When the command started, by `time.perf_counter`.
    """
    effects = None
    text = ""
    is_packed = isinstance(run.recipe, DistillPairsRecipe) and run.recipe.data.pack
    if run.held_out is not None and not is_packed:
        source = run.held_out.source
        num_batches = min(_REPORT_BATCHES, run.held_out.num_batches)
        text = f"{num_batches} held-out batches of {source.batch_size}"
        device = run.built.model.device
        batches = [to_device(unpacked(source.batch(i)), device) for i in range(num_batches)]
        examples = list(traced_batches(batches))
        before = measure(load_teacher(teacher, device.type), examples)
        after = measure(load_teacher(model, device.type), examples)
        effects = compare(before, after, {})
    return write_report(
        model, command=command, sources=[teacher], text=text, effects=effects, start=start
    )
