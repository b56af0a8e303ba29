"""Every way to train by a report has the gradients of a plain backward of the whole batch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, SequentialSampler

from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.report.report import Report
from autofit.training.batch import map_batched
from autofit.training.samples import Rows
from autofit.training.workload import Workload
from tests.integrations.conftest import report_of

GLOBAL = 8
LENGTH = GLOBAL  # of a sequence, so that what is as long as the global batch is not cut
WIDTH, WORDS = 8, 16
WANTED = "not installed: pip install -e . --group dev"
SIZES = {"right": GLOBAL, "short": 5, "larger": 11}
LOADED = {"whole": GLOBAL, "one micro-batch": 4, "short": 5, "another step": 11, "two steps": 16}
"""Samples that a trainer's loader has, in micro-batches of 4 where the model can be split."""


class Decoder(nn.Module):
    """A causal language model whose head is its embedding; it ignores padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, places: torch.Tensor, causal: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = self.block(self.words(ids) + self.places(places), causal)
        return {"loss": cross_entropy(self.head(hidden).transpose(1, 2), labels)}


class Pair(nn.Module):
    """A body between two linear layers; a loss of the mean over samples."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, WIDTH), body, nn.Linear(WIDTH, 3)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        return scale * cross_entropy(self.last(self.body(self.first(x))), y)


class Masked(nn.Module):
    """A block whose attention leaves out what a mask of each sample marks, and a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(
        self, ids: torch.Tensor, padding: torch.Tensor, causal: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.block(self.words(ids), causal.isinf(), src_key_padding_mask=padding)
        kept = hidden.masked_fill(padding[:, :, None], 0.0).sum(1)
        return cross_entropy(self.last(kept / (~padding).sum(1, keepdim=True)), y)


class Several(nn.Module):
    """Images, words and numbers, none of the length of another."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read, self.last = (
            nn.Conv2d(2, WIDTH, 3), nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH + 4, 3)
        )  # fmt: skip

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        seen = self.see(image).mean((2, 3)) + self.read(text).mean(1)
        return cross_entropy(self.last(torch.cat([seen, x], 1)), y)


class Frozen(Pair):
    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.first.requires_grad_(False)


@dataclass
class Examples:
    """Its constructor takes no `kind`, and one field is a class that is a dataclass."""

    x: torch.Tensor
    y: torch.Tensor
    made_of: type = field(default=Plan)
    kind: str = field(init=False, default="numbers")


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 4, generator=generator), torch.arange(n) % 3


def named(n: int) -> dict[str, torch.Tensor]:
    return dict(zip("xy", numbers(n), strict=True))


def ids(n: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + length)
    return torch.randint(1, WORDS, (n, length), generator=generator)


def text(n: int) -> dict[str, torch.Tensor]:
    words = ids(n)
    padding = torch.arange(LENGTH) >= 3 + torch.arange(n)[:, None] % 6
    return {
        "ids": words.masked_fill(padding, 0),
        "labels": words.masked_fill(padding, -100),
        "places": torch.arange(LENGTH),
        "causal": nn.Transformer.generate_square_subsequent_mask(LENGTH),
    }


def nested(n: int) -> dict[str, Any]:
    x, y = numbers(n)
    return {"inputs": [{"x": x}, None], "more": (y, "a word")}


def masked(n: int) -> dict[str, torch.Tensor]:
    given = text(n)
    padding = given["labels"] == -100
    return {"ids": given["ids"], "padding": padding, "causal": given["causal"], "y": numbers(n)[1]}


