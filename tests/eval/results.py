"""Made-up results of an evaluation."""

from dataclasses import replace

from stmoe_eval.answers.likelihood import Scoring
from stmoe_eval.answers.predict import RouterSummary
from stmoe_eval.reports.published import published_scores
from stmoe_eval.reports.records import (
    ClassCount,
    DataInfo,
    InputLengths,
    MetricScore,
    ModelInfo,
    Report,
    RunSettings,
    SystemResult,
    TaskResult,
    WorstAnswer,
)
from stmoe_eval.reports.report_files import device_name, library_versions
from stmoe_eval.task import GREEDY

HUB = DataInfo(None, "owner/colours", "plain", "validation", "main")


def a_score(metric, value, low=None, high=None):
    return MetricScore(metric=metric, value=value, stderr=1.0, low=low, high=high)


def a_router(**changes):
    fields = {"fraction_dropped": 0.0123, "load_cv": 0.5, "max_over_mean": 2.0}
    fields |= {"dead_experts": 1.0, "expert_load": [3, 0, 9]}
    return {"encoder": RouterSummary(**{**fields, **changes})}


def a_task(name="colour", scores=None, router=None, **changes):
    """The result of a task with made-up scores of two systems."""
    scores = scores or [a_score("accuracy", 80.0, 70.0, 90.0)]
    row = {"mode": "generate", "scores": scores, "num_examples": 25}
    row |= {"num_unparsable": 2, "num_empty": 1}
    systems = [
        SystemResult(name="ours", router=router or a_router(), **row),
        SystemResult(name="other", router=None, **row),
    ]
    published = []
    for one in scores:
        published += published_scores(name, one.metric, changes.get("variant_of"))
    fields = {
        "version": 1,
        "description": "Colours | things <b>.",
        "licence": "CC0-1.0",
        "prompt_source": "T5",
        "variant_of": None,
        "split": "validation",
        "limit": None,
        "data": HUB,
        **dict.fromkeys(("num_rows", "num_expected", "num_available", "num_examples"), 25),
        "num_groups": 5,
        "decoding": GREEDY,
        "digest": "0",
        "inputs": InputLengths(6.5, 6.0, longest=9, limit=8, num_cut=3),
        "by_class": [ClassCount("red", right=1, total=2, answered=3)],
        "worst": [WorstAnswer("x", "a|b <i>" + "long " * 500, target="red", output="", score=0.0)],
        "notes": ["A note."],
    }
    return TaskResult(task=name, systems=systems, published=published, **{**fields, **changes})


def a_model(**changes):
    fields = {"folder": "runs/a", "fingerprint": "0123", "class_name": "T5", "parameters": 5}
    fields |= {"active_parameters": 3, "chosen_by": None, "last_of_run": False}
    return ModelInfo(**{**fields, **changes})


def a_report(*tasks, **changes):
    unset = dict.fromkeys(("modes", "split", "limit", "data", "revision"))
    names = [task.task for task in tasks]
    settings = RunSettings(tasks=names, scoring=Scoring(), ranks=1, ep=1, tp=1, **unset)
    report = Report(
        command="stmoe eval run",
        settings=settings,
        versions=library_versions(),
        device=device_name(),
        models={"ours": a_model()},
        tasks=list(tasks),
    )
    return replace(report, **changes)
