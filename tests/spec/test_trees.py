"""Trees of drafts: what is said of them, which part of one is fed, and what heads guess in them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.draft_tree import full_tree, parents_of, parse_token_tree
from quire.errors import NotSupported
from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.trees import TreeNode
from quire.sched.costs import StepCosts
from quire.spec.depth import WORTH, Candidate, Costs, best_depths
from quire.spec.proposer import Guess
from quire.spec.survival import UNJUDGED, Survival
from quire.spec.taken import Taken
from quire.spec.tree import Parents, children_of, paths_of, survivals
from quire.spec.verify import verified_path
from quire.speculative import parse_speculative
from quire.step import Draft
from tests.spec import heads
from tests.spec.cases import TEXTS, open_tiny
from tests.spec.head_oracles import (
    chain,
    eagle3_guess,
    medusa_logits,
    mtp_guess,
    streams_of,
    target_of,
)

# ------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "tree": 2}, "one token for each position; .* eagle3, medusa, mtp"),
        ({"method": "suffix", "speculative_token_tree": "[(0,)]"}, "one token for each position"),
        ({"method": "draft_model", "model": "x", "tree": 2}, "'draft_model', which guesses one"),
        ({"method": "mtp", "tree": 1}, "from 2 to 8"),
        ({"method": "mtp", "tree": True}, "from 2 to 8"),
        ({"method": "mtp", "tree": 2, "speculative_token_tree": "[(0,)]"}, "one of them"),
        ({"method": "mtp", "speculative_token_tree": "[(0,), (0, 1)]"}, r"\(0, 0\) is not"),
        ({"method": "mtp", "speculative_token_tree": "[(1, 0), (0,), (1,), ()]"}, "no path"),
        ({"method": "mtp", "speculative_token_tree": "[(0,), (0, 8)]"}, "from 0 to 7"),
        ({"method": "mtp", "speculative_token_tree": "open('x')"}, "want a list"),
        ({"method": "mtp", "speculative_token_tree": "[]"}, "want a list"),
    ],
)
def test_trees_that_cannot_be_are_named(given: Any, message: str) -> None:
    """Red when a tree is ignored, or read where there is none."""
    with pytest.raises(NotSupported, match=message):
        parse_speculative(given)


def test_what_vllm_says_of_trees_is_understood() -> None:
    """Red when a path of vLLM's means another guess, or a cap is not one of drafts."""
    tree = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
    config = parse_speculative({"method": "mtp", "speculative_token_tree": tree})
    assert (config.depth, config.levels) == (6, 3)
    found = config.token_tree(3)
    assert found == parse_token_tree([[0], [0, 0], [0, 0, 0], [1], [0, 1], [1, 0]])
    assert found is not None and parents_of(found) == (0, 1, 2, 0, 1, 4)
    assert parse_speculative({"method": "eagle3", "model": "x", "tree": 2}).depth == 10
    for width, levels, num in itertools.product((2, 3, 8), (1, 3, 5), (1, 7, 64)):
        made = full_tree(width, levels, num)
        assert sorted(parse_token_tree(list(made))) == sorted(made)
        assert len(made) == min(num, sum(width**level for level in range(1, levels + 1)))


# ------------------------------------------------------------ the rule


def test_a_tree_keeps_what_the_best_of_its_chains_keeps() -> None:
    """Red when a sibling that was drawn is missed, or one that was not is followed."""
    rng = random.Random(3)
    for _ in range(300):
        parents = random_tree(rng, rng.randint(1, 9))
        ranks = {node: rank for few in children_of(parents) for rank, node in enumerate(few)}
        drafts = [ranks[node] for node in range(1, 1 + len(parents))]  # siblings differ
        # What is drawn depends on the tokens before, and on nothing else.
        paths = paths_of(parents)
        drawn = [hash(tuple(drafts[n - 1] for n in path)) % 3 for path in paths]
        nodes = verified_path(drawn, drafts, parents)
        right = [p for p in paths if all(drafts[n - 1] == drawn[m] for m, n in steps(p))]
        assert len(nodes) - 1 == max(map(len, right))
        assert tuple(nodes[1:]) in right


def steps(path: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *path)))


def random_tree(rng: random.Random, num: int) -> Parents:
    return tuple(rng.choice((node, rng.randint(0, node))) for node in range(num))


