"""Small architectures of libraries for `benchmarks.placement_models`, with their own blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.equivalence.steps import seed_everything
from autofit.training.workload import Workload
from benchmarks.library_models import (
    MakeBatch,
    Scale,
    diffusion,
    images,
    labelled,
    of_images,
    pairs,
    pixels,
    spectrogram,
    speech,
    squares,
    timm_model,
    tokens,
    torchvision_model,
    transformers_model,
)


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


def of_boxes(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a detector; each image has two boxes."""
    box = torch.tensor([[8.0, 8.0, 40.0, 40.0], [20.0, 20.0, 60.0, 50.0]])
    targets = [{"boxes": box, "labels": torch.tensor([1, 2])} for _ in batch["x"]]
    losses = model(list(batch["x"]), targets)
    return torch.stack(list(losses.values())).sum()


def vision(name: str, *blocks: str, batch: MakeBatch | None = None, **options: Any) -> Architecture:
    make = torchvision_model(name, num_classes=10, **options)
    return Architecture("torchvision", make, batch or images(4, 64), blocks, of_images)


def detector(name: str, *blocks: str, **options: Any) -> Architecture:
    make = torchvision_model(name, ".detection", weights_backbone=None, num_classes=5, **options)
    return Architecture("torchvision", make, images(2, 64), blocks, of_boxes)


def timm(name: str, *blocks: str, size: int = 64, **options: Any) -> Architecture:
    return Architecture("timm", timm_model(name, **options), images(4, size), blocks, of_images)


def hf(
    name: str, batch: MakeBatch, *blocks: str, loss_fn: Any = None, seeds: int = 1, **options: Any
) -> Architecture:
    make = transformers_model(name, **options)
    return Architecture("transformers", make, batch, blocks, loss_fn, seeds)


SCALE = Scale(
    vocabulary=96,
    width=48,
    inner_width=128,
    layers=5,
    heads=4,
    positions=72,
    image_size=64,
    channels=16,
    latent_size=16,
)
_TOKENS = tokens(4, 48, SCALE.vocabulary)
_SPEECH = SCALE.speech(mask_time_length=4)

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
        _TOKENS,
        vocab_size=96,
        n_embd=48,
        n_layer=6,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": hf("LlamaForCausalLM", _TOKENS, **SCALE.decoder(attention_dropout=0.1)),
    "mistral": hf(
        "MistralForCausalLM", _TOKENS, **SCALE.decoder(attention_dropout=0.1, sliding_window=16)
    ),
    "gemma2": hf("Gemma2ForCausalLM", _TOKENS, **SCALE.decoder(attention_dropout=0.1, head_dim=12)),
    "mixtral": hf(
        "MixtralForCausalLM", _TOKENS, **SCALE.decoder(attention_dropout=0.1, num_local_experts=4)
    ),
    "qwen3_moe": hf(
        "Qwen3MoeForCausalLM",
        _TOKENS,
        **SCALE.decoder(
            attention_dropout=0.1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            head_dim=12,
        ),
    ),
    "opt (LayerDrop)": hf(
        "OPTForCausalLM",
        _TOKENS,
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
        _TOKENS,
        vocab_size=96,
        hidden_size=48,
        n_layer=5,
        n_head=4,
        hidden_dropout=0.1,
    ),
    "mamba": hf(
        "MambaForCausalLM",
        _TOKENS,
        vocab_size=96,
        hidden_size=48,
        num_hidden_layers=5,
        state_size=8,
    ),
    "bert": hf("BertForMaskedLM", _TOKENS, **SCALE.encoder()),
    "albert": hf("AlbertForMaskedLM", _TOKENS, "AlbertLayer", **SCALE.encoder(embedding_size=24)),
    "deberta_v2": hf(
        "DebertaV2ForMaskedLM",
        _TOKENS,
        **SCALE.encoder(relative_attention=True, pos_att_type="c2p|p2c"),
    ),
    "electra": hf("ElectraForMaskedLM", _TOKENS, **SCALE.encoder(embedding_size=24)),
    "longformer": hf(
        "LongformerForMaskedLM",
        _TOKENS,
        **SCALE.encoder(attention_window=[8] * 5, type_vocab_size=2),
    ),
    "t5": hf("T5ForConditionalGeneration", _TOKENS, **SCALE.t5()),
    "switch_transformers": hf(
        "SwitchTransformersForConditionalGeneration",
        _TOKENS,
        **SCALE.t5(),
        num_experts=4,
        expert_capacity=64,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
    ),
    "bart": hf("BartForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "m2m_100 (LayerDrop)": hf(
        "M2M100ForConditionalGeneration",
        _TOKENS,
        seeds=3,
        **SCALE.sequence_to_sequence(encoder_layerdrop=0.2, decoder_layerdrop=0.2),
    ),
    "whisper": hf(
        "WhisperForConditionalGeneration",
        spectrogram(3, (40, 96), 24, SCALE.vocabulary),
        **SCALE.sequence_to_sequence(
            num_mel_bins=40, max_source_positions=48, max_target_positions=32
        ),
    ),
    "wav2vec2": hf("Wav2Vec2ForCTC", speech(3, 3200, 8), **_SPEECH),
    "hubert": hf("HubertForCTC", speech(3, 3200, 8), **_SPEECH),
    "vit": hf(
        "ViTForImageClassification", labelled(4, SCALE.image_size), num_labels=10, **SCALE.patches()
    ),
    "vit_mae": hf(
        "ViTMAEForPreTraining",
        pixels(4, SCALE.image_size),
        **SCALE.patches(),
        decoder_hidden_size=32,
        decoder_num_hidden_layers=3,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    "segformer": hf(
        "SegformerModel",
        pixels(4, SCALE.image_size),
        "SegformerLayer",
        loss_fn=squares,
        hidden_sizes=[16, 24, 32, 48],
        decoder_hidden_size=32,
    ),
    "clip": hf(
        "CLIPModel",
        pairs(4, SCALE.image_size, 24, SCALE.vocabulary),
        text_config=SCALE.encoder(),
        vision_config=SCALE.patches(),
        projection_dim=32,
    ),
    # diffusers
    **{
        name: Architecture("diffusers", make, batch, (), squares)
        for name, (make, batch) in diffusion(SCALE).items()
    },
    # the slowest last
    "fasterrcnn": detector(
        "fasterrcnn_mobilenet_v3_large_320_fpn", "InvertedResidual", min_size=128, max_size=128
    ),
    "ssdlite": detector("ssdlite320_mobilenet_v3_large", "InvertedResidual"),
    "retinanet": detector("retinanet_resnet50_fpn", "Bottleneck", min_size=96, max_size=96),
}
