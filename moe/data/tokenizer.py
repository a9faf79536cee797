"""The tokenizer, trained by SentencePiece or of bytes, with T5's layout, used as transformers' tokenizer.

Comes after `corpus`, before `pipeline`. Layout: `<pad>` 0, `</s>` 1, `<unk>` 2, the learnt pieces,
then the sentinels `<extra_id_99>` ... `<extra_id_0>`, so that `<extra_id_0>` has the highest id.
"""

import copy
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from moe.checks import check_integer
from moe.checksums import read_sums, refuse_damage, write_sums
from moe.errors import ConfigError, DataError
from moe.files import check_replaceable, kind_of, register_folder_kind, whole_folder
from moe.parsing import read_json, reading

PAD = "<pad>"
EOS = "</s>"
UNK = "<unk>"
SPACE = "\u2581"
"""SentencePiece's mark of a space: the first character of a piece that starts a word."""

NUM_SENTINELS = 100
MODEL_MAX_LENGTH = 512

SENTENCEPIECE_FILE = "spiece.model"
TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_VOCABULARIES = ("sentencepiece.bpe.model", "source.spm", "vocab.json")
"""Files of M2M100, NLLB and mBART, of Marian, and of BART."""

TOKENIZER = register_folder_kind(
    "tokenizer",
    markers=[TOKENIZER_FILE, SENTENCEPIECE_FILE],
    parts=[TOKENIZER_FILE, SENTENCEPIECE_FILE, *_SETTINGS_FILES, "chat_template.jinja"],
)
_MOST_PIECES = 1_000_000  # initial candidates, which sentencepiece prunes

# T5's training settings, which its spiece.model carries. The number of threads is fixed: with
# another number, sums over threads are rounded differently, which gives another model.
_TRAINING_SETTINGS = {
    "model_type": "unigram",
    "normalization_rule_name": "nmt_nfkc",
    "character_coverage": 0.99995,
    "pad_id": 0,
    "eos_id": 1,
    "unk_id": 2,
    "bos_id": -1,
    "num_threads": 2,
    "max_sentence_length": 2**30,  # the default silently skips longer lines
    "minloglevel": 2,
}

_NORMALIZER = sentencepiece.SentencePieceNormalizer(  # pyright: ignore[reportAttributeAccessIssue]
    rule_name=_TRAINING_SETTINGS["normalization_rule_name"],
    add_dummy_prefix=False,
    escape_whitespaces=False,
    remove_extra_whitespaces=True,
)

# Scores are rounded to this grid, so that two libraries choose the same pieces. sentencepiece adds
# up the scores of a whole text in float32, tokenizers those of a word in float64; on the grid both
# are exact up to 2**18 (tens of thousands of tokens). Without it the two read 4 of 2,376 whole
# files of docstrings (the standard library, torch and numpy) differently, with it none.
_SCORE_GRID = 2.0**-6

# Below the score of any segmentation of the same letters, so that text which happens to say
# "</s>" is not read as the end of a sequence.
_NEVER_CHOSEN = -1000.0

# The byte that each letter of a byte-level vocabulary stands for.
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}

_CONTROL_TOKENS = ("pad_token", "bos_token", "eos_token", "unk_token", "sep_token", "cls_token")


class SpecialIds(NamedTuple):
    """The ids that span corruption and batches need."""

    pad: int
    eos: int
    first_sentinel: int
    """Id of `<extra_id_0>`, the highest; those of the next sentinels descend from it."""
    num_sentinels: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> "SpecialIds":
        """Returns the ids of `tokenizer`.

        Raises:
            DataError: When it has no padding token, end token or sentinel.
        """
        pad, eos = pad_and_eos(tokenizer)
        vocabulary = tokenizer.get_vocab()
        first = vocabulary.get(sentinel(0))
        if first is None:
            raise DataError(
                f"The tokenizer lacks {sentinel(0)}. Use one made by `train_tokenizer`."
            )

        # As many as descend from the first without a gap.
        num_sentinels = 0
        while vocabulary.get(sentinel(num_sentinels)) == first - num_sentinels:
            num_sentinels += 1
        return cls(pad, eos, first, num_sentinels)