# ------------------------------------------------------------ which part is fed


@pytest.mark.parametrize("seed", range(12))
def test_the_best_part_of_a_tree_is_taken(seed: int) -> None:
    """Red when another part of the tree gives more tokens a second, by more than a hair."""
    rng = random.Random(seed)
    step = StepCosts.of([(1, 1.0), (3, 1.0 + rng.random() / 2), (9, 1.5 + 2 * rng.random())])
    guess = ordered_guess(rng, 7)
    candidate = Candidate(guess.chances, parents=guess.parents)
    (num,) = best_depths([candidate], 1, Costs(step))
    survive = survivals(guess.chances, guess.parents)

    def rate(nodes: Sequence[int]) -> float:
        return (2 + sum(survive[n - 1] for n in nodes)) / step.seconds(2 + len(nodes))

    parts = [
        nodes
        for size in range(8)
        for nodes in itertools.combinations(range(1, 8), size)
        if all(guess.parents[node - 1] in (0, *nodes) for node in nodes)
    ]
    assert rate(range(1, 1 + num)) >= max(map(rate, parts)) / WORTH - 1e-9


def ordered_guess(rng: random.Random, num: int) -> Guess:
    parents = random_tree(rng, num)
    chances = [0.9 * rng.random() for _ in parents]
    for siblings in children_of(parents):  # later ones promise less
        ranked = sorted((chances[node - 1] for node in siblings), reverse=True)
        for node, chance in zip(siblings, ranked, strict=True):
            chances[node - 1] = chance
    survive = survivals(chances, parents)
    nodes = sorted(range(1, 1 + num), key=lambda node: (-survive[node - 1], node))
    places = {0: 0, **{node: place for place, node in enumerate(nodes, 1)}}
    return Guess(
        tuple(chances[node - 1] for node in nodes),
        parents=tuple(places[parents[node - 1]] for node in nodes),
    )


def test_a_draft_that_comes_with_a_sibling_costs_the_drafter_nothing() -> None:
    """Red when the model that drafts is counted once for each guess it makes at a position."""
    draft = StepCosts.of([(1, 0.3)])
    flat = StepCosts.of([(1, 1.0), (64, 1.01)])
    wide = Candidate((0.4, 0.3), is_made=False, parents=(0, 0))
    deep = Candidate((0.4, 0.3), is_made=False, parents=(0, 1))
    assert best_depths([wide], 0, Costs(flat, draft)) == [2]
    assert best_depths([deep], 0, Costs(flat, draft)) == [1]


def test_the_trunk_lies_where_a_chain_would() -> None:
    """Red when first guesses that are right must move, or a rank gets another's place."""
    guess = Guess((0.5, 0.4, 0.5, 0.5), (10, 20, 11, 12), (0, 0, 1, 3))
    taken = Taken.of(guess, (1, 2, 3, 4), 4)
    assert taken.draft == Draft(4, (10, 11, 12, 20), (0, 1, 2, 0))
    assert taken.chances == (0.5, 0.5, 0.5, 0.4)
    assert Taken.of(guess, (1, 3, 4), 3).draft == Draft(3, (10, 11, 12))  # nothing but the trunk


def test_ranks_are_counted_apart() -> None:
    """Red when second guesses spoil what is thought of first ones, or unjudged ones count."""
    survival, id, own, tree = Survival(), RequestId(1), (0.7, 0.15, 0.7), (0, 0, 1)
    for _ in range(200):
        survival.learn_tree(id, own, tree, (2,))  # the second guess is always the right one
    first, second, behind = survival.tree_chances(id, own, tree)
    assert first < 0.1 and second <= first
    survival = Survival()
    for _ in range(200):
        survival.learn_tree(id, own, tree, (1, UNJUDGED))  # what follows the end is not judged
    first, second, behind = survival.tree_chances(id, own, tree)
    assert first > 0.9 and second < 0.1 and behind > 0.9


# ------------------------------------------------------------ what heads guess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trees")
    open_tiny(made, "llama")
    open_tiny(made, "deepseek_v3")
    heads.add_mtp(made / "deepseek_v3")
    heads.eagle3(made / "eagle3", 64)
    heads.medusa(made / "medusa", 64)
    return made


