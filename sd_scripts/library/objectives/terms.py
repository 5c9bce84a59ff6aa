"""Further terms of the flow-matching loss, each one number a sample: (B,), float32, 0 where prediction and truth agree.

e = v - v* is the velocity's error; the predicted clean latent is x0 - sigma e, exactly, on the straight path. Means are over the elements
of a sample times its mask, as the distance's are; what a mask leaves black has no influence at all. Every term has a finite gradient
everywhere, at e = 0 too.

Shapes: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.schema.anchored_flow import AnchoredFlowOptions

COLOUR_TERMS = ("lambda_struct", "lambda_light", "lambda_color", "lambda_tex")
"""Terms on luminance and colour, which need a map from latents to them."""
MOST_SIGMA = 0.5
"""Colour terms are 0 at noisier levels: there a predicted image is a blur, whose light and structure nobody wants."""
TINY = 1e-12
"""Below this a norm or variance counts as 0 and gets no gradient."""


@dataclass(frozen=True)
class Compared:
    """What the terms compare, float32."""

    velocity: Tensor
    """(B, C, h, w) predicted."""
    target: Tensor
    """(B, C, h, w) v* = noise - x0."""
    x0: Tensor
    """(B, C, h, w)"""
    sigma: Tensor
    """(B, 1, 1, 1)"""
    mask: Tensor
    """(B, 1, h, w), not negative; ones where nothing is masked."""

    @property
    def error(self) -> Tensor:
        """e."""
        return self.velocity - self.target

    @property
    def predicted_x0(self) -> Tensor:
        """x0 - sigma e."""
        return self.x0 - self.sigma * self.error


Term = Callable[[Compared], Tensor]


def terms_of(options: AnchoredFlowOptions, colours: Tensor | None) -> dict[str, Term]:
    """All terms by the names of their weights; those on colours only with a map (3, C) from latents to luminance and two colours."""
    factor, magnitude = options.downsample_factor, options.lf_magnitude_weight
    terms: dict[str, Term] = {
        "lambda_cosine": cosine,
        "lambda_fft": spectrum,
        "alpha_hf": lambda seen: fine_error(seen, factor),
        "beta_lf": lambda seen: coarse_difference(seen, factor, magnitude),
    }
    if colours is not None:
        of = colours
        terms |= {
            "lambda_struct": lambda seen: _calm(seen) * structure(seen, of),
            "lambda_light": lambda seen: _calm(seen) * moments(seen, of[:1]),
            "lambda_color": lambda seen: _calm(seen) * moments(seen, of[1:]),
            "lambda_tex": lambda seen: _calm(seen) * texture(seen, of, factor),
        }
    return terms


def cosine(seen: Compared) -> Tensor:
    """1 - cos(v, v*) of all elements of a sample."""
    return cosine_distance(seen.velocity, seen.target, seen.mask)


def spectrum(seen: Compared) -> Tensor:
    """Mean modulus of the error's spectrum at high frequencies: sum of M |F(e)| / (C sum of M), by channel, so that phase counts too.

    F is the orthonormal two-dimensional transform, M = sigmoid(12 (r - 1/4)) a smooth high pass at r, the radius of a frequency (in
    cycles a latent pixel, on the grid of fftfreq) divided by that of the highest, sqrt(1/2).
    """
    channels, height, width = seen.error.shape[1:]
    passed = high_pass(height, width).to(seen.error.device)
    modulus = torch.fft.fft2(seen.error * seen.mask, norm="ortho").abs()
    return (modulus * passed).sum(dim=(1, 2, 3)) / (channels * passed.sum())


def high_pass(height: int, width: int) -> Tensor:
    """M (h, w) of `spectrum`, float32."""
    down, across = torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)[None, :]
    return torch.sigmoid(12 * ((down**2 + across**2).sqrt() / 0.5**0.5 - 0.25))


def fine_error(seen: Compared, factor: int) -> Tensor:
    """Mean |e - coarse(e)|; as the high pass is linear, this is that of the clean latent divided by sigma."""
    return _mean(without_coarse(seen.error, seen.mask, factor).abs() * seen.mask)


def coarse_difference(seen: Compared, factor: int, magnitude_weight: float) -> Tensor:
    """1 - cos of the coarse parts of the predicted and the true clean latent, plus magnitude_weight times the squared difference of their
    norms, as root mean squares so that the size of the image does not matter."""
    predicted, area = coarse(seen.predicted_x0, seen.mask, factor)
    true, _ = coarse(seen.x0, seen.mask, factor)
    found = cosine_distance(predicted, true, area)
    if magnitude_weight:
        found = found + magnitude_weight * (_root_mean_square(predicted, area) - _root_mean_square(true, area)).square()
    return found


def structure(seen: Compared, colours: Tensor) -> Tensor:
    """1 - cos between the luminances of the predicted and the true image, each without its mean."""
    predicted, true = mapped(seen.predicted_x0, colours[:1]), mapped(seen.x0, colours[:1])
    return cosine_distance(predicted - _masked_mean(predicted, seen.mask), true - _masked_mean(true, seen.mask), seen.mask)


def moments(seen: Compared, colours: Tensor) -> Tensor:
    """|difference of means| + |difference of deviations|, averaged over the channels of `colours` (K, C)."""
    predicted, true = mapped(seen.predicted_x0, colours), mapped(seen.x0, colours)
    means = (_masked_mean(predicted, seen.mask) - _masked_mean(true, seen.mask)).abs()
    deviations = (_deviation(predicted, seen.mask) - _deviation(true, seen.mask)).abs()
    return (means + deviations).mean(dim=(1, 2, 3))


def texture(seen: Compared, colours: Tensor, factor: int) -> Tensor:
    """Mean |fine structure of the predicted luminance - that of the true one|."""
    difference = mapped(seen.predicted_x0 - seen.x0, colours[:1])
    return _mean(without_coarse(difference, seen.mask, factor).abs() * seen.mask)


# What they are made of.


def cosine_distance(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """1 - cos of a and b (B, C, h, w), each element weighted by weights (B, 1, h, w); 0 and 1/2 where both, or one, is 0.

    Computed as half the squared distance between the unit vectors, which keeps small angles that 1 - cos would lose in float32.
    """
    return (weights * (a / _norm(a, weights) - b / _norm(b, weights)).square()).sum(dim=(1, 2, 3)) / 2


def coarse(x: Tensor, mask: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Means over squares of factor x factor latent pixels, weighted by the mask, and the mask's sum in each square.

    Squares at the lower and right edge may be cut off; they are means over what is there.
    """
    height, width = x.shape[-2:]
    padding = (0, -width % factor, 0, -height % factor)
    square = factor * factor
    area = F.avg_pool2d(F.pad(mask, padding), factor) * square
    total = F.avg_pool2d(F.pad(x * mask, padding), factor) * square
    return torch.where(area > 0, total / area.clamp(min=TINY), 0.0), area


