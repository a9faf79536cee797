"""A loaded sequence-to-sequence checkpoint of this library or of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from moe.checkpoint.loading import load_model, load_model_on_mesh
from moe.checksums import model_fingerprint
from moe.data.tokenizer import prompt_ids
from moe.errors import CheckpointError, is_panic
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.parsing import reading
from stmoe_eval.answers.batches import Request, TokenizedRequest
from stmoe_eval.answers.data_ranks import SINGLE_PROCESS, DataRanks
from stmoe_eval.answers.inference import (
    AS_SAVED,
    ConfiguredModel,
    Inference,
    configure,
    torch_dtype,
)

_SPECIAL_TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
)


class Seq2Seq(NamedTuple):
    """A loaded checkpoint.

    Attributes:
        model: The model; on a mesh this rank's part.
        tokenizer: Its own.
        fingerprint: Fingerprint of the checkpoint's files; known to rank 0 only.
        ranks: The ranks that use it.
        inference: Settings that override the checkpoint's own.
    """

    model: Any
    tokenizer: Any
    fingerprint: str
    ranks: DataRanks = SINGLE_PROCESS
    inference: Inference = AS_SAVED

    @property
    def sparse(self) -> bool:
        """Whether the model has routers whose outputs can be collected."""
        is_ours = isinstance(self.model, STMoEForConditionalGeneration)
        return is_ours and bool(self.model.sparse_layers())

    @property
    def start(self) -> list[int]:
        """Tokens that every answer begins with.

        They are the decoder's start and, for a model that was fine-tuned with one, the sentinel.
        """
        generation = self.model.generation_config
        first = generation.decoder_start_token_id
        if first is None:
            first = self.model.config.decoder_start_token_id
        if first is None:
            first = self.pad

        forced = generation.forced_bos_token_id
        return [first] if forced is None else [first, forced]

    @property
    def pad(self) -> int:
        """Token that fills short rows."""
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = self.model.config.pad_token_id
        return 0 if pad is None else pad

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        eos = self.model.generation_config.eos_token_id
        return [eos] if isinstance(eos, int) else list(eos)

    def tokenize(self, requests: Sequence[Request], max_tokens: int) -> list[TokenizedRequest]:
        """Returns the requests with their tokens; truncated ones keep the tokenizer's end tokens.

        Args:
            requests: The requests.
            max_tokens: Maximum number of tokens of an input; the tokenizer's own limit may be
                lower.
        """
        # Tokenize all texts at once, which is faster; the few that are too long again, truncated.
        max_tokens = min(max_tokens, self.tokenizer.model_max_length)
        texts = [request.inputs for request in requests]
        try:
            all_tokens = prompt_ids(self.tokenizer, texts)
        except BaseException as error:
            # tokenizers panics when a regular expression backtracks for too long.
            if not is_panic(error):
                raise
            raise CheckpointError(
                f"The tokenizer of {self.tokenizer.name_or_path} failed on a text: {error}. Correct "
                "the patterns in its tokenizer.json."
            ) from error

        tokenized: list[TokenizedRequest] = []
        for request, tokens in zip(requests, all_tokens, strict=True):
            truncated = len(tokens) > max_tokens
            if truncated:
                (tokens,) = prompt_ids(self.tokenizer, [request.inputs], max_tokens)
            tokens = tokens or [self.tokenizer.eos_token_id]
            tokenized.append(TokenizedRequest(request, tokens, truncated))
        return tokenized


def load_seq2seq(
    folder: Path, ranks: DataRanks = SINGLE_PROCESS, inference: Inference = AS_SAVED
) -> Seq2Seq:
    """Returns a sequence-to-sequence checkpoint of this library or of transformers.

    The task defines how to generate: only the special tokens of the checkpoint's settings are kept,
    not beams, minimum lengths or penalties.

    Args:
        folder: The checkpoint.
        ranks: Ranks that will use it; on a mesh each reads only its part.
        inference: Settings that replace the checkpoint's own.

    Raises:
        CheckpointError: When the folder is missing, or holds no such model with all its weights and
            a tokenizer; or one of them needs custom code from the folder, which is never run.
        ConfigError: When the model cannot have the capacity that is set.
    """
    configured = configure(folder, inference)
    model = _load_model(folder, ranks, configured)
    tokenizer = _load_tokenizer(folder)

    # Keep only the special tokens of the generation config.
    special_tokens = {name: getattr(model.generation_config, name) for name in _SPECIAL_TOKENS}
    if special_tokens["eos_token_id"] is None:
        special_tokens["eos_token_id"] = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(**special_tokens)

    # Rank 0 alone writes the predictions that need the fingerprint.
    digest = model_fingerprint(folder) if ranks.world.rank == 0 else ""
    return Seq2Seq(model, tokenizer, digest, ranks, configured.changes)


def _load_model(folder: Path, ranks: DataRanks, configured: ConfiguredModel) -> Any:
    """Returns the model of a checkpoint, whole or this rank's part."""
    config = configured.config
    dtype = torch_dtype(configured.changes)
    if not config.is_encoder_decoder:
        raise CheckpointError(
            f"{folder} holds a model of type {config.model_type!r}, which has no encoder and "
            "decoder. Give a sequence-to-sequence checkpoint, e.g. of this library, T5 or BART."
        )

    if ranks.mesh is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        options: dict[str, Any] = {"trust_remote_code": False}
        if configured.settings:
            options["config"] = config
        if dtype is not None:
            options["dtype"] = dtype
        return load_model(folder, device=device, model_class=AutoModelForSeq2SeqLM, **options)

    # Dispatch to slots would need batches of one shape on all ranks; rows route the same tokens to
    # the same experts.
    config = STMoEConfig.from_pretrained(folder, dispatch="ragged", **configured.settings)
    config.dtype = config.dtype if dtype is None else dtype
    model, _ = load_model_on_mesh(folder, ranks.mesh, config=config, gather=False)
    return model


def _load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a checkpoint."""
    problem, advice = "cannot be loaded", "Restore its files."
    with reading(
        f"The tokenizer in {folder}", problem=problem, advice=advice, error=CheckpointError
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    # If the files are missing, transformers may create an empty tokenizer. One of bytes has none.
    files = list(dict.fromkeys(type(tokenizer).vocab_files_names.values()))
    if files and not any((folder / name).is_file() for name in files):
        raise CheckpointError(
            f"{folder} holds no tokenizer: none of {', '.join(files)} exists. Save the model's tokenizer there with "
            "its save_pretrained."
        )
    return tokenizer