Seen = list[tuple[list[int], int, Tensor, list[int]]]  # tokens, known ones, logits, children


def watched(folder: Path, family: str, config: dict[str, Any]) -> Seen:
    """Every node that something is guessed behind, with the tokens on the way to it.

    Now and then a guess is replaced by what will be drawn, for it to be right."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = open_tiny(folder, family).generate([TEXTS[0], TEXTS[1]], params, use_tqdm=False)
    texts = [[*(o.prompt_token_ids or ()), *o.outputs[0].token_ids] for o in found]
    llm = open_tiny(folder, family, speculative_config={"adaptive": False, **config})
    drafter: Any = llm._engine.runner.drafter
    draw, seen, tokens = drafter._draws.draw_children, [], llm._engine.runner.rows.tokens

    def watch(nodes: Sequence[TreeNode], logits: Tensor) -> None:
        kept = logits.clone()
        draw(nodes, logits)
        for node, row in zip(nodes, kept, strict=True):
            start, own = node.work.start, tokens[node.work.row]
            way = [start + step for step in paths_of(node.parents)[node.node]]
            read = [*own[: start + 1].tolist(), *own[way].tolist()]
            children = [start + child for child in node.children]
            seen.append((read, start, row, own[children].tolist()))
            for text in texts:
                if text[: len(read)] == read and len(seen) % 4 and len(text) > len(read):
                    own[children[len(seen) % len(children)]] = text[len(read)]

    drafter._draws.draw_children = watch
    again = llm.generate([TEXTS[0], TEXTS[1]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in found]
    assert len(seen) > 12 and llm.stats().num_accepted_tokens > 6
    return seen


TREE = {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (1, 1), (2,), (1, 1, 0)]"}


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mtp"])
@torch.inference_mode()
def test_heads_guess_behind_every_node_as_published(
    method: str, folder: Path, tmp_path: Path
) -> None:
    """Red when a node reads a sibling, another's feature or position, or ranks are mixed up."""
    family = "deepseek_v3" if method == "mtp" else "llama"
    target = target_of(folder / family)
    config = {"method": method, **TREE}
    if method != "mtp":
        config["model"] = str(folder / method)
    features: Any = lambda streams: streams[-1]  # noqa: E731
    if method == "eagle3":
        features, guess = eagle3_guess(folder / "eagle3", target)
    elif method == "mtp":
        guess = mtp_guess(folder / family, tmp_path / "deeper", target)
    for tokens, start, logits, children in watched(folder, family, config):
        depth, known = len(tokens) - 1 - start, features(streams_of(target, tokens[:start]))
        if method == "medusa":
            want = medusa_logits(folder / "medusa", known[-1], depth)
        else:
            want = chain(known, tokens, start, depth + 1, guess)[-1]
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        assert children == logits.topk(len(children)).indices.tolist()


def test_a_tree_is_no_deeper_than_there_are_heads(folder: Path) -> None:
    """Red when a level that no head fills is fed as guesses."""
    config = {"method": "medusa", "model": str(folder / "medusa"), "tree": 2}
    llm = open_tiny(folder, "llama", speculative_config=config)
    drafts: Any = llm._engine.core.drafts
    assert max(map(len, paths_of(drafts.proposer._proposers[1]._parents))) == 3
    config = {
        **config,
        "tree": None,
        "speculative_token_tree": str([(0,) * n for n in range(1, 5)]),
    }
    with pytest.raises(NotSupported, match="4 tokens deep, but there are 3 heads"):
        open_tiny(folder, "llama", speculative_config=config)


def test_attention_that_reads_no_paths_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a tree is read as a chain, or the refusal hides who refuses and what to do."""
    config = {"method": "medusa", "model": str(folder / "medusa")}
    llm = open_tiny(folder, "llama", speculative_config=config)
    attention = type(llm._engine.runner.backend)
    monkeypatch.setattr(attention, "caps", replace(attention.caps, trees=False))
    message = f"attention {attention.__name__}, which reads no paths: leave .*tree out"
    with pytest.raises(NotSupported, match=message):
        open_tiny(folder, "llama", speculative_config={**config, "tree": 2})
    open_tiny(folder, "llama", speculative_config=config)  # chains are read by all
