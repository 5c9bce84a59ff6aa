"""The terms of the loss once more, in numpy and float64, written from their definitions with plain loops: what the tests compare with.

Everything is of one sample: v, target, x0 (C, h, w), sigma a number, mask (h, w), colours (3, C).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cosine(a: Array, b: Array, weights: Array) -> float:
    """1 - cos, each element weighted."""
    return float(1 - (weights * a * b).sum() / np.sqrt((weights * a * a).sum() * (weights * b * b).sum()))


def blocks(x: Array, mask: Array, factor: int) -> tuple[Array, Array, Array]:
    """Masked means of squares, the mask's sum in each, and the means back at full size."""
    channels, height, width = x.shape
    rows, columns = -(-height // factor), -(-width // factor)
    means, area, full = np.zeros((channels, rows, columns)), np.zeros((rows, columns)), np.zeros_like(x)
    for row in range(rows):
        for column in range(columns):
            here = (slice(row * factor, (row + 1) * factor), slice(column * factor, (column + 1) * factor))
            area[row, column] = mask[here].sum()
            if area[row, column]:
                for channel in range(channels):
                    means[channel, row, column] = (x[channel][here] * mask[here]).sum() / area[row, column]
                    full[channel][here] = means[channel, row, column]
    return means, area, full


def spectrum(error: Array, mask: Array) -> float:
    channels, height, width = error.shape
    total = passed = 0.0
    for u in range(height):
        for w in range(width):
            down, across = (u if u < (height + 1) // 2 else u - height) / height, (w if w < (width + 1) // 2 else w - width) / width
            high = 1 / (1 + np.exp(-12 * (np.hypot(down, across) / np.sqrt(0.5) - 0.25)))
            passed += high
            wave = np.exp(-2j * np.pi * (u * np.arange(height)[:, None] / height + w * np.arange(width)[None, :] / width))
            total += high * sum(abs((error[channel] * mask * wave).sum()) for channel in range(channels)) / np.sqrt(height * width)
    return float(total / (channels * passed))


def fine(error: Array, mask: Array, factor: int) -> float:
    return float((np.abs(error - blocks(error, mask, factor)[2]) * mask).mean())


def coarse(predicted: Array, true: Array, mask: Array, factor: int, magnitude_weight: float) -> float:
    found, area, _ = blocks(predicted, mask, factor)
    wanted = blocks(true, mask, factor)[0]
    norms = [np.sqrt((area * x * x).sum() / (len(x) * area.sum())) for x in (found, wanted)]
    return cosine(found, wanted, area) + magnitude_weight * (norms[0] - norms[1]) ** 2


def luminances(latents: Array, colours: Array) -> Array:
    return np.array([sum(row[channel] * latents[channel] for channel in range(len(latents))) for row in colours])


def centred(x: Array, mask: Array) -> Array:
    return x - (x * mask).sum() / mask.sum()


def structure(predicted: Array, true: Array, mask: Array, colours: Array) -> float:
    return cosine(*(centred(luminances(x, colours)[0], mask) for x in (predicted, true)), mask)


def moments(predicted: Array, true: Array, mask: Array, colours: Array) -> float:
    found = []
    for a, b in zip(luminances(predicted, colours), luminances(true, colours), strict=True):
        means = [(x * mask).sum() / mask.sum() for x in (a, b)]
        deviations = [np.sqrt((centred(x, mask) ** 2 * mask).sum() / mask.sum()) for x in (a, b)]
        found.append(abs(means[0] - means[1]) + abs(deviations[0] - deviations[1]))
    return float(np.mean(found))


def all_terms(
    v: Array, target: Array, x0: Array, sigma: float, mask: Array, colours: Array, factor: int, magnitude_weight: float
) -> dict[str, float]:
    """Every term by the name of its weight."""
    error = v - target
    predicted = (x0 + sigma * target) - sigma * v
    calm = float(sigma <= 0.5)
    return {
        "lambda_cosine": cosine(v, target, mask),
        "lambda_fft": spectrum(error, mask),
        "alpha_hf": fine(error, mask, factor),
        "beta_lf": coarse(predicted, x0, mask, factor, magnitude_weight),
        "lambda_struct": calm * structure(predicted, x0, mask, colours),
        "lambda_light": calm * moments(predicted, x0, mask, colours[:1]),
        "lambda_color": calm * moments(predicted, x0, mask, colours[1:]),
        "lambda_tex": calm * fine(luminances(predicted - x0, colours[:1]), mask, factor),
    }
