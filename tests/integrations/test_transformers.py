"""Plans in a real `transformers.Trainer` of tiny models with random weights, on the CPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit import Dimension, InvalidArgument, Plan
from autofit.report.details import training_lines
from autofit.report.place import Place
from tests.integrations.conftest import by_steps, compiled_graphs, report_of

WANTED = "not installed: pip install -e . --group dev"
transformers = pytest.importorskip("transformers", reason=f"transformers is {WANTED}")
pytest.importorskip("accelerate", reason=f"accelerate is {WANTED}")
Trainer: Any = transformers.Trainer

from autofit.integrations import transformers as integration  # noqa: E402  # after the skip

LENGTHS = (5, 31, 12, 9, 24, 7, 16, 28)
TOKENS = 32


def causal_lm() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=TOKENS,
        n_embd=16,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        loss_type="ForCausalLMLoss",
    )
    return transformers.GPT2LMHeadModel(config).eval()  # as `from_pretrained` returns it


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(1, 64, (LENGTHS[n % 8],), generator=generator).tolist()}
        for n in range(24)
    ]


def collate(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to a common length; what is padding is no target."""
    ids = torch.zeros(len(chosen), TOKENS, dtype=torch.int64)
    for row, sample in zip(ids, chosen, strict=True):
        row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


