"""Wish: the form that weights are wanted in, whatever form they are stored in."""

from __future__ import annotations

from dataclasses import dataclass

from quire.quant.load_forms import LoadForm

HEADS = ("embed.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class Wish:
    keep_packed: bool = False  # weights that multiply stay as they are stored
    form: LoadForm | None = None  # they are brought into this form

    @property
    def is_packed(self) -> bool:
        """Whether weights may come in other forms than floats of the model's dtype."""
        return self.keep_packed or self.form is not None

    def form_of(self, name: str) -> LoadForm | None:
        """For one parameter. Embeddings and heads are worth eight bits, routers all they have."""
        if self.form is None or ".router." in name or name == "score.weight":
            return None
        return self.form.for_heads() if name in HEADS else self.form
