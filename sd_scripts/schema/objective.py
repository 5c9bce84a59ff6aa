"""How a clean latent becomes a loss: times, noise, distance, weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Fraction, NotNegative, Number, Positive, Section, Show, WholeNumber, raise_all

_HUBER = Show(needs="loss_type=huber|smooth_l1")
_TIMES = Show(needs="objective=flow")
"""What chooses and weights free times; a family with another objective has its own."""


class ObjectiveSection(Section):
    """The training objective of any family."""

    title: ClassVar[str] = "Advanced Training"


class RegressionOptions(ObjectiveSection):
    """What noise prediction, v-prediction and flow matching have in common."""

    loss_type: Literal["l2", "l1", "huber", "smooth_l1", "charbonnier"] = "l2"
    """Distance between prediction and target: l2, l1, huber = 2c(sqrt(d^2+c^2)-c), smooth_l1 = 2(sqrt(d^2+c^2)-c), charbonnier =
    sqrt(d^2+1e-6). The best answer to l2 is the mean, which a sampler needs; to the others it is closer to the median."""
    huber_schedule: Annotated[Literal["constant", "exponential", "snr"], _HUBER] = "snr"
    """How c of huber and smooth_l1 changes with the noise level: not, exponentially in time down to huber_c, or with the signal-to-noise
    ratio."""
    huber_c: Annotated[Positive, _HUBER] = 0.1
    """The c of huber and smooth_l1 at the noisiest time (constant: everywhere)."""
    huber_scale: Annotated[Positive, _HUBER] = 1.0
    """Factor on c for the constant and exponential schedules."""
    min_timestep: Annotated[WholeNumber, Field(le=999), _TIMES] = 0
    """Lowest time trained on, of 1000."""
    max_timestep: Annotated[int, Field(ge=1, le=1000), _TIMES] = 1000
    """Times trained on stay below this, of 1000."""
    sigmoid_scale: Annotated[Positive, _TIMES] = 1.0
    """Width of the normal variable in sigmoid and shift."""
    logit_mean: Annotated[float, Field(ge=-100, le=100), _TIMES] = 0.0
    """Mean of logit_normal; above 0 trains more on noisy times."""
    logit_std: Annotated[Positive, _TIMES] = 1.0
    """Standard deviation of logit_normal."""
    discrete_flow_shift: Annotated[Positive, _TIMES] = 3.0
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift (FLUX: and sigma); above 1 trains more on noisy times."""

    @model_validator(mode="after")
    def _times_are_a_range(self) -> Self:
        if self.min_timestep >= self.max_timestep:
            raise_all([f"min_timestep ({self.min_timestep}) must be below max_timestep ({self.max_timestep})"])
        return self


class ObjectiveOptions(RegressionOptions):
    """The training objective of a UNet: noise prediction, v-prediction or flow matching."""

    min_snr_gamma: Positive | None = None
    """Min-SNR weighting (Hang et al. 2023), 5 is usual; None is off."""
    debiased_estimation_loss: bool = False
    """Weight by 1/sqrt(SNR) for noise prediction, 1/(SNR+1) for v (Yu et al. 2023); sqrt(SNR) where the picture is predicted, which is as
    for noise."""
    scale_v_pred_loss_like_noise_pred: bool = False
    """Weight a v loss by SNR/(SNR+1), which makes it count like a noise loss."""
    v_pred_like_loss: NotNegative = 0.0
    """Add this times the noise loss divided by SNR/(SNR+1), for noise prediction; 0 is off."""
    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift"] = "uniform"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid, then
    shifted by discrete_flow_shift."""
    noise_offset: NotNegative = 0.0
    """Add this times one normal number for each picture and channel to the noise, so that dark and bright pictures are learned; 0.03 to 0.1
    is usual, 0 is off."""
    noise_offset_random_strength: Annotated[bool, Show(needs="noise_offset")] = False
    """Draw the strength of noise_offset from 0 to its value for each picture."""
    adaptive_noise_scale: Annotated[Number, Show(needs="noise_offset")] = 0.0
    """Add this times the absolute mean of each latent channel to noise_offset."""
    multires_noise_iterations: Annotated[WholeNumber, Field(le=64)] = 0
    """Levels of pyramid noise (Whitaker 2023), 6 to 10 is usual; 0 is off."""
    multires_noise_discount: Annotated[Fraction, Show(needs="multires_noise_iterations")] = 0.3
    """Strength of each further level of pyramid noise."""
    ip_noise_gamma: NotNegative = 0.0
    """Perturb the noisy input by this times fresh noise while the target stays (Ning et al. 2023), 0.1 is usual; 0 is off."""
    ip_noise_gamma_random_strength: Annotated[bool, Show(needs="ip_noise_gamma")] = False
    """Draw the strength of ip_noise_gamma from 0 to its value for each picture."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.noise_offset and self.multires_noise_iterations:
            problems.append("noise_offset and multires_noise_iterations do the same job in two ways; set one of them to 0")
        if self.min_snr_gamma is not None and self.debiased_estimation_loss:
            problems.append("min_snr_gamma and debiased_estimation_loss both weight by the signal-to-noise ratio; choose one")
        raise_all(problems)
        return self


class FlowObjectiveOptions(RegressionOptions):
    """The training objective of a flow-matching transformer: the velocity from picture to noise."""

    huber_schedule: Annotated[Literal["constant", "exponential", "snr"], _HUBER] = "constant"
    """How c of huber and smooth_l1 changes with the noise level: not, exponentially in time down to huber_c, or with the signal-to-noise
    ratio."""
    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "flux_shift", "qwen_shift", "mode", "sigma"] = "shift"
    """Density of the training times; each family says which of them it has."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75), _TIMES] = 1.29
    """Weight of mode sampling (Esser et al. 2024): above 0 favours the middle, below 0 the ends."""
    model_prediction_type: Annotated[Literal["raw", "additive", "sigma_scaled"], _TIMES] = "raw"
    """What is compared with noise - picture: raw is the prediction itself and the right choice; additive (prediction + x_t) and
    sigma_scaled (x_t - sigma prediction) are kohya's others, with which a correct model does not reach a small loss. They are here to
    repeat old runs."""
    weighting_scheme: Annotated[Literal["none", "sigma_sqrt", "cosmap"], _TIMES] = "none"
    """Weight of a time in the loss: none, sigma_sqrt = 1/sigma^2, cosmap = 2/(pi (1 - 2 sigma + 2 sigma^2)) (Esser et al. 2024). kohya's
    scripts apply it with sigma_scaled only; here it always counts."""
    base_prior_weight: NotNegative = 0.0
    """Self-distillation: regularisation pictures teach the network to stay what the base model is, by the distance to the base's own
    velocity times this, instead of by their pixels. Keeps what a distilled model can do. For adapters; needs regularisation pictures
    (num_class_images makes them). 0 trains on them as on pictures."""
