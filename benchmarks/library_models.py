"""Models of torchvision, timm, transformers and diffusers, and batches that they train on.

Weights are random. Each function returns a function that makes a model or draws a batch when it is
called; a `Scale` gives the entries of configurations. The packages are imported when a model of
theirs is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Batch = Mapping[str, Any]
MakeModel = Callable[[], nn.Module]
MakeBatch = Callable[[], Batch]


def torchvision_model(name: str, part: str = "", **options: Any) -> MakeModel:
    """Return a model of torchvision, by a function's name or a class's; part: as ".video"."""

    def make() -> nn.Module:
        made = getattr(importlib.import_module(f"torchvision.models{part}"), name)
        return made(**({} if name[0].isupper() else {"weights": None}), **options)  # type: ignore[no-any-return]

    return make


def timm_model(name: str, **options: Any) -> MakeModel:
    """Return a classifier of timm for ten classes."""

    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=10, **options)  # type: ignore[no-any-return]

    return make


def transformers_model(name: str, **options: Any) -> MakeModel:
    """Return a model of transformers by its class, with these entries of its configuration."""

    def make() -> nn.Module:
        made = getattr(importlib.import_module("transformers"), name)
        model = made(made.config_class(**options)).train()
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # of keys and values, for inference
        return model  # type: ignore[no-any-return]

    return make


def diffusers_model(name: str, **options: Any) -> MakeModel:
    """Return a model of diffusers by its class."""

    def make() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**options)  # type: ignore[no-any-return]

    return make


def switch_checkpointing_on(model: Any) -> None:
    """Checkpoint the model's blocks by the switch that its library offers."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.set_grad_checkpointing(True)


# Losses


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the mean squares of all floating outputs."""
    output = model(**batch)
    parts = tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)
    floating = [part for part in parts if isinstance(part, Tensor) and part.requires_grad]
    return torch.stack([part.float().square().mean() for part in floating]).sum()


def of_images(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a classifier, summed over its heads if it has several."""
    found = model(batch["x"])
    heads = found if isinstance(found, tuple) else [found]
    losses = [nn.functional.cross_entropy(head, batch["labels"]) for head in heads]
    return torch.stack(losses).sum()


# Batches


def images(samples: int, size: int) -> MakeBatch:
    return lambda: {
        "x": torch.randn(samples, 3, size, size),
        "labels": torch.randint(10, (samples,)),
    }


