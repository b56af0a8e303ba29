"""Models of transformers, and batches that they train on.

Weights are random. Each function returns a function that makes a model or draws a batch when it is
called; a `Scale` gives the entries of configurations. The package is imported when a model is made.
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


def transformers_model(name: str, **options: Any) -> MakeModel:
    """Return a model of transformers by its class, with these entries of its configuration."""

    def make() -> nn.Module:
        made = getattr(importlib.import_module("transformers"), name)
        model = made(made.config_class(**options)).train()
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # of keys and values, for inference
        return model  # type: ignore[no-any-return]

    return make


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the mean squares of all floating outputs."""
    output = model(**batch)
    parts = tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)
    floating = [part for part in parts if isinstance(part, Tensor) and part.requires_grad]
    return torch.stack([part.float().square().mean() for part in floating]).sum()


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
    """

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    positions: int
    image_size: int
    channels: int

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