def several(n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    image = torch.randn(n, 2, 6, 4, generator=generator)
    return {"image": image, "text": ids(n, 5), **named(n)}


def valid(batch: Any) -> float:
    return float((batch["labels"] != -100).sum())


def of_fields(model: nn.Module, batch: Any) -> torch.Tensor:
    assert batch.kind == "numbers"
    assert batch.made_of is Plan
    return model(batch.x, batch.y)


def of_nested(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["inputs"][0]["x"], batch["more"][0])


def scaled(n: int) -> dict[str, torch.Tensor]:
    return {"scale": torch.tensor(0.5), **named(n)}


@dataclass(frozen=True)
class Case:
    """A model, its batch of n samples, and what is given to the search.

    Attributes:
        splits: whether the search may split a batch of it.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    given: dict[str, Any] = field(default_factory=dict)
    splits: bool = True


MODELS: dict[str, Case] = {
    "decoder, tied, padded": Case(Decoder, text, {"loss_weight": valid}),
    "padding that is not weighed": Case(Decoder, text, splits=False),
    "several inputs": Case(Several, several),
    "masks": Case(Masked, masked),
    "BatchNorm": Case(lambda: Pair(nn.BatchNorm1d(WIDTH)), named, splits=False),
    "dict": Case(lambda: Pair(nn.Tanh()), named),
    "dataclass": Case(
        lambda: Pair(nn.Tanh()), lambda n: Examples(*numbers(n)), {"loss_fn": of_fields}
    ),
    "nested": Case(lambda: Pair(nn.Tanh()), nested, {"loss_fn": of_nested}),
    "constant scale": Case(lambda: Pair(nn.Tanh()), scaled),
    "frozen parts": Case(Frozen, named),
    "float64": Case(
        lambda: Pair(nn.Tanh()).double(), lambda n: (numbers(n)[0].double(), numbers(n)[1])
    ),
}


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(case: Case, batch: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of one backward of the whole batch, with nothing of autofit."""
    model = model_of(case)
    torch.autograd.backward(loss_of(case, model, batch))
    return gradients(model)


def loss_of(case: Case, model: nn.Module, batch: Any) -> torch.Tensor:
    if "loss_fn" in case.given:
        loss = case.given["loss_fn"](model, batch)
    else:
        loss = model(**batch) if isinstance(batch, dict) else model(*batch)
    return loss["loss"] if isinstance(loss, dict) else loss


def report_for(case: Case, micro_batch: int = 3) -> Report:
    plan = Plan.split(GLOBAL, micro_batch) if case.splits else Plan(GLOBAL)
    workload = Workload(model_of(case), case.batch(3), global_batch=GLOBAL, **case.given)
    found = report_of(workload, plan)
    facts = {
        **found.record.workload,
        "given": list(case.given),
        "loss": "the model's own loss",
        "may_change_accumulation": case.splits,
    }
    return replace(found, record=replace(found.record, workload=facts))


def by_apply(case: Case, batch: Any) -> dict[str, torch.Tensor]:
    model = model_of(case)
    seen: list[dict[str, torch.Tensor]] = []
    note = lambda model, _: seen.append(gradients(model))  # noqa: E731 - as users write it
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with report_for(case).apply(model, optimizer, before_step=note) as training:
        training.step(batch)
    return seen[0]


def by_own_loop(case: Case, batch: Any) -> dict[str, torch.Tensor]:
    model = model_of(case)
    with report_for(case).apply(model, torch.optim.SGD(model.parameters(), 0.0)) as training:
        for micro_batch, weight in training.micro_batches(batch):
            with training.context():
                loss = loss_of(case, model, micro_batch)
            training.backward(loss, weight)
        found = gradients(model)
        training.optimizer_step()
    return found


def collate_of(case: Case, batch: Any) -> Callable[[list[int]], Any]:
    """Return what makes a micro-batch of the batch's samples with these numbers."""
    samples = Rows.of(case.batch(3))  # of no size that a constant tensor has, too
    return lambda chosen: map_batched(lambda t: t[chosen], batch, samples.places(batch))


def samples_in(case: Case, batch: Any) -> int:
    return Rows.of(case.batch(3)).size(batch)


def loader_of(case: Case, batch: Any, micro_batch: int) -> Any:
    data: Any = list(range(samples_in(case, batch)))
    return DataLoader(data, micro_batch, collate_fn=collate_of(case, batch))


Steps = list[dict[str, torch.Tensor]]
"""The gradients that each optimizer step of a training had."""


def by_accelerate(case: Case, batch: Any, micro_batch: int = 4) -> Steps:
    accelerate = pytest.importorskip("accelerate", reason=WANTED)
    from autofit.integrations.accelerate import applied, arguments

    report = report_for(case, micro_batch)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **arguments(report))
    model = model_of(case)
    loader = loader_of(case, batch, report.plan.micro_batch)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0), loader)
    model, optimizer, loader = prepared
    seen: Steps = []
    with applied(report, accelerator, model, optimizer):
        for micro in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(case, model, micro))
                optimizer.step()
                if accelerator.sync_gradients:
                    seen.append(gradients(model))
                optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return seen


def by_lightning(case: Case, batch: Any, micro_batch: int = 4) -> Steps:
    lightning = pytest.importorskip("lightning.pytorch", reason=WANTED)
    from autofit.integrations.lightning import arguments

    seen: Steps = []

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # without types
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(case)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(case, self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(gradients(self.model))

    report = report_for(case, micro_batch)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments(report),
    )
    trainer.fit(Module(), loader_of(case, batch, report.plan.micro_batch))
    return seen


