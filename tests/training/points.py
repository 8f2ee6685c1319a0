"""A batch of points on a line, for workloads that are not texts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Points:
    values: Tensor

    @property
    def tokens(self) -> int:
        return len(self.values)

    @property
    def counts(self) -> dict[str, int]:
        return {"square": len(self.values)}

    def to(self, device) -> Points:
        return Points(self.values.to(device))
