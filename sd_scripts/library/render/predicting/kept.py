"""What is kept from call to call: tensors by key, within a limit of bytes, the least used going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor


class Kept:
    """Tensors by key. One that is larger than the whole limit is given out and not kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._tensors: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of this key; made and kept when it is not there."""
        if key in self._tensors:
            self._tensors.move_to_end(key)
            return self._tensors[key]
        made = self._tensors[key] = make()
        while self.num_bytes > self.max_bytes:
            self._tensors.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forgets everything."""
        self._tensors.clear()
