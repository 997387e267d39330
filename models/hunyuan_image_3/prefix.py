"""Keys and values of token prefixes, kept between steps and prompts, and taken over from text generation.

A picture's prefix (everything before its ``<timestep>``) is computed in the prefill phase, where each rank owns the KV heads of its micro shard. With
Ulysses these are the heads it attends with in denoise, so the same cache goes on; otherwise the missing heads of the shard are fetched from the
replica partners once. In plan ``replicated`` it owns all heads of its shard, and denoise goes on with those of them that it needs.
Every decision here depends only on what all ranks know, so ranks never disagree about what to compute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...parallel.collectives import PhaseView
from .kv_cache import KVCache
from .model import HunyuanImage3Model, ReferenceFeatures
from .token_row import TokenRow

# A guided batch needs two rows; two more keep the previous prompt, so that going back to it costs nothing.
MAX_ROWS = 4


@dataclass
class TextRecord:
    """What text generation left behind: tokens whose K/V are in ``cache`` (prefill-phase heads)."""

    tokens: tuple[int, ...]
    features: tuple[str, ...]
    cache: KVCache
    adopted: bool = False


@dataclass(frozen=True)
class PrefixRecord:
    """A prefix ready for denoise. ``cache`` is None on ranks whose guidance branch does not need it."""

    cache: KVCache | None
    branches: frozenset[int]
    reused: int


class PrefixStore:
    """Prefixes of one rank. ``reuse_text`` False always computes the prefix again (an ablation, and a check of the reuse)."""

    def __init__(self, model: HunyuanImage3Model, *, reuse_text: bool = True):
        self._model = model
        self.reuse_text = reuse_text
        self._rows: OrderedDict[str, PrefixRecord] = OrderedDict()
        self._text: TextRecord | None = None

    def clear(self) -> None:
        self._rows.clear()
        self._text = None

    @property
    def nbytes(self) -> int:
        caches = {id(r.cache): r.cache for r in self._rows.values() if r.cache is not None}
        if self._text is not None:
            caches[id(self._text.cache)] = self._text.cache
        return sum(cache.nbytes for cache in caches.values())

    def keeps(self, cache: KVCache) -> bool:
        """Whether a prefix in ``cache`` is kept."""
        return any(record.cache is cache for record in self._rows.values())

    def remember_text(self, tokens: Sequence[int], features: Sequence[ReferenceFeatures], cache: KVCache) -> None:
        """Offer the K/V of a generated row; ``tokens`` are exactly those whose K/V are present."""
        self._text = TextRecord(tuple(tokens), tuple(f.digest for f in features), cache)

    def prepare(self, row: TokenRow, features: Sequence[ReferenceFeatures], branches: frozenset[int]) -> PrefixRecord:
        """The prefix of ``row`` for the guidance branches that need it; computed unless it is kept."""
        key = self._key(row, features)
        record = self._rows.get(key)
        if record is None or not branches <= record.branches:
            record = self._compute(row, features, branches)
            self._rows[key] = record
        self._rows.move_to_end(key)
        while len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)
        return record

    def known_tokens(self, row: TokenRow, features: Sequence[ReferenceFeatures]) -> int:
        """How many tokens of the row's prefix need no computing now: all of a kept prefix, or those that text generation has left."""
        if self._key(row, features) in self._rows:
            return row.prefix_length
        return self._shared_with_text(row, features)

    def _shared_with_text(self, row: TokenRow, features: Sequence[ReferenceFeatures]) -> int:
        """Length of the row's beginning whose K/V text generation has left.

        The row is tokenized again from the text, so it may part from the generated tokens somewhere; an edited text does, and an unconditional
        row behind the pictures. Pictures attend in both directions, so all of them are shared or nothing is.
        """
        text = self._text
        if not self.reuse_text or text is None or tuple(f.digest for f in features) != text.features:
            return 0
        pairs = zip(text.tokens, row.tokens[: row.prefix_length], strict=False)
        shared = next((i for i, (kept, wanted) in enumerate(pairs) if kept != wanted), min(len(text.tokens), row.prefix_length))
        return shared if all(span.vit[1] <= shared for span in row.cond) else 0

    def _compute(self, row: TokenRow, features: Sequence[ReferenceFeatures], branches: frozenset[int]) -> PrefixRecord:
        model, prefix = self._model, row.prefix_length
        cache, reused = self._start(row, features)
        if reused < prefix:
            model.prefill(row, reused, prefix, cache, features)
        had, needed = model.plan.ar_parts(), model.plan.denoise_parts()
        if needed == had:
            return PrefixRecord(cache, branches, reused)
        if set(needed) <= set(had):
            return PrefixRecord(self._take_heads(cache, row), branches, reused)
        return PrefixRecord(self._fetch_heads(cache, row, branches), branches, reused)

    def _start(self, row: TokenRow, features: Sequence[ReferenceFeatures]) -> tuple[KVCache, int]:
        """A cache for the whole row and how many of its leading positions already hold K/V.

        A row that begins with all of the text goes on in the text's own cache, the first one of them; others copy what they share, since a row
        writes its own tokens and its picture behind the shared part.
        """
        text, capacity, shared = self._text, row.gen.image[1], self._shared_with_text(row, features)
        if text is None or shared == 0:
            return self._model.new_cache(capacity, "prefill"), 0
        if shared == len(text.tokens) and not text.adopted and text.cache.capacity >= capacity:
            text.adopted = True
            text.cache.length = shared
            return text.cache, shared
        cache = self._model.new_cache(capacity, "prefill")
        cache.copy_prefix(text.cache, shared)
        return cache, shared

    def _take_heads(self, cache: KVCache, row: TokenRow) -> KVCache:
        """Those heads of ``cache`` that denoise needs; nothing has to come from another rank."""
        plan, prefix = self._model.plan, row.prefix_length
        width = cache.k.shape[2] // len(plan.ar_parts())
        first, last = plan.denoise_parts()[0] * width, (plan.denoise_parts()[-1] + 1) * width
        part = self._model.new_cache(row.gen.image[1], "denoise")
        part.copy_prefix(KVCache(cache.k[:, :, first:last], cache.v[:, :, first:last]), prefix)
        return part

    def _fetch_heads(self, cache: KVCache, row: TokenRow, branches: frozenset[int]) -> KVCache | None:
        """The heads of all needed micro shards side by side; every replica takes part, the branches that need the row keep it."""
        model, prefix = self._model, row.prefix_length
        view: PhaseView = model.comm.phase("denoise")
        keep = view.topology.cfg_rank in branches
        whole = model.new_cache(row.gen.image[1], "denoise") if keep else None
        micros = model.plan.denoise_parts()
        layers = model.config.num_hidden_layers
        heads = cache.k.shape[2]
        with view.forward({"kv_gather": 2 * layers}, "prefix heads"):
            for layer in range(layers):
                for name in ("k", "v"):
                    parts = view.replica_kv_gather(getattr(cache, name)[layer, :prefix], f"prefix.{layer}.{name}")
                    if whole is not None:
                        for place, micro in enumerate(micros):
                            getattr(whole, name)[layer, :prefix, place * heads : (place + 1) * heads] = parts[micro]
        if whole is not None:
            whole.length = prefix
        return whole

    def _key(self, row: TokenRow, features: Sequence[ReferenceFeatures]) -> str:
        """The topology of denoise too: it decides which heads a rank has of a prefix, and which ranks have it at all."""
        return "|".join([self._model.plan.describe_denoise(), row.digest(), *(f.digest for f in features)])
