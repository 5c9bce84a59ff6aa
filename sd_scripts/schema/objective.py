"""How a clean latent becomes a loss: times, noise, distance, weights."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .errors import Problem
from .fields import Fraction, NotNegative, Number, Positive, Section, Show, WholeNumber, raise_all

_HUBER = Show(needs="loss_type=huber|smooth_l1")
_TIMES = Show(needs="objective=flow")
"""What chooses and weights free times; a family with another objective has its own."""


class ObjectiveSection(Section):
    """The training objective of any family."""

    title: ClassVar[str] = "Advanced Training"
    leading_parts: ClassVar[tuple[str, ...]]
    """Parts of the loss whose columns come first in the table of epochs, whether a run has them or not."""

    target: ClassVar[Literal["noise", "velocity", "own"]] = "own"
    """What the network's prediction is compared with: the noise (or v, or the image), the velocity, or what a family says itself."""
    has_terms: ClassVar[bool] = False
    """Whether the loss may have further terms, see AnchoredFlowOptions."""

    @property
    def network_calls(self) -> tuple[int, bool]:
        """In how many ways the network is called, with and without gradient, adapter and text; and whether with some rows only."""
        raise NotImplementedError

    @property
    def times(self) -> tuple[int, int]:
        """First and last of the 1000 times that training sees."""
        return 0, 1000

    @property
    def prior_weight(self) -> float:
        """Weight of the distance to the base model on regularisation images; 0 trains on them as on images."""
        return 0.0

    @property
    def num_anchors(self) -> int:
        """How many samples in a row see every noise level that is trained; 0 where levels are not dealt."""
        return 0

    @property
    def wants_empty_text(self) -> bool:
        """Whether the objective asks the network for its answer to the empty caption."""
        return False

    @property
    def term_weights(self) -> dict[str, float]:
        """The further terms of the loss with their weights; none in objectives that have no such terms."""
        return {}

    @property
    def compares_samples(self) -> bool:
        """Whether a sample's loss depends on the others of its batch."""
        raise NotImplementedError

    def style_problems(self, styles: Collection[str]) -> list[Problem]:
        """What is wrong with styles that the objective names, where the data has these; nothing where it names none."""
        return []

    def size_problems(self, sides: Collection[tuple[int, int]]) -> list[Problem]:
        """What is wrong with comparing latents of these sides (h, w); nothing where places are not compared with each other."""
        return []


