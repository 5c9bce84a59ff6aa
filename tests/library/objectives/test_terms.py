"""Further terms of the loss against a second implementation in float64, their gradients, and what scaling and masks do to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sd_scripts.library.objectives.colours import fit_colours
from sd_scripts.library.objectives.terms import COLOUR_TERMS, Compared, high_pass, terms_of, without_coarse
from sd_scripts.schema.anchored_flow import TERMS, AnchoredFlowOptions
from tests.library.objectives.references import all_terms

FACTOR, MAGNITUDE = 4, 0.3
OPTIONS = AnchoredFlowOptions(downsample_factor=FACTOR, beta_lf=1.0, lf_magnitude_weight=MAGNITUDE)


def fresh() -> torch.Generator:
    return torch.Generator().manual_seed(torch.randint(2**31, ()).item())


def compared(masked: bool = True, samples: int = 3, sigma: float | None = None, dtype: torch.dtype = torch.float64) -> Compared:
    """Random values on a size that squares of 4 do not fill."""
    rng = fresh()
    shape = (samples, 5, 10, 7)
    velocity, target, x0 = (torch.randn(shape, generator=rng, dtype=dtype) for _ in range(3))
    levels = torch.rand(samples, generator=rng, dtype=dtype) * 0.5 if sigma is None else torch.full((samples,), sigma, dtype=dtype)
    mask = (
        torch.rand((samples, 1, 10, 7), generator=rng, dtype=dtype).round(decimals=1) if masked else torch.ones(samples, 1, 10, 7).to(dtype)
    )
    mask[:, :, :, -3:] *= 0.0 if masked else 1.0
    return Compared(velocity, target, x0, levels.view(-1, 1, 1, 1), mask)


def colours() -> torch.Tensor:
    return torch.randn(3, 5, generator=fresh())


@pytest.mark.parametrize("masked", [True, False])
def test_each_term_equals_its_definition_in_float64(masked: bool) -> None:
    of = colours()
    terms = terms_of(OPTIONS, of)
    for sigma in (None, 0.5, 0.51, 1.0):
        seen = compared(masked, sigma=sigma)
        found = {name: term(seen) for name, term in terms.items()}
        for sample in range(3):
            wanted = all_terms(
                *(x[sample].double().numpy() for x in (seen.velocity, seen.target, seen.x0)),
                float(seen.sigma[sample]),
                seen.mask[sample, 0].double().numpy(),
                of.double().numpy(),
                FACTOR,
                MAGNITUDE,
            )
            assert found.keys() == wanted.keys() == set(TERMS)
            for name, value in wanted.items():
                assert found[name][sample].item() == pytest.approx(value, rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("name", TERMS)
def test_each_term_has_the_gradient_of_its_value(name: str) -> None:
    term, seen = terms_of(OPTIONS, colours())[name], compared(sigma=0.4)

    def value(velocity: torch.Tensor) -> torch.Tensor:
        return term(replace(seen, velocity=velocity))

    assert torch.autograd.gradcheck(value, (seen.velocity.clone().requires_grad_(),), eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", TERMS)
def test_each_term_is_zero_without_an_error_and_its_gradient_stays_finite(name: str) -> None:
    term = terms_of(OPTIONS, colours())[name]
    random = compared(sigma=0.4, dtype=torch.float32)
    nothing = torch.zeros_like(random.x0)
    for seen in (random, replace(random, target=nothing, x0=nothing), replace(random, mask=torch.zeros_like(random.mask))):
        velocity = seen.target.clone().requires_grad_()
        value = term(replace(seen, velocity=velocity))
        assert value.abs().max() == 0
        value.sum().backward()
        assert velocity.grad is not None and velocity.grad.isfinite().all()


@pytest.mark.parametrize("name", TERMS)
def test_what_a_mask_leaves_black_has_no_influence(name: str) -> None:
    term, seen = terms_of(OPTIONS, colours())[name], compared(sigma=0.3)
    velocity = seen.velocity.clone().requires_grad_()
    value = term(replace(seen, velocity=velocity))
    value.sum().backward()
    black = (seen.mask == 0).expand_as(velocity)
    assert velocity.grad is not None and velocity.grad[black].abs().max() == 0 and velocity.grad[~black].abs().max() > 0
    other = torch.where(black, torch.randn(velocity.shape, generator=fresh(), dtype=torch.float64), seen.velocity)
    assert torch.allclose(term(replace(seen, velocity=other)), value, rtol=1e-12)


def test_terms_of_a_sample_do_not_depend_on_its_batch() -> None:
    seen = compared()
    for name, term in terms_of(OPTIONS, colours()).items():
        single = [term(Compared(*(x[i : i + 1] for x in (seen.velocity, seen.target, seen.x0, seen.sigma, seen.mask)))) for i in range(3)]
        assert torch.allclose(term(seen), torch.cat(single), rtol=1e-12), name


def test_terms_scale_as_their_definitions_say() -> None:
    of, seen = colours(), compared(masked=False, sigma=0.3)
    terms = terms_of(OPTIONS, of)
    larger = replace(seen, velocity=seen.target + 3 * seen.error)
    for name in ("lambda_fft", "alpha_hf", "lambda_tex"):
        assert torch.allclose(terms[name](larger), 3 * terms[name](seen)), name
    assert torch.allclose(terms["lambda_cosine"](replace(seen, velocity=5 * seen.velocity)), terms["lambda_cosine"](seen))
    # The error of the clean latent is -sigma e and the high pass is linear.
    in_x0 = without_coarse(seen.predicted_x0 - seen.x0, seen.mask, FACTOR).abs().mean(dim=(1, 2, 3))
    assert torch.allclose(in_x0, 0.3 * terms["alpha_hf"](seen))
    # A constant error is coarse, and one that changes sign from pixel to pixel is fine.
    constant, checkered = torch.ones_like(seen.x0), torch.ones_like(seen.x0)
    checkered[..., ::2, ::2], checkered[..., 1::2, 1::2] = -1, -1
    assert terms["alpha_hf"](replace(seen, velocity=seen.target + constant)).abs().max() < 1e-12
    small = replace(
        seen, velocity=seen.target[..., :8, :4] + checkered[..., :8, :4], target=seen.target[..., :8, :4], mask=seen.mask[..., :8, :4]
    )
    assert torch.allclose(terms["alpha_hf"](small), torch.ones(3, dtype=torch.float64))


def test_the_high_pass_falls_from_fine_to_coarse_and_is_half_at_a_quarter() -> None:
    passed = high_pass(64, 64)
    assert passed[0, 0] < 0.05 and passed[32, 32] > 0.999
    # 16 / 64 of the sampling rate is 1 / sqrt(8) of the highest; a quarter of the highest is 8 sqrt(2) of 64, down the diagonal at 8.
    assert abs(passed[8, 8] - 0.5) < 1e-6
    assert torch.allclose(passed[1:], passed[1:].flip(0)) and torch.allclose(passed, passed.T)


def test_a_linear_decoder_is_found_again() -> None:
    """The map is that of any decoder that is linear in the latents, whatever it adds."""
    rng = fresh()
    decoder, constant = torch.randn(3, 5, generator=rng), torch.randn(3, 1, 1, generator=rng)

    def decode(latents: torch.Tensor) -> torch.Tensor:
        rgb = torch.einsum("kc,bchw->bkhw", decoder, latents) + constant
        return rgb.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)

    found = fit_colours([torch.randn(5, 40, 20, generator=rng), torch.randn(5, 6, 8, generator=rng)], decode)
    red, green, blue = decoder.double()
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    wanted = torch.stack([luminance, 0.564 * (blue - luminance), 0.713 * (red - luminance)])
    assert torch.allclose(found.double(), wanted, atol=2e-3)


def test_terms_on_colours_are_those_that_need_the_map() -> None:
    assert set(terms_of(OPTIONS, None)) == set(TERMS) - set(COLOUR_TERMS)
