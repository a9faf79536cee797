"""stmoe generate: answers texts with a model, one line each.

stmoe generate --model runs/finetune/best/model "LATIN SMALL LETTER A" "DIGIT ONE"
stmoe generate --model runs/finetune/best/model < questions.txt > answers.txt
stmoe generate --model runs/teacher/model --num-beams 4 --pairs pairs.jsonl < questions.txt

The last writes pairs on which `stmoe finetune --train pairs.jsonl` trains a student: distillation by sequences.
"""

import json
import sys
from collections.abc import Iterator

import torch

from moe.cli import Parser, integer, path
from moe.data.tokenizer import load_tokenizer
from moe.errors import DataError
from moe.files import output_path, write_text
from moe.hosts.all_hosts import load_model


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
    parser.add_argument(
        "--pairs", help="JSONL file to write texts and answers to, for stmoe finetune --train"
    )
    return parser


def main(argv: list[str]) -> None:
    """Prints the answer to each text, in order.

    Raises:
        CheckpointError: When the model is missing or damaged.
        DataError: When a text is empty, or the tokenizer is missing.
    """
    options = build_parser().parse_args(argv)
    pairs_file = None
    if options.pairs is not None:
        pairs_file = output_path(
            options.pairs, suffix=".jsonl", option="--pairs", inputs=[options.model]
        )

    texts = options.texts or sys.stdin.read().splitlines()
    if not texts:
        raise DataError("There is no text to answer. Give texts, or lines on the standard input.")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise DataError(
                f"Text {number} of {len(texts)} is empty. Give a text, or leave it out."
            )

    model = load_model(options.model).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(options.model)

    pairs: list[str] = []
    for batch in _batches(texts, options.batch_size):
        encoded = tokenizer(batch, padding=True, return_tensors="pt").to(model.device)
        answers = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=options.max_new_tokens,
            num_beams=options.num_beams,
        )
        decoded = tokenizer.batch_decode(answers, skip_special_tokens=True)
        for text, answer in zip(batch, decoded, strict=True):
            print(answer.replace("\n", " "), flush=True)
            pairs.append(json.dumps({"inputs": text, "targets": answer}, ensure_ascii=False))
    if pairs_file is not None:
        write_text(pairs_file, "\n".join(pairs) + "\n")


def _batches(texts: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]