class InOrder(Trainer):  # type: ignore[misc]  # of a library without types here
    """Takes the samples in order, and keeps the loss of every optimizer step."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", ()), float(loss)]
        self.allowed_tf32 = torch.backends.cuda.matmul.allow_tf32
        return loss


class OwnLoss(InOrder):
    """Adds a penalty, over the items of the whole step as the Trainer wants it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        penalty = outputs["logits"].square().mean(-1)[inputs["attention_mask"] > 0].sum()
        loss = loss + self.args.weight_decay * penalty / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class MeanLoss(InOrder):
    """Leaves the items of the step out: what it adds grows with the number of micro-batches."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def trainer_of(folder: Path, kind: Any = InOrder, evaluated: Any = None, **changed: Any) -> Any:
    arguments = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 0.02,
        "weight_decay": 0.1,
        "max_grad_norm": 0.3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(str(folder), **arguments | changed)
    data = {"train_dataset": samples(), "eval_dataset": evaluated}
    return kind(causal_lm(), args, **data, data_collator=collate)


def losses_by_apply(plan: Plan, units: tuple[str, ...], trainer: Any) -> tuple[Any, list[float]]:
    """Return a report whose best plan is this one, and three losses by `report.apply`."""
    report = report_of(integration.workload(trainer), plan, units)
    model, other, data = copy.deepcopy(trainer.model), copy.copy(trainer), trainer.train_dataset
    other.model, other.optimizer = model, None
    flat = trainer.data_collator is flattened  # of which a training is given the samples
    with report.apply(model, other.create_optimizer()) as training:
        given = [data[at : at + 8] for at in (0, 8, 16)]
        losses = [float(training.step(each if flat else collate(each))) for each in given]
    assert len(set(losses)) == 3
    return report, losses


def check_losses(
    trainer: Any, plan: Plan, units: tuple[str, ...] = (), *, apart: float = 1e-5
) -> Any:
    """Three steps of the Trainer have the losses of `report.apply`; return what was applied."""
    report, expected = losses_by_apply(plan, units, trainer)
    applied = integration.apply(report, trainer)
    trainer.train()
    assert by_steps(trainer.losses, plan) == pytest.approx(expected, rel=apart)
    return applied


PLANS: dict[str, tuple[Plan, tuple[str, ...], dict[str, Any]]] = {
    "accumulation": (Plan(2, accumulation_steps=4), (), {}),
    "a loss of ones own": (Plan(2, accumulation_steps=4), (), {"kind": OwnLoss}),
    "no accumulation": (Plan(8), (), {}),
    "bfloat16": (
        Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"}),
        (),
        {},
    ),
    "label smoothing": (Plan(8), (), {"label_smoothing_factor": 0.1}),
    "placement": (
        Plan(
            8,
            settings={
                "checkpointing.level": 1,
                "optimizer.implementation": "for_loop",
                "precision.dtype": "bfloat16",
            },
        ),
        ("transformer.h.0", "transformer.h.2"),
        {},
    ),
    "fused": (
        Plan(2, accumulation_steps=4, settings={"optimizer.implementation": "fused"}),
        (),
        {"optim": "adamw_torch"},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_three_steps_of_the_trainer_have_the_losses_of_apply(name: str, tmp_path: Path) -> None:
    plan, units, arguments = PLANS[name]
    # bfloat16 rounds to three digits; accelerate casts the logits, and the loss is out of autocast
    apart = 1e-4 if "precision.dtype" in plan.settings else 1e-5
    check_losses(trainer_of(tmp_path, **arguments), plan, units, apart=apart)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["default", "bfloat16"])
def test_a_compiled_plan_is_the_trainers_own_compilation(dtype: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    settings = {"compile.mode": "default", "precision.dtype": dtype}
    plan = Plan(4, accumulation_steps=2, settings=settings)
    weights, before = copy.deepcopy(trainer.model.state_dict()), compiled_graphs()
    applied = check_losses(trainer, plan, apart=1e-3 if dtype == "bfloat16" else 1e-5)
    assert compiled_graphs() > before
    assert trainer.args.torch_compile
    assert "torch_compile=True (was False)" in applied.lines
    applied.undo()
    assert (trainer.args.torch_compile, trainer.args.torch_compile_backend) == (False, None)
    trainer.model.load_state_dict(weights)
    before = compiled_graphs()
    trainer.train()
    assert compiled_graphs() == before, "the Trainer kept its compiled model"


def test_a_plan_that_does_not_compile_turns_compilation_off(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, torch_compile=True)
    with pytest.warns(UserWarning, match="torch_compile"):
        report = report_of(integration.workload(trainer), Plan(8))
    applied, before = integration.apply(report, trainer), compiled_graphs()
    assert not trainer.args.torch_compile
    trainer.train()
    assert compiled_graphs() == before
    applied.undo()
    assert trainer.args.torch_compile_backend == "inductor"
    dimensions = {**report.record.dimensions, "compile.mode": Dimension(["off"])}
    record = replace(report.record, dimensions=dimensions)
    integration.apply(replace(report, record=record), trainer)
    assert trainer.args.torch_compile, "the search did not choose"


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, 3),
        ({"max_steps": -1, "num_train_epochs": 2}, 6),
        ({"max_steps": -1, "num_train_epochs": 1.5, "per_device_train_batch_size": 5}, 5),
        (
            {
                "max_steps": -1,
                "num_train_epochs": 2,
                "per_device_train_batch_size": 5,
                "dataloader_drop_last": True,
            },
            4,
        ),
    ],
)
def test_the_steps_of_a_training_are_those_that_the_trainer_takes(
    arguments: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, **arguments)
    assert integration._planned_steps(trainer) == {"planned_steps": steps}
    trainer.train()
    assert trainer.state.global_step == steps


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32"])
def test_three_steps_on_a_gpu_have_the_losses_of_apply(dtype: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, use_cpu=False, optim="adamw_torch")
    settings = {"precision.dtype": dtype, "optimizer.implementation": "fused"}
    plan = Plan(2, accumulation_steps=4, settings={**settings, "checkpointing.level": 1})
    applied = check_losses(trainer, plan, ("transformer.h.1",), apart=1e-3)
    assert trainer.allowed_tf32 is (dtype == "tf32")
    applied.undo()
    assert not torch.backends.cuda.matmul.allow_tf32


def adapted(folder: Path) -> Any:
    peft = pytest.importorskip("peft", reason=f"peft is {WANTED}")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])
    trainer = trainer_of(folder)
    model = peft.get_peft_model(causal_lm(), lora)
    return InOrder(model, trainer.args, train_dataset=samples(), data_collator=collate)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft sets it as the layers of GPT-2 need it
@pytest.mark.parametrize("of", [trainer_of, adapted])
def test_a_prediction_has_the_gradients_and_the_state_of_a_real_step(
    of: Callable[[Path], Any], tmp_path: Path
) -> None:
    trainer = of(tmp_path)
    before = copy.copy(vars(trainer))
    found: Any = integration.predict(trainer, gpu="L4")
    assert vars(trainer) == before
    assert str(found.plan).startswith("4 x 2")
    trainer.train()
    state = trainer.optimizer.optimizer.state
    held = {
        "gradients": [p for p in trainer.model.parameters() if p.requires_grad],
        "optimizer_state": [value for kept in state.values() for value in kept.values()],
    }
    for kind, tensors in held.items():
        blocks = sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)
        assert found.breakdown[kind] == pytest.approx(blocks, rel=0.02)


@pytest.mark.slow
def test_a_prediction_checkpoints_as_the_arguments_say(tmp_path: Path) -> None:
    size = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}
    kept: Any = autofit.predict(integration.workload(trainer_of(tmp_path, **size)), gpu="L4")
    trainer = trainer_of(tmp_path, gradient_checkpointing=True, **size)
    recomputed: Any = integration.predict(trainer, gpu="L4")
    assert recomputed.breakdown["activations"] < 0.9 * kept.breakdown["activations"]
    assert integration.predict(trainer, gpu="L4", plan=Plan(64, global_batch=64)) == recomputed
    assert not any(getattr(each, "gradient_checkpointing", 0) for each in trainer.model.modules())


@pytest.mark.slow
def test_a_check_probes_or_predicts_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bf16=True)
    assert integration.check(trainer, device="cpu", vram_budget="64MiB").fits
    assert not integration.check(trainer, gpu="L4", vram_budget="320MiB").fits


class NotesEvaluations(InOrder):
    def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        self.args.seen.append((model.training, torch.is_grad_enabled(), len(inputs["input_ids"])))
        return super().prediction_step(model, inputs, *given, **named)


@pytest.mark.slow
def test_an_evaluation_is_the_trainers_own(tmp_path: Path) -> None:
    data = {"all": samples()}
    trainer = trainer_of(tmp_path, NotesEvaluations, data, per_device_eval_batch_size=6)
    workload = integration.workload(trainer)
    batch: Any = workload.evaluation_batch(6)
    assert batch["attention_mask"].sum(1).tolist() == [31, 31, 31, 28, 28, 28]
    trainer.args.seen = []
    probed = autofit.probe(workload, device="cpu", vram_budget="64MiB")
    assert probed.measurement.evaluation_peak_bytes is not None, str(probed)
    assert trainer.args.seen == [], "it ran in the worker"
    with torch.no_grad():
        workload.eval_step(trainer.model, batch)  # type: ignore[misc]  # it is there
    assert trainer.args.seen == [(False, False, 6)]


@pytest.mark.slow
def test_an_evaluation_of_the_trainer_may_be_what_does_not_fit(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, evaluated=samples(), per_device_eval_batch_size=4096)
    workload, alone = map(integration.workload, (trainer, trainer_of(tmp_path)))
    found, less = (autofit.predict(each, gpu="L4") for each in (workload, alone))
    assert found.evaluation_bytes == found.required_bytes > less.required_bytes + 2**26
    assert not autofit.check(workload, device="cpu", vram_budget="64MiB").fits
    assert autofit.check(alone, device="cpu", vram_budget="64MiB").fits


@pytest.mark.parametrize("use", [integration.workload, integration.search])
def test_a_trainer_that_is_distributed_is_refused(use: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(InvalidArgument, match="shard the model"):
        use(trainer)


def test_a_workload_is_what_the_trainer_trains(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    before = copy.copy(vars(trainer))
    workload = integration.workload(trainer)
    assert vars(trainer) == before
    assert trainer.accelerator._dataloaders == []
    assert (workload.global_batch, workload.sample_batch_size) == (8, 4)
    assert workload.clip_grad_norm == 0.3
    optimizer: Any = workload.optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    batch: Any = workload.batch(4)
    lengths = sorted(batch["attention_mask"].sum(1).tolist())
    assert lengths == [28, 31, 31, 31], "the longest of all samples"
    assert workload.recipe.weight(batch, 4) == sum(lengths), "targets that are not -100"


def test_the_trainers_own_optimizer_is_what_a_plan_trains_with(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    assert integration.workload(trainer).optimizer is trainer.optimizer


def test_the_loss_travels_without_the_trainers_model_and_data(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, OwnLoss)
    workload = integration.workload(trainer)
    loss_fn: Any = workload.loss_fn
    trainer.compute_metrics = None
    written = pickle.dumps(loss_fn)
    assert len(written) < 100_000
    copied = pickle.loads(written)
    batch = workload.batch(4)
    expected = loss_fn(trainer.model, batch)
    assert copied(trainer.model, batch).item() == expected.item()
    assert copied._trainer.model is None, "or the model of a probe would outlive it"


LEVEL_1 = {"checkpointing.level": 1}


def test_what_the_arguments_can_say_is_written_there_and_taken_back(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, optim="adamw_torch", gradient_checkpointing=True)
    settings: dict[str, Any] = {
        "precision.dtype": "bfloat16",
        "optimizer.implementation": "fused",
        **LEVEL_1,
    }
    plan = Plan(2, accumulation_steps=4, settings=settings)
    report = report_of(integration.workload(trainer), plan, ("transformer.h.1",))
    args, callbacks = trainer.args, list(trainer.callback_handler.callbacks)
    before = copy.copy(vars(args))
    applied = integration.apply(report, trainer)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (args.bf16, args.optim) == (True, "adamw_torch_fused")
    assert trainer.accelerator.mixed_precision == "bf16"
    assert not args.gradient_checkpointing
    assert "per_device_train_batch_size=2 (was 4)" in applied.lines
    assert "checkpointing.level=1 is applied to model and optimizer" in applied.lines[-1]
    trainer.train()
    assert "forward" not in vars(trainer.model.transformer.h[1]), "training has ended"
    applied.undo()
    assert vars(args) == before
    assert trainer.callback_handler.callbacks == callbacks
    assert trainer.accelerator.mixed_precision == "no"
    trainer.train()  # without the autocast of before
    assert trainer.model.forward.__func__ is type(trainer.model).forward


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_training_that_raises_leaves_no_plan_on_the_model(
    error: type[BaseException], tmp_path: Path
) -> None:
    class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # of a library without types
        on = True

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert "forward" in vars(trainer.model.transformer.h[1])
            if self.on:
                raise error("the user's")

    trainer = trainer_of(tmp_path)
    plan = Plan(2, accumulation_steps=4, settings=LEVEL_1)
    report = report_of(integration.workload(trainer), plan, ("transformer.h.1",))
    applied = integration.apply(report, trainer)
    trainer.add_callback(Stops())
    with pytest.raises(error, match="the user's"):
        trainer.train()
    assert "forward" not in vars(trainer.model.transformer.h[1])
    Stops.on = False
    trainer.train()
    applied.undo()
    assert "train" not in vars(trainer)
    integration.apply(report, trainer)
    pickle.dumps(integration.TrainerLoss(trainer))


def test_a_trainer_without_data_asks_for_a_batch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    batch = collate(samples()[:4])
    trainer.train_dataset = None
    with pytest.raises(InvalidArgument, match="sample_batch="):
        integration.workload(trainer)
    assert integration.workload(trainer, sample_batch=batch).sample_batch_size == 4


@pytest.mark.parametrize(("kind", "adds_up"), [(OwnLoss, True), (MeanLoss, False)])
def test_a_loss_that_grows_with_the_accumulation_shows_it(
    kind: Any, adds_up: bool, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, kind)
    workload = integration.workload(trainer)
    recipe, model = workload.recipe, trainer.model
    batch, given = workload.batch(4), workload.samples_of(4)
    halves = [half.whole() for half in workload.samples.micro_batches(given, (2, 2))]
    losses = [recipe.loss_and_source(model, each)[0].item() for each in (batch, *halves)]
    weights = [recipe.weight(half, 2) for half in halves]
    split = sum(w * loss for w, loss in zip(weights, losses[1:], strict=True)) / sum(weights)
    assert (split == pytest.approx(losses[0], rel=1e-6)) is adds_up


def test_a_search_leaves_the_trainer_as_it_was_and_its_plan_trains(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bf16=True, gradient_checkpointing=True)
    before, args = copy.copy(vars(trainer)), copy.copy(vars(trainer.args))
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    quick = autofit.SearchOptions(effort="quick")
    report = integration.search(trainer, vram_budget="64MiB", max_probes=1, options=quick)
    assert vars(trainer) == before
    assert vars(trainer.args) == args
    assert not trainer.model.training
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    assert report.best.ok
    assert report.record.search.planned_samples == 3 * 8
    assert 8 % report.plan.micro_batch == 0
    assert "precision.dtype" not in report.plan.settings, "the arguments have bf16"
    told = " ".join(report.record.notes)
    assert "bf16=True in TrainingArguments" in told
    assert "eval mode" not in told
    assert "gradient_checkpointing=True" in told
    loaded = autofit.load(report.save(tmp_path / "report.json"))
    exec("\n".join(training_lines(loaded.record, Place())), {"report": loaded, "trainer": trainer})
    assert trainer.state.global_step == 3


def flattened(chosen: list[dict[str, Any]]) -> Any:
    """One row of all samples, one after another."""
    rows = [sample | {"labels": sample["input_ids"]} for sample in chosen]
    return transformers.DataCollatorWithFlattening()(rows)


def test_a_collator_that_flattens_has_the_samples_of_the_arguments(tmp_path: Path) -> None:
    """And trains by a plan as the Trainer does."""
    trainer = trainer_of(tmp_path)
    trainer.data_collator = flattened
    workload = integration.workload(trainer)
    assert workload.plan() == Plan.split(8, 4)
    assert workload.batch(4)["input_ids"].shape == (1, 31 * 3 + 28)
    assert workload.batch(8)["input_ids"].shape == (1, 2 * (31 * 3 + 28))
    predicted: Any = integration.predict(trainer, gpu="L4")
    assert predicted.plan == Plan.split(8, 4)
    applied = integration.apply(report_of(workload, workload.plan()), trainer)
    assert applied.lines == ("nothing to change: TrainingArguments already match the plan",)
    applied.undo()
    check_losses(trainer, Plan(2, accumulation_steps=4))


def test_a_training_of_samples_refuses_a_batch_of_a_collator_that_flattens(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.data_collator = flattened
    report = report_of(integration.workload(trainer), Plan(8))
    with (
        report.apply(trainer.model, trainer.create_optimizer()) as training,
        pytest.raises(InvalidArgument, match="list of samples"),
    ):
        training.step(flattened(samples()[:8]))
