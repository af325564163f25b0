"""translate: a drafter's rows in the target's order, so that it reads and names the target's ids.

Its embedding gets a row for each of the target's tokens, its head keeps the rows that the target
has a token for (`text/shared_tokens.py` says which). From there on it is a model of the target's
vocabulary like any other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.models.decoder import Decoder
from quire.models.heads.vocabulary import DraftVocabulary
from quire.nn.embed import Embedding
from quire.nn.linear import Linear
from quire.quant.deferred import made
from quire.text.shared_tokens import SharedTokens


def translate(model: Decoder, shared: SharedTokens) -> None:
    """For a model whose weights are in and that is not finished."""
    spec, num_tokens = model.spec, len(shared.read_as)
    dtype, device = model.dtype, model.device
    own, theirs = torch.tensor(shared.pairs, device=device).unbind(1)  # [shared] each
    (embed,) = map(made, model.embed.weight.weights())
    (head,) = [embed] if spec.tied else map(made, model.head.weight.weights())
    model.embed = Embedding(num_tokens, spec.hidden_size, dtype, device)
    model.embed.weight.keep(None, embed.pick(torch.tensor(shared.read_as, device=device)))
    parts = {"head": len(own)}
    model.head = Linear(spec.hidden_size, parts, bias=False, dtype=dtype, device=device)
    model.head.weight.keep("head", head.pick(own))
    model.vocabulary = DraftVocabulary(theirs, num_tokens)
    model.spec = replace(spec, vocab_size=num_tokens, tied=False)
