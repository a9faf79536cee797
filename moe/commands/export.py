"""stmoe export: writes a model for another engine, or for a browser.

stmoe export --model runs/switch --to runs/onnx
stmoe export --model runs/student/model --to runs/ct2 --format ctranslate2 --quantization int8
stmoe export --model runs/names/model --to names.html --format html
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from moe.checkpoint.loading import find_class, load_model
from moe.cli import Parser, model_name
from moe.commands.convert import new_model_folder
from moe.convert.formats import convert_checkpoint, find_tokenizer_files
from moe.convert.graphs import export_onnx, export_torch
from moe.data.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILE
from moe.errors import ConfigError
from moe.files import output_path, whole_folder, write_text
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.transformers_private import find_file
from moe.serving.model_page import model_page


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe export", description="Writes a model for another engine.")
    parser.add_argument(
        "--model", type=model_name, required=True, help="a folder of a model, or hub name"
    )
    parser.add_argument(
        "--to", required=True, help="the folder to make, or the file with --format html"
    )
    parser.add_argument(
        "--format",
        choices=("onnx", "torch", "ctranslate2", "html"),
        default="onnx",
        help="what to write: html is a page that runs the model in a browser (onnx)",
    )
    parser.add_argument(
        "--quantization",
        choices=("int8", "int8_float32", "int16"),
        help="of the weights, with --format ctranslate2 (float32)",
    )
    return parser


def main(argv: list[str]) -> None:
    """Exports a model.

    Raises:
        CheckpointError: When the model is missing or damaged.
        ConfigError: When the format does not have what the model computes, or its extra is missing.
    """
    options = build_parser().parse_args(argv)
    if options.quantization is not None and options.format != "ctranslate2":
        raise ConfigError(
            f"--quantization cannot be combined with --format {options.format}. Leave it out."
        )
    if options.format == "html":
        page = output_path(options.to, suffix=".html", option="--to", inputs=[options.model])
        write_text(page, model_page(Path(options.model)))
        print(f"The page is {page}, with {page.stat().st_size / 1e6:.1f} MB. Open it in a browser.")
        return

    target = new_model_folder(options.to, inputs=[options.model])
    with whole_folder(target, kind="model") as folder:
        message = _write(options, folder)
        _copy_texts(options.model, folder)
    print(message)
    print(f"The exported model is in {target}.")


def _write(options: Any, folder: Path) -> str:
    """Writes the model into a folder, and returns a line for the user."""
    if options.format == "ctranslate2":
        return _write_ctranslate2(options, folder)
    model = load_model(options.model, dropless=True, dtype=torch.float32)
    if not isinstance(model, STMoEForConditionalGeneration):
        raise ConfigError(
            f"{type(model).__name__} cannot be exported in this format; expected a T5, a Switch or a model of ours."
        )
    if options.format == "torch":
        export_torch(model, folder)
        return "torch.export.load(FILE).module() returns each graph."
    difference = export_onnx(model, folder)
    return f"The logits of onnxruntime differ by at most {difference:.1g} from the model's."


def _write_ctranslate2(options: Any, folder: Path) -> str:
    try:
        from ctranslate2.converters import TransformersConverter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The export to CTranslate2 needs it: pip install 'stmoe[ct2]'. ({error})"
        ) from error
    source = options.model
    is_ours = issubclass(find_class(source), STMoEForConditionalGeneration)
    if not {TOKENIZER_FILE, SENTENCEPIECE_FILE} & find_tokenizer_files(source, {}).keys():
        raise ConfigError(
            f"{source} has no tokenizer, whose vocabulary CTranslate2 needs. Save the model's tokenizer there."
        )
    with tempfile.TemporaryDirectory() as temporary:
        converter = TransformersConverter(temporary if is_ours else source)
        # Ours is written as transformers' T5, which the converter reads. It scales the head of a model that is
        # called tied, which transformers 5 calls every T5.
        if is_ours:
            convert_checkpoint(options.model, Path(temporary), form="t5", dtype=torch.float32)
            load = converter.load_model

            def load_t5(*args: Any, **kwargs: Any) -> Any:
                model = load(*args, **kwargs)
                config = STMoEConfig.from_pretrained(options.model)
                model.config.tie_word_embeddings = config.scale_decoder_outputs
                return model

            converter.load_model = load_t5
        converter.convert(str(folder), quantization=options.quantization, force=True)
    return "ctranslate2.Translator(FOLDER) answers lists of tokens."


def _copy_texts(source: str, folder: Path) -> None:
    """Copies the tokenizer, and the configs that the folder does not have."""
    files = find_tokenizer_files(source, {})
    for name in ("config.json", "generation_config.json"):
        path = find_file(source, name)
        if path is not None and not (folder / name).exists():
            files[name] = path
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
