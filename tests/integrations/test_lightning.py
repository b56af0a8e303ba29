"""Plans in a real Lightning Trainer, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autofit
from autofit import InvalidArgument, Plan
from autofit.integrations import lightning as integration
from autofit.report.details import training_lines
from autofit.report.place import Place
from autofit.training.samples import Collated
from tests.integrations.conftest import by_steps, compiled_graphs, losses_by_apply, report_of

lightning: Any = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install -e . --group dev"
)


DRAWN = torch.Generator().manual_seed(0)
NUMBERS: Any = [(torch.randn(8, generator=DRAWN), torch.tensor(place % 3)) for place in range(24)]
RAGGED: Any = [
    (inputs.repeat(1 + place % 3, 1), target.repeat(1 + place % 3))
    for place, (inputs, target) in enumerate(NUMBERS)
]
"""Sequences of other lengths."""


class Data(lightning.LightningDataModule):  # type: ignore[misc]  # of a library without types here
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.numbers = NUMBERS

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.numbers, self.batch_size)


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # likewise
    """Keeps the loss of every micro-batch that Lightning runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return {"loss": loss}

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def trainer_of(**arguments: Any) -> Any:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**quiet | arguments)


def optimizer_of(module: Any) -> Any:
    return module.configure_optimizers()["optimizer"]


def check_losses(
    plan: Plan,
    units: tuple[str, ...] = (),
    module: Any = None,
    *,
    own: Any = None,
    apart: float = 1e-5,
    **arguments: Any,
) -> int:
    """Three steps of a Trainer of these arguments have the losses of `report.apply`.

    Nothing is left on the module, nor on the data.

    Returns:
        The number of graphs that the Trainer compiled.
    """
    module, data = module or Classifier(), Data()
    own = own or trainer_of(**arguments)
    report = report_of(integration.workload(module, data, trainer=own), plan, units)
    expected = losses_by_apply(
        report,
        module,
        optimizer_of,
        DataLoader(NUMBERS, 8),
    )
    module.losses.clear()
    before = compiled_graphs()
    trainer = trainer_of(**{"max_epochs": 1, **arguments, **integration.arguments(report)})
    trainer.fit(module, datamodule=data)
    found = [loss / plan.accumulation_steps for loss in by_steps(module.losses, plan)]
    assert found == pytest.approx(expected, rel=apart)
    assert data.batch_size == 4, "given back"
    assert not any({"forward", "_compiled_call_impl"} & {*vars(each)} for each in module.modules())
    return compiled_graphs() - before


