"""In which precision, and at which size, a training fits which GPUs: a prediction for each.

Weights are float32, with and without autocast in a type of fewer bits, or are of such a type
themselves. A GPU is asked about those that it computes natively.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autofit.checks.predict import (
    SPEED_WORDS,
    GpuTable,
    gpus_by_memory,
    largest_words,
    predict,
    relative_speeds,
    seconds_of_a_sample,
    speed_words,
)
from autofit.devices.gpu_catalogue import Gpu
from autofit.errors import InvalidArgument
from autofit.plan import Plan, Settings
from autofit.prediction.predict import Prediction
from autofit.registry import load_strategies
from autofit.report.text import WIDTH, Part, laid_out, table
from autofit.training.workload import Workload
from autofit.units import format_bytes

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class Precision:
    """A way to train in fewer bits, or in float32.

    Attributes:
        weights: their type.
        autocast: the type of autocast around forward and loss; None: without.
    """

    weights: str
    autocast: str | None = None

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.autocast is not None:
            return f"mixed {self.autocast}"
        return self.weights if self.weights == FLOAT32 else f"pure {self.weights}"

    def is_native(self, gpu: Gpu) -> bool:
        """Whether a GPU computes its types in hardware."""
        native = {FLOAT16: gpu.tensor_cores, BFLOAT16: gpu.native_bfloat16}
        return native.get(self.autocast or self.weights, True)

    def is_outdone(self, gpu: Gpu) -> bool:
        """Whether a GPU has bfloat16 in its place, which needs no scaling of the loss."""
        return FLOAT16 in (self.autocast, self.weights) and gpu.native_bfloat16


_OF_ALL_WEIGHTS = (
    Precision(FLOAT32),
    Precision(FLOAT32, BFLOAT16),
    Precision(FLOAT32, FLOAT16),
    Precision(BFLOAT16),
)
# An optimizer rounds most updates of float16 weights away, so they have to stay as they are.
_OF_FROZEN_WEIGHTS = (*_OF_ALL_WEIGHTS, Precision(FLOAT16))
_WORDS = (
    "Largest micro-batch by precision: mixed is autocast over float32 weights, pure has weights of "
    "that type; - where a GPU does not compute it natively"
)


def predict_precisions(
    name: str,
    workload_in: Callable[[str], Workload],
    plan: Plan,
    gpus: Sequence[Any],
    *,
    weights: str | None = None,
    frozen: bool = False,
    ranks: int | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> PrecisionTable:
    """Predict a plan in each precision on each GPU that computes it natively.

    Args:
        name: of the training, for the answer.
        workload_in: type of the weights -> what is trained.
        plan: without a precision.
        gpus: as for `autofit.predict`.
        weights: their type; None: all that the GPUs compute natively.
        frozen: whether the weights are not trained, but adapters beside them.
        ranks: as for `autofit.predict`.
        progress: called with a line about each GPU.

    Raises:
        InvalidArgument: none of the GPUs computes that type natively; or as of `autofit.predict`.
        Exception: as of `autofit.predict`.
    """
    found, tables = gpus_by_memory(gpus), dict[str, GpuTable]()
    for precision in _precisions(weights, frozen=frozen):
        native = [
            gpu
            for gpu in found
            if precision.is_native(gpu) and (weights == FLOAT16 or not precision.is_outdone(gpu))
        ]
        settings = _settings(precision.autocast)
        if not native or settings is None:
            continue
        tables[precision.name] = predict(
            workload_in(precision.weights),
            plan=replace(plan, settings={**plan.settings, **settings}),
            gpu=native,
            ranks=ranks,
            progress=lambda line, of=precision.name: progress(f"{of}: {line}"),
        )
    if not tables:
        raise InvalidArgument(
            f"{_listed([gpu.name for gpu in found])}: no {weights} in hardware. Leave dtype out, "
            "or give float32"
        )
    answered = {gpu for table in tables.values() for gpu in table.predictions}
    lacking = [gpu.name for gpu in found if gpu.name not in answered]
    return PrecisionTable(name, tables, tuple(dict.fromkeys(lacking)))


def _precisions(weights: str | None, *, frozen: bool) -> Sequence[Precision]:
    offered = _OF_FROZEN_WEIGHTS if frozen else _OF_ALL_WEIGHTS
    if weights is None:
        return offered
    return [each for each in offered if each.weights == weights] or [Precision(weights)]


def _settings(autocast: str | None) -> Settings | None:
    """Return the settings of autocast in a type; None: no installed strategy has it."""
    if autocast is None:
        return {}
    for strategy in load_strategies():
        of_terms = getattr(strategy, "of_standard_terms", None)
        settings: Settings = of_terms({"autocast": autocast}) if of_terms else {}
        if settings:
            return settings
    return None


@dataclass(frozen=True)
class PrecisionTable:
    """What a training needs in several precisions on several GPUs.

    Attributes:
        name: of the training.
        tables: precision -> its predictions.
        lacking: GPUs that compute in none of them natively.
    """

    name: str
    tables: Mapping[str, GpuTable]
    lacking: tuple[str, ...] = ()

    @cached_property
    def _by_gpu(self) -> dict[str, dict[str, Prediction]]:
        """GPU -> precision -> prediction, in the order of memory."""
        by_gpu: dict[str, dict[str, Prediction]] = {}
        for precision, found in self.tables.items():
            for gpu, prediction in found.predictions.items():
                by_gpu.setdefault(gpu, {})[precision] = prediction
        size = {gpu: next(iter(each.values())).gpu.total_bytes for gpu, each in by_gpu.items()}
        return dict(sorted(by_gpu.items(), key=lambda item: size[item[0]]))

    @property
    def fits(self) -> bool | None:
        """Whether it fits one of the GPUs in one of the precisions; None: NCCL decides."""
        answers = [each.fits() for found in self._by_gpu.values() for each in found.values()]
        return True if True in answers else None if None in answers else False

    @property
    def verdict(self) -> str:
        """Whether, where, at which size and in which precision it fits, in one line."""
        asked = len(self._by_gpu) + len(self.lacking)
        if asked == 1:
            return f"{self.name}: {_verdict_on(*next(iter(self._by_gpu.items())))}"
        fitting = {gpu: names for gpu, found in self._by_gpu.items() if (names := _fitting(found))}
        count = f"{len(fitting)} of {asked} GPUs"
        if not fitting:
            words = "may fit some" if self.fits is None else "fits none"
            return f"{self.name}: {words} of {asked} GPUs"
        smallest, names = next(iter(fitting.items()))
        return f"{self.name}: fits {count}, the smallest of them {smallest} in {_listed(names)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        precisions = {name: found.to_dict() for name, found in self.tables.items()}
        return {
            "training": self.name,
            "verdict": self.verdict,
            "fits": self.fits,
            "precisions": precisions,
            "lacking": list(self.lacking),
        }

    def __str__(self) -> str:
        is_one = len(self._by_gpu) + len(self.lacking) == 1
        made = self._of_one() if is_one else self._of_several()
        return laid_out([self.verdict, "", made, "", *self._remarks()], WIDTH)

    def _of_one(self) -> Part:
        titles = ("data type", "required", "fits", "largest micro-batch")
        return table(titles, self._rows_of_one(), right=(1,))

    def _of_several(self) -> Part:
        titles = ("GPU", "VRAM budget", "fits", *self.tables, "speed (estimate)")
        return table(titles, self._rows(), right=(1, *range(3, len(titles))))

    def _rows_of_one(self) -> Iterator[tuple[str, ...]]:
        for precision, each in next(iter(self._by_gpu.values())).items():
            answer = {True: "yes", False: "no", None: "?"}[each.fits()]
            largest = largest_words(each.largest_micro_batch, each.plan)
            yield precision, format_bytes(each.interval[1]), answer, largest

    def _rows(self) -> Iterator[tuple[str, ...]]:
        speeds = relative_speeds({gpu: _seconds(found) for gpu, found in self._by_gpu.items()})
        for gpu, found in self._by_gpu.items():
            budget = format_bytes(next(iter(found.values())).gpu.usable_bytes)
            answers = [each.fits() for each in found.values()]
            answer = "yes" if True in answers else "?" if None in answers else "no"
            sizes = (_size_in(found.get(precision)) for precision in self.tables)
            yield gpu, budget, answer, *sizes, speed_words(speeds[gpu])

    def _remarks(self) -> list[str]:
        lines = ["Predicted, with the margin of the prediction, for all memory that is usable"]
        if len(self._by_gpu) > 1:
            lines += [_WORDS, f"{SPEED_WORDS}. In the fastest precision in which it fits"]
        if self.lacking:
            types = _listed(list(self.tables))
            lines.append(f"Left out, without {types} in hardware: {', '.join(self.lacking)}")
        notes = (note for found in self.tables.values() for note in found.notes)
        return [*lines, *dict.fromkeys(notes)]


def _size_in(prediction: Prediction | None) -> str:
    if prediction is None:
        return "-"
    return largest_words(prediction.largest_micro_batch, prediction.plan).partition(",")[0]


def _fitting(found: Mapping[str, Prediction]) -> list[str]:
    return [precision for precision, each in found.items() if each.fits()]


def _seconds(found: Mapping[str, Prediction]) -> float | None:
    """Return the time of a sample in the fastest precision that fits, else at a smaller size."""
    of = [each for each in found.values() if each.fits()] or list(found.values())
    return min((time for each in of if (time := seconds_of_a_sample(each))), default=None)


def _verdict_on(gpu: str, found: Mapping[str, Prediction]) -> str:
    budget = format_bytes(next(iter(found.values())).gpu.usable_bytes)
    if names := _fitting(found):
        needs = format_bytes(min(found[name].interval[1] for name in names))
        return f"fits {gpu} in {_listed(names)}, from {needs} of {budget}"
    if any(each.fits() is None for each in found.values()):
        return f"may fit {gpu}: what NCCL takes is unknown"
    sizes = {name: each.largest_micro_batch or 0 for name, each in found.items()}
    if largest := max(sizes.values()):
        names = [name for name, size in sizes.items() if size == largest]
        return f"does not fit {gpu}; a micro-batch of {largest} does, in {_listed(names)}"
    name, least = min(found.items(), key=lambda item: item[1].interval[1])
    needs = format_bytes(least.interval[1])
    asked = f"{name} with micro-batches of {least.plan.micro_batch} needs {needs} of {budget}"
    return f"does not fit {gpu}, not even one sample; {asked}"


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
