"""Anchor-coupled rectified flow (AC-RF), which trains the steps a few-step sampler takes, or plain flow matching."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Count, Fraction, NotNegative, Positive, Show, WholeNumber, raise_all
from .objective import FlowObjectiveOptions

TERMS = ("lambda_cosine", "lambda_fft", "alpha_hf", "beta_lf", "lambda_struct", "lambda_light", "lambda_color", "lambda_tex")
"""Weights of the further terms of the loss, which a data set or a sample may have of its own."""

_ACRF = Show(needs="objective=acrf")
_FLOW = Show(needs="objective=flow")
_SNR = Show(needs="anchor_weighting=min_snr|vp_min_snr")
_LEVELS = Show(needs="objective=acrf", fold="Free noise levels")
_TERM = Show(fold="Further terms of the loss")
_CURVATURE = Show(needs="objective=acrf", fold="Straight paths")
_GUIDANCE = Show(fold="Guidance in training")


class AnchoredFlowOptions(FlowObjectiveOptions):
    """Flow matching at the steps of a few-step sampler (AC-RF), or at free times."""

    has_terms: ClassVar[bool] = True
    leading: ClassVar[tuple[str, ...]] = (
        *("objective", "turbo_steps", "jitter_scale", "anchor_weighting", "snr_gamma", "snr_floor", "timestep_sampling"),
        *("discrete_flow_shift", "base_prior_weight", "loss_type"),
    )

    objective: Literal["acrf", "flow"] = "flow"
    """What is trained: flow is ordinary flow matching at times of timestep_sampling; acrf trains only the noise levels of the sampler's own
    steps. Measured on the built-in model there is no difference between them; base_prior_weight is what keeps a few-step model fast."""
    timestep_sampling: Annotated[Literal["uniform", "sigmoid", "logit_normal", "shift", "mode", "sigma"], _FLOW] = "sigma"
    """Density of the training times of objective flow: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift =
    sigmoid shifted by discrete_flow_shift; mode (mode_scale); sigma = uniform shifted by discrete_flow_shift."""
    turbo_steps: Annotated[Count, Field(le=1000), _ACRF] = 8
    """Sampler steps that acrf trains. Their noise levels are the sampler's own; make images with this many steps."""
    jitter_scale: Annotated[Fraction, _ACRF] = 0.25
    """Spread of the noise level around an anchor, as a share of the way to the middle between it and its neighbours; 0 trains the
    anchors exactly. The first anchor, pure noise, moves only downwards."""
    anchor_weighting: Annotated[Literal["uniform", "step_length", "min_snr", "vp_min_snr"], _ACRF] = "uniform"
    """Weight of an anchor in the loss, its mean over all anchors 1. uniform; step_length by how far the sampler moves there; min_snr
    is min(SNR, snr_gamma) sigma^2, exact for straight paths; vp_min_snr is min(SNR, snr_gamma) / (SNR + 1), to repeat old runs."""
    snr_gamma: Annotated[Positive, _SNR] = 5.0
    """Limit of the signal-to-noise ratio in min_snr and vp_min_snr."""
    snr_floor: Annotated[Fraction, _SNR] = 0.1
    """Lowest weight that min_snr and vp_min_snr give, before the mean is made 1."""
    free_stream_ratio: Annotated[Fraction, _LEVELS] = 0.0
    """Share of samples that are trained at a free noise level, uniform and shifted as the sampler's steps, not at an anchor."""
    free_stream_final_ratio: Annotated[Fraction | None, _LEVELS] = None
    """Share at the end of the run, reached in a straight line from free_stream_ratio; None keeps it."""
    lambda_cosine: Annotated[NotNegative, _TERM] = 0.0
    """Weight of 1 - cosine between the network's velocity and the true one."""
    lambda_fft: Annotated[NotNegative, _TERM] = 0.0
    """Weight of the mean modulus of the error's spectrum (complex, per channel) above about a quarter of the highest frequency."""
    alpha_hf: Annotated[NotNegative, _TERM] = 0.0
    """Weight of the mean absolute error of fine structure: what is left of the velocity's error without its coarse part. The same on the
    clean latent would be this times the noise level."""
    beta_lf: Annotated[NotNegative, _TERM] = 0.0
    """Weight of 1 - cosine between the coarse parts of the predicted clean latent and the true one."""
    lf_magnitude_weight: Annotated[NotNegative, Show(needs="beta_lf", fold=_TERM.fold)] = 0.0
    """Weight, within beta_lf, of the squared difference between the norms (root mean squares) of the coarse parts."""
    downsample_factor: Annotated[int, Field(ge=2, le=16), _TERM] = 4
    """Coarse parts are averages over squares of this many latent pixels."""
    lambda_struct: Annotated[NotNegative, _TERM] = 0.0
    """Weight of 1 - cosine between the luminances of the predicted image and of the true one, each without its mean. It is a linear map
    of the latents, fitted to this VAE when training starts; like the three below, for noise levels up to 0.5 only."""
    lambda_light: Annotated[NotNegative, _TERM] = 0.0
    """Weight of the differences of the luminance's mean and deviation."""
    lambda_color: Annotated[NotNegative, _TERM] = 0.0
    """Weight of the differences of mean and deviation of the two colour channels."""
    lambda_tex: Annotated[NotNegative, _TERM] = 0.0
    """Weight of the mean absolute difference of the luminance's fine structure."""
    curvature_weight: Annotated[NotNegative, _CURVATURE] = 0.0
    """Weight of the squared second difference of the velocity over three noise levels half an anchor gap apart: keeps paths straight. Costs
    two forward passes more, in the steps that have it."""
    curvature_interval: Annotated[Count, Show(needs="curvature_weight", fold=_CURVATURE.fold)] = 10
    """Every this many optimizer steps have the curvature term."""
    curvature_start: Annotated[WholeNumber, Show(needs="curvature_weight", fold=_CURVATURE.fold)] = 0
    """Optimizer step from which on there is a curvature term."""
    cfg_training_scale: Annotated[float, Field(ge=1, le=1000), _GUIDANCE] = 1.0
    """Train the velocity with guidance of this scale, p + (scale - 1)(p - n) with n for the empty caption; 1 trains without. The gradient
    goes through both, which costs a second forward and backward pass."""
    cfg_training_ratio: Annotated[Fraction, Show(needs="cfg_training_scale!=1.0", fold=_GUIDANCE.fold)] = 1.0
    """Share of samples that cfg_training_scale applies to."""
    latent_jitter: NotNegative = 0.0
    """Add this times fresh normal noise to the noisy latent while the target stays."""

    @model_validator(mode="after")
    def _acrf_agrees(self) -> Self:
        if self.turbo_steps == 1 and "snr" in self.anchor_weighting and not self.snr_floor:
            raise_all(
                [f"{self.anchor_weighting} weighs pure noise, the one step of turbo_steps = 1, by 0; raise snr_floor or choose uniform"]
            )
        return self

    @property
    def num_anchors(self) -> int:
        return self.turbo_steps if self.objective == "acrf" else 0

    @property
    def wants_empty_text(self) -> bool:
        return self.cfg_training_scale > 1

    @property
    def term_weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in TERMS}

    @property
    def network_calls(self) -> tuple[int, bool]:
        """Those of flow matching, guidance on some rows, and the curvature term's."""
        calls, prior = super().network_calls
        guided = self.cfg_training_scale != 1
        return calls + guided + (self.curvature_weight > 0), prior or guided