def pad_and_eos(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Returns the ids of padding and of the end token.

    Raises:
        DataError: When the tokenizer lacks one of them.
    """
    pad = tokenizer.pad_token_id
    eos = tokenizer.eos_token_id
    if not isinstance(pad, int) or not isinstance(eos, int):
        raise DataError(
            f"The tokenizer's padding token has id {pad} and its end token {eos}; expected both. "
            "Set pad_token and eos_token in its tokenizer_config.json."
        )
    return pad, eos


def has_sentinels(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Returns whether a tokenizer has sentinels for masked spans."""
    return sentinel(0) in tokenizer.get_vocab()


def input_frame(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Returns the special tokens before and after an input of the encoder.

    With sentinels an end token follows, as in T5. Without them they are those that the tokenizer
    adds to any text: Gemma's adds `<bos>` before and nothing after.
    """
    _, eos = pad_and_eos(tokenizer)
    return ([], [eos]) if has_sentinels(tokenizer) else _added_tokens(tokenizer)


def target_frame(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Returns the special tokens before and after a target of the decoder.

    They are those that the tokenizer adds to targets, such as the code of their language, if an end
    token is among them; else an end token follows, as in T5 and Gemma.

    Raises:
        ConfigError: When the tokenizer has language codes, and does not know that of the targets.
    """
    _, eos = pad_and_eos(tokenizer)
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise ConfigError(
            "The tokenizer has language codes, but the language of the targets was not given. Add "
            "--target-language CODE, or a column target_language."
        )
    start, end = _added_tokens(tokenizer, targets=True)
    return (start, end) if eos in end and not has_sentinels(tokenizer) else ([], [eos])


def _added_tokens(tokenizer: Any, *, targets: bool = False) -> tuple[list[int], list[int]]:
    """Returns the special tokens that a tokenizer adds before and after any text, or any target."""
    (text,) = text_ids(tokenizer, ["a"], targets=targets)
    side = "text_target" if targets else "text"
    framed = tokenizer(**{side: "a"}, split_special_tokens=True)["input_ids"]
    start = framed.index(text[0])
    return framed[:start], framed[start + len(text) :]


def prompt_ids(
    tokenizer: Any, texts: Sequence[str], max_length: int | None = None
) -> list[list[int]]:
    """Returns the tokens of each text between those that the tokenizer adds to any text.

    Args:
        tokenizer: Tokenizer of transformers.
        texts: What users wrote; their markers are tokens, see `text_ids`.
        max_length: Most tokens of a text; longer ones lose their end. None for any number.
    """
    if not texts:
        return []
    start, end = _added_tokens(tokenizer)
    all_ids = text_ids(tokenizer, texts, markers=True)
    return [enclose(ids, max_length, start=start, end=end) for ids in all_ids]


def enclose(
    ids: Sequence[int], length: int | None, *, start: Sequence[int] = (), end: Sequence[int] = ()
) -> list[int]:
    """Returns tokens between `start` and `end`, truncated so that there are `length` in all.

    Args:
        ids: Tokens of a text; they alone are truncated.
        length: Most tokens with both ends; None for any number.
        start: Tokens in front, e.g. a sentinel.
        end: Tokens to append, e.g. the end token.

    Source:
        seqio `preprocessors.append_eos_after_trim` and `experimental.add_task_with_sentinels` at
        b898b9f. Differs: no.
    """
    room = len(ids) if length is None else max(0, length - len(start) - len(end))
    return [*start, *ids[:room], *end]


def text_ids(
    tokenizer: Any, texts: Sequence[str], *, markers: bool = False, targets: bool = False
) -> list[list[int]]:
    """Returns the tokens of each text, without those that the tokenizer adds to any text.

    No text can write a control token, as in sentencepiece: `</s>` and `<pad>` are read as letters.

    Args:
        tokenizer: Tokenizer of transformers.
        texts: What users wrote.
        markers: Whether the other special tokens, such as `<extra_id_0>`, are tokens where a text
            has them, unless the tokenizer's `split_special_tokens` is set; else they are letters.
        targets: Whether the decoder reads them: Marian has another vocabulary for it.
    """
    if not texts:
        return []
    markers = markers and not tokenizer.split_special_tokens
    reader, pattern = _text_reader(tokenizer, len(tokenizer))

    # Every second part of a text is a marker.
    parts = [pattern.split(text) if markers else [text] for text in texts]
    letters = list(chain.from_iterable(of_text[::2] for of_text in parts))
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    side = "text_target" if targets else "text"
    encoded = iter(reader(**{side: letters}, **options)["input_ids"])

    all_ids: list[list[int]] = []
    for of_text in parts:
        ids = list(next(encoded))
        for marker in of_text[1::2]:
            ids += [tokenizer.convert_tokens_to_ids(marker.strip()), *next(encoded)]
        all_ids.append(ids)
    return all_ids


def piece_texts(
    tokenizer: Any, ids: Sequence[int], *, errors: str = "backslashreplace"
) -> list[str]:
    r"""Returns the texts of pieces, one by one, with SentencePiece's mark for a space.

    A piece of a byte-level vocabulary, whose letters are bytes, may end within a character.

    Args:
        tokenizer: Any tokenizer of transformers.
        ids: Token ids; the text of one that the tokenizer lacks is e.g. `<id 130>`.
        errors: How bytes that are a part of a character are written, as in `bytes.decode`: by
            default as in `\xce`.
    """
    is_byte_level = tokenizer.is_fast and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    texts = []
    for token_id, piece in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        text = f"<id {token_id}>" if piece is None else str(piece)
        if is_byte_level and _BYTE_OF.keys() >= set(text):
            text = bytes(map(_BYTE_OF.__getitem__, text)).decode("utf-8", errors)
            text = text.replace(" ", SPACE)
        texts.append(text)
    return texts


def written(text: str) -> str:
    """Returns a text in the form that T5's vocabulary and ours of pieces write: NFKC, with single spaces.

    Byte-level vocabularies write any form. Answers and targets are compared in this one, so that a
    score does not depend on the vocabulary.
    """
    return _NORMALIZER.Normalize(text)


@lru_cache(maxsize=8)
def _text_reader(tokenizer: Any, num_tokens: int) -> tuple[Any, re.Pattern[str]]:
    """Returns a tokenizer whose model writes no special token, and a pattern that finds markers.

    Args:
        tokenizer: Any tokenizer of transformers.
        num_tokens: Its size, so that a tokenizer that has grown is read again.
    """
    # A marker may take the white space around it, as BART's <mask> does.
    names = {getattr(tokenizer, name) for name in _CONTROL_TOKENS}
    patterns = []
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and token.content not in names:
            patterns.append(
                token.lstrip * r"\s*" + re.escape(token.content) + token.rstrip * r"\s*"
            )
            names.add(token.content)
    patterns.sort(key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(patterns)})" if patterns else "(?!)")

    # A unigram model finds special tokens in a text if they are among its pieces. No text has a
    # piece with a space.
    if not (tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, models.Unigram)):
        return tokenizer, pattern
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    for piece in model["vocab"]:
        if piece[0] in names:
            piece[:] = [f" {piece[0]}", 0.0]
    pieces = list(map(tuple, model["vocab"]))
    reader = copy.deepcopy(tokenizer)
    reader.backend_tokenizer.model = models.Unigram(pieces, model["unk_id"], model["byte_fallback"])
    return reader, pattern


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
    check_replaceable(Path(out_dir), kind=TOKENIZER)  # before the work, not after
    model = _train_sentencepiece(texts, vocab_size)
    serialized = model.SerializeToString(deterministic=True)
    return _save(to_transformers(model), Path(out_dir), {SENTENCEPIECE_FILE: serialized})


