"""transformers' NLLB-MoE in a process of its own, whose environment may hold another version.

    python -I nllb_moe_peer.py FOLDER

Saves logits in the folder of the model, and then decodes for each line `batch new_tokens` of its
input, and prints its CPU time.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import NllbMoeForConditionalGeneration


def main(folder: Path) -> None:
    """Prints the version, and answers lines until they end."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    inputs = torch.load(folder / "inputs.pt")
    model: Any = NllbMoeForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        torch.save(model(**inputs).logits, folder / "logits.pt")
        print(transformers.__version__, flush=True)
        for line in sys.stdin:
            batch, new_tokens = map(int, line.split())
            options = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
            model.generate(inputs["input_ids"][:batch], do_sample=False, **options)
            print(time.process_time(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
