"""The vocabulary: trained by SentencePiece, laid out as T5's, used as a transformers tokenizer.

Comes after `corpus`, before `tokens`. Layout: `<pad>` 0, `</s>` 1, `<unk>` 2, the learnt pieces,
then the sentinels `<extra_id_99>` ... `<extra_id_0>`, so that `<extra_id_0>` has the highest id.
"""

import copy
import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moe.checks import check_integer, shown
from moe.checksums import read_sums, refuse_damage, write_sums
from moe.errors import DataError, MoEError
from moe.files import check_replaceable, kind_of, whole_folder
from moe.parsing import read_json

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
NUM_SENTINELS = 100
MODEL_MAX_LENGTH = 512
SENTENCEPIECE_FILE, TOKENIZER_FILE = "spiece.model", "tokenizer.json"
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MOST_PIECES = 1_000_000  # candidates that sentencepiece starts from and takes pieces away

# T5's training settings (its spiece.model carries them). The number of threads is fixed because
# sums over threads are rounded differently for another number, which gives another model.
_TRAINING_SETTINGS = {
    "model_type": "unigram",
    "normalization_rule_name": "nmt_nfkc",
    "character_coverage": 0.99995,
    "pad_id": 0,
    "eos_id": 1,
    "unk_id": 2,
    "bos_id": -1,
    "num_threads": 2,
    "max_sentence_length": 2**30,  # the default leaves longer lines out without a word
    "minloglevel": 2,
}
# sentencepiece adds up the scores of a whole text in float32, tokenizers those of a word in
# float64. On this grid both are exact up to 2**18 (tens of thousands of tokens), so that nothing is
# chosen by rounding. Of all docstrings of the standard library, torch and numpy, as trained the two
# read 4 of 2,376 whole files differently, on the grid none.
_SCORE_GRID = 2.0**-6
# Below any segmentation of the same letters: text that happens to say "</s>" is not read as the end
# of a sequence.
_NEVER_CHOSEN = -1000.0


class SpecialIds(NamedTuple):
    """The ids that span corruption and batches need."""

    pad: int
    eos: int
    first_sentinel: int
    """`<extra_id_0>`: the highest id; those of the next sentinels descend from it."""
    num_sentinels: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> "SpecialIds":
        """Returns the ids of `tokenizer`.

        Raises:
            DataError: When it has no padding or end token, or its sentinels do not descend from
                `<extra_id_0>`.
        """
        vocabulary = tokenizer.get_vocab()
        first = vocabulary.get(sentinel(0))
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        if first is None or not isinstance(pad, int) or not isinstance(eos, int):
            raise DataError(
                f"The tokenizer lacks one of {PAD}, {EOS}, {sentinel(0)}. Use one made by `train_tokenizer`."
            )
        number = 0
        while vocabulary.get(sentinel(number)) == first - number:
            number += 1
        if sentinel(number) in vocabulary:
            raise DataError(
                f"{sentinel(number)} has id {vocabulary[sentinel(number)]}; expected {first - number}, descending from "
                f"{sentinel(0)} = {first} as in T5. Use a tokenizer made by `train_tokenizer`."
            )
        return cls(pad, eos, first, number)


