"""Summaries of news: XSum, one sentence each, and CNN/Daily Mail, a few.

ROUGE is without stemming, with T5's ` . ` rule: a predicted sentence ends at ` . `, since T5's
vocabulary has no newline. The headline is ROUGE-2, which the paper prints.
"""

from stmoe_eval.scores.metrics import ROUGE1, ROUGE2, ROUGELSUM
from stmoe_eval.source import EXPORT, MAIN, HubData
from stmoe_eval.task import Decoding, Task, register_task
from stmoe_eval.text.postprocess import unchanged
from stmoe_eval.text.preprocess import summarize

# T5's for summaries.
_DECODING = Decoding(max_tokens=128, num_beams=4, alpha=0.6)
_LENGTH = 512

register_task(
    Task(
        name="xsum",
        version=1,
        description=(
            "An article of the BBC, to its first sentence, which the article lacks. T5 has no task "
            "for it: this is T5's prompt for summaries."
        ),
        licence="unknown; texts of the BBC",
        source=HubData(
            "EdinburghNLP/xsum",
            "default",
            counts={"train": 204045, "validation": 11332, "test": 11334},
            columns={"document": str, "summary": str},
            revisions=(EXPORT, MAIN),
        ),
        preprocess=summarize("document", "summary"),
        postprocess=unchanged,
        metrics=(ROUGE2, ROUGE1, ROUGELSUM),
        inputs_length=_LENGTH,
        targets_length=_LENGTH,
        decoding=_DECODING,
        split="test",
        family="Summarization",
    )
)

register_task(
    Task(
        name="cnn_dailymail",
        version=1,
        description="An article of CNN or the Daily Mail, to its highlights, one on each line.",
        licence="Apache-2.0 for the scripts; texts of CNN and Daily Mail",
        source=HubData(
            "abisee/cnn_dailymail",
            "3.0.0",
            counts={"train": 287113, "validation": 13368, "test": 11490},
            columns={"article": str, "highlights": str},
        ),
        preprocess=summarize("article", "highlights"),
        postprocess=unchanged,
        metrics=(ROUGE2, ROUGE1, ROUGELSUM),
        inputs_length=_LENGTH,
        targets_length=_LENGTH,
        decoding=_DECODING,
        split="test",
        family="Summarization",
    )
)