class RegressionOptions(ObjectiveSection):
    """What noise prediction, v-prediction and flow matching have in common."""

    leading_parts: ClassVar[tuple[str, ...]] = ()

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
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift; above 1 trains more on noisy times."""
    ip_noise_gamma: NotNegative = 0.0
    """Perturb the noisy input by this times fresh noise while the target stays (Ning et al. 2023), 0.1 is usual; 0 is off."""
    ip_noise_gamma_random_strength: Annotated[bool, Show(needs="ip_noise_gamma")] = False
    """Draw the strength of ip_noise_gamma from 0 to its value for each image."""

    @property
    def times(self) -> tuple[int, int]:
        return self.min_timestep, self.max_timestep

    @property
    def network_calls(self) -> tuple[int, bool]:
        """One: with gradient, adapter and text."""
        return 1, False

    @property
    def compares_samples(self) -> bool:
        """Each sample has a loss of its own."""
        return False

    @model_validator(mode="after")
    def _times_are_a_range(self) -> Self:
        if self.min_timestep >= self.max_timestep:
            raise_all([f"min_timestep ({self.min_timestep}) must be below max_timestep ({self.max_timestep})"])
        return self


class ObjectiveOptions(RegressionOptions):
    """The training objective of a UNet: noise prediction, v-prediction or flow matching."""

    target: ClassVar[Literal["noise"]] = "noise"

    min_snr_gamma: Positive | None = None
    """Min-SNR weighting (Hang et al. 2023), 5 is usual; None is off."""
    debiased_estimation_loss: bool = False
    """Weight by 1/sqrt(SNR) for noise prediction, 1/(SNR+1) for v (Yu et al. 2023); sqrt(SNR) where the image is predicted, which is as
    for noise."""
    scale_v_pred_loss_like_noise_pred: bool = False
    """Weight a v loss by SNR/(SNR+1), which makes it count like a noise loss."""
    v_pred_like_loss: NotNegative = 0.0
    """Add this times the noise loss divided by SNR/(SNR+1), for noise prediction; 0 is off."""
    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift"] = "uniform"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid, then
    shifted by discrete_flow_shift."""
    noise_offset: NotNegative = 0.0
    """Add this times one normal number for each image and channel to the noise, so that dark and bright images are learned; 0.03 to 0.1
    is usual, 0 is off."""
    noise_offset_random_strength: Annotated[bool, Show(needs="noise_offset")] = False
    """Draw the strength of noise_offset from 0 to its value for each image."""
    adaptive_noise_scale: Annotated[Number, Show(needs="noise_offset")] = 0.0
    """Add this times the absolute mean of each latent channel to noise_offset."""
    multires_noise_iterations: Annotated[WholeNumber, Field(le=64)] = 0
    """Levels of pyramid noise (Whitaker 2023), 6 to 10 is usual; 0 is off."""
    multires_noise_discount: Annotated[Fraction, Show(needs="multires_noise_iterations")] = 0.3
    """Strength of each further level of pyramid noise."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.noise_offset and self.multires_noise_iterations:
            problems.append("noise_offset and multires_noise_iterations do the same job in two ways; set one of them to 0")
        if self.min_snr_gamma is not None and self.debiased_estimation_loss:
            problems.append("min_snr_gamma and debiased_estimation_loss both weight by the signal-to-noise ratio; choose one")
        raise_all(problems)
        return self


@dataclass(frozen=True)
class SizeShift:
    """A shift of times by the image's size: e^mu, with mu linear in the tokens through two points (tokens, mu)."""

    fewest: tuple[int, float]
    most: tuple[int, float]
    patch: int = 2
    """Latents along the side of a token."""


class FlowObjectiveOptions(RegressionOptions):
    """The training objective of a flow-matching transformer: the velocity from image to noise."""

    target: ClassVar[Literal["velocity"]] = "velocity"

    huber_schedule: Annotated[Literal["constant", "exponential", "snr"], _HUBER] = "constant"
    size_shifts: ClassVar[dict[str, SizeShift]] = {}
    """What of timestep_sampling shifts by the image's size."""

    timestep_sampling: str = "shift"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid shifted by
    discrete_flow_shift; a shift named after the model = sigmoid shifted by the image's size, as the model is sampled; mode (mode_scale);
    sigma = uniform shifted by discrete_flow_shift."""
    discrete_flow_shift: Annotated[Positive, _TIMES] = 3.0
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75), _TIMES] = 1.29
    """Weight of mode sampling (Esser et al. 2024): above 0 favours the middle, below 0 the ends."""
    model_prediction_type: Annotated[Literal["raw", "additive", "sigma_scaled"], _TIMES] = "raw"
    """What is compared with noise - image: raw is the prediction itself and the right choice; additive (prediction + x_t) and
    sigma_scaled (x_t - sigma prediction) are kohya's others, with which a correct model does not reach a small loss. They are here to
    repeat old runs."""
    weighting_scheme: Annotated[Literal["none", "sigma_sqrt", "cosmap"], _TIMES] = "none"
    """Weight of a time in the loss: none, sigma_sqrt = 1/sigma^2, cosmap = 2/(pi (1 - 2 sigma + 2 sigma^2)) (Esser et al. 2024). kohya's
    scripts apply it with sigma_scaled only; here it always counts."""
    base_prior_weight: NotNegative = 0.0
    """Self-distillation: regularisation images teach the network to stay what the base model is, by the distance to the base's own
    velocity times this, instead of by their pixels. Keeps what a distilled model can do. For adapters; needs regularisation images
    (num_class_images makes them). 0 trains on them as on images."""

    @property
    def prior_weight(self) -> float:
        return self.base_prior_weight

    @property
    def network_calls(self) -> tuple[int, bool]:
        """One, and the base model's on regularisation images."""
        prior = self.base_prior_weight > 0
        return 1 + prior, prior
