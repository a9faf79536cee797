"""stmoe distill: trains a student, dense or smaller, on the probabilities of a sparse teacher.

    stmoe distill --config distill_pretrain --teacher runs/pretrain/model \
        --corpus runs/corpus --out runs/student [--resume]
    stmoe distill --config distill_finetune --teacher runs/finetune/best/model \
        --train pairs.jsonl --out runs/student

The student is made of the teacher: each layer of experts becomes a dense one. With `--student
MODEL` it is another model with the same vocabulary, such as a merged or pruned teacher.
"""

import dataclasses
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers.utils import logging

from moe.checkpoint.loading import check_model_folder
from moe.checks import check_choice
from moe.checksums import write_sums
from moe.commands import finetune, pretrain
from moe.commands.surgery_report import (
    REPORT_FILE,
    Effects,
    SurgeryReport,
    compare,
    measure,
    size_rows,
)
from moe.convert.formats import convert_checkpoint
from moe.convert.hf_config import to_hf_config
from moe.data.corpus import load_corpus
from moe.data.pipeline import Batch, BatchSource, PairSource
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.launch import World
from moe.distributed.replica_groups import find_replica_groups
from moe.errors import ConfigError
from moe.files import check_kind, output_path, whole_folder
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
    cached_teacher,
    load_teacher,
    teacher_config,
)
from moe.tracing.recorder import traced_batches
from moe.training.command import RecipeCommand, typed_settings
from moe.training.finetuning import choose_data
from moe.training.heldout_loss import to_device
from moe.training.loop import refuse_to_overwrite, train
from moe.training.recipe import FinetuneRecipe, PretrainRecipe
from moe.training.run import TRAINING_RUN, Run

STUDENT_FOLDER = "student"
"""Folder in the run with the student before training, unless `--student` gives one."""

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


class _Text(NamedTuple):
    """What a student is trained on.

    Attributes:
        source: Training batches, for calibration.
        pairs: The pairs; None for a corpus.
    """

    source: BatchSource
    pairs: finetune.FinetuningData | None


def distill_command(argv: Sequence[str]) -> RecipeCommand[DistillRecipe | DistillPairsRecipe]:
    """Returns the command with its options: for pairs if the arguments name some."""
    is_pairs = "train" in typed_settings(list(argv))
    command: RecipeCommand[DistillRecipe | DistillPairsRecipe] = RecipeCommand(
        DistillPairsRecipe if is_pairs else DistillRecipe,
        "Trains a student on the probabilities of a sparse teacher.",
        prog="stmoe distill",
    )
    command.add_argument("--teacher", type=Path, required=True, help="folder of the teacher")
    command.add_argument(
        "--student", type=Path, help="model to train (a dense one made of the teacher)"
    )
    command.add_argument("--corpus", type=Path, help="folder made by stmoe corpus")
    command.add_argument(
        "--train", type=Path, help="JSONL file with inputs and targets, instead of --corpus"
    )
    command.add_argument(
        "--dev", type=Path, help="JSONL file of pairs to score, instead of a share of --train"
    )
    command.add_argument(
        "--dev_share", type=float, help="share of --train that is held out and scored"
    )
    command.add_argument("--out", type=str, required=True, help="folder of the run")
    command.add_argument(
        "--save_as",
        type=str,
        default="ours",
        help="t5 also writes the student as transformers' T5, to out/t5 (ours)",
    )
    command.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    command.add_timeout()
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
    with distill_command(argv).launch(argv) as (world, recipe, arguments):
        # Reject invalid options before reading any data.
        typed = typed_settings(argv)
        inputs = [arguments.teacher, arguments.student, arguments.corpus, arguments.train]
        out = output_path(arguments.out, inputs=inputs)
        check_kind(out, TRAINING_RUN)
        find_replica_groups(recipe.mesh, world)
        broadcast_from_rank_zero(lambda: refuse_to_overwrite(out, arguments.resume))
        check_options(recipe, arguments, typed)
        check_models(arguments)
        if isinstance(recipe, DistillPairsRecipe):
            recipe = choose_data(recipe, None, arguments.train, typed)

        # The student, and its run beside the teacher.
        text = read_text(recipe, arguments, world)
        student = arguments.student
        if student is None:
            student = out / STUDENT_FOLDER
            make = partial(make_student, recipe.distillation, recipe.seed, text, arguments, student)
            world.print_on_rank_zero(broadcast_from_rank_zero(make))
        run = build_run(recipe, text, student, out, arguments, world, argv)
        run = with_teacher(run, recipe.distillation, arguments.teacher, world)
        model = train(
            run, resume=arguments.resume, description="distill", process_start=process_start
        )
        world.print_on_rank_zero(f"The model is in {model}.")

        # The student beside its teacher.
        def finish() -> None:
            if not (model / REPORT_FILE).exists():
                command = shlex.join(["stmoe", "distill", *argv])
                print(write_report(run, arguments.teacher, model, command, start))
            if arguments.save_as == "t5":
                with whole_folder(out / "t5", kind="model") as folder:
                    convert_checkpoint(model, folder, form="t5")
                    write_sums(folder)
                print(f"As transformers' T5 it is in {out / 't5'}.")

        broadcast_from_rank_zero(finish)