def tokens(samples: int, length: int, vocabulary: int) -> MakeBatch:
    """Return token ids, none of them special, with labels."""

    def draw() -> Batch:
        ids = torch.randint(3, vocabulary - 6, (samples, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def speech(samples: int, length: int, labels: int) -> MakeBatch:
    return lambda: {
        "input_values": torch.randn(samples, length),
        "labels": torch.randint(1, 31, (samples, labels)),
    }


def spectrogram(samples: int, size: tuple[int, int], labels: int, vocabulary: int) -> MakeBatch:
    return lambda: {
        "input_features": torch.randn(samples, *size),
        "labels": torch.randint(3, vocabulary - 6, (samples, labels)),
    }


def pixels(samples: int, size: int) -> MakeBatch:
    return lambda: {"pixel_values": torch.randn(samples, 3, size, size)}


def labelled(samples: int, size: int) -> MakeBatch:
    return lambda: {**pixels(samples, size)(), "labels": torch.randint(10, (samples,))}


def pairs(samples: int, size: int, length: int, vocabulary: int) -> MakeBatch:
    """Return images, each with a text."""
    return lambda: {
        "input_ids": torch.randint(3, vocabulary - 6, (samples, length)),
        **pixels(samples, size)(),
        "return_loss": True,
    }


# Configurations


@dataclass(frozen=True)
class Scale:
    """How large models are; methods return entries of configurations, with some more.

    Attributes:
        vocabulary: the number of token ids.
        width, inner_width: features of a token, in its stream and inside of a feed-forward layer.
        layers: blocks of a model; where there is an encoder and a decoder, one less in each.
        heads: of attention; half as many for keys and values where these differ.
        positions: the longest sequence.
        image_size: in pixels, of images that are cut into patches of 8 x 8.
        channels: of the first level of a network of convolutions.
        latent_size: in pixels, of what a diffusion in latent space sees.
    """

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    positions: int
    image_size: int
    channels: int
    latent_size: int

    def blocks(self, **more: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.width,
            "intermediate_size": self.inner_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            **more,
        }

    def text(self, **more: Any) -> dict[str, Any]:
        return {"vocab_size": self.vocabulary, "pad_token_id": 0, **more}

    def encoder(self, **more: Any) -> dict[str, Any]:
        return self.text(**self.blocks(max_position_embeddings=self.positions), **more)

    def decoder(self, **more: Any) -> dict[str, Any]:
        return self.encoder(num_key_value_heads=self.heads // 2, **more)

    def gpt(self, **more: Any) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_positions": self.positions,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **more,
        }

    def sequence_to_sequence(self, **more: Any) -> dict[str, Any]:
        return self.text(
            d_model=self.width,
            encoder_layers=self.layers - 1,
            decoder_layers=self.layers - 1,
            encoder_attention_heads=self.heads,
            decoder_attention_heads=self.heads,
            encoder_ffn_dim=self.inner_width,
            decoder_ffn_dim=self.inner_width,
            max_position_embeddings=self.positions,
            decoder_start_token_id=2,
            dropout=0.1,
            **more,
        )

    def t5(self, **more: Any) -> dict[str, Any]:
        return self.text(
            d_model=self.width,
            d_kv=self.width // self.heads,
            d_ff=self.inner_width,
            num_layers=self.layers - 1,
            num_decoder_layers=self.layers - 1,
            num_heads=self.heads,
            decoder_start_token_id=0,
            **more,
        )

    def speech(self, **more: Any) -> dict[str, Any]:
        return self.blocks(
            vocab_size=32,
            conv_dim=(2 * self.channels,) * 3,
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            **more,
        )

    def patches(self, **more: Any) -> dict[str, Any]:
        return self.blocks(image_size=self.image_size, patch_size=8, **more)


def diffusion(scale: Scale, samples: int = 4) -> dict[str, tuple[MakeModel, MakeBatch]]:
    """Return models of diffusers with what they are called with; `squares` is a loss of theirs."""
    channels, latent_size = scale.channels, scale.latent_size
    times = torch.tensor([3, 50, 700, 9])[:samples]
    text = ("encoder_hidden_states", (16, 2 * channels))
    levels: dict[str, Any] = {
        "block_out_channels": (channels, 2 * channels, 2 * channels),
        "layers_per_block": 1,
        "norm_num_groups": scale.heads,
    }
    autoencoder: dict[str, Any] = {
        "block_out_channels": (channels, 2 * channels),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": scale.heads,
    }
    transformer: dict[str, Any] = {
        "num_attention_heads": scale.heads,
        "attention_head_dim": scale.width // scale.heads,
        "in_channels": 4,
        "num_layers": scale.layers,
        "sample_size": latent_size,
    }

    def drawn(
        name: str, channels: int, size: int, *drawn: tuple[str, tuple[int, ...]], **more: Any
    ) -> MakeBatch:
        return lambda: {
            name: torch.randn(samples, channels, size, size),
            **{key: torch.randn(samples, *shape) for key, shape in drawn},
            **more,
        }

    image = drawn("sample", 3, 2 * latent_size)
    return {
        "unet_2d": (
            diffusers_model(
                "UNet2DModel",
                sample_size=2 * latent_size,
                down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
                dropout=0.1,
                **levels,
            ),
            drawn("sample", 3, 2 * latent_size, timestep=times),
        ),
        "unet_2d_condition": (
            diffusers_model(
                "UNet2DConditionModel",
                sample_size=latent_size,
                down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=2 * channels,
                attention_head_dim=8,
                **levels,
            ),
            drawn("sample", 4, latent_size, text, timestep=times),
        ),
        "autoencoder_kl": (diffusers_model("AutoencoderKL", **autoencoder), image),
        "vq_model": (diffusers_model("VQModel", **autoencoder), image),
        "dit": (
            diffusers_model("DiTTransformer2DModel", dropout=0.1, norm_num_groups=4, **transformer),
            drawn(
                "hidden_states",
                4,
                latent_size,
                timestep=times,
                class_labels=torch.tensor([1, 2, 3, 4])[:samples],
            ),
        ),
        "pixart": (
            diffusers_model(
                "PixArtTransformer2DModel",
                cross_attention_dim=scale.width,
                caption_channels=2 * channels,
                norm_num_groups=4,
                **transformer,
            ),
            drawn(
                "hidden_states",
                4,
                latent_size,
                text,
                timestep=times,
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ),
        ),
        "sd3": (
            diffusers_model(
                "SD3Transformer2DModel",
                patch_size=2,
                joint_attention_dim=2 * channels,
                caption_projection_dim=scale.width,
                pooled_projection_dim=4 * channels,
                pos_embed_max_size=latent_size,
                out_channels=4,
                **transformer,
            ),
            drawn(
                "hidden_states",
                4,
                latent_size,
                text,
                ("pooled_projections", (4 * channels,)),
                timestep=times,
            ),
        ),
    }
