"""Pipelines of transformers for the three tasks that its version 5 removed.

    import moe  # registers them
    from transformers import pipeline

    summarize = pipeline("summarization", model="t5-small", prefix="summarize: ")
    summaries = summarize(texts, max_new_tokens=60)

They work with any encoder-decoder, dense or sparse, and answer by continuous batching.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from transformers import AutoModelForSeq2SeqLM, Pipeline, pipelines
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


class TextToTextPipeline(Pipeline):
    """Texts in, texts out.

    A list returns a list of results, a generator or dataset yields them, a text returns one. A
    result is a dict with one text. Options of a call, or of the pipeline: the fields of Sampling,
    `batch_size`, `max_input`, and `prefix`, which is put before each text.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(
        self, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        known = ["prefix", "max_input", *(field.name for field in fields(Sampling))]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"The pipeline has no option {name!r}; expected {', '.join(known)}."
                    f"{did_you_mean(name, known)}"
                )
        prefix = {"prefix": options.pop("prefix")} if "prefix" in options else {}
        return prefix, options, {}

    def preprocess(self, input_: Any, prefix: str = "", **_: Any) -> Any:
        """Returns the text with its prefix."""
        return prefix + input_ if isinstance(input_, str) else input_

    def forward(self, model_inputs: Any, **options: Any) -> Any:
        """Returns the answer to one text."""
        return self._forward(model_inputs, **options)

    def _forward(self, input_tensors: Any, **options: Any) -> Any:
        (answer,) = BatchGenerator(self.model, self.tokenizer, max_batch=1, **options).map(
            [input_tensors]
        )
        return answer

    def postprocess(self, model_outputs: Any, **_: Any) -> dict[str, str]:
        """Returns the text of an answer.

        Raises:
            DataError: When the text was refused.
        """
        if model_outputs.error is not None:
            raise DataError(f"Text {model_outputs.number}: {model_outputs.error}")
        return {TEXT_KEYS[self.task]: model_outputs.text}

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
        max_batch = batch_size if batch_size > 1 else _DEFAULT_BATCH
        generator = BatchGenerator(
            self.model, self.tokenizer, max_batch=max_batch, **forward_params
        )
        texts = (self.preprocess(text, **preprocess_params) for text in inputs)
        for answer in generator.map(texts):
            yield self.postprocess(answer, **postprocess_params)


def register_pipelines() -> None:
    """Registers the tasks; transformers 5 has removed them and only raises errors."""
    removed: dict[str, str] = getattr(pipelines, "REMOVED_TASKS", {})
    for task in TEXT_KEYS:
        removed.pop(task, None)
        PIPELINE_REGISTRY.register_pipeline(
            task, TextToTextPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
