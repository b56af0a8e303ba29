"""Do the checkpoint levels of real architectures train exactly, and save what blocks would?

    python -m benchmarks.placement_models [--only NAME ...] [--out benchmarks/results/FILE.md]

Small configurations of architectures from torchvision, timm, transformers and diffusers, with
dropout on and no pretrained weights. For each one:

- looking: seconds to find the levels, and how many plain steps of the same batch take as long;
- bits: parameters, buffers, gradients and losses that differ from plain training in any bit, over
  three optimizer steps at every level;
- least: the least peak of any level, and that of full checkpointing of the model's own blocks (by
  the library's own switch, or `torch.utils.checkpoint` around each of the blocks named here), as
  shares of the plain peak. A peak is the most live bytes in a real forward and backward pass
  beside weights, buffers, samples and the gradients of weights, which do not grow with the batch;
  of a few random seeds, the largest.

The packages are no requirement of anything else here; architectures of a package that is not
installed are named and skipped.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autofit.equivalence.steps import seed_everything
from autofit.memory.tracer import MemoryTracer
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import PlainContext
from autofit.training.training import Training
from autofit.training.workload import Workload

SETTING = "checkpointing.level"
STEPS = 3


@dataclass(frozen=True)
class Architecture:
    """A model to measure.

    Attributes:
        package: that has it.
        make: returns the model.
        batch: returns what it is called with.
        blocks: class names of its own blocks; (): the library's switch finds them.
        loss_fn: None: the model returns its loss.
        seeds: random seeds to measure peaks with; several where parts are skipped at random.
    """

    package: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    blocks: tuple[str, ...] = ()
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None
    seeds: int = 1

    def workload(self) -> Workload:
        """The same weights and samples each time."""
        seed_everything(0)
        return Workload(
            self.make(),
            self.batch(),
            loss_fn=self.loss_fn,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        )


def squares(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the mean square of all floating outputs."""
    output = model(**batch)
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    parts = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def of_images(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy of a classifier of images."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def of_boxes(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a detector; each image has two boxes."""
    box = torch.tensor([[8.0, 8.0, 40.0, 40.0], [20.0, 20.0, 60.0, 50.0]])
    targets = [{"boxes": box, "labels": torch.tensor([1, 2])} for _ in batch["x"]]
    losses = model(list(batch["x"]), targets)
    return torch.stack(list(losses.values())).sum()


def images(samples: int = 4, size: int = 64) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {
        "x": torch.randn(samples, 3, size, size),
        "labels": torch.randint(10, (samples,)),
    }


def tokens(samples: int = 4, length: int = 48, **more: Any) -> Callable[[], dict[str, Any]]:
    """Return token ids, with labels; `more`: what else the model wants, as name=range of ids."""

    def make() -> dict[str, Any]:
        ids = torch.randint(3, 90, (samples, length))
        return {"input_ids": ids, "labels": ids.clone(), **{k: v() for k, v in more.items()}}

    return make


def vision(name: str, *blocks: str, batch: Any = None, **options: Any) -> Architecture:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        pretrained = {} if name[0].isupper() else {"weights": None}
        return getattr(models, name)(num_classes=10, **pretrained, **options)  # type: ignore[no-any-return]

    return Architecture("torchvision", make, batch or images(), blocks, of_images)


def detector(name: str, *blocks: str, **options: Any) -> Architecture:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models.detection")
        return getattr(models, name)(  # type: ignore[no-any-return]
            weights=None, weights_backbone=None, num_classes=5, **options
        )

    return Architecture("torchvision", make, images(2, 64), blocks, of_boxes)


def timm(name: str, *blocks: str, size: int = 64, **options: Any) -> Architecture:
    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=10, **options)  # type: ignore[no-any-return]

    return Architecture("timm", make, images(4, size), blocks, of_images)


