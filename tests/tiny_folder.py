"""A model folder small enough for a test to write: a tiny Llama config and a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<s>", "</s>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def write_tiny_folder(folder: Path, *, tokenizer: bool = True, **changes: object) -> Path:
    """Use it with load_format='dummy': there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if tokenizer:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: id for id, token in enumerate((*SPECIAL, *letters))}
        made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(list(SPECIAL))
        made.save(str(folder / "tokenizer.json"))
        words = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