@pytest.mark.parametrize(
    ("plan", "units"),
    [
        (Plan(2, accumulation_steps=4), ()),
        (Plan(8), ()),
        (Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"}), ()),
        (
            Plan(
                4,
                accumulation_steps=2,
                settings={"checkpointing.level": 1, "optimizer.implementation": "fused"},
            ),
            ("net.1", "net.2"),
        ),
    ],
    ids=["accumulation", "no accumulation", "bfloat16", "placement"],
)
def test_three_steps_of_the_trainer_have_the_losses_of_apply(
    plan: Plan, units: tuple[str, ...]
) -> None:
    own = trainer_of(accumulate_grad_batches=2, gradient_clip_val=0.5)
    check_losses(plan, units, own=own, gradient_clip_val=0.5)


class Called(Classifier):
    """Calls itself in its training step, so that its call can be compiled."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.net(inputs)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.slow
def test_a_compiled_plan_has_the_losses_of_apply() -> None:
    plan = Plan(2, accumulation_steps=4, settings={"compile.mode": "default"})
    assert check_losses(plan, module=Called()) == 1


def test_gradients_are_clipped_by_value_as_the_trainer_does() -> None:
    check_losses(Plan(8), gradient_clip_val=0.01, gradient_clip_algorithm="value")


@pytest.mark.cuda
def test_three_steps_on_a_gpu_have_the_losses_of_apply() -> None:
    settings: dict[str, Any] = {"precision.dtype": "float16", "checkpointing.level": 1}
    plan = Plan(4, accumulation_steps=2, settings=settings)
    check_losses(plan, ("net.1",), Classifier().cuda(), apart=1e-3, accelerator="gpu")


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 3}, 9),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 3),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 3, "limit_train_batches": 0.34}, 3),
        ({"max_epochs": -1, "max_steps": 7}, 7),
        ({"max_epochs": -1}, None),
    ],
)
def test_the_steps_of_a_schedule_are_those_of_the_trainer(
    arguments: dict[str, Any], steps: int | None
) -> None:
    trainer, data = trainer_of(**arguments), Data(8)
    data.setup("fit")
    assert integration.Schedule.of(trainer, data).optimizer_steps == steps
    if steps is not None:
        trainer.strategy._lightning_module = module = Classifier()
        module.trainer = trainer
        trainer._data_connector.attach_data(module, datamodule=data)
        assert trainer.estimated_stepping_batches == steps


def test_a_workload_is_what_the_module_trains() -> None:
    module, own = Classifier(), trainer_of(accumulate_grad_batches=3, gradient_clip_val=0.5)
    workload = integration.workload(module, Data(), trainer=own)
    assert (workload.sample_batch_size, workload.global_batch) == (4, 12)
    assert workload.clip_grad_norm == 0.5
    assert isinstance(workload.optimizer, torch.optim.AdamW)
    loader = DataLoader(NUMBERS, 6)
    assert integration.workload(module, loader).global_batch == 6


def test_a_data_module_is_left_for_the_trainer_to_set_up() -> None:
    calls: list[Any] = []

    class Recording(Data):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append((stage, self.trainer))
            super().setup(stage)

    module, data, own = Classifier(), Recording(), trainer_of(max_steps=1)
    before = dict(vars(data))
    integration.workload(module, data, trainer=own)
    assert calls == ["prepare_data", ("fit", own)]
    assert vars(data) == before
    own.fit(module, datamodule=data)
    assert calls[2:] == calls[:2]


def test_a_search_keeps_the_trainers_mixed_precision() -> None:
    module, own = Classifier(), trainer_of(precision="bf16-mixed", max_epochs=3)
    report = integration.search(
        module,
        Data(),
        trainer=own,
        vram_budget="64MiB",
        max_probes=1,
        options=autofit.SearchOptions(effort="quick"),
    )
    assert report.best.ok
    assert report.record.search.planned_samples == 3 * len(NUMBERS)
    assert "precision.dtype" not in report.plan.settings
    assert "precision='bf16-mixed' of the Trainer asks for it" in " ".join(report.record.notes)
    assert module._trainer is None
    assert module.losses == [], "the copies in the worker were trained"
    pasted = "\n".join(training_lines(report.record, Place()))
    pasted = pasted.replace(
        "Trainer(**",
        "Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, **",
    )
    exec(pasted, {"report": report, "module": module, "data": Data()})
    assert len(module.losses) == len(NUMBERS) // report.plan.micro_batch


def not_automatic() -> Any:
    module = Classifier()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("module", "data", "arguments", "words"),
    [
        (Classifier(), None, {}, "DataModule"),
        (Classifier(), Data(), {"precision": "64-true"}, "precision='64-true'"),
        (not_automatic(), Data(), {}, "training_step="),
    ],
    ids=["no data", "float64", "manual optimization"],
)
def test_what_cannot_be_searched_is_said(
    module: Any, data: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        integration.workload(module, data, trainer=trainer_of(**arguments))


class Forgetful(Classifier):
    """Keeps no losses: reading one needs its value, which a prediction has not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Validated(Forgetful):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        super().training_step(batch, batch_idx)


class WithValidation(Data):
    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(NUMBERS, 2), DataLoader(NUMBERS, 512)]


@pytest.mark.slow
def test_a_validation_is_measured_where_module_and_data_have_one() -> None:
    module, data = Validated(), WithValidation()
    for other in ((Forgetful(), data), (module, Data()), (module, data, 0)):
        own = trainer_of(limit_val_batches=other[2]) if len(other) > 2 else None
        assert integration.workload(*other[:2], trainer=own).eval_samples is None
    workload = integration.workload(module, data)
    assert workload.eval_samples == 512
    trial = autofit.probe(workload, device="cpu", vram_budget="64MiB")
    assert trial.measurement.evaluation_peak_bytes is not None, str(trial)
    found: Any = autofit.predict(workload, gpu="L4")
    assert found.evaluation_bytes is not None


