"""Pipelines of transformers for the three tasks that its version 5 removed.

    import moe  # registers them
    from transformers import pipeline

    summarize = pipeline("summarization", model="t5-small", prefix="summarize: ")
    summaries = summarize(texts, max_new_tokens=60)

They work with any encoder-decoder, dense or sparse, and answer by continuous batching.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from typing import Any

from transformers import AutoModelForSeq2SeqLM, GenerationConfig, Pipeline, pipelines
from transformers.pipelines import PIPELINE_REGISTRY

from moe.errors import ConfigError, DataError, did_you_mean
from moe.serving.batch_generator import BatchGenerator
from moe.serving.sampling import Sampling

TEXT_KEYS = {
    "text2text-generation": "generated_text",
    "summarization": "summary_text",
    "translation": "translation_text",
}
"""Key of the text in a result, by task, as in transformers 4."""

_DEFAULT_BATCH = 32
_OF_BATCH_GENERATOR = ("max_input", *(field.name for field in fields(Sampling)))


class TextToTextPipeline(Pipeline):
    """Texts in, texts out.

    A list returns a list of results, a generator or dataset yields them, a text returns one. A
    result is a dict with one text, or a list of them with `num_return_sequences`. Options of a
    call, or of the pipeline: the fields of Sampling, `batch_size`, `max_input`, and `prefix`, which
    is put before each text; by default that of the task in the model's config. Other options of
    `generate`, such as `num_beams`, are answered by it, one padded batch after the other.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(
        self, prefix: str | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        known = {"prefix", *_OF_BATCH_GENERATOR, *vars(GenerationConfig())}
        for name in options.keys() - known:
            raise ConfigError(
                f"The pipeline has no option {name!r}; expected prefix, "
                f"{', '.join(_OF_BATCH_GENERATOR)}, or one of generate().{did_you_mean(name, known)}"
            )
        return {} if prefix is None else {"prefix": prefix}, options, {}

    def preprocess(self, input_: Any, prefix: str | None = None, **_: Any) -> Any:
        """Returns the text with its prefix."""
        if not isinstance(input_, str):
            return input_
        if prefix is not None:
            return prefix + input_
        config: Any = self.model.config
        of_task = (getattr(config, "task_specific_params", None) or {}).get(self.task, {})
        return (of_task.get("prefix") or getattr(config, "prefix", None) or "") + input_

    def forward(self, model_inputs: Any, **options: Any) -> Any:
        """Returns the result of one text."""
        return self._forward(model_inputs, **options)

    def _forward(self, input_tensors: Any, **options: Any) -> Any:
        return next(self._results([input_tensors], 1, options))

    def postprocess(self, model_outputs: Any, **_: Any) -> Any:
        """Returns the result as it is."""
        return model_outputs

    def get_iterator(
        self,
        inputs: Iterable[str],
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        """Yields the results of many texts; transformers' default of `batch_size`, 1, stands for 32."""
        texts = (self.preprocess(text, **preprocess_params) for text in inputs)
        max_batch = batch_size if batch_size > 1 else _DEFAULT_BATCH
        return self._results(texts, max_batch, forward_params)

    def _results(
        self, texts: Iterable[Any], max_batch: int, options: dict[str, Any]
    ) -> Iterator[Any]:
        """Yields the result of each text: one dict, or a list of several.

        Raises:
            DataError: When a text was refused.
        """
        key = TEXT_KEYS[self.task]
        if options.keys() <= set(_OF_BATCH_GENERATOR):
            generator = BatchGenerator(self.model, self.tokenizer, max_batch=max_batch, **options)
            for answer in generator.map(texts):
                if answer.error is not None:
                    raise DataError(f"Text {answer.number}: {answer.error}")
                yield {key: answer.text}
            return

        model: Any = self.model
        tokenizer: Any = self.tokenizer
        source = iter(texts)
        while batch := list(islice(source, max_batch)):
            inputs = tokenizer(batch, return_tensors="pt", padding=True).to(self.device)
            tokens = model.generate(
                inputs["input_ids"], attention_mask=inputs["attention_mask"], **options
            )
            answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            results = [{key: answer} for answer in answers]
            num_answers = len(results) // len(batch)
            for first in range(0, len(results), num_answers):
                several = results[first : first + num_answers]
                yield several if num_answers > 1 else several[0]


def register_pipelines() -> None:
    """Registers the tasks; transformers 5 has removed them and only raises errors."""
    removed: dict[str, str] = getattr(pipelines, "REMOVED_TASKS", {})
    for task in TEXT_KEYS:
        removed.pop(task, None)
        PIPELINE_REGISTRY.register_pipeline(
            task, TextToTextPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
