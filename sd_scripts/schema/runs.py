"""What every kind of run is made of; the kinds themselves stand in their families' options."""

from collections.abc import Mapping
from typing import ClassVar, Self, cast

from pydantic import model_validator

from .compile import CompileOptions
from .dataset import DatasetOptions
from .distributed import DistributedOptions
from .fields import Options, raise_all
from .memory import MemoryOptions, UNetMemoryOptions
from .model import ModelOptions, UNetModelOptions
from .network import AdapterOptions, WholeOptions
from .objective import ObjectiveOptions, ObjectiveSection
from .optimizer import BUILT_IN, OPTIMIZERS, SCHEDULE_FREE, WEIGHT_BY_WEIGHT, ZOO, OptimizerOptions
from .output import OutputOptions
from .samples import SampleOptions, UNetSampleOptions
from .training import TrainingOptions


class RunOptions(Options):
    """All options of one kind of run, nested by section."""

    family: ClassVar[str]
    estimates: ClassVar[bool] = True
    defaults_of_version_1: ClassVar[Mapping[str, object]] = {}
    """Options that had another default in files of schema_version 1, with it."""
    script: ClassVar[str]
    """File below sd_scripts that trains it."""
    label: ClassVar[str]
    method: ClassVar[str]
    """network trains an adapter on a frozen model, full the model itself, scratch a model that is made by the run."""

    model: ModelOptions
    dataset: DatasetOptions
    network: AdapterOptions | WholeOptions
    optimizer: OptimizerOptions = OptimizerOptions()
    training: TrainingOptions = TrainingOptions()
    compile: CompileOptions = CompileOptions()
    memory: MemoryOptions = MemoryOptions()
    distributed: DistributedOptions = DistributedOptions()
    objective: ObjectiveSection
    samples: SampleOptions
    output: OutputOptions

    @property
    def adapter(self) -> AdapterOptions:
        """The network section of a run whose method is network."""
        return cast("AdapterOptions", self.network)

    @property
    def whole(self) -> WholeOptions:
        """That of a run of another method."""
        return cast("WholeOptions", self.network)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        network = self.network
        if network.train_text_encoder and self.dataset.cache_text_encoder_outputs and not network.frozen_encoders:
            problems.append(
                "train_text_encoder changes the text embeddings in every step, so cache_text_encoder_outputs must be off; "
                "turn one of them off"
            )
        training, distributed = self.training, self.distributed
        if distributed.global_batch_size is not None and training.gradient_accumulation_steps != 1:
            problems.append("gradient_accumulation_steps follows from global_batch_size; remove one of them")
        problems += self._memory_option_problems() + self._prior_problems() + self._adapter_problems() + self._rate_problems()
        optimizer = self.optimizer
        if not optimizer.allow_custom_modules:
            if optimizer.optimizer_type not in OPTIMIZERS:
                problems.append(
                    f"optimizer_type: {optimizer.optimizer_type} is not in the list ({', '.join(BUILT_IN)}, and {len(ZOO)} of "
                    "pytorch-optimizer, see docs/options.md); a class of your own needs --allow_custom_modules on the command line, "
                    "because it runs other people's code"
                )
            if optimizer.lr_scheduler_type is not None:
                problems.append(
                    f"lr_scheduler_type: {optimizer.lr_scheduler_type} runs other people's code and needs --allow_custom_modules on the "
                    "command line"
                )
        if training.use_ema and optimizer.optimizer_type in SCHEDULE_FREE:
            problems.append(
                f"{optimizer.optimizer_type} averages the weights by itself, and its average is what is saved; turn use_ema off"
            )
        raise_all(problems)
        return self

    def _rate_problems(self) -> list[str]:
        """Rates of which none is above 0."""
        network, rate = self.network, self.optimizer.learning_rate
        rates = network.backbone_rates(rate) if network.train_unet else []
        if network.train_text_encoder:
            rates += network.text_encoder_lr or [rate]
        if any(rates):
            return []
        factors = self.adapter.block_factors if self.method == "network" else ()
        if factors and not any(factors):
            return ["block_lr_weight: every block has 0, so nothing would be trained; give one of them a value, such as 1"]
        return ["learning_rate: all learning rates are 0, so nothing would be trained; give one of them a value, such as 0.0001"]

    def _prior_problems(self) -> list[str]:
        """What base_prior_weight needs."""
        if not self.objective.prior_weight:
            return []
        problems, data = [], self.dataset
        if self.method != "network":
            problems.append("base_prior_weight needs the base model beside the trained one, which only an adapter run has; set it to 0")
        if self.network.train_text_encoder:
            problems.append("base_prior_weight asks the base model, whose text encoders train_text_encoder changes; turn one of them off")
        toy = data.train_data_dir is not None and data.train_data_dir.startswith("toy:")
        if not (data.reg_data_dir or data.num_class_images or data.dataset_config or toy):
            problems.append(
                "base_prior_weight compares with the base model on regularisation images; give reg_data_dir, or num_class_images, "
                "which makes them"
            )
        return problems

    def _adapter_problems(self) -> list[str]:
        """What a training adapter needs."""
        if self.method == "network" or not self.model.undoes_distillation:
            return []
        return ["training_adapter is for adapters; a model that is trained itself cannot leave it out of the saved file. Remove it"]

    def _memory_option_problems(self) -> list[str]:
        """Options for memory and speed that do not go together."""
        compiling, memory, distributed, training = self.compile, self.memory, self.distributed, self.training
        problems = []
        if compiling.compile and distributed.distributed_strategy == "fsdp2":
            problems.append("compile works on a network that each process holds whole; turn it off, or set distributed_strategy to ddp")
        if memory.blocks_to_swap and distributed.distributed_strategy == "fsdp2":
            problems.append("blocks_to_swap and distributed_strategy fsdp2 both decide where weights are; set one of them back")
        if memory.blocks_to_swap and compiling.records_addresses:
            problems.append(
                f"blocks_to_swap moves weights, and CUDA graphs ({compiling.graph_option}) replay fixed addresses; choose compile_mode "
                "default or max-autotune-no-cudagraphs with compile_backend inductor, or set blocks_to_swap to 0"
            )
        if memory.blocks_to_swap and compiling.compile and compiling.compile_scope == "network":
            problems.append(
                "compile_scope network makes one code of all blocks, between which blocks_to_swap has nothing to move; take blocks"
            )
        if memory.cuda_cudnn_benchmark and training.deterministic:
            problems.append("cuda_cudnn_benchmark chooses kernels by their speed, so a run is not deterministic; turn one of them off")
        if self.model.quantization != "none":
            if self.method != "network":
                problems.append("transformer_quantization holds a frozen network in few bits, but this run trains it; set it to none")
            if distributed.distributed_strategy == "fsdp2":
                problems.append(
                    "distributed_strategy fsdp2 cannot shard a quantised network; set transformer_quantization to none, or "
                    "distributed_strategy to ddp"
                )
        if self.output.has_all_parts and getattr(self.model, "text_encoder_quantization", "none") != "none":
            problems.append(
                "save_model_as diffusers writes the text encoder too, of which text_encoder_quantization keeps few bits; set "
                "text_encoder_quantization to none, or save_model_as to safetensors"
            )
        return problems + self._full_finetune_problems()

    def _full_finetune_problems(self) -> list[str]:
        """What is wrong with the memory options of weights that are trained themselves."""
        memory, optimizer, problems = self.memory, self.optimizer, []
        if optimizer.optimizer_type not in WEIGHT_BY_WEIGHT:
            problems += [
                f"{name} moves weights one at a time, and {optimizer.optimizer_type} may need all at once; choose an optimizer_type of "
                f"{', '.join(WEIGHT_BY_WEIGHT)}, or turn {name} off"
                for name, on in (("fused_backward_pass", memory.steps_in_backward), ("full_bf16", memory.weights_in_bf16))
                if on
            ]
        if memory.steps_in_backward:
            training = self.training
            if training.gradient_accumulation_steps != 1:
                problems.append(
                    "fused_backward_pass moves a weight with each batch, so gradients cannot be summed over "
                    f"{training.gradient_accumulation_steps} batches; set gradient_accumulation_steps to 1"
                )
            if optimizer.max_grad_norm:
                problems.append(
                    "fused_backward_pass lets go of each gradient before all are known, so they cannot be clipped together; set "
                    "max_grad_norm to 0"
                )
            if training.mixed_precision == "fp16":
                problems.append("fused_backward_pass cannot leave out a step whose gradients overflow in fp16; take mixed_precision bf16")
            if self.distributed.multi_gpu:
                problems.append("fused_backward_pass works in one process; turn multi_gpu off")
        if memory.weights_in_bf16 and self.training.mixed_precision not in ("bf16", "auto"):
            problems.append(f"full_bf16 needs mixed_precision bf16, not {self.training.mixed_precision}")
        if memory.weights_in_bf16 and self.distributed.distributed_strategy == "fsdp2":
            problems.append("full_bf16 works on weights that each process holds whole; turn it off, or set distributed_strategy to ddp")
        return problems


class UNetRun(RunOptions):
    """What models on a noise schedule have in common."""

    model: UNetModelOptions
    memory: UNetMemoryOptions = UNetMemoryOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    samples: UNetSampleOptions = UNetSampleOptions()

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.model.prediction_type == "flow" and self.model.zero_terminal_snr:
            raise_all(["zero_terminal_snr belongs to noise schedules; prediction_type flow has none. Turn it off"])
        return self
