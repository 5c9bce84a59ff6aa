"""Optimizers by name: they move, their arguments are checked, and what they gathered can be put back."""

from __future__ import annotations

import math

import pytest
import pytorch_optimizer
import torch

from sd_scripts.families import RUNS
from sd_scripts.library.train.checkpoint import pack, unpack
from sd_scripts.library.train.lion import Lion
from sd_scripts.library.train.optim import learning_rate_at, make_optimizer, restore, shown
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.optimizer import BUILT_IN, OWN_RATE, SCHEDULE_FREE, ZOO, OptimizerOptions

NAMES = {
    "AdamW": (),
    "Adafactor": (),
    "Lion": ("weight_decay=0.1",),
    "Prodigy": ("d0=0.01",),
    "SGD": ("momentum=0.9", "nesterov=True"),
    "torch.optim.Adamax": (),
    "torch.optim.NAdam": (),
    **dict.fromkeys(ZOO, ()),
}
RATES = {
    **dict.fromkeys((*OWN_RATE, "AdamG", "LARS"), 1.0),
    "AdaDelta": 20.0,
    "AdaMod": 5.0,
    "FTRL": 0.5,
    "Gravity": 0.5,
    "SCION": 0.01,
}
"""Learning rates of those that do not go down well with the usual one of this file."""

LEFT_OUT = {
    **dict.fromkeys(("AdaHessian", "SophiaH", "AliG", "LBFGS"), "asks for second derivatives or a closure"),
    **dict.fromkeys(
        ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon", "SpectralSphere"), "matrices in groups of their own"
    ),
    **dict.fromkeys(("AdaLOMO", "LOMO", "AdamMini"), "takes a model, not weights"),
    **dict.fromkeys(("BSAM", "Ranger21", "DeMo"), "needs another argument or package"),
    **dict.fromkeys(("AdaShift", "Conda", "Kron", "ROSE", "ScalableShampoo", "SPAM"), "a state that only pickle keeps"),
    **dict.fromkeys(("ASGD", "DASH", "SOAP", "Magma", "MADGRAD"), "other bits after a restored state"),
    **dict.fromkeys(("LoRARite", "SaRA", "RACS"), "leaves vectors, or weights that are no pair, as they are"),
    **dict.fromkeys(("DAdaptAdaGrad", "DAdaptSGD", "Kate", "SPlus", "AdaSmooth", "Ranger"), "brings no quadratic down at any rate"),
    "Shampoo": "roots of singular statistics, which are not finite for every second start",
}
"""Optimizers of the package that are not in the zoo, and why."""


def make(name: str, weights: list[torch.Tensor], arguments: tuple[str, ...] = (), lr: float = 0.05) -> torch.optim.Optimizer:
    lr = RATES.get(name, lr)
    options = OptimizerOptions(optimizer_type=name, learning_rate=lr, optimizer_args=arguments, allow_custom_modules="." in name)
    return make_optimizer(options, [{"params": weights[:1], "lr": lr, "name": "a"}, {"params": weights[1:], "lr": lr, "name": "b"}])


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]


def step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> float:
    wanted = (torch.arange(parameter.numel()).sin().view_as(parameter) for parameter in parameters)
    loss = sum((parameter - there).square().sum() for parameter, there in zip(parameters, wanted))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_brings_a_quadratic_down(name: str) -> None:
    parameters = weights()
    optimizer = make(name, parameters, NAMES[name])
    losses = [step(optimizer, parameters) for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_optimizer_goes_on_to_the_same_bits(name: str) -> None:
    parameters = weights()
    optimizer = make(name, parameters, NAMES[name])
    for _ in range(5):
        step(optimizer, parameters)
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(optimizer.state_dict(), tensors, "optimizer")
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = make(name, copies, NAMES[name])
    restore(other, unpack(packed, tensors))
    for _ in range(5):
        step(optimizer, parameters)
        step(other, copies)
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies))


def test_settings_of_the_new_run_win_over_those_in_the_state() -> None:
    parameters = weights()
    old = make("AdamW", parameters, ("weight_decay=0.5",))
    step(old, parameters)
    new = make("AdamW", parameters, ("weight_decay=0.25",))
    restore(new, old.state_dict())
    assert [group["weight_decay"] for group in new.param_groups] == [0.25, 0.25]
    assert len(new.state) == 2


def test_a_state_of_other_groups_is_refused() -> None:
    parameters = weights()
    other = torch.optim.AdamW(parameters)
    with pytest.raises(ValueError):
        restore(make("AdamW", parameters), other.state_dict())


def test_lion_follows_the_papers_algorithm_in_float64() -> None:
    lr, (b1, b2), decay = 0.02, (0.9, 0.99), 0.3
    parameter = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    x, m = parameter.detach().clone(), torch.zeros(7, dtype=torch.float64)
    optimizer = Lion([parameter], lr=lr, betas=(b1, b2), weight_decay=decay)
    for _ in range(20):
        g = torch.randn(7, dtype=torch.float64)
        parameter.grad = g.clone()
        optimizer.step()
        x = x - lr * ((b1 * m + (1 - b1) * g).sign() + decay * x)
        m = b2 * m + (1 - b2) * g
    torch.testing.assert_close(parameter.detach(), x, rtol=1e-12, atol=1e-12)


