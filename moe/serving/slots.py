"""The cache of a batch whose rows begin and end at different times.

Every row is a request. All rows write their next key into the same column, so a row that begins
later is like one with padding on its left, which every model of transformers can mask. Columns
before the oldest row's first one are not read.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

_FIRST_COLUMNS = 64
"""Columns allocated at first; doubled when they are full."""


class _Columns:
    """Rows in use and columns [first, end) that their self-attention reads; shared by all layers."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.first = 0
        self.end = 0


class _SelfLayer(CacheLayerMixin):
    """Self-attention keys and values <float>[rows, H, columns, d] of one layer."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, columns: _Columns) -> None:
        super().__init__()
        self.keys: Any = keys
        self.values: Any = values
        self.columns = columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the layer is allocated at once."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one column <float>[N, H, 1, d] and returns what is read <float>[N, H, keys, d]."""
        N, first, end = self.columns.num_rows, self.columns.first, self.columns.end
        self.keys[:N, :, end] = key_states[:, :, 0]
        self.values[:N, :, end] = value_states[:, :, 0]
        return self.keys[:N, :, first : end + 1], self.values[:N, :, first : end + 1]

    def get_seq_length(self) -> int:
        """Returns the number of columns that are read, without the next one."""
        return self.columns.end - self.columns.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys of a call, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: there is no maximum."""
        return -1


class Slots:
    """Keys and values of the rows in use, which are always the first ones.

    Attributes:
        cache: Cache that the model reads, and extends by one column in each step.
        memory_length: Largest number of encoder tokens in a row.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.device = device
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.memory_length = 0
        self._columns = _Columns()
        self._begins: list[int] = []  # first column of each row
        self._lengths: list[int] = []  # encoder tokens of each row
        self._begin_of_row = torch.zeros(0)
        self._cross_mask: Tensor | None = None
        self._self: list[_SelfLayer] = []
        self._cross: list[tuple[Tensor, Tensor]] = []  # <float>[rows, H, M, d]

    def positions(self) -> Tensor:
        """Returns the position of each row's next token <int64>[N, 1], counted from its first."""
        return self._columns.end - self._begin_of_row

    def self_mask(self) -> Tensor | None:
        """Returns which keys each row sees <bool>[N, keys], the next one included; None for all."""
        first, end = self._columns.first, self._columns.end
        if max(self._begins) == first:
            return None
        return torch.arange(first, end + 1, device=self.device) >= self._begin_of_row

    def cross_mask(self) -> Tensor | None:
        """Returns which encoder tokens each row sees <bool>[N, M]; None for all."""
        return self._cross_mask

    def advance(self) -> None:
        """Counts the column that the model has written, and makes room for the next one."""
        self._columns.end += 1
        self._make_room()

    def add(self, cache: EncoderDecoderCache, lengths: list[int]) -> None:
        """Adds rows after the others.

        Args:
            cache: Keys and values of R new rows, which have equal numbers of tokens so far.
            lengths: R numbers of encoder tokens; the keys are padded to the largest on the right.
        """
        new_self: list[Any] = cache.self_attention_cache.layers
        new_cross: list[Any] = cache.cross_attention_cache.layers
        num_tokens = new_self[0].keys.shape[2]
        memory_length = new_cross[0].keys.shape[2]

        # The new rows end in the same column as the others.
        columns = self._columns
        if not self._self:
            self._allocate(new_self, new_cross)
        if columns.num_rows == 0:
            columns.first = columns.end = 0
        columns.end = max(columns.end, num_tokens)
        self._make_room()
        begin = columns.end - num_tokens
        rows = slice(columns.num_rows, columns.num_rows + len(lengths))
        for layer, new in zip(self._self, new_self, strict=True):
            layer.keys[rows, :, begin : columns.end] = new.keys
            layer.values[rows, :, begin : columns.end] = new.values

        for index, new in enumerate(new_cross):
            keys, values = (_widened(kept, memory_length) for kept in self._cross[index])
            keys[rows, :, :memory_length] = new.keys
            values[rows, :, :memory_length] = new.values
            self._cross[index] = (keys, values)

        self._begins += [begin] * len(lengths)
        self._lengths += lengths
        self._show_rows()

    def remove(self, rows: list[int]) -> None:
        """Ends rows; the last rows take their places, so the order of the others changes.

        Args:
            rows: Rows in use, in descending order.
        """
        end = self._columns.end
        for row in rows:
            last = len(self._begins) - 1
            begin, length = self._begins.pop(), self._lengths.pop()
            if row == last:
                continue
            for layer in self._self:
                layer.keys[row, :, begin:end] = layer.keys[last, :, begin:end]
                layer.values[row, :, begin:end] = layer.values[last, :, begin:end]
            for keys, values in self._cross:
                keys[row, :, :length] = keys[last, :, :length]
                values[row, :, :length] = values[last, :, :length]
            self._begins[row] = begin
            self._lengths[row] = length
        self._show_rows()

    def _allocate(self, new_self: list[Any], new_cross: list[Any]) -> None:
        """Allocates layers like those of new rows. Masked keys are read, so they must be finite."""
        for new in new_self:
            _, heads, _, width = new.keys.shape
            shape = (self.max_rows, heads, _FIRST_COLUMNS, width)
            layer = _SelfLayer(
                new.keys.new_zeros(shape), new.values.new_zeros(shape), self._columns
            )
            self._self.append(layer)
        self.cache.self_attention_cache.layers.extend(self._self)

        for index, new in enumerate(new_cross):
            _, heads, _, width = new.keys.shape
            shape = (self.max_rows, heads, 0, width)
            self._cross.append((new.keys.new_zeros(shape), new.values.new_zeros(shape)))
            self.cache.cross_attention_cache.layers.append(DynamicLayer())
            self.cache.is_updated[index] = True

    def _make_room(self) -> None:
        """Moves the columns that are read to the front, or allocates more, when the last is used."""
        columns = self._columns
        while columns.end >= self._self[0].keys.shape[2]:
            first = columns.first
            if first < columns.end // 2:
                for layer in self._self:
                    layer.keys = _widened(layer.keys, 2 * columns.end)
                    layer.values = _widened(layer.values, 2 * columns.end)
                continue
            for layer in self._self:
                for kept in (layer.keys, layer.values):
                    kept[:, :, : columns.end - first] = kept[:, :, first : columns.end].clone()
            self._begins = [begin - first for begin in self._begins]
            columns.end -= first
            self._show_rows()

    def _show_rows(self) -> None:
        """Gives the model the rows in use."""
        N = self._columns.num_rows = len(self._begins)
        if N == 0:
            return
        self._columns.first = min(self._begins)
        self._begin_of_row = torch.tensor(self._begins, device=self.device)[:, None]  # [N, 1]

        M = self.memory_length = max(self._lengths)
        self._cross_mask = None
        if min(self._lengths) < M:
            lengths = torch.tensor(self._lengths, device=self.device)[:, None]
            self._cross_mask = torch.arange(M, device=self.device) < lengths  # [N, M]

        layers: list[Any] = self.cache.cross_attention_cache.layers
        for layer, (keys, values) in zip(layers, self._cross, strict=True):
            layer.keys = keys[:N, :, :M]
            layer.values = values[:N, :, :M]
            layer.is_initialized = True


def _widened(kept: Tensor, columns: int) -> Tensor:
    """Returns <float>[rows, H, at least `columns`, d] with the same values, then zeros."""
    if kept.shape[2] >= columns:
        return kept
    rows, heads, _, width = kept.shape
    wide = kept.new_zeros(rows, heads, columns, width)
    wide[:, :, : kept.shape[2]] = kept
    return wide
