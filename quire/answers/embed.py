"""Embeddings: a model's pooled hidden states, made comparable.

Hidden states of a language model all point much the same way: between any two questions the cosine
is 0.8. What tells them apart is how each number differs from its usual value, so every dimension is
taken in units of its own spread over a fixed set of sentences. Then a random projection makes as
many numbers of it as `features.py` has. Pure arithmetic; `server/embedder.py` asks the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.answers.features import SIZE, Vector

_SENTENCES = """
Name a colour.|How old is the universe?|Write a function that adds two numbers.
Hello, how are you today?|Summarise this article in two sentences.|What time is it in Tokyo?
Fix the bug in my code.|List five kinds of fruit.|Who was the first person in space?
Translate this sentence into German.|Explain gravity to a child.
Draft an email to my landlord about the heating.|What should I cook tonight?
Is it safe to eat raw eggs?|Give me a recipe for soup.|How do I learn to play the guitar?
What is the meaning of life?|Describe a sunset over the mountains.
Convert ten miles to kilometres.|Which laptop should I buy?|Tell me about the history of Rome.
How does the stock market work?|Write a short story about a dragon.|Why do cats purr?
What is the square root of two?|Plan a birthday party for a friend.|Help me with my homework.
How do I change a tyre?|Compare tea and coffee.|What are good names for a dog?
Give an example of a metaphor.|How many people live in India?|Proofread the following paragraph.
What is a hash table?|Suggest a title for my essay.|How do airplanes fly?
Write a SQL query that counts users.|When did the war end?|How can I save money?
What is the weather like in spring?|Explain the rules of chess.|Who painted this picture?
How do I grow tomatoes?|What does this error message mean?|Make a table of the planets.
Should I take the train or the bus?|Rewrite this text in a friendly tone.|What is democracy?
"""
# Questions and wishes of all kinds. A change of one changes all embeddings.
REFERENCES = tuple(_SENTENCES.replace("\n", "|").strip("|").split("|"))


class Scale(NamedTuple):
    """What is usual for a model."""

    mean: NDArray[np.float32]  # [hidden]
    spread: NDArray[np.float32]  # [hidden]
    projection: NDArray[np.float32]  # [hidden, SIZE]

    @staticmethod
    def of(references: Sequence[Sequence[float]]) -> Scale:
        """From what the model makes of REFERENCES."""
        rows = np.array(references, np.float64)  # [references, hidden]
        spread = rows.std(axis=0)
        spread[spread < 1e-6] = 1.0
        draw = np.random.Generator(np.random.PCG64(7))
        signs = draw.integers(0, 2, size=(rows.shape[1], SIZE), dtype=np.int8)
        projection = (2.0 * signs - 1.0).astype(np.float32) / np.float32(np.sqrt(SIZE))
        return Scale(rows.mean(axis=0).astype(np.float32), spread.astype(np.float32), projection)

    @property
    def digest(self) -> bytes:
        """Vectors of two scales may be compared where these are equal."""
        return sha256(b"".join(part.tobytes() for part in self)).digest()

    def embedding(self, pooled: Sequence[float]) -> Vector:
        """[SIZE], of length 1."""
        row = (np.array(pooled, np.float32) - self.mean) / self.spread
        made = row @ self.projection
        length = float(np.linalg.norm(made))
        return np.asarray(made / np.float32(length) if length else made, np.float32)