def test_adafactor_follows_the_learning_rate_and_moves_weights_that_are_zero() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = make("Adafactor", [parameter, torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    parameter.grad = torch.randn(4, 4)
    optimizer.step()
    assert math.isclose(float(parameter.detach().square().mean().sqrt()), 1e-2, rel_tol=0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_args": ("weight_decay",)}, "key=value"),
        ({"optimizer_args": ("betas=(0.9,",)}, "not a Python literal"),
        ({"optimizer_args": ("weight_decya=0.1",)}, "does not know weight_decya; it knows betas"),
        ({"optimizer_args": ("lr=1",)}, "lr is set by learning_rate"),
        ({"optimizer_args": ("betas=(2.0,0.9)",)}, "AdamW refuses them"),
        ({"optimizer_args": ("eps=1", "eps=2")}, "given twice"),
        ({"optimizer_args": ("eps=__import__('os').getcwd()",)}, "not a Python literal"),
        ({"optimizer_type": "Adafactor", "optimizer_args": ("relative_step=True",)}, "ignore learning_rate"),
        ({"optimizer_type": "AdamW8bit"}, "pip install bitsandbytes"),
        ({"optimizer_type": "CAME", "optimizer_args": ("beta1=0.9",)}, "CAME does not know beta1; it knows betas"),
        ({"optimizer_type": "torch.optim.Adamax"}, "--allow_custom_modules"),
        ({"optimizer_type": "Nothing", "allow_custom_modules": True}, "module.Class"),
        ({"optimizer_type": "no.such.Thing", "allow_custom_modules": True}, "cannot be imported"),
        ({"optimizer_type": "torch.optim.Nothing", "allow_custom_modules": True}, "nothing called Nothing"),
        ({"optimizer_type": "torch.optim.lr_scheduler", "allow_custom_modules": True}, "not a class"),
    ],
)
def test_a_wrong_optimizer_is_a_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_optimizer(OptimizerOptions(**options), [{"params": weights(), "lr": 1e-3, "name": "a"}])
    assert words in str(caught.value)


def test_prodigy_refuses_two_different_rates() -> None:
    first, second = weights()
    groups = [{"params": [first], "lr": 1.0, "name": "a"}, {"params": [second], "lr": 0.5, "name": "b"}]
    with pytest.raises(OptionError, match="must be equal"):
        make_optimizer(OptimizerOptions(optimizer_type="Prodigy", learning_rate=1.0), groups)


def test_the_zoo_has_each_optimizer_of_the_package_that_keeps_the_promises_of_the_others() -> None:
    """Names that are ours already mean ours."""
    ours = {name.lower() for name in (*BUILT_IN, "Adam")}
    names = {pytorch_optimizer.load_optimizer(name).__name__ for name in pytorch_optimizer.get_supported_optimizers()}
    assert set(ZOO) == {name for name in names if name.lower() not in ours} - set(LEFT_OUT)
    assert not any(name in LEFT_OUT and name in ZOO for name in names)


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_a_schedule_free_optimizer_gives_out_its_average_and_goes_on_from_its_own_weights(name: str) -> None:
    parameters = weights()
    optimizer = make(name, parameters)
    for _ in range(7):
        step(optimizer, parameters)
    trained = [parameter.detach().clone() for parameter in parameters]
    # The trained y lies between the average x and the free z: y = b x + (1 - b) z.
    between = optimizer.param_groups[0].get("betas", (optimizer.param_groups[0].get("momentum"),))[0]
    wanted = [(y.double() - (1 - between) * optimizer.state[p]["z"].double()) / between for p, y in zip(parameters, trained)]
    with pytest.raises(RuntimeError, match="in the middle"), shown(optimizer):
        for found, average in zip(parameters, wanted):
            torch.testing.assert_close(found.detach().double(), average, rtol=1e-5, atol=1e-6)
        raise RuntimeError("in the middle")
    assert all(torch.equal(parameter, own) for parameter, own in zip(parameters, trained))
    step(optimizer, parameters)


def test_a_schedule_is_left_out_for_kohyas_name_of_a_schedule_free_optimizer_and_kept_for_ours() -> None:
    """sd-scripts trains them without one, whatever the line says; here the option says what is done."""
    line = ["--pretrained_model_name_or_path", "toy", "--train_data_dir", "toy:star", "--lr_scheduler", "cosine", "--optimizer_type"]
    for name, schedule in {
        "ScheduleFreeAdamW": "cosine",
        "AdamWScheduleFree": "constant",
        "schedulefree.RAdamScheduleFree": "constant",
    }.items():
        asked = command_line.parse_cli(RUNS["sdxl", "network"], [*line, name])
        assert (asked.options.optimizer.optimizer_type in SCHEDULE_FREE, asked.options.optimizer.lr_scheduler) == (True, schedule), name
        assert any("lr_scheduler" in note for note in asked.notes) == (schedule == "constant"), asked.notes


def test_an_average_of_averages_is_refused() -> None:
    given = {"train_data_dir": "toy:star", "pretrained_model_name_or_path": "toy", "optimizer_type": "ScheduleFreeAdamW"}
    flat.build(RUNS["sdxl", "network"], given)
    with pytest.raises(OptionError, match="turn use_ema off"):
        flat.build(RUNS["sdxl", "network"], {**given, "use_ema": True})


def test_a_scheduler_class_of_ones_own_becomes_a_function_of_the_step() -> None:
    options = OptimizerOptions(
        lr_scheduler_type="torch.optim.lr_scheduler.StepLR", lr_scheduler_args=("step_size=3", "gamma=0.5"), allow_custom_modules=True
    )
    factor = learning_rate_at(options, 7)
    assert [factor(step) for step in (0, 2, 3, 6, 100, 1)] == [1.0, 1.0, 0.5, 0.25, 0.25, 1.0]


def test_a_scheduler_that_needs_the_loss_is_refused_in_words() -> None:
    options = OptimizerOptions(lr_scheduler_type="torch.optim.lr_scheduler.ReduceLROnPlateau", allow_custom_modules=True)
    with pytest.raises(OptionError, match="function of the step"):
        learning_rate_at(options, 5)
