"""A fine-tune of a model of transformers, as a workload made from the model's config alone.

    workload = autofit.integrations.hugging_face.workload("org/model", batch=8, sequence=2048)
    print(autofit.predict(workload, gpu="L4"))

Only `config.json` is read, from a folder or from the hub: no weights are downloaded, and no code of
a repository is run. The model is of the class that the config's `architectures` names, built by the
auto classes of transformers. Its batch has `input_ids` and `labels`, or images, as the class takes
them; the loss is the model's own, and the optimizer AdamW.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.integrations.applied import library
from autofit.plan import check_count
from autofit.training.workload import Workload
from autofit.units import counted

HUB = "hf:"
DTYPES = ("float32", "bfloat16", "float16")
CONFIG = "config.json"
# Tokens of a sample where none are asked for: as fine-tunes of language models often have them.
DEFAULT_SEQUENCE = 2048
# Models whose positions begin after that of padding: of the 514 that RoBERTa has a sample uses 512.
_POSITIONS_AFTER_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "xmod"}
    | {"data2vec-text", "ibert", "longformer", "mpnet"}
)
_MULTIPLE = 8
_WAY_OUT = (
    "write a function that returns its autofit.Workload, and name it as path/to/file.py:function"
)


def workload(
    model: str | os.PathLike[str],
    *,
    batch: int = 1,
    sequence: int | None = None,
    lora_rank: int | None = None,
    dtype: str | None = None,
) -> Workload:
    """Return a fine-tune of a model as a workload, for `autofit.predict` and `autofit.check`.

    Args:
        model: "org/model" of the Hugging Face hub, of which the config is downloaded; or a folder
            with a config.json.
        batch: samples of the sample batch.
        sequence: tokens of a sample; None: 2048, or as many as the model has positions for. Images
            are as large as the config says.
        lora_rank: train adapters of this rank on all linear layers, by peft, and nothing else;
            None: all parameters are trained.
        dtype: of the weights, "float32", "bfloat16" or "float16"; None: the config's own, as
            `from_pretrained` loads them. Adapters are float32 beside weights of fewer bits.

    Raises:
        InvalidArgument: an argument is not valid; there is no such repository or folder, or no
            access to it; or the config does not tell how the model is trained.
        PredictionUnavailable: the hub cannot be reached.
    """
    return FineTune.read(model, batch=batch, sequence=sequence, lora_rank=lora_rank).workload(dtype)


@dataclass(frozen=True)
class _Task:
    """What a class of models is trained for.

    Attributes:
        auto: the auto class of transformers that builds it.
        mapping: of `transformers.models.auto.modeling_auto`: type of model -> class.
        batch: (config, samples, tokens of each) -> a batch with labels.
        lora: peft's name of the task; None: it has none.
    """

    auto: str
    mapping: str
    batch: Callable[[Any, int, int], Mapping[str, torch.Tensor]]
    lora: str | None = None

    @property
    def is_of_images(self) -> bool:
        return self.batch is _images

    @property
    def adapters(self) -> Mapping[str, Any]:
        """What peft is told beside the rank: a new head is trained whole, without an adapter."""
        if self.lora in _WITH_NEW_HEADS:
            return {"task_type": self.lora, "exclude_modules": _NEW_HEADS}
        return {"task_type": self.lora}

    def classes(self) -> dict[str, tuple[str, ...]]:
        """Return the classes by type of model."""
        module = library("transformers.models.auto.modeling_auto")
        named = getattr(module, self.mapping).items()
        return {kind: (name,) if isinstance(name, str) else tuple(name) for kind, name in named}


@dataclass(frozen=True)
class FineTune:
    """A fine-tune of a model of transformers.

    Attributes:
        name: of the repository or the folder.
        config: of the model.
        task: what it is trained for.
        batch: samples.
        sequence: tokens of a sample; 0 for images.
        lora_rank: None: all parameters are trained.
    """

    name: str
    config: Any
    task: _Task
    batch: int
    sequence: int
    lora_rank: int | None = None

    @classmethod
    def read(
        cls,
        model: str | os.PathLike[str],
        *,
        batch: int | None = None,
        sequence: int | None = None,
        lora_rank: int | None = None,
    ) -> FineTune:
        """Return the fine-tune; arguments and errors are those of `workload`."""
        name = os.fspath(model)
        batch = check_count("batch", 1 if batch is None else batch)
        if lora_rank is not None:
            check_count("lora_rank", lora_rank)
            library("peft")  # a search for it in the worker would come late
        config = _read_config(name)
        task = _task_of(config, name)
        if task.lora == "SEQ_CLS" and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # else such a model takes one sample; none of ours is padded
        return cls(name, config, task, batch, _sequence(config, task, sequence, name), lora_rank)

    @property
    def own_dtype(self) -> str:
        """The type of the weights as they were saved; float32 where the config does not say."""
        dtype = getattr(self.config, "dtype", None) or self.config.get_text_config().dtype
        return str(dtype or torch.float32).removeprefix("torch.")

    def workload(self, dtype: str | None = None) -> Workload:
        """Return it with weights of a type; see the function `workload`.

        Raises:
            InvalidArgument: there is no such type.
        """
        chosen = self.own_dtype if dtype is None else dtype
        check_dtype(chosen)
        adapters = None
        if self.lora_rank is not None:
            adapters = {"r": self.lora_rank, "target_modules": "all-linear", **self.task.adapters}
        built = _Built(self.config, self.task.auto, chosen, adapters)
        made = self.task.batch(self.config, self.batch, self.sequence)
        images = getattr(torch, chosen)  # convolutions take inputs of the type of their weights
        batch = {name: each.to(images) if each.dim() == 4 else each for name, each in made.items()}
        return Workload(built, batch, optimizer=torch.optim.AdamW)

    def __str__(self) -> str:
        folder = os.path.isdir(self.name) and Path(self.name).resolve().name
        return ", ".join([folder or self.name.removeprefix(HUB), self._samples, *self._adapters])

    @property
    def _samples(self) -> str:
        if self.task.is_of_images:
            return (
                f"{counted(self.batch, 'image')} of {'x'.join(map(str, _image_shape(self.config)))}"
            )
        return f"{self.batch} x {self.sequence} tokens"

    @property
    def _adapters(self) -> list[str]:
        return [] if self.lora_rank is None else [f"LoRA of rank {self.lora_rank}"]


def check_dtype(dtype: str) -> None:
    """Refuse what is no type of weights.

    Raises:
        InvalidArgument: it is none.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