def without_coarse(x: Tensor, mask: Tensor, factor: int) -> Tensor:
    """x minus the mean of the square that each latent pixel lies in: what is left is orthogonal to everything coarse."""
    means = coarse(x, mask, factor)[0].repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    return x - means[..., : x.shape[-2], : x.shape[-1]]


def mapped(latents: Tensor, colours: Tensor) -> Tensor:
    """Latents (B, C, h, w) times a map (K, C): (B, K, h, w)."""
    return torch.einsum("kc,bchw->bkhw", colours.to(latents), latents)


def _calm(seen: Compared) -> Tensor:
    return (seen.sigma.flatten() <= MOST_SIGMA).float()


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=(1, 2, 3))


def _norm(x: Tensor, weights: Tensor) -> Tensor:
    return (weights * x.square()).sum(dim=(1, 2, 3), keepdim=True).clamp(min=TINY).sqrt()


def _root_mean_square(x: Tensor, weights: Tensor) -> Tensor:
    count = x.shape[1] * weights.sum(dim=(1, 2, 3)).clamp(min=TINY)
    return _norm(x, weights).flatten() / count.sqrt()


def _masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each channel, (B, K, 1, 1)."""
    return (x * mask).sum(dim=(2, 3), keepdim=True) / mask.sum(dim=(2, 3), keepdim=True).clamp(min=TINY)


def _deviation(x: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation of each channel, (B, K, 1, 1)."""
    return _masked_mean((x - _masked_mean(x, mask)).square(), mask).clamp(min=TINY).sqrt()