def check_options(
    recipe: DistillRecipe | DistillPairsRecipe, arguments: Namespace, typed: set[str]
) -> None:
    """Raises a ConfigError for options that exclude each other or would change nothing."""
    check_choice("--save_as", arguments.save_as, ["ours", "t5"])
    if (arguments.corpus is None) == (arguments.train is None):
        found = "both" if arguments.corpus else "none"
        raise ConfigError(
            f"Expected one of --corpus and --train to train on, got {found}. Give one of them."
        )
    for name in ("dev", "dev_share"):
        if arguments.corpus is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} has no effect with --corpus. Leave it out.")
    if arguments.student is not None and "distillation.init" in typed:
        raise ConfigError(
            f"--distillation.init {recipe.distillation.init} has no effect with --student "
            f"{arguments.student}, which has weights. Leave one of them out."
        )
    if not recipe.distillation.cached_batches and "distillation.top_n" in typed:
        raise ConfigError(
            f"--distillation.top_n {recipe.distillation.top_n} has no effect without a file. Leave it out, or set "
            "--distillation.cached_batches."
        )


def check_models(arguments: Namespace) -> None:
    """Raises a ConfigError for a teacher or student that do not fit each other or the format."""
    check_model_folder(arguments.teacher)
    teacher = teacher_config(arguments.teacher)
    if arguments.student is None:
        config = student_config(teacher)
        obstacles = dense_obstacles(teacher)
    else:
        check_model_folder(arguments.student)
        config = STMoEConfig.from_pretrained(arguments.student)
        obstacles = []
        if config.vocab_size != teacher.vocab_size:
            raise ConfigError(
                f"The student in {arguments.student} has {config.vocab_size} tokens (vocab_size), the teacher in "
                f"{arguments.teacher} has {teacher.vocab_size}: its probabilities are of other tokens. Give models of "
                "one vocabulary."
            )
        vocabularies = [
            load_tokenizer(f).get_vocab() for f in (arguments.teacher, arguments.student)
        ]
        if vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"The tokenizers in {arguments.teacher} and {arguments.student} differ, so that the teacher's "
                "probabilities are of other tokens. Give models of one tokenizer."
            )
    if arguments.save_as == "t5":
        if obstacles:
            raise ConfigError(
                f"The student of {arguments.teacher} cannot be saved as a T5: {'; '.join(obstacles)}. Leave out "
                "--save_as t5: in our format it keeps sparse layers of one expert."
            )
        to_hf_config(config, "t5")


# ---------------------------------------------------------------------------
# The student and its run


def read_text(
    recipe: DistillRecipe | DistillPairsRecipe, arguments: Namespace, world: World
) -> _Text:
    """Returns the training text, read by the teacher's tokenizer."""
    tokenizer = load_tokenizer(arguments.teacher)
    if isinstance(recipe, DistillRecipe):
        tokens = tokenize_corpus(load_corpus(arguments.corpus).train, tokenizer)
        return _Text(pretrain.build_source(recipe, tokens, SpecialIds.of(tokenizer)), None)

    data = finetune.read_own_pairs(recipe, arguments, world)
    settings = dataclasses.asdict(recipe.data)
    del settings["workers"]
    (pairs,) = data.train.values()
    source = PairSource(
        pairs, tokenizer, batch_size=recipe.training.batch_size, seed=recipe.seed, **settings
    )
    return _Text(source, data)


