"""Weights on the loss of a sample, as functions of its time: (B,) -> (B,)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Kind, Path
from sd_scripts.schema.anchored_flow import AnchoredFlowOptions
from sd_scripts.schema.errors import Problem, refuse
from sd_scripts.schema.objective import FlowObjectiveOptions, ObjectiveOptions

Weight = Callable[[Tensor], Tensor]

MOST_SNR = 1000.0
"""Signal-to-noise ratios are cut here where their inverse is a weight."""


def min_snr(gamma: float, kind: Kind, path: Path) -> Weight:
    """min(SNR, gamma) on the loss in x0, expressed for what the network predicts (Hang et al. 2023, arXiv 2303.09556).

    An error e of the prediction is an error of x0 of e s/a (epsilon), e s (v, where a^2 + s^2 = 1), e s / (a + s) (velocity) or e itself
    (sample); so the weights are min(SNR, gamma)/SNR, min(SNR, gamma)/(SNR + 1), min(SNR, gamma) (s / (a + s))^2 and min(SNR, gamma).
    """

    def weight(t: Tensor) -> Tensor:
        a, s = path.coefficients(t)
        if kind == "epsilon":
            # min(1, gamma / SNR), finite where SNR is 0.
            return torch.clamp(gamma * (s / a) ** 2, max=1)
        if kind == "sample":
            return diffusion.snr(path, t).clamp(max=gamma)
        factor = s**2 if kind == "v_prediction" else (s / (a + s)) ** 2
        # min(SNR, gamma) factor = min(a^2 factor / s^2, gamma factor), finite where s is 0.
        return torch.minimum(a**2 * (factor / s**2).nan_to_num(nan=1.0), gamma * factor)

    return weight


def debiased(kind: Kind, path: Path) -> Weight:
    """1/sqrt(SNR) for noise prediction, 1/(SNR + 1) for v (Yu et al. 2023, arXiv 2310.08442).

    For sample sqrt(SNR), which is the first of these, because an error of x0 is one of the noise over sqrt(SNR).
    """
    if kind == "epsilon":
        return lambda t: diffusion.snr(path, t).clamp(max=MOST_SNR).rsqrt()
    if kind == "sample":
        return lambda t: diffusion.snr(path, t).clamp(max=MOST_SNR).sqrt()
    return lambda t: 1 / (diffusion.snr(path, t).clamp(max=MOST_SNR) + 1)


def like_noise(path: Path) -> Weight:
    """SNR/(SNR + 1): what turns the scale of a v loss into that of a noise loss."""

    def weight(t: Tensor) -> Tensor:
        snr = diffusion.snr(path, t).clamp(max=MOST_SNR)
        return snr / (snr + 1)

    return weight


def flow_weight_of(options: FlowObjectiveOptions) -> Weight:
    """The weight that weighting_scheme names, of sigma = t (Esser et al. 2024, arXiv 2403.03206, section 3.1)."""
    return {
        "none": torch.ones_like,
        "sigma_sqrt": lambda t: t**-2.0,
        "cosmap": lambda t: 2 / (math.pi * (1 - 2 * t + 2 * t**2)),
    }[options.weighting_scheme]


def anchor_weights(options: AnchoredFlowOptions, sigmas: Tensor) -> Tensor:
    """The weights that anchor_weighting gives to noise levels sigmas (N,), float64, falling; their mean is 1.

    With SNR = ((1 - sigma) / sigma)^2, an error e of the velocity is one of sigma e in the clean latent; so min(SNR, gamma) on the loss
    there (Hang et al. 2023, arXiv 2303.09556) is min(SNR, gamma) sigma^2 on the velocity's. vp_min_snr divides by SNR + 1 instead, which is
    right for v prediction on variance-preserving paths only.
    """
    squared, gamma = sigmas.double().square(), options.snr_gamma
    exact = torch.minimum((1 - sigmas.double()).square(), gamma * squared)
    step_length = sigmas.double() - torch.cat([sigmas.double()[1:], torch.zeros(1, dtype=torch.float64)])
    weights = {
        "uniform": torch.ones_like(squared),
        "step_length": step_length,
        "min_snr": exact.clamp(min=options.snr_floor),
        "vp_min_snr": (exact / ((1 - sigmas.double()).square() + squared)).clamp(min=options.snr_floor),
    }[options.anchor_weighting]
    return weights / weights.mean()


def weight_of(options: ObjectiveOptions, kind: Kind, path: Path) -> Weight:
    """The product of all weights that the options ask for. Raises OptionError for those that this kind of model cannot have."""
    ends_in_noise = path.coefficients(torch.ones(1))[0].item() == 0
    problems = []
    if options.debiased_estimation_loss and kind == "velocity":
        problems.append(
            Problem("debiased_estimation_loss", "debiased_estimation_loss is for noise and v prediction; this is a flow model. Turn it off")
        )
    if options.debiased_estimation_loss and kind == "epsilon" and ends_in_noise:
        problems.append(
            Problem(
                "debiased_estimation_loss", "debiased_estimation_loss is infinite for noise prediction with zero terminal SNR; turn one off"
            )
        )
    if options.scale_v_pred_loss_like_noise_pred and kind != "v_prediction":
        problems.append(
            Problem(
                "scale_v_pred_loss_like_noise_pred",
                f"scale_v_pred_loss_like_noise_pred is for v_prediction; this model predicts {kind}. Turn it off",
            )
        )
    if options.v_pred_like_loss and (kind != "epsilon" or ends_in_noise):
        problems.append(
            Problem(
                "v_pred_like_loss",
                f"v_pred_like_loss is for noise prediction without zero terminal SNR; this model predicts {kind}. Set it to 0",
            )
        )
    refuse(problems)
    factors: list[Weight] = []
    if options.min_snr_gamma is not None:
        factors.append(min_snr(options.min_snr_gamma, kind, path))
    if options.scale_v_pred_loss_like_noise_pred:
        factors.append(like_noise(path))
    if options.v_pred_like_loss:
        factors.append(lambda t: 1 + options.v_pred_like_loss / like_noise(path)(t))
    if options.debiased_estimation_loss:
        factors.append(debiased(kind, path))

    def product(t: Tensor) -> Tensor:
        weight = torch.ones_like(t)
        for factor in factors:
            weight = weight * factor(t)
        return weight

    return product