@dataclass(frozen=True)
class _Built:
    """Builds the model, on whichever device is the default one: without values on the meta device.

    Attributes:
        config: of the model.
        auto: name of the auto class.
        dtype: of the weights.
        adapters: of peft's LoraConfig; None: no adapters.
    """

    config: Any
    auto: str
    dtype: str
    adapters: Mapping[str, Any] | None

    def __call__(self) -> torch.nn.Module:
        auto = getattr(library("transformers"), self.auto)
        model: torch.nn.Module = auto.from_config(self.config, dtype=getattr(torch, self.dtype))
        model.train()
        if self.adapters is None:
            return model
        peft = library("peft")
        trained: torch.nn.Module = peft.get_peft_model(model, peft.LoraConfig(**self.adapters))
        return trained


# The config.


def _read_config(name: str) -> Any:
    """Return the config of a folder or of a repository.

    Raises:
        InvalidArgument, PredictionUnavailable: as of `workload`.
    """
    transformers = library("transformers")
    folder = _folder(name)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of the config, whose code is transformers' own
        if "trust_remote_code" in str(error):
            raise InvalidArgument(
                f"{name} brings code of its own, which is not run: {_WAY_OUT}"
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise InvalidArgument(
            f"transformers {transformers.__version__} cannot read the {CONFIG} of {name}: {reason}"
        ) from error
    if getattr(config, "quantization_config", None):
        kind = _get(config.quantization_config, "quant_method") or "a method that is not named"
        raise InvalidArgument(
            f"the weights of {name} are quantized ({kind}), which a config alone does not build: "
            f"name the model that it was made from, or {_WAY_OUT}"
        )
    return config


def _get(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _folder(name: str) -> Path:
    """Return the folder that holds the config, which is downloaded if it is of the hub."""
    if not name.startswith(HUB) and os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, CONFIG)):
            raise InvalidArgument(
                f"the folder {name} has no {CONFIG}: name one that `save_pretrained` wrote"
            )
        return Path(name)
    return Path(_downloaded(name.removeprefix(HUB))).parent