def sentinel(number: int) -> str:
    """Returns the text of a sentinel, e.g. `<extra_id_0>`."""
    return f"<extra_id_{number}>"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_dir: Path | str
) -> PreTrainedTokenizerFast:
    """Trains a vocabulary, writes it to `out_dir` (whole or not at all), and returns it.

    The same texts in the same order give the same files. `AutoTokenizer.from_pretrained(out_dir)`
    loads them.

    Args:
        texts: Documents; each paragraph (line) is trained on as a sentence.
        vocab_size: Size of the embedding that the vocabulary needs: pieces, 3 special tokens and
            100 sentinels.
        out_dir: Receives spiece.model, tokenizer.json and tokenizer_config.json; an earlier
            tokenizer is replaced.

    Raises:
        ConfigError: When `vocab_size` leaves no room for pieces.
        DataError: When the texts are too few for the vocabulary or too varied for it; says which
            size is possible.
    Source:
        T5 (arXiv:1910.10683) section 2.2.1. Differs: scores are rounded to 1/64, so that both
        libraries agree.
    """
    check_replaceable(Path(out_dir), kind="tokenizer")  # before the work, not after
    model = _round_scores(_train_sentencepiece(texts, vocab_size))
    tokenizer = to_transformers(model)

    with whole_folder(Path(out_dir), kind="tokenizer") as partial:
        with _failures_of_tokenizers(partial / TOKENIZER_FILE, advice="Try another --out."):
            tokenizer.save_pretrained(str(partial))
        (partial / SENTENCEPIECE_FILE).write_bytes(model.SerializeToString(deterministic=True))
        write_sums(partial)
    return load_tokenizer(out_dir)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer in `folder`: that of `train_tokenizer`, or of a saved model.

    Raises:
        DataError: When the folder has no tokenizer.json, or a file of it is damaged; names the
            file.
    """
    folder = Path(folder)
    advice = f"Make one with `python -m scripts.train_tokenizer --corpus CORPUS --out {folder}`."
    if not (folder / TOKENIZER_FILE).is_file():
        raise DataError(
            f"{folder} has no readable {TOKENIZER_FILE} (there is no such file). {advice}"
        )

    settings = [name for name in _SETTINGS_FILES if (folder / name).is_file()]
    names = {TOKENIZER_FILE, *settings}
    if kind_of(folder) != "tokenizer":  # a model, to which a user may have saved a tokenizer
        names &= (read_sums(folder) or {}).keys()
    refuse_damage(folder, names, advice=advice)

    path = folder / TOKENIZER_FILE
    check_tokenizer_files(folder, advice=advice)
    with _failures_of_tokenizers(folder / settings[0] if settings else path, advice):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        tokenizer(
            "a \U0010fffe"
        )  # what does not fit together, as an unknown token that is none, shows only now
    return tokenizer


def check_tokenizer_files(folder: Path, *, advice: str) -> None:
    """Raises when a file of a fast tokenizer cannot be read, and names it; one that is missing is
    passed over.

    Args:
        folder: Of a tokenizer or a model, of this library or not.
        advice: What the user can do.

    Raises:
        DataError: When a file is damaged.
    """
    path = folder / TOKENIZER_FILE
    if path.is_file():
        read_json(path, advice=advice, nan=True)
        with _failures_of_tokenizers(path, advice):
            tokenizers.Tokenizer.from_file(str(path))

    for name in _SETTINGS_FILES:
        if not (folder / name).is_file():
            continue
        content = read_json(folder / name, advice=advice, nan=True)
        if not isinstance(content, dict):
            raise DataError(
                f"{folder / name}: its content is {shown(content)}; expected an object. {advice}"
            )


@contextmanager
def _failures_of_tokenizers(path: Path, advice: str) -> Iterator[None]:
    """Turns what the tokenizers library raises for a file into an OSError or a DataError that names
    it.

    It raises plain `Exception`, and a `PanicException`, which is none, where its Rust code gives
    up.
    """
    try:
        yield
    except BaseException as error:
        is_usual = isinstance(
            error, OSError | ValueError | TypeError | KeyError | AttributeError | IndexError
        )
        is_theirs = type(error) is Exception or type(error).__name__ == "PanicException"
        if isinstance(error, MoEError) or not (is_usual or is_theirs):
            raise

        refused_by_system = re.search(r"\(os error (\d+)\)", str(error))
        if refused_by_system:
            number = int(refused_by_system[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path} cannot be used: {' '.join(str(error).split())[:300]}. {advice}"
        ) from error


def end_with_sentinel(tokenizer: PreTrainedTokenizerFast, wanted: bool) -> PreTrainedTokenizerFast:
    """Returns a copy that ends every text with the first sentinel and the end token, or with the
    end token alone.
    """
    ids, copied = SpecialIds.of(tokenizer), copy.deepcopy(tokenizer)
    end = (str(tokenizer.eos_token), ids.eos)
    copied.backend_tokenizer.post_processor = _endings(
        *[(sentinel(0), ids.first_sentinel)] * wanted, end
    )
    return copied


def _endings(*tokens: tuple[str, int]) -> processors.TemplateProcessing:
    """Returns what puts these tokens, with their ids, after every text."""
    names = [name for name, _ in tokens]
    return processors.TemplateProcessing(
        single=["$A", *names], pair=["$A", *names, "$B", *names], special_tokens=list(tokens)
    )


def _train_sentencepiece(texts: Iterable[str], vocab_size: int) -> ModelProto:
    """Returns a trained unigram model of `vocab_size` less the sentinels."""
    check_integer(
        "vocab_size",
        vocab_size,
        least=NUM_SENTINELS + 4,
        most=_MOST_PIECES,
        reason=f"{NUM_SENTINELS} sentinels and 3 special tokens are part of it, and SentencePiece chooses its pieces "
        f"among {_MOST_PIECES:,} candidates",
    )
    num_pieces = vocab_size - NUM_SENTINELS
    lines = (line for text in texts for line in text.splitlines() if line.strip())
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=lines,
            model_writer=written,
            vocab_size=num_pieces,
            **_TRAINING_SETTINGS,
        )
    except RuntimeError as error:
        raise DataError(_explain_training_error(str(error), vocab_size)) from error
    return ModelProto.FromString(written.getvalue())


def _explain_training_error(message: str, vocab_size: int) -> str:
    """Returns what a failure of sentencepiece means for the user."""
    if match := re.search(r"Vocabulary size too high.*<= (\d+)", message):
        return (
            f"The corpus is too small for a vocabulary of {vocab_size}: at most {int(match[1]) + NUM_SENTINELS} "
            f"(with {NUM_SENTINELS} sentinels) is possible. Give more text or a smaller --vocab-size."
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"The corpus has too many different characters for a vocabulary of {vocab_size}: at least "
            f"{int(match[1]) + NUM_SENTINELS} is needed. Give a larger --vocab-size."
        )
    return f"No vocabulary of {vocab_size} can be trained on this corpus: {message.strip()}. Is there any text in it?"


def _round_scores(model: ModelProto) -> ModelProto:
    """Returns the model with its scores rounded to the grid."""
    rounded = ModelProto()
    rounded.CopyFrom(model)
    for piece in rounded.pieces:
        piece.score = round(piece.score / _SCORE_GRID) * _SCORE_GRID
    return rounded


def to_transformers(
    model: ModelProto, num_sentinels: int = NUM_SENTINELS
) -> PreTrainedTokenizerFast:
    """Returns the same tokenizer for transformers, with sentinels, and `</s>` after every text.

    It differs from sentencepiece only in its normaliser, which looks up visible characters, not
    code points: of a ligature or other compatibility character it loses the combining marks that
    follow.
    """
    control = ModelProto.SentencePiece.Type.CONTROL
    scores = [
        (piece.piece, _NEVER_CHOSEN if piece.type == control else piece.score)
        for piece in model.pieces
    ]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=2, byte_fallback=False))
    charsmap = model.normalizer_spec.precompiled_charsmap  # empty when letters stay as they are
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(charsmap)] if charsmap else []),
            normalizers.Replace(
                tokenizers.Regex("^ +| +$"), ""
            ),  # Strip() would take U+0085 too, unlike sentencepiece
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    backend.post_processor = _endings((EOS, 1))
    sentinels = [sentinel(number) for number in range(num_sentinels)]
    backend.add_special_tokens([PAD, EOS, UNK, *reversed(sentinels)])  # ids grow in this order
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=sentinels,
        model_max_length=MODEL_MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