def hf(
    name: str, batch: Any, *blocks: str, loss_fn: Any = None, seeds: int = 1, **options: Any
) -> Architecture:
    """Return a model of transformers by its class, with these entries of its configuration."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        cls = getattr(transformers, name)
        model = cls(cls.config_class(**options)).train()
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # of keys and values, for inference
        return model  # type: ignore[no-any-return]

    return Architecture("transformers", make, batch, blocks, loss_fn, seeds)


def diffusion(name: str, batch: Any, *blocks: str, **options: Any) -> Architecture:
    def make() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**options)  # type: ignore[no-any-return]

    return Architecture("diffusers", make, batch, blocks, squares)


_BLOCKS: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
_TEXT: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0}


def _decoder(**more: Any) -> dict[str, Any]:
    """Return the entries that most decoders of transformers share."""
    return {
        **_TEXT,
        **_BLOCKS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        **more,
    }


def _encoder(**more: Any) -> dict[str, Any]:
    return {**_TEXT, **_BLOCKS, "max_position_embeddings": 72, **more}


def _seq2seq(**more: Any) -> dict[str, Any]:
    return {
        **_TEXT,
        "d_model": 48,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 2,
        **more,
    }


_T5: dict[str, Any] = {
    **_TEXT,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 128,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_SPEECH: dict[str, Any] = {
    **_BLOCKS,
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 4,
}
_PIXELS: dict[str, Any] = {**_BLOCKS, "image_size": 64, "patch_size": 8}


def _speech() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(3, 3200), "labels": torch.randint(1, 31, (3, 8))}


def _spectrogram() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(3, 40, 96), "labels": torch.randint(3, 90, (3, 24))}


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 64, 64)}


def _labelled() -> dict[str, torch.Tensor]:
    return _pixels() | {"labels": torch.randint(10, (4,))}


def _pairs() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, 90, (4, 24)),
        "pixel_values": torch.randn(4, 3, 64, 64),
        "return_loss": True,
    }


def _noisy(channels: int, size: int = 32, **more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        sample = torch.randn(3, channels, size, size)
        return {"sample": sample, "timestep": torch.tensor([3, 50, 700])} | {
            name: draw() for name, draw in more.items()
        }

    return make


def _latents(**more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(3, 4, 16, 16),
            "timestep": torch.tensor([3, 50, 700]),
            **{name: draw() for name, draw in more.items()},
        }

    return make


_UNET: dict[str, Any] = {
    "block_out_channels": (16, 32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}

ARCHITECTURES: dict[str, Architecture] = {
    # torchvision
    "resnet18": vision("resnet18", "BasicBlock", batch=images(4, 32)),
    "densenet121": vision("densenet121", "_DenseBlock", batch=images(2, 64)),
    "convnext_tiny": vision("convnext_tiny", "CNBlock", batch=images(2, 32)),
    "mobilenet_v3_small": vision("mobilenet_v3_small", "InvertedResidual"),
    "efficientnet_b0": vision("efficientnet_b0", "MBConv"),
    "regnet_y_400mf": vision("regnet_y_400mf", "ResBottleneckBlock"),
    "shufflenet_v2": vision("shufflenet_v2_x0_5", "InvertedResidual"),
    "squeezenet": vision("squeezenet1_1", "Fire"),
    "swin": vision(
        "SwinTransformer",
        "SwinTransformerBlock",
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2, 4],
        num_heads=[2, 2, 4],
        window_size=[4, 4],
        dropout=0.1,
    ),
    "vision transformer": vision(
        "VisionTransformer",
        "EncoderBlock",
        image_size=64,
        patch_size=8,
        num_layers=6,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=128,
        dropout=0.1,
    ),
    # timm
    "timm resnet26t": timm("resnet26t", size=32),
    "timm convnext_atto": timm("convnext_atto", drop_path_rate=0.1),
    "timm vit_tiny": timm(
        "vit_tiny_patch16_224", img_size=64, depth=6, proj_drop_rate=0.1, drop_path_rate=0.1
    ),
    "timm swin": timm(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        embed_dim=24,
        depths=(2, 2, 4),
        num_heads=(2, 2, 4),
    ),
    "timm efficientnet_lite0": timm("efficientnet_lite0", drop_path_rate=0.1),
    "timm regnetx_002": timm("regnetx_002"),
    "timm poolformer": timm("poolformer_s12", "MetaFormerBlock"),
    "timm mobilevit": timm("mobilevit_xxs"),
    "timm beit": timm("beit_base_patch16_224", img_size=64, depth=4, embed_dim=48, num_heads=4),
    "timm repvgg_a0": timm("repvgg_a0", size=32),
    "timm efficientvit_b0": timm("efficientvit_b0"),
    "timm regnety_002": timm("regnety_002"),
    # transformers
    "gpt2": hf(
        "GPT2LMHeadModel",
        tokens(),
        vocab_size=96,
        n_embd=48,
        n_layer=6,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": hf("LlamaForCausalLM", tokens(), **_decoder()),
    "mistral": hf("MistralForCausalLM", tokens(), **_decoder(sliding_window=16)),
    "gemma2": hf("Gemma2ForCausalLM", tokens(), **_decoder(head_dim=12)),
    "mixtral": hf("MixtralForCausalLM", tokens(), **_decoder(num_local_experts=4)),
    "qwen3_moe": hf(
        "Qwen3MoeForCausalLM",
        tokens(),
        **_decoder(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=12),
    ),
    "opt (LayerDrop)": hf(
        "OPTForCausalLM",
        tokens(),
        vocab_size=96,
        hidden_size=48,
        num_hidden_layers=6,
        ffn_dim=128,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=48,
        layerdrop=0.2,
        seeds=3,
        dropout=0.1,
        pad_token_id=0,
    ),
    "bloom": hf(
        "BloomForCausalLM",
        tokens(),
        vocab_size=96,
        hidden_size=48,
        n_layer=5,
        n_head=4,
        hidden_dropout=0.1,
    ),
    "mamba": hf(
        "MambaForCausalLM",
        tokens(),
        vocab_size=96,
        hidden_size=48,
        num_hidden_layers=5,
        state_size=8,
    ),
    "bert": hf("BertForMaskedLM", tokens(), **_encoder()),
    "albert": hf("AlbertForMaskedLM", tokens(), "AlbertLayer", **_encoder(embedding_size=24)),
    "deberta_v2": hf(
        "DebertaV2ForMaskedLM",
        tokens(),
        **_encoder(relative_attention=True, pos_att_type="c2p|p2c"),
    ),
    "electra": hf("ElectraForMaskedLM", tokens(), **_encoder(embedding_size=24)),
    "longformer": hf(
        "LongformerForMaskedLM", tokens(), **_encoder(attention_window=[8] * 5, type_vocab_size=2)
    ),
    "t5": hf("T5ForConditionalGeneration", tokens(), **_T5),
    "switch_transformers": hf(
        "SwitchTransformersForConditionalGeneration",
        tokens(),
        **_T5,
        num_experts=4,
        expert_capacity=64,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
    ),
    "bart": hf("BartForConditionalGeneration", tokens(), **_seq2seq()),
    "m2m_100 (LayerDrop)": hf(
        "M2M100ForConditionalGeneration",
        tokens(),
        seeds=3,
        **_seq2seq(encoder_layerdrop=0.2, decoder_layerdrop=0.2),
    ),
    "whisper": hf(
        "WhisperForConditionalGeneration",
        _spectrogram,
        **_seq2seq(num_mel_bins=40, max_source_positions=48, max_target_positions=32, dropout=0.1),
    ),
    "wav2vec2": hf("Wav2Vec2ForCTC", _speech, **_SPEECH),
    "hubert": hf("HubertForCTC", _speech, **_SPEECH),
    "vit": hf("ViTForImageClassification", _labelled, num_labels=10, **_PIXELS),
    "vit_mae": hf(
        "ViTMAEForPreTraining",
        _pixels,
        **_PIXELS,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=3,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    "segformer": hf(
        "SegformerModel",
        _pixels,
        "SegformerLayer",
        loss_fn=squares,
        hidden_sizes=[16, 24, 32, 48],
        decoder_hidden_size=32,
    ),
    "clip": hf(
        "CLIPModel",
        _pairs,
        text_config=_encoder(),
        vision_config=_PIXELS,
        projection_dim=32,
    ),
    # diffusers
    "unet_2d": diffusion(
        "UNet2DModel",
        _noisy(3),
        sample_size=32,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
        **_UNET,
    ),
    "unet_2d_condition": diffusion(
        "UNet2DConditionModel",
        _noisy(4, 16, encoder_hidden_states=lambda: torch.randn(3, 6, 32)),
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **_UNET,
    ),
    "autoencoder_kl": diffusion(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(3, 3, 32, 32)},
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    ),
    "dit": diffusion(
        "DiTTransformer2DModel",
        _latents(class_labels=lambda: torch.tensor([1, 2, 3])),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        num_layers=5,
        sample_size=16,
        dropout=0.1,
        norm_num_groups=4,
    ),
    "pixart": diffusion(
        "PixArtTransformer2DModel",
        _latents(
            encoder_hidden_states=lambda: torch.randn(3, 6, 32),
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        num_layers=4,
        sample_size=16,
        cross_attention_dim=48,
        caption_channels=32,
        norm_num_groups=4,
    ),
    "sd3": diffusion(
        "SD3Transformer2DModel",
        _latents(
            encoder_hidden_states=lambda: torch.randn(3, 6, 32),
            pooled_projections=lambda: torch.randn(3, 64),
        ),
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=12,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=48,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        out_channels=4,
    ),
    # the slowest last
    "fasterrcnn": detector(
        "fasterrcnn_mobilenet_v3_large_320_fpn", "InvertedResidual", min_size=128, max_size=128
    ),
    "ssdlite": detector("ssdlite320_mobilenet_v3_large", "InvertedResidual"),
    "retinanet": detector("retinanet_resnet50_fpn", "Bottleneck", min_size=96, max_size=96),
}


@dataclass(frozen=True)
class Result:
    """Measurements of one architecture.

    Attributes:
        step_s: seconds of a plain optimizer step on the sample batch.
        looking_s: seconds to find the levels.
        levels: their number, plain training included.
        differing: values that differ in any bit from plain training, and all compared.
        plain_bytes, least_bytes, own_bytes: peaks of plain training, of the level with the least,
            and of full checkpointing of the model's own blocks.
        notes: of the strategy.
    """

    name: str
    package: str
    step_s: float
    looking_s: float
    levels: int
    differing: tuple[int, int]
    plain_bytes: int
    least_bytes: int
    own_bytes: int
    notes: tuple[str, ...]

    def row(self) -> str:
        """Return a row of the table."""
        share = self.least_bytes / self.own_bytes
        cells = (
            self.name,
            self.package,
            f"{1000 * self.step_s:.0f}",
            f"{self.looking_s:.1f}",
            f"{self.looking_s / self.step_s:.0f}",
            str(self.levels),
            f"{self.differing[0]} of {self.differing[1]}",
            f"{self.plain_bytes / 2**20:.2f}",
            f"{self.own_bytes / self.plain_bytes:.2f}",
            f"{self.least_bytes / self.plain_bytes:.2f}",
            f"{share:.2f}",
        )
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| model | package | plain step, ms | looking, s | in plain steps | levels | differing "
    "| plain peak, MiB | own blocks | least level | least / own blocks |"
)


def measure(name: str, architecture: Architecture) -> Result:
    """Find the levels of a model and train at each of them."""
    strategy = load_strategies(["checkpointing"])[0]
    workload = architecture.workload()

    def build() -> Workload:
        return copy.deepcopy(workload)

    plain, step_s = train(build())
    context = PlainContext(build)
    gc.collect()
    gc.freeze()  # as a worker does, whose collections would go through all that libraries import
    began = time.process_time()
    dimension = strategy.dimensions(context)[SETTING]
    looking_s = time.process_time() - began
    gc.unfreeze()
    context.close()
    levels = {level: dimension.payloads.get(level) for level in dimension.values}
    differing = compared = 0
    peaks = []
    for payload in levels.values():
        found, _ = train(build(), payload)
        differing += sum(not _same(plain[key], found.get(key)) for key in plain)
        compared += len(plain)
        peaks.append(peak_bytes(build(), payload, architecture.seeds))
    own = build()
    with checkpointing_its_own_blocks(own.build_model(), architecture.blocks):
        own_bytes = peak_bytes(own, seeds=architecture.seeds)
    return Result(
        name,
        architecture.package,
        step_s,
        looking_s,
        len(levels),
        (differing, compared),
        peaks[0],
        min(peaks),
        own_bytes,
        tuple(context.notes),
    )


def training_of(workload: Workload, payload: Any = None) -> Training:
    """Return a training on the whole sample batch with a level's payload; None: plain."""
    model = workload.build_model()
    plan = Plan(workload.sample_batch_size, settings={SETTING: 0 if payload is None else 1})
    return Training(
        model,
        workload.build_optimizer(model),
        workload.recipe,
        ResolvedPlan(
            plan,
            {} if payload is None else {SETTING: payload},
            load_strategies(["checkpointing"]),
        ),
        device=torch.device("cpu"),
        batched=workload.batched_places,
    )


