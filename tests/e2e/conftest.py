"""Servers that the client tests share: one open, one with keys and a model that thinks, one real.

Each is started once per test process. The tiny model's text is noise, so these tests are about
shapes, counts and agreement; `served_real` is for the few that read what was said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.e2e.harness import Served
from tests.engine.tiny import random_llama, save_tiny_folder
from tests.text.tiny_tokenizers import byte_level

CONTEXT = 4096
USER_KEY, OTHER_KEY, ADMIN_KEY = "user-key", "other-key", "admin-key"
THINK_END = "</think>"
THINKING_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-long")
    save_tiny_folder(folder, random_llama(max_position_embeddings=CONTEXT))
    return folder


@pytest.fixture(scope="session")
def served(long_folder: Path) -> Iterator[Served]:
    """No keys: anyone on this machine may ask."""
    with Served(long_folder, "--device", "cpu") as server:
        yield server
        server.wait_idle()  # whatever the tests did, nothing may be left behind


@pytest.fixture(scope="session")
def served_packed(packed_folder: Path) -> Iterator[Served]:
    """As `served`, with weights in four bits."""
    flags = ["--device", "cpu", "--quantization", "rtn-int4-g32"]
    with Served(packed_folder, *flags) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="session")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with one token more, which ends its thoughts."""
    folder = tmp_path_factory.mktemp("tiny-thinking")
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(THINK_END, special=False, normalized=False)])
    size = tokenizer.get_vocab_size()
    save_tiny_folder(folder, random_llama(max_position_embeddings=CONTEXT, vocab_size=size))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = THINKING_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def guarded(thinking_folder: Path) -> Iterator[Served]:
    """Keys, two open requests for each, a model that thinks, and the other HTTP server."""
    flags = ["--api-key", USER_KEY, "--api-key", OTHER_KEY, "--admin-api-key", ADMIN_KEY]
    flags += ["--max-requests-per-key", "2", "--http-server", "uvicorn", "--public-metrics"]
    with Served(thinking_folder, "--device", "cpu", *flags) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="session")
def served_real(default_model_path: Path) -> Iterator[Served]:
    with Served(default_model_path, "--device", "cpu", "--threads", "1") as server:
        yield server


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def no_blanks() -> dict[str, int]:
    """A logit_bias against blanks, so that the noise of a grammar's JSON is short."""
    vocab = byte_level().get_vocab()
    texts = {id: byte_level().decode([id], skip_special_tokens=False) for id in vocab.values()}
    return {str(id): -100 for id, text in texts.items() if text and not text.strip()}
