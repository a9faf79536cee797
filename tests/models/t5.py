"""Transformers' own T5 with the weights of one of our dense models: the oracle of attention, caches
and outputs.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import T5ForConditionalGeneration

from moe import STMoEForConditionalGeneration
from moe.convert.formats import convert_checkpoint


def as_t5(
    ours: STMoEForConditionalGeneration, attention: str = "eager"
) -> T5ForConditionalGeneration:
    with TemporaryDirectory() as folder:
        theirs = Path(folder) / "theirs"
        theirs.mkdir()
        ours.save_pretrained(Path(folder) / "ours")
        convert_checkpoint(Path(folder) / "ours", theirs, form="t5")
        return T5ForConditionalGeneration.from_pretrained(theirs, attn_implementation=attention)
