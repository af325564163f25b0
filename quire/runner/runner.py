"""ModelRunner: StepPlan -> tensors -> model -> StepResult. Orchestration only, and no decisions.

One forward serves any mix of prompt chunks and decodes. Its last layer computes only the rows that
somebody reads (`tail.py`). On CUDA, steps of not too many tokens replay captured graphs: of
decodes with or without drafts, of one prompt, or of both (`graphs.py`, `prompt_graphs.py`,
`mixed_graphs.py`; `captured.py` has what they capture). `execute`
returns a pending result and does not wait for the device. The one exception is grammars
(`masks.py`): they wait for the previous step's tokens while the device runs this step's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, prompt_planner
from quire.forward import Batch, ForwardContext, StateReads, Taps
from quire.grammar.live import LiveMatchers
from quire.lora.bank import AdapterBank
from quire.memory.pool import PagePool
from quire.memory.transfer import Transfer
from quire.models.decoder import Decoder
from quire.native.urge import GivenUp, Urge
from quire.runner import rows as bits
from quire.runner.adapted import adapted_of, recorded_of
from quire.runner.balancer import Balancer
from quire.runner.captured import decoded, mixed_queries, prompt_logits
from quire.runner.drafts import Drafter, drafts_of
from quire.runner.gather import StepShape, decode_batches, ragged_batches
from quire.runner.graphs import GraphCache
from quire.runner.home_pages import HomePages, HomeRows
from quire.runner.joint_graphs import graph_memory
from quire.runner.masks import GrammarMasks, StepMask
from quire.runner.mixed_graphs import MixedGraphs, MixedSize, Queries
from quire.runner.pending import Draw, GivenUpStep, PendingStep
from quire.runner.pooling import Pools
from quire.runner.prompt_graphs import PromptGraphs
from quire.runner.prompt_parts import PromptReader, prompt_parts, prompt_score
from quire.runner.rows import RequestRows
from quire.runner.sampling import sample_inputs
from quire.runner.span import Span
from quire.runner.states import Forwarded, Launched, Replayed, StepRead, StepStates
from quire.runner.step_forms import form_of
from quire.runner.tail import min_dropped, tail_of
from quire.runner.tapes import Tapes
from quire.runner.tree_rest import settle
from quire.runner.trees import Nodes
from quire.runner.upload import IntArray, Uploader
from quire.sample.inputs import TokenMask
from quire.sample.ops import sample_ops_of
from quire.sample.sampler import Sampler
from quire.step import Pending, StepForm, StepPlan, Work

if TYPE_CHECKING:  # CPU installs need no triton
    from quire.runner.adapted_graphs import AdaptedGraphs


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        spec: AttnSpec,
        pool: PagePool,
        rows: RequestRows,
        use_graphs: bool,
        expand_prompts: bool = False,
    ) -> None:
        """`expand_prompts`: latent attention takes its expanded form for prompts, which is faster
        for long ones; only without a prefix cache (see `attn/latent_forms.py`)."""
        self.expand_prompts = expand_prompts
        self.model, self.backend, self.spec = model, backend, spec
        self.pool, self.rows, self.by_node = pool, rows, backend.caps.by_node
        self.group_specs = [replace(spec, window=window) for window in pool.groups.windows]
        self.sampler = Sampler(sample_ops_of(model.device))
        self.uploader = Uploader(model.device)
        self.matchers = LiveMatchers()  # filled by the engine, for requests with a grammar
        self.masks = GrammarMasks(self.matchers, model.spec.vocab_size, self.uploader)
        self.pools = Pools(rows, model.classify)
        self.min_dropped = min_dropped(model.device)  # rows, for a step to have a tail
        self.tapes: Tapes | None = None  # on a CPU; set by the engine
        self.urge: Urge | None = None  # likewise, where steps of the background may be given up
        self.prompt_reader: PromptReader | None = None  # takes the place of prompt logprobs
        self.drafter: Drafter | None = None  # likewise, where a model makes drafts
        self.state_reads: StateReads | None = None  # what the drafter reads of steps; likewise
        self.adapters: AdapterBank | None = None  # likewise, where adapters can be added
        self.adapted_graphs: AdaptedGraphs | None = None  # likewise, where they are on a GPU
        self.transfer: Transfer | None = None  # likewise, where pages are kept elsewhere too
        self.balancer: Balancer | None = None  # likewise, where experts have second homes
        self.is_timed = False  # whether results say how long the device was at them; likewise
        self.homes: HomePages | None = None  # where ranks have requests of their own
        if model.ranks.has_homes:
            self.homes = HomePages(model.ranks, pool.num_pages)
        self.graphs: GraphCache | None = None
        if use_graphs:
            sizes = rows.max_rows, rows.max_len, rows.max_rows
            memory = graph_memory(model.ranks, model.device)
            self.graphs = GraphCache(partial(decoded, self), *sizes, memory)
        self.prompt_graphs: PromptGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        if self.graphs is not None and backend.caps.prompt_graphs:
            fewest = prompt_planner(backend).fewest_tokens(spec)
            self.prompt_graphs = PromptGraphs(partial(prompt_logits, self), self.graphs, fewest)
            mixed = partial(mixed_queries, self)
            self.mixed_graphs = MixedGraphs(mixed, self.graphs, model.spec.num_active_params)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        span = Span() if self.is_timed and plan.works else None
        try:
            launched = self._launch(plan)
        except GivenUp:
            self.admit(plan)
            return GivenUpStep()
        return PendingStep(()) if launched is None else self._conclude(launched, span)

    def _launch(self, plan: StepPlan) -> Launched | None:
        """Up to the forward; None: nobody feeds anything."""
        plan = plan if self.homes is None else self.homes.own_part(plan)
        shape, sent = self._prepare(plan)
        if shape is None:
            self.admit(plan)
            return None
        drafts = self._make_drafts(plan, sent)
        if drafts is None and "trees" in sent:
            drafts = drafts_of(self.rows, sent)
        made: Tensor | Replayed | Callable[[], Forwarded]
        if self.graphs is not None and shape.is_padded_decode:
            made = self._replayed(plan, shape, sent)
        elif self.prompt_graphs is not None and "tiles" in sent:
            made = self.prompt_graphs.replay(sent, int(shape.context_lens[0]))
        else:
            made = self._forward(plan, shape, sent)
        return Launched(plan, shape, sent, drafts, made)

    def _conclude(self, launched: Launched, span: Span | None = None) -> PendingStep:
        """What is drawn and read of a step."""
        plan, shape, sent, drafts, logits = launched
        read: StepRead | None = None
        states: StepStates | None = None
        if isinstance(logits, Replayed):
            logits, states = logits
        elif not isinstance(logits, Tensor):
            read = self._read(plan, shape, sent, logits())
            logits, states = self.model.logits(read.sampled), read.states
        # What only sampling reads goes up while the device runs the forward.
        self.admit(plan)
        draw = self._draw(plan, shape, sent, logits) if len(shape.sampled) else None
        if draw is not None and drafts is not None:
            draw = draw._replace(drafts=drafts)
        prompts, pooled = ((), ()) if read is None else (read.prompts, read.pooled)
        pending = PendingStep(plan.works, draw, prompts, pooled, span)
        if shape.trees is not None and states is not None:
            rest = settle(pending, sent, self.rows, self.pool, self.spec.page_size)
            self._keep(rest.works, rest.shape(self.rows), rest.of(states))
        if draw is not None and draw.mask is not None:
            self.masks.remember(draw.mask, pending)
        return pending

    def admit(self, plan: StepPlan) -> None:
        self.rows.set_wishes(plan.admissions, self.uploader)
        self.masks.admit(plan.admissions)

    # ------------------------------------------------------------ inputs

    def _prepare(self, plan: StepPlan) -> tuple[StepShape | None, dict[str, Tensor]]:
        """All that comes before the forward."""
        staging, transfer = self._stage, self.transfer
        return staging(plan) if transfer is None else transfer.around(plan, staging)

    def _stage(self, plan: StepPlan) -> tuple[StepShape | None, dict[str, Tensor]]:
        """Apply the plan's edits to rows and pool, and bring its lengths to the device."""
        arrays: dict[str, IntArray] = {}
        shape = None
        if plan.works:
            form = form_of(self, plan) if plan.form is None else plan.form
            shape = self._shape(plan, form, arrays)
        self.rows.stage(plan, arrays)
        if plan.page_copies:
            pairs = np.asarray(plan.page_copies, dtype=np.int32)
            arrays["copy_from"], arrays["copy_to"] = pairs[:, 0], pairs[:, 1]
        if not arrays:
            return shape, {}
        sent = self.uploader.send(arrays)
        self.rows.apply(plan, sent)
        if plan.page_copies:
            copies = (sent["copy_from"].long(), sent["copy_to"].long())
            self.pool.copy(*copies)
            if self.drafter is not None:
                self.drafter.copy_pages(*copies)
        return shape, sent

    def _make_drafts(self, plan: StepPlan, sent: dict[str, Tensor]) -> Tensor | None:
        """Drafts that the plan leaves to the runner go into the rows; returns those of all samples.

        The draw writes over them."""
        if self.drafter is None:
            return None
        self.drafter.begin(plan)
        works = [work for work in plan.works if work.num_drafts and not work.drafts]
        if not works:
            return None
        self.drafter.fill(works)
        return drafts_of(self.rows, sent)

    def _shape(self, plan: StepPlan, form: StepForm, arrays: dict[str, IntArray]) -> StepShape:
        """Add a step's lengths to its upload, padded as its form wants it."""
        works, spare, by_node = plan.works, self.rows.max_rows, self.by_node
        if form.kind == "decodes":
            shape = StepShape(works, spare, form.num_tokens, by_node=by_node)
        elif form.kind == "prompt":
            shape = StepShape(works, spare, pad_tokens=form.num_tokens)
        elif form.kind == "mixed":
            size = MixedSize(form.num_tokens, form.num_singles)
            shape = StepShape(works, spare, mixed_size=size, by_node=by_node)
            arrays["mixed_tiles"] = prompt_planner(self.backend).mixed_tiles(
                shape.query_lens, shape.context_lens, size.num_singles, size.most_prompts, self.spec
            )
        else:
            shape = StepShape(works, spare, by_node=by_node)
        shape.stage(arrays)
        if form.kind == "prompt":
            lens = (shape.query_lens, shape.context_lens, form.num_tokens)
            arrays["tiles"] = prompt_planner(self.backend).prompt_tiles(*lens, self.spec)
        return shape

    def batches(self, shape: StepShape, sent: dict[str, Tensor]) -> tuple[Batch, ...]:
        rows, size = self.rows, self.spec.page_size
        if shape.is_decode:
            lens = shape.context_lens
            batches = decode_batches(rows, sent["rows"], sent["positions"], size, lens)
        else:
            batches = ragged_batches(rows, shape, sent, size)
        if not self.expand_prompts:
            return batches
        prompts = np.asarray([rows.num_prompt(row) for row in shape.sequences().rows], np.int32)
        return tuple(replace(batch, host_prompt_lens=prompts) for batch in batches)

    # ------------------------------------------------------------ forward

    def _replayed(
        self, plan: StepPlan, shape: StepShape, sent: dict[str, Tensor]
    ) -> Tensor | Replayed:
        """Logits of the samples of a step of few tokens; with trees its states, to be kept when
        they are walked."""
        assert self.graphs is not None
        longest, num = int(shape.context_lens.max()), plan.num_tokens
        at = sent["rows"], sent["positions"]
        graphs = self.graphs if self.adapted_graphs is None else self.adapted_graphs.of(shape)
        logits, hidden, streams = graphs.replay(*at, longest, plan.shares_prefix, Nodes.of(sent))
        logits, hidden = logits[:num], hidden[:num]
        index = sent["sample_index"]
        is_whole = len(index) == num  # else someone fed a prompt's last-but-one token
        logits = logits if is_whole else logits[index]
        if self.drafter is None and shape.trees is None:
            return logits
        states = StepStates(streams, hidden, hidden if is_whole else hidden[index])
        if shape.trees is not None:
            return Replayed(logits, states)
        self._keep(plan.works, shape, states)
        return logits

    def _forward(
        self, plan: StepPlan, shape: StepShape, sent: dict[str, Tensor]
    ) -> Callable[[], Forwarded]:
        """Begins it; call the result to have its states."""
        states = (self._by_layer if self.tapes is None else self._on_tape)(plan, shape, sent)
        return lambda: states

    def _on_tape(self, plan: StepPlan, shape: StepShape, sent: dict[str, Tensor]) -> Forwarded:
        assert self.tapes is not None
        has_tail = self.has_tail(plan, shape)
        adapted = recorded_of(self.adapters, self.rows, shape)
        batches, own = self.batches(shape, sent), self.home_rows(shape)
        stop = self.urge.address if self.urge is not None and plan.is_background else 0
        (hidden,) = self.tapes.run(batches, sent, has_tail, adapted, own=own, stop=stop)
        return Forwarded(hidden, self.tapes.streams(shape.num_tokens), has_tail)

    def _by_layer(self, plan: StepPlan, shape: StepShape, sent: dict[str, Tensor]) -> Forwarded:
        ctx, q, residual = self._queries(shape, sent)
        tail = tail_of(self, shape, sent, ctx.batch) if self.has_tail(plan, shape) else None
        hidden = self.model.read_out(q, residual, ctx, tail)
        return Forwarded(hidden, ctx.taps.taken() if ctx.taps else (), tail is not None)

    def _read(
        self, plan: StepPlan, shape: StepShape, sent: dict[str, Tensor], states: Forwarded
    ) -> StepRead:
        """All that is read of a step's hidden states, but for the draw."""
        made = StepRead(states.hidden)
        every = None if states.has_tail else states.hidden
        if every is not None:
            if self.rows.reads_hidden(plan.works):
                asked = (plan.works, shape, self.rows, every)
                score = prompt_score(self.model.logits, self.sampler.ops.best)
                prompts = prompt_parts(*asked, score, self.prompt_reader)
                made = StepRead(every, prompts, self.pools.take(shape, every))
            if self.tapes is None or len(shape.sampled) < shape.num_tokens:
                made = made._replace(sampled=every[sent["sample_index"]])
        seen = StepStates(states.streams, every, made.sampled)
        if shape.trees is None:
            self._keep(plan.works, shape, seen)
        return made._replace(states=seen)

    def _keep(self, works: tuple[Work, ...], shape: StepShape, states: StepStates) -> None:
        if self.drafter is not None and self._reads(works) is not None:
            self.drafter.keep(works, shape, states)

    def give_prompts(self, reader: PromptReader | None) -> None:
        """From now on hidden states of prompts whose logprobs are asked for go there instead."""
        self.prompt_reader = reader

    def hand_over(self, reads: StateReads) -> None:
        """These hidden states are read of every step whose requests may draft."""
        self.state_reads = reads
        self.prompt_graphs = None  # hidden states stay inside of them

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose input the drafter reads."""
        return () if self.state_reads is None else self.state_reads.layers

    def _reads(self, works: Sequence[Work]) -> StateReads | None:
        may = any(work.is_read and self.rows.may_draft(work.row) for work in works)
        return self.state_reads if may else None

    def has_tail(self, plan: StepPlan, shape: StepShape) -> bool:
        num_dropped = shape.num_tokens - len(shape.sampled)
        if num_dropped < self.min_dropped or self.rows.reads_hidden(plan.works):
            return False
        if shape.trees is not None and self.tapes is None:
            return False  # a tail's own plan knows no paths
        reads = self._reads(plan.works)
        return reads is None or reads.leaves_tail(self.model.spec.num_layers)

    def planned(self, batches: tuple[Batch, ...], max_context: int | None = None) -> ForwardContext:
        plans = tuple(
            self.backend.plan(batch, spec, max_context)
            for batch, spec in zip(batches, self.group_specs, strict=True)
        )
        taps = Taps(self.taps) if self.taps else None
        return ForwardContext(batches[0], self.backend, plans, self.pool, taps)

    def _queries(self, shape: StepShape, sent: dict[str, Tensor]) -> Queries:
        """The step up to its last layer's attention."""
        if shape.mixed_size is not None:
            assert self.mixed_graphs is not None
            return self.mixed_graphs.replay(sent, shape.mixed_size)
        adapted = adapted_of(self.adapters, self.rows, shape)
        batches, own = self.batches(shape, sent), self.home_rows(shape)
        if own is None:
            ctx = replace(self.planned(batches), adapted=adapted)
        else:
            ctx = self.planned(tuple(map(own.batch, batches)))
            ctx = replace(ctx, batch=batches[0], adapted=adapted, homes=own.tokens)
        return Queries(ctx, *self.model.queries(ctx))

    def home_rows(self, shape: StepShape) -> HomeRows | None:
        """Which rows of a step are ours; None: all."""
        return None if self.homes is None else self.homes.of(shape, self.rows.homes[shape.rows])

    # ------------------------------------------------------------ outputs

    def _draw(
        self, plan: StepPlan, shape: StepShape, sent: dict[str, Tensor], logits: Tensor
    ) -> Draw:
        row_ids = shape.rows[shape.sampled]
        mask: TokenMask | None = None
        judge: StepMask | None = None
        if np.bitwise_or.reduce(self.rows.needs[row_ids]) & bits.GRAMMAR:
            mask, judge = self.masks.make(self.rows, plan.works, shape)
        inputs = sample_inputs(self.rows, shape, sent, self.uploader, mask)
        # Stored in the rows as well: the next step need not wait until the host has seen them.
        drawn = self.sampler(logits, inputs)
        nums: list[int | None] = []
        if drawn.logprobs is not None:
            infos = [self.rows.info[row] for row in row_ids]
            nums = [info.params.logprobs if info else None for info in infos]
        return Draw(shape.sampled.tolist(), drawn, nums, judge)