class ForTrainer(nn.Module):
    """A model as a `transformers.Trainer` calls it, over the items of a step if it is told them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.inner = case, model_of(case)
        self.accepts_loss_kwargs = "loss_weight" in case.given

    def forward(self, num_items_in_batch: Any = None, **batch: Any) -> dict[str, torch.Tensor]:
        loss = loss_of(self.case, self.inner, batch)
        if num_items_in_batch is not None:
            loss = loss * self.case.given["loss_weight"](batch) / num_items_in_batch
        return {"loss": loss}


def by_transformers(case: Case, batch: Any, micro_batch: int = 4) -> Steps:
    transformers = pytest.importorskip("transformers", reason=WANTED)
    pytest.importorskip("accelerate", reason=WANTED)
    from autofit.integrations.transformers import apply

    seen: Steps = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # without types
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(gradients(given["model"].inner))

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]  # without types
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            """Take the samples in order, in the versions too that have no argument for it."""
            return SequentialSampler(train_dataset or self.train_dataset)

    model = ForTrainer(case)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=2, max_grad_norm=0.0,
            learning_rate=0.0, num_train_epochs=1, remove_unused_columns=False, report_to="none",
            save_strategy="no", disable_tqdm=True, label_names=["labels"],
        )  # fmt: skip
        trainer = InOrder(
            model,
            args,
            data_collator=collate_of(case, batch),
            train_dataset=list(range(samples_in(case, batch))),
            callbacks=[Watch()],
        )
        with apply(report_for(case, micro_batch), trainer):
            trainer.train()
    return seen


TRAINERS = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "transformers": by_transformers,
}
WAYS = {"apply": by_apply, "own loop": by_own_loop}


@pytest.mark.filterwarnings("ignore")  # of a batch of another size
@pytest.mark.parametrize(
    ("model", "size"),
    [(m, size) for m in MODELS for size in SIZES if MODELS[m].splits or size != "larger"],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_has_the_gradients_of_the_whole_batch(model: str, way: str, size: str) -> None:
    case, batch = MODELS[model], MODELS[model].batch(SIZES[size])
    torch.testing.assert_close(WAYS[way](case, batch), plain(case, batch))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [name for name in MODELS if not MODELS[name].splits])
def test_a_larger_batch_that_must_not_be_split_is_refused(model: str, way: str) -> None:
    case = MODELS[model]
    with pytest.raises(InvalidArgument, match="allow_accumulation_change=True"):
        WAYS[way](case, case.batch(SIZES["larger"]))


OF_EVERY_LENGTH = ("decoder, tied, padded", "dict", "BatchNorm")
"""Models whose loaders have all lengths; what ends a loader is the same for the others."""


def takes(trainer: str, case: Case) -> bool:
    """Whether the trainer can train it: `Trainer` calls a model by names, others do not weigh."""
    if trainer == "transformers":
        return isinstance(case.batch(GLOBAL), dict)
    return "loss_weight" not in case.given


TRAINED = [
    (model, trainer, loaded)
    for model in MODELS
    for trainer in TRAINERS
    if takes(trainer, MODELS[model])
    for loaded in (LOADED if model in OF_EVERY_LENGTH else ["two steps"])
]


def drops_samples(case: Case, trainer: str, loaded: str) -> bool:
    """Whether the last step of a loader is not what it would be by a plain loop, and says so."""
    is_whole = loaded in ("whole", "two steps") or not case.splits
    # It divides by the items or the micro-batches that a step has.
    is_divided = trainer == "transformers" and ("loss_weight" in case.given or loaded != "short")
    return not is_whole and not is_divided


@pytest.mark.parametrize(("model", "trainer", "loaded"), TRAINED)
def test_a_step_of_a_trainer_has_them_too_or_it_is_said(
    model: str, trainer: str, loaded: str
) -> None:
    case, batch = MODELS[model], MODELS[model].batch(LOADED[loaded])
    numbers = list(range(samples_in(case, batch)))
    steps = [numbers[at : at + GLOBAL] for at in range(0, len(numbers), GLOBAL)]
    wanted = [plain(case, collate_of(case, batch)(step)) for step in steps]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = TRAINERS[trainer](case, batch)
    is_said = any("drop samples" in str(each.message) for each in said)
    assert is_said == drops_samples(case, trainer, loaded)
    torch.testing.assert_close(found[:-1], wanted[:-1])
    with pytest.raises(AssertionError) if is_said else nullcontext():
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_a_trainer_that_cannot_weigh_its_micro_batches_refuses_to(trainer: str) -> None:
    case = MODELS["decoder, tied, padded"]
    with pytest.raises(InvalidArgument, match="loss_weight"):
        TRAINERS[trainer](case, case.batch(GLOBAL))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_refuses_micro_batches_of_two_sizes(trainer: str) -> None:
    with pytest.raises(InvalidArgument, match="even_split"):
        TRAINERS[trainer](MODELS["dict"], named(GLOBAL), micro_batch=3)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_lost_its_samples_is_refused_in_words(way: str) -> None:
    batch = named(GLOBAL) | {"y": torch.tensor(1)}
    with pytest.raises((InvalidArgument, ValueError), match="samples"):
        WAYS[way](MODELS["dict"], batch)
