"""cached_path: the longest prefix of a request that the tree has, and why it is no longer.

At the end of a prefix the windows of all layer groups must be complete, or its layers could not go
on from there. The reason for a miss is for people: it is shown with the answer's usage.
"""

from __future__ import annotations

from quire.kv.prefix import Node, PrefixTree, longest_hit
from quire.request import Request

ITEM = 4  # bytes of one token id in the hashed stream


def cached_path(request: Request, tree: PrefixTree, page_size: int) -> list[Node] | None:
    """The nodes that can be adopted; None: this request must compute every position."""
    if request.params.prompt_logprobs is not None and request.num_output == 0:
        request.cache_note = "prompt_logprobs needs every position computed"
    elif request.params.pooling == "mean":
        request.cache_note = "mean pooling needs every position computed"
    elif len(request.tokens) < page_size:
        request.cache_note = f"prompt is shorter than one page of {page_size} tokens"
    else:
        return _walk(request, tree, page_size)
    return None


def _walk(request: Request, tree: PrefixTree, size: int) -> list[Node]:
    stream = request.tokens.tobytes()
    key = tree.root_of(request)
    path: list[Node] = []
    request.cache_note = ""  # that of an earlier look, or of a home that was not taken
    for start in range(0, len(request.tokens) // size * size, size):
        tokens = stream[start * ITEM : (start + size) * ITEM]
        key = tree.child_key(key, tokens)
        node = tree.find(key, tokens)
        if node is None:
            seen = "was evicted" if tree.was_evicted(key) else "was not seen before"
            request.cache_note = f"page {start // size} of this prefix {seen}"
            break
        path.append(node)
    longest = longest_hit(path, tree.windows, size)
    if longest < len(path):
        request.cache_note = (
            f"{longest} of {len(path)} known pages of this prefix are usable: pages of layers"
            " that see only a window were evicted"
        )
    return path[:longest]
