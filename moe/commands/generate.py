"""stmoe generate: answers texts with a model, one line each.

stmoe generate --model runs/finetune/best/model "LATIN SMALL LETTER A" "DIGIT ONE"
stmoe generate --model runs/finetune/best/model < questions.txt > answers.txt
"""

import sys
from collections.abc import Iterator

import torch

from moe.checkpoint.loading import load_complete
from moe.cli import Parser, integer, path
from moe.data.tokenizer import load_tokenizer
from moe.errors import DataError
from moe.models.modeling import STMoEForConditionalGeneration


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe generate", description="Answers texts with a model.")
    parser.add_argument(
        "--model", type=path, required=True, help="folder of a model with its tokenizer"
    )
    parser.add_argument("texts", nargs="*", help="texts (each line of the standard input)")
    parser.add_argument(
        "--max-new-tokens", type=integer(least=1), default=64, help="length of an answer (64)"
    )
    parser.add_argument(
        "--num-beams", type=integer(least=1), default=1, help="beams of the search; 1 is greedy (1)"
    )
    parser.add_argument(
        "--batch-size", type=integer(least=1), default=16, help="texts answered at once (16)"
    )
    return parser


def main(argv: list[str]) -> None:
    """Prints the answer to each text, in order.

    Raises:
        CheckpointError: When the model is missing or damaged.
        DataError: When a text is empty, or the tokenizer is missing.
    """
    options = build_parser().parse_args(argv)

    texts = options.texts or sys.stdin.read().splitlines()
    if not texts:
        raise DataError("There is no text to answer. Give texts, or lines on the standard input.")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise DataError(
                f"Text {number} of {len(texts)} is empty. Give a text, or leave it out."
            )

    model = load_complete(STMoEForConditionalGeneration, options.model).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(options.model)

    for batch in _batches(texts, options.batch_size):
        encoded = tokenizer(batch, padding=True, return_tensors="pt").to(model.device)
        answers = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=options.max_new_tokens,
            num_beams=options.num_beams,
        )
        for answer in tokenizer.batch_decode(answers, skip_special_tokens=True):
            print(answer.replace("\n", " "), flush=True)


def _batches(texts: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]
