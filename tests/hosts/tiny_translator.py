"""A small random M2M100 in a folder with the files of the hub's, and pairs of two languages that it does not know."""

import json

import sentencepiece
import torch
from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer

ENGLISH = ["sun", "moon", "sea", "red", "blue", "house", "river", "tree"]
NEW = {
    "sw": ["izuba", "ukwezi", "inyanja", "umutuku", "ubururu", "inzu", "umugezi", "igiti"],
    "zu": ["dzuwa", "mwezi", "nyanja", "fiira", "buluu", "nyumba", "mtsinje", "mtengo"],
}
PAIRS = [
    {"inputs": word, "targets": target, "target_language": code}
    for code, targets in NEW.items()
    for word, target in zip(ENGLISH, targets, strict=True)
]


def write_pairs(path, pairs=PAIRS):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def train_pieces(stem, words):
    """Writes a sentencepiece model of the words' letters and pieces to `stem`.model, and returns its pieces."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words)] * 9),
        model_prefix=str(stem),
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(f"{stem}.model")
    return [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]


def save_m2m100(folder):
    folder.mkdir(parents=True)
    learnt = train_pieces(folder / "sentencepiece.bpe", [*ENGLISH, *NEW["sw"], *NEW["zu"]])
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *learnt]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"))
    special = {"additional_special_tokens": list(tokenizer.lang_token_to_id)}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))

    torch.manual_seed(0)
    stacks = {"layers": 2, "ffn_dim": 32, "attention_heads": 2}
    sizes = {
        f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in stacks.items()
    }
    config = M2M100Config(
        vocab_size=len(pieces) + 108,
        d_model=24,
        max_position_embeddings=64,
        attention_dropout=0.0,
        init_std=0.3,
        **sizes,
    )
    model = M2M100ForConditionalGeneration(config)
    model.generation_config.num_beams = 5  # as on the hub
    model.save_pretrained(folder)
    return folder
