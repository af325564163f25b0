"""DraftVocabulary: the target's tokens that a head with fewer outputs can name.

EAGLE-3 stores `d2t`: what to add to an output's number for the target's token id; Medusa's
`token_map` has the ids themselves. Logits are spread over the target's vocabulary before anything
is drawn, because the noise of a draw is keyed by the target's ids.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.errors import CheckpointError


class DraftVocabulary:
    """
    >>> some = DraftVocabulary.from_offsets(torch.tensor([1, 1, 3]), 8)
    >>> some.spread(torch.tensor([[5.0, 6.0, 7.0]]))
    tensor([[-inf, 5., 6., -inf, -inf, 7., -inf, -inf]])
    """

    def __init__(self, ids: Tensor, num_tokens: int) -> None:
        """`ids` [outputs] int64 are the target's, each once, on the head's device. Raises
        CheckpointError."""
        is_inside = ids.ndim == 1 and len(ids) > 0 and int(ids.min()) >= 0
        if not is_inside or int(ids.max()) >= num_tokens or len(ids.unique()) < len(ids):
            raise CheckpointError(
                f"the head's table of tokens names some twice or outside of the target's"
                f" {num_tokens}: it is for another model"
            )
        self.ids, self.num_tokens = ids, num_tokens

    @staticmethod
    def from_offsets(offsets: Tensor, num_tokens: int) -> DraftVocabulary:
        offsets = offsets.long()
        own = torch.arange(len(offsets), device=offsets.device)
        return DraftVocabulary(offsets + own, num_tokens)

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, outputs] -> [rows, tokens], with no chance for tokens that have no output."""
        shape = (len(logits), self.num_tokens)
        if logits.device.type == "cpu":
            # Not torch's: its threads would spin for a while, on cores that the next step needs.
            wide = torch.from_numpy(np.full(shape, -np.inf, np.float32)).to(logits.dtype)
        else:
            wide = logits.new_full(shape, -torch.inf)
        return wide.index_copy_(1, self.ids, logits)