def train(workload: Workload, payload: Any = None) -> tuple[dict[str, torch.Tensor], float]:
    """Return what three optimizer steps left, and the seconds of the fastest of them."""
    seed_everything(1)
    left: dict[str, torch.Tensor] = {}
    seconds = []
    with training_of(workload, payload) as training:

        def update(step: Callable[[], None]) -> None:
            for name, parameter in training.model.named_parameters():
                if parameter.grad is not None:
                    left[f"gradient {number} of {name}"] = parameter.grad.detach().clone()
            step()

        training.wrap_optimizer_step(update)
        for number in range(STEPS):
            began = time.process_time()
            left[f"loss {number}"] = training.step(workload.sample_batch).clone()
            seconds.append(time.process_time() - began)
        left |= {f"parameter {n}": p.detach() for n, p in training.model.named_parameters()}
        left |= {f"buffer {n}": b for n, b in training.model.named_buffers()}
    return left, min(seconds)


def peak_bytes(workload: Workload, payload: Any = None, seeds: int = 1) -> int:
    """Return the most bytes at once of what one forward and backward pass makes."""
    with training_of(workload, payload) as training:
        return max(_peak_bytes(training, workload.sample_batch, seed) for seed in range(seeds))


def _peak_bytes(training: Training, batch: Any, seed: int) -> int:
    seed_everything(seed)
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    tracer = MemoryTracer(record=True)
    tracer.register_foreign([parameters, list(training.model.buffers()), tree_leaves(batch)])
    of_weights: set[int | None] = set()
    hooks = [
        parameter.register_hook(  # type: ignore[no-untyped-call]  # torch does not annotate it
            lambda gradient: of_weights.add(tracer.number_of(gradient))
        )
        for parameter in parameters
    ]
    with tracer:
        training.accumulate(batch)
    for hook in hooks:
        hook.remove()
    training.zero_grad()
    live: dict[int, int] = {}
    now = most = 0
    for number, nbytes in tracer.events:
        if abs(number) not in of_weights:
            now += nbytes if number > 0 else -live.pop(-number)
            most = max(most, now)
            if number > 0:
                live[number] = nbytes
    return most


