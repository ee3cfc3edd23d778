"""Symmetric cross-entropy (Wang et al. 2019, arXiv:1908.06112)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SCE:
    """a · cross-entropy + b · reverse cross-entropy, with log 0 = −4 for the label."""

    a: float = 0.1
    b: float = 1.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(B, C) logits and (B, C) label distributions -> (B,) losses."""
        log_p = logits.log_softmax(dim=1)
        forward = -(targets * log_p).sum(dim=1)
        reverse = -(log_p.exp() * targets.log().clamp(min=-4)).sum(dim=1)
        return self.a * forward + self.b * reverse