def make_student(
    settings: DistillationSettings, seed: int, text: _Text, arguments: Namespace, folder: Path
) -> str:
    """Writes the student before training, unless a resumed run has it, and returns what it is."""
    if not (arguments.resume and folder.exists()):
        gates = {}
        if settings.init != "random":
            teacher = load_teacher(arguments.teacher, "cpu")
            batches = map(text.source.batch, range(_CALIBRATION_BATCHES))
            gates = mean_gates(teacher, batches)
            del teacher
        with whole_folder(folder, kind="model") as partial_folder:
            dense_student_checkpoint(arguments.teacher, partial_folder, settings.init, gates, seed)
            write_sums(partial_folder)

    config = STMoEConfig.from_pretrained(folder)
    sentence = (
        f"The student has {config.num_parameters():,} parameters; its layers in place of experts start as "
        f"{settings.init!r}."
    )
    obstacles = dense_obstacles(teacher_config(arguments.teacher))
    if obstacles:
        sentence += f" It keeps sparse layers of one expert: {'; '.join(obstacles)}."
    return sentence


def build_run(
    recipe: DistillRecipe | DistillPairsRecipe,
    text: _Text,
    student: Path,
    out: Path,
    arguments: Namespace,
    world: World,
    argv: list[str],
) -> Run:
    """Returns the run of the student without its teacher."""
    if isinstance(recipe, DistillPairsRecipe):
        assert text.pairs is not None, "read_text reads them"
        return finetune.build_run(recipe, student, text.pairs, out, world)
    recipe = pretrain.with_architecture(recipe, student, argv)
    return pretrain.build_run(recipe, arguments.corpus, arguments.teacher, out, world, student)


def with_teacher(run: Run, settings: DistillationSettings, teacher: Path, world: World) -> Run:
    """Returns a run whose loss includes the teacher's probabilities."""
    weights = (settings.hard_weight, settings.soft_weight, settings.temperature)
    if not settings.cached_batches:
        model = load_teacher(teacher, world.device_type, run.built.mesh)
        return run._replace(forward=Distillation(*weights, teacher=model))
    source = cached_teacher(
        teacher,
        run.source,
        world.device_type,
        num_batches=settings.cached_batches,
        top_n=settings.top_n,
        temperature=settings.temperature,
    )
    return run._replace(source=source, forward=Distillation(*weights))


# ---------------------------------------------------------------------------
# The report


def write_report(run: Run, teacher: Path, model: Path, command: str, start: float) -> SurgeryReport:
    """Writes into the folder of the trained student how it compares with its teacher.

    Args:
        run: The run.
        teacher: Folder of the teacher.
        model: Folder of the trained student.
        command: The command line.
        start: When the command started, by `time.perf_counter`.
    """
    effects = None
    text = ""
    if run.held_out is not None:
        text = f"{run.held_out.num_batches} held-out batches of {run.held_out.source.batch_size}"
        effects = _effects(run, teacher, model)
    report = SurgeryReport(
        command=command,
        source=str(teacher),
        sizes=size_rows(teacher, model),
        text=text,
        effects=effects,
        tables=[],
        seconds=time.perf_counter() - start,
    )
    report.write(model)
    write_sums(model)
    return report


def _effects(run: Run, teacher: Path, model: Path) -> Effects:
    """Returns losses, answers and routing of teacher and student on the held-out batches."""
    assert run.held_out is not None, "the caller has looked"
    examples = map(run.held_out.source.batch, range(run.held_out.num_batches))
    device_type = run.built.model.device.type
    measured = []
    batches = None
    for folder in (teacher, model):
        loaded = load_teacher(folder, device_type)
        if batches is None:
            moved = [to_device(_unpacked(batch), loaded.device) for batch in examples]
            batches = list(traced_batches(moved))
        measured.append(measure(loaded, batches))
        del loaded
    before, after = measured
    return compare(before, after, {})


def _unpacked(batch: Batch) -> Batch:
    """Returns a batch with a mask in place of the segments of its rows."""
    if "segment_ids" not in batch:
        return batch
    mask = (batch["segment_ids"] != 0).long()
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": batch["labels"]}