def train_byte_tokenizer(
    texts: Iterable[str], vocab_size: int, out_dir: Path | str
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, writes it to `out_dir` (whole or not at all), and returns it.

    It suits many scripts: no character is unknown, and the tokens of a text give the same text
    back. The same texts in the same order give the same files.

    Args:
        texts: Texts of any length.
        vocab_size: Size of the embedding that the vocabulary needs: 256 bytes, pieces, 3 special
            tokens and 100 sentinels. Few texts give fewer pieces.
        out_dir: Receives tokenizer.json and tokenizer_config.json; an earlier tokenizer is replaced.

    Raises:
        ConfigError: When `vocab_size` leaves no room for bytes.

    Source:
        Language Models are Unsupervised Multitask Learners (GPT-2) section 2.2.
    """
    check_replaceable(Path(out_dir), kind=TOKENIZER)  # before the work, not after
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + NUM_SENTINELS + 3
    reason = f"{len(alphabet)} bytes, {NUM_SENTINELS} sentinels and 3 special tokens are part of it"
    check_integer("vocab_size", vocab_size, least=least, most=_MOST_PIECES, reason=reason)

    # Merges stay within words, numbers and punctuation, so none of them writes a special token.
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_SENTINELS,
        special_tokens=[PAD, EOS, UNK],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _save(_wrap(backend, NUM_SENTINELS), Path(out_dir), {})


def _save(
    tokenizer: PreTrainedTokenizerFast, folder: Path, other_files: Mapping[str, bytes]
) -> PreTrainedTokenizerFast:
    """Writes a tokenizer to a folder, whole or not at all, and returns it as it is loaded."""
    with whole_folder(folder, kind=TOKENIZER) as partial:
        tokenizer.save_pretrained(str(partial))
        for name, content in other_files.items():
            (partial / name).write_bytes(content)
        write_sums(partial)
    return load_tokenizer(folder)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer in `folder`: made by `train_tokenizer`, or saved with a model.

    Raises:
        DataError: When the folder has neither tokenizer.json nor another vocabulary, or a file is
            damaged; names the file.
    """
    folder = Path(folder)
    advice = f"Make one with `stmoe tokenizer --corpus CORPUS --out {folder}`."
    if (folder / "config.json").is_file():
        advice = "Copy the files of the model's tokenizer there, from where the model comes from."

    # Others' checkpoints may have their own files alone; ours always have a tokenizer.json.
    vocabularies = [TOKENIZER_FILE, SENTENCEPIECE_FILE, *_OTHER_VOCABULARIES]
    present = [name for name in vocabularies if (folder / name).is_file()]
    if not present:
        raise DataError(f"{folder} has no {TOKENIZER_FILE} and no {SENTENCEPIECE_FILE}. {advice}")

    # Its files are unchanged. A user may have saved a tokenizer to a model's folder, whose
    # checksums do not include it.
    sums = read_sums(folder) or {}
    names = set(sums) if kind_of(folder) == TOKENIZER else {*present, *_SETTINGS_FILES} & set(sums)
    refuse_damage(folder, names, advice=advice)

    # Files that do not fit together, e.g. a missing unknown token, show when the tokenizer is used.
    with reading(folder / present[0], advice=advice):
        tokenizer = _find_tokenizer_class(folder, present[0]).from_pretrained(str(folder))
        tokenizer("a \U0010fffe")
    return tokenizer


def _find_tokenizer_class(folder: Path, vocabulary: str) -> Any:
    """Returns the class that reads a tokenizer: its own if no other knows its languages or its files."""
    settings: dict[str, Any] = {"model_type": ""}
    for file in ("config.json", *_SETTINGS_FILES[:1]):
        if (folder / file).is_file():
            settings |= read_json(folder / file)
    of_model = TOKENIZER_MAPPING_NAMES.get(settings["model_type"].removeprefix("sparse_"))
    own = tokenizer_class_from_name(settings.get("tokenizer_class") or of_model or "")
    if vocabulary in _OTHER_VOCABULARIES or hasattr(own, "src_lang"):
        return own or AutoTokenizer
    return PreTrainedTokenizerFast if vocabulary == TOKENIZER_FILE else T5Tokenizer


def end_with_sentinel(
    tokenizer: PreTrainedTokenizerFast, has_sentinel: bool
) -> PreTrainedTokenizerFast:
    """Returns a copy that ends every text with the end token, preceded by the first sentinel.

    Args:
        tokenizer: Tokenizer with sentinels.
        has_sentinel: Whether the sentinel comes before it; False for the end token alone.
    """
    ids = SpecialIds.of(tokenizer)
    endings = [(str(tokenizer.eos_token), ids.eos)]
    if has_sentinel:
        endings.insert(0, (sentinel(0), ids.first_sentinel))

    copied = copy.deepcopy(tokenizer)
    copied.backend_tokenizer.post_processor = _end_with(*endings)
    return copied


def _end_with(*tokens: tuple[str, int]) -> processors.TemplateProcessing:
    """Returns the processor that puts these tokens, with their ids, after every text."""
    names = [name for name, _ in tokens]
    return processors.TemplateProcessing(
        single=["$A", *names], pair=["$A", *names, "$B", *names], special_tokens=list(tokens)
    )


def _train_sentencepiece(texts: Iterable[str], vocab_size: int) -> ModelProto:
    """Returns a trained unigram model of `vocab_size` less the sentinels, its scores on the grid."""
    # The smallest vocabulary has one piece, the largest all candidates.
    reason = (
        f"{NUM_SENTINELS} sentinels and 3 special tokens are part of it, and SentencePiece "
        f"chooses its pieces among {_MOST_PIECES:,} candidates"
    )
    check_integer(
        "vocab_size", vocab_size, least=NUM_SENTINELS + 4, most=_MOST_PIECES, reason=reason
    )

    model_file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=_filled_lines(texts),
            model_writer=model_file,
            vocab_size=vocab_size - NUM_SENTINELS,
            **_TRAINING_SETTINGS,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip() or "it has no text"
        raise DataError(
            f"The corpus does not give {vocab_size - NUM_SENTINELS} pieces, which with {NUM_SENTINELS} "
            f"sentinels are a vocabulary of {vocab_size}: {reason}"
        ) from error
    model = ModelProto.FromString(model_file.getvalue())
    for piece in model.pieces:
        piece.score = round(piece.score / _SCORE_GRID) * _SCORE_GRID
    return model


def _filled_lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.splitlines():
            if line.strip():
                yield line


def to_transformers(
    model: ModelProto, num_sentinels: int = NUM_SENTINELS
) -> PreTrainedTokenizerFast:
    """Returns the same tokenizer for transformers, with sentinels, and `</s>` after every text.

    It differs from sentencepiece in its normaliser alone, which looks up visible characters instead
    of code points: it loses the combining marks that follow a ligature or another compatibility
    character.
    """
    # The pieces with their scores; `</s>` in a text is never read as the end of a sequence.
    control = ModelProto.SentencePiece.Type.CONTROL
    scores = []
    for piece in model.pieces:
        score = _NEVER_CHOSEN if piece.type == control else piece.score
        scores.append((piece.piece, score))
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=2, byte_fallback=False))

    # Letters by sentencepiece's table, which is empty when they stay as they are; then spaces.
    steps = []
    character_map = model.normalizer_spec.precompiled_charsmap
    if character_map:
        steps.append(normalizers.Precompiled(character_map))
    # Strip() would take U+0085 too, unlike sentencepiece.
    steps.append(normalizers.Replace(tokenizers.Regex("^ +| +$"), ""))
    steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    backend.normalizer = normalizers.Sequence(steps)

    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    return _wrap(backend, num_sentinels)


def _wrap(backend: tokenizers.Tokenizer, num_sentinels: int) -> PreTrainedTokenizerFast:
    """Returns the tokenizer for transformers, with sentinels, and `</s>` after every text."""
    backend.post_processor = _end_with((EOS, 1))

    # Ids are assigned in this order, so <extra_id_0> has the highest id.
    sentinels = [sentinel(number) for number in range(num_sentinels)]
    backend.add_special_tokens([PAD, EOS, UNK, *reversed(sentinels)])
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