def _downloaded(repository: str) -> str:
    """Return the path of a repository's config.

    Raises:
        InvalidArgument, PredictionUnavailable: as of `workload`.
    """
    hub, errors = library("huggingface_hub"), library("huggingface_hub.errors")
    try:
        path: str = hub.hf_hub_download(repository, CONFIG, library_name="autofit")
    except errors.HFValidationError as error:
        raise InvalidArgument(
            f"{repository!r} is not the name of a repository: write {HUB}ORG/MODEL"
        ) from error
    except errors.GatedRepoError as error:
        raise InvalidArgument(
            f"access to {repository} is restricted: ask for it on the model's page, and log in "
            "(`hf auth login`, or the variable HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidArgument(
            f"the hub has no model {repository!r}, or it is private: check the name, and log in "
            "for a private one (`hf auth login`, or the variable HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise PredictionUnavailable(
            f"the {CONFIG} of {repository} is not on this machine, and the hub cannot be reached: "
            f"connect, or name a folder with the {CONFIG}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise InvalidArgument(
            f"{repository} has no {CONFIG}, so it is not a model of transformers: {_WAY_OUT}"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PredictionUnavailable(
            f"the {CONFIG} of {repository} could not be downloaded: {reason}"
        ) from error
    return path


# What a model is trained for, and its batches.


def _task_of(config: Any, name: str) -> _Task:
    """Return what a model is trained for, by its class, or else by its type of model.

    Raises:
        InvalidArgument: the config does not tell, or it takes more than text or images.
    """
    kind = config.model_type
    named = (getattr(config, "architectures", None) or [None])[0]
    others = _classes_of(*_OF_SEVERAL_INPUTS)
    if named is not None and named not in others:
        for task in _TASKS:
            if named in task.classes().get(kind, ()):
                return task
    has_head = named is not None and "For" in named
    if not has_head and named not in others:
        for task in _IN_DOUBT:
            if kind in task.classes() and (task.auto != _SEQ_2_SEQ or config.is_encoder_decoder):
                return task
    what = named or f"the type of model {kind!r}"
    raise InvalidArgument(
        f"{name}: how {what} is trained cannot be told from its config. {_WAY_OUT.capitalize()}"
    )


def _classes_of(*mappings: str) -> set[str]:
    tables = (_Task("", mapping, _images).classes().values() for mapping in mappings)
    return {name for table in tables for names in table for name in names}


def _sequence(config: Any, task: _Task, asked: int | None, name: str) -> int:
    """Return the tokens of a sample.

    Raises:
        InvalidArgument: the model has no positions for so many, or takes images.
    """
    if task.is_of_images:
        if asked is not None:
            raise InvalidArgument(f"{name} takes images, which have no sequence: leave it out")
        _image_shape(config)
        return 0
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.model_type in _POSITIONS_AFTER_PADDING:
        positions -= (config.pad_token_id or 0) + 1
    if asked is None:
        most = DEFAULT_SEQUENCE if positions is None else min(DEFAULT_SEQUENCE, positions)
        return max(most // _MULTIPLE * _MULTIPLE, 1)
    check_count("sequence", asked)
    if positions is not None and asked > positions:
        raise InvalidArgument(
            f"sequence={asked} is longer than the {positions} positions of {name} "
            "(max_position_embeddings in its config)"
        )
    return asked


def _ids(config: Any, *shape: int) -> torch.Tensor:
    """Return ids of tokens; from the middle of the vocabulary, whose ends have special ones."""
    size = config.get_text_config().vocab_size
    numbers = torch.arange(math.prod(shape)) % max(size // 4, 1)
    ids: torch.Tensor = (numbers + size // 4).reshape(shape)
    return ids


def _language(config: Any, samples: int, sequence: int) -> Mapping[str, torch.Tensor]:
    ids = _ids(config, samples, sequence)
    return {"input_ids": ids, "labels": ids.clone()}


def _labels(config: Any, samples: int) -> torch.Tensor:
    """Return a label of each sample, of the type that the model's loss goes by."""
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return torch.zeros(samples, config.num_labels)
    if getattr(config, "problem_type", None) == "regression" and config.num_labels > 1:
        return torch.zeros(samples, config.num_labels)
    return torch.zeros(samples, dtype=torch.long if config.num_labels > 1 else torch.float32)


def _labelled(config: Any, samples: int, sequence: int) -> Mapping[str, torch.Tensor]:
    return {"input_ids": _ids(config, samples, sequence), "labels": _labels(config, samples)}


def _labelled_tokens(config: Any, samples: int, sequence: int) -> Mapping[str, torch.Tensor]:
    ids = _ids(config, samples, sequence)
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


def _spans(config: Any, samples: int, sequence: int) -> Mapping[str, torch.Tensor]:
    ends = {name: torch.zeros(samples, dtype=torch.long) for name in _ENDS}
    return {"input_ids": _ids(config, samples, sequence)} | ends


_ENDS = ("start_positions", "end_positions")


def _images(config: Any, samples: int, sequence: int) -> Mapping[str, torch.Tensor]:
    pixels = torch.zeros(samples, *_image_shape(config))
    return {"pixel_values": pixels, "labels": _labels(config, samples)}


def _image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width.

    Raises:
        InvalidArgument: the config does not say.
    """
    size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
    if size is None or channels is None:
        raise InvalidArgument(
            f"the config of this {config.model_type} does not say how large its images are "
            f"(image_size, num_channels). {_WAY_OUT.capitalize()}"
        )
    height, width = (size, size) if isinstance(size, int) else size
    return int(channels), int(height), int(width)


# As peft names these tasks, and the modules of theirs that it trains whole.
_WITH_NEW_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_NEW_HEADS = r"(.*\.)?(classifier|score|qa_outputs)(\..*)?"
_SEQ_2_SEQ = "AutoModelForSeq2SeqLM"
_NAMES = "MODEL_FOR_{}_MAPPING_NAMES"
_CAUSAL = _Task("AutoModelForCausalLM", _NAMES.format("CAUSAL_LM"), _language, "CAUSAL_LM")
_ENCODER_DECODER = _Task(
    _SEQ_2_SEQ, _NAMES.format("SEQ_TO_SEQ_CAUSAL_LM"), _language, "SEQ_2_SEQ_LM"
)
_MASKED = _Task("AutoModelForMaskedLM", _NAMES.format("MASKED_LM"), _language)
_OF_IMAGES = _Task(
    "AutoModelForImageClassification", _NAMES.format("IMAGE_CLASSIFICATION"), _images
)
_TASKS = (
    _ENCODER_DECODER,
    _CAUSAL,
    _MASKED,
    _OF_IMAGES,
    _Task(
        "AutoModelForSequenceClassification",
        _NAMES.format("SEQUENCE_CLASSIFICATION"),
        _labelled,
        "SEQ_CLS",
    ),
    _Task(
        "AutoModelForTokenClassification",
        _NAMES.format("TOKEN_CLASSIFICATION"),
        _labelled_tokens,
        "TOKEN_CLS",
    ),
    _Task(
        "AutoModelForQuestionAnswering", _NAMES.format("QUESTION_ANSWERING"), _spans, "QUESTION_ANS"
    ),
)
# Of a model without a head (BertModel), or a config without `architectures`, the first that its
# type has: most encoders have a head for causal language models too, which few train.
_IN_DOUBT = (_ENCODER_DECODER, _OF_IMAGES, _MASKED, _CAUSAL)
# Classes that take images or sounds beside their text, some of which have a task above as well.
_OF_SEVERAL_INPUTS = (
    _NAMES.format("IMAGE_TEXT_TO_TEXT"),
    _NAMES.format("MULTIMODAL_LM"),
    _NAMES.format("SPEECH_SEQ_2_SEQ"),
)