@pytest.mark.parametrize("use", [integration.workload, integration.search])
@pytest.mark.parametrize(
    ("distributed", "words"),
    [
        (lambda: {"devices": 2, "strategy": "ddp"}, "uses 2 devices"),
        (
            lambda: {"strategy": lightning.strategies.ModelParallelStrategy()},
            "shards the model",
        ),
    ],
)
def test_a_trainer_that_is_distributed_is_refused(
    use: Any, distributed: Callable[[], dict[str, Any]], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        use(Classifier(), Data(), trainer=trainer_of(**distributed()))


def of_form(form: Callable[[torch.optim.Optimizer, Any], Any]) -> Any:
    """Return a module that returns its optimizers in one of the forms that Lightning takes."""
    module: Any = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    module.configure_optimizers = lambda: form(optimizer, schedule)
    return module


@pytest.mark.parametrize(
    "form",
    [
        lambda optimizer, scheduler: optimizer,
        lambda optimizer, scheduler: [optimizer],
        lambda optimizer, scheduler: ([optimizer], [scheduler]),
        lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": scheduler},
        lambda optimizer, scheduler: [{"optimizer": optimizer}],
    ],
)
def test_the_optimizer_is_found_in_every_form(form: Any) -> None:
    workload = integration.workload(of_form(form), Data())
    assert isinstance(workload.optimizer, torch.optim.SGD)


@pytest.mark.parametrize(
    "form",
    [
        lambda optimizer, scheduler: [optimizer, optimizer],
        lambda optimizer, scheduler: ([optimizer, optimizer], [scheduler]),
        lambda optimizer, scheduler: [{"optimizer": optimizer}, {"optimizer": optimizer}],
    ],
)
def test_two_optimizers_are_refused(form: Any) -> None:
    with pytest.raises(InvalidArgument, match="configure_optimizers"):
        integration.workload(of_form(form), Data())


class Scheduled(Classifier):
    """Asks its Trainer for the length of the training, its optimizer and its schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        (rate,) = self.lr_schedulers().get_last_lr()
        assert self.optimizers().param_groups[0]["lr"] == rate
        self.log("rate", rate)
        assert not self.trainer.is_last_batch
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


def test_a_module_may_ask_the_trainer_that_was_passed() -> None:
    module, data = Scheduled(), Data()
    trainer = trainer_of(max_epochs=3, accumulate_grad_batches=2)
    workload: Any = integration.workload(module, data, trainer=trainer)
    assert isinstance(workload.optimizer, torch.optim.AdamW)
    assert workload.loss_fn(module, workload.batch(4)).requires_grad
    assert module.steps == 9  # 24 samples in micro-batches of 4, two a step, three times
    assert module._trainer is None
    assert trainer.train_dataloader is None


def test_a_prediction_and_a_check_take_the_trainers_accumulation() -> None:
    """And their worker asks the Trainer, too."""
    trainer = trainer_of(accumulate_grad_batches=3, max_epochs=3)
    found: Any = integration.predict(Scheduled(), Data(), trainer=trainer, gpu="L4")
    assert str(found.plan).startswith("4 x 3")
    verdict = integration.check(Scheduled(), Data(), trainer=trainer, gpu="L4")
    assert verdict.fits
    assert verdict.required_bytes == found.required_bytes > 0


def test_what_a_module_asks_a_missing_trainer_for_is_named() -> None:
    """Its optimizer may be given."""
    with pytest.raises(
        InvalidArgument, match=r"configure_optimizers of a Scheduled .*pass trainer=.*optimizer="
    ):
        integration.workload(Scheduled(), Data())
    module = Scheduled()
    workload: Any = integration.workload(module, Data(), optimizer=torch.optim.AdamW)
    assert workload.optimizer is torch.optim.AdamW
    with pytest.raises(
        InvalidArgument, match=r"training_step of a Scheduled .*test_lightning.py:\d"
    ):
        workload.loss_fn(module, workload.batch(4))


def flattened(chosen: list[Any]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*chosen, strict=True)]


def test_samples_are_those_of_the_loader_whatever_its_batches_look_like() -> None:
    module, loader = Classifier(), DataLoader(RAGGED, 4, collate_fn=flattened)
    own = trainer_of(accumulate_grad_batches=2)
    workload = integration.workload(module, loader, trainer=own)
    assert workload.plan() == Plan.split(8, 4)
    assert workload.batch(4)[0].shape == (12, 8)
    report = report_of(workload, Plan(4, accumulation_steps=2))
    trainer = trainer_of(max_epochs=1, **integration.arguments(report))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the training loader makes")
        trainer.fit(module, loader)


def test_a_hook_before_the_transfer_sees_the_batches_of_the_loader() -> None:
    class Scaled(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [10 * batch[0], batch[1]]

    module = Scaled()
    plain, scaled = (integration.workload(each, Data()) for each in (Classifier(), module))
    assert torch.equal(scaled.batch(4)[0], 10 * plain.batch(4)[0])
    rows = [each.samples.rows for each in (plain, scaled) if isinstance(each.samples, Collated)]
    assert rows[0] == rows[1]
