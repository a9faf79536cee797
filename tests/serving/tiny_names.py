"""A random model of names in the files of the one that comes with the library."""

import json
from pathlib import Path

from moe.data.tokenizer import train_byte_tokenizer
from moe.kernels.quantized_weight import Quantization
from moe.serving.languages import LANGUAGES_FILE
from moe.surgery.quantize import quantize_checkpoint
from tests.models.tiny import tiny_model

LANGUAGES = {"xh": "Xhosa", "el": "Greek", "sr_Latn": "Serbian (Latin)"}
LONGEST = 17


def write_names_model(folder: Path) -> Path:
    """Returns a folder with a model of three languages in 8 bits."""
    texts = [f"{code}: Ivory Coast" for code in LANGUAGES]
    tokenizer = train_byte_tokenizer(texts, 400, folder / "tokenizer")
    model = tiny_model(vocab_size=400, tie_word_embeddings=True, capacity_factor=0.5)
    model.save_pretrained(folder / "float")
    tokenizer.save_pretrained(folder / "float")
    names = folder / "names"
    names.mkdir()
    quantize_checkpoint(folder / "float", names, Quantization(8), whole=True)
    languages = {code: {"name": name, "family": "any"} for code, name in LANGUAGES.items()}
    content = {"languages": languages, "longest_name": LONGEST}
    (names / LANGUAGES_FILE).write_text(json.dumps(content))
    return names