@contextmanager
def checkpointing_its_own_blocks(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Checkpoint all blocks of these classes; (): by the switch that the library offers."""
    found = [module for module in model.modules() if type(module).__name__ in blocks]
    for block in found:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if blocks and not found:
        raise LookupError(f"the model has no {' or '.join(blocks)}")
    if not blocks:
        _switch(model)
    yield


def _switch(model: Any) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.set_grad_checkpointing(True)


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether all bits agree; NaN is itself."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def missing_packages(packages: Iterable[str]) -> dict[str, str]:
    """Return why each of the packages that cannot be imported is left out."""
    missing = {}
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as error:  # some raise RuntimeError where they do not match torch
            missing[package] = f"{type(error).__name__}: {error}"
    return missing


def report(chosen: Mapping[str, Architecture]) -> Iterator[str]:
    """Yield the lines of the results, each as soon as it is known."""
    packages = dict.fromkeys(architecture.package for architecture in chosen.values())
    missing = missing_packages(packages)
    there = ", ".join(f"{p} {version(p)}" for p in packages if p not in missing)
    yield f"# Checkpoint levels of real architectures, {date.today()}"
    yield ""
    yield (
        f"torch {torch.__version__}, {there}, Python {platform.python_version()}, "
        f"{_processor()}, 1 thread; {STEPS} optimizer steps at every level"
    )
    yield from (f"Skipped, as {p} cannot be imported: {why}" for p, why in missing.items())
    yield ""
    yield HEADER
    yield "|" + "---|" * (HEADER.count("|") - 1)
    results, failed = [], {}
    for name, architecture in chosen.items():
        if architecture.package in missing:
            continue
        try:
            results.append(measure(name, architecture))
        except Exception as error:  # the others are measured all the same
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        else:
            yield results[-1].row()
    yield ""
    yield from summary(results)
    yield from (f"- {name} failed: {why}" for name, why in failed.items())
    yield ""
    yield from (f"- {r.name}: {note}" for r in results for note in r.notes)


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield what all the results say together."""
    if not results:
        return
    shares = [r.least_bytes / r.own_bytes for r in results]
    looking = [r.looking_s / r.step_s for r in results]
    yield f"- {len(results)} architectures, {sum(r.levels for r in results)} levels"
    yield (
        f"- values that differ from plain training: {sum(r.differing[0] for r in results)} of "
        f"{sum(r.differing[1] for r in results)}"
    )
    yield (
        f"- least level over own blocks: median {statistics.median(shares):.2f}, "
        f"worst {max(shares):.2f}, above 1.00 in {sum(round(s, 3) > 1 for s in shares)}"
    )
    yield (
        f"- looking: median {statistics.median(looking):.0f} plain steps, worst "
        f"{max(looking):.0f}; {sum(r.looking_s for r in results):.0f} s in all"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (lines.read_text().splitlines() if lines.exists() else ())
        if line.startswith("model name")
    ]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ARCHITECTURES)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for line in report({name: ARCHITECTURES[name] for name in arguments.only or ARCHITECTURES}):
        print(line, flush=True)
        lines.append(line)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
