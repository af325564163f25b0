"""Front: the router of a simulated cluster. Its choice, index and places are the real router's.

Each node is an upstream. What a cache holds is asked for as often as `quire router` asks; a node in
the middle of a step answers when the step is over. The network takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from quire.kv.cache_news import CacheLog
from quire.router.choose import Chooser
from quire.router.place import Place
from quire.router.prefix_index import CacheNews
from quire.router.prompt_keys import prompt_of_tokens
from quire.router.settings import Policy, RouterSettings, UpstreamAddress
from quire.router.upstream import Upstream
from quire.sim.clock import Clock
from quire.sim.engine import Node


class News(NamedTuple):
    """On its way from a node to the router."""

    node: int
    news: CacheNews


class Front:
    def __init__(self, nodes: Sequence[Node], policy: Policy) -> None:
        self.clock = Clock()
        self._nodes = nodes
        self._chooser = Chooser(policy, self.clock)
        self._upstreams = [
            Upstream(UpstreamAddress(f"replica-{i}", "simulated", i)) for i in range(len(nodes))
        ]
        for upstream in self._upstreams:
            upstream.came_up()
        self._page_size = nodes[0].engine.costs.engine.page_size
        self._logs = []
        if policy == "prefix":
            self._logs = [CacheLog(node.kv.tree, self._page_size) for node in nodes]
        self._places: dict[int, Place] = {}
        self.watch_s = RouterSettings(upstreams=()).watch_s
        for number in range(len(nodes)):  # the router was there before the first request
            if (news := self.look(number)) is not None:
                self.hear(news, 0.0)

    def place(self, index: int, tokens: Sequence[int], now: float) -> int:
        """The number of the node that answers this request."""
        self.clock.move_to(now)
        prompt = prompt_of_tokens(tokens, "", self._page_size if self._logs else 0)
        upstream = self._chooser.choose(self._upstreams, prompt)
        assert upstream is not None
        self._places[index] = Place.take(upstream, prompt, now)
        return self._upstreams.index(upstream)

    def answered(self, index: int, now: float, is_over: bool, is_stream: bool = True) -> None:
        """A piece of an answer came."""
        place = self._places[index]
        place.first_byte(now, is_stream)
        if is_over:
            place.leave()
            del self._places[index]

    def look(self, node: int) -> News | None:
        """What a cache holds, as its node says it now; None: nobody asks."""
        if not self._logs:
            return None
        index = self._upstreams[node].index
        news = self._logs[node].since(index.epoch, index.next)
        told = {**news, "is_whole": bool(news["is_whole"])}
        return News(node, msgspec.convert(told, CacheNews))

    def hear(self, news: News, now: float) -> None:
        self._upstreams[news.node].index.take(news.news, now)
