"""Models that nobody here wrote, for `benchmarks.emulation_models`: sizes, batches and losses.

They are as wide as they are used, or nearly, and not as deep, so that their peaks are of
activations as well as weights, and a step is a second or less of launches.
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


@dataclass(frozen=True)
class Model:
    """A model and what it is trained with.

    Attributes:
        package: that has it.
        make: returns the model.
        batch: returns what `loss_fn` takes.
        loss_fn: of model and batch; None: the model returns its loss.
        switchable: whether the library can checkpoint it.
    """

    package: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
    switchable: bool = False


def switch_checkpointing_on(model: Any) -> None:
    """Checkpoint the model's blocks by the switch that its library offers."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.set_grad_checkpointing(True)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean square of the first floating output."""
    output = model(**batch)
    parts = output.to_tuple() if hasattr(output, "to_tuple") else output
    floating = (t for t in tree_leaves(parts) if isinstance(t, Tensor) and t.requires_grad)
    return next(floating).float().square().mean()


def of_images(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a classifier, or of each of its heads."""
    found = model(batch["x"])
    heads = found if isinstance(found, tuple) else [found]
    losses = [nn.functional.cross_entropy(head, batch["labels"]) for head in heads]
    return torch.stack(losses).sum()


def of_pixels(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a segmentation."""
    labels = torch.zeros_like(batch["x"][:, 0], dtype=torch.long)
    return nn.functional.cross_entropy(model(batch["x"])["out"], labels)


def images(samples: int, size: int) -> Callable[[], Batch]:
    return lambda: {
        "x": torch.randn(samples, 3, size, size),
        "labels": torch.randint(10, (samples,)),
    }


def clips() -> Batch:
    return {"x": torch.randn(4, 3, 8, 56, 56), "labels": torch.randint(10, (4,))}


def tokens(samples: int = 8, length: int = 128) -> Callable[[], Batch]:
    def make() -> Batch:
        ids = torch.randint(3, 8000, (samples, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def _vision(name: str, samples: int = 16, size: int = 96, **options: Any) -> Model:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        made = getattr(models, name)
        pretrained = {} if name[0].isupper() else {"weights": None}
        return made(num_classes=10, **pretrained, **options)  # type: ignore[no-any-return]

    return Model("torchvision", make, images(samples, size), of_images)


def _segmentation(name: str) -> Model:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models.segmentation")
        options = {"weights": None, "weights_backbone": None, "num_classes": 10}
        return getattr(models, name)(**options)  # type: ignore[no-any-return]

    return Model("torchvision", make, images(8, 96), of_pixels)


def _video(name: str) -> Model:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models.video")
        return getattr(models, name)(weights=None, num_classes=10)  # type: ignore[no-any-return]

    return Model("torchvision", make, lambda: clips(), of_images)


def _timm(name: str, samples: int = 16, size: int = 96, **options: Any) -> Model:
    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=10, **options)  # type: ignore[no-any-return]

    return Model("timm", make, images(samples, size), of_images, "img_size" in options)


def _hf(
    name: str, batch: Any, *, loss_fn: Any = None, switch: bool = True, **options: Any
) -> Model:
    """Return a model of transformers by its class, with these entries of its configuration."""

    def make() -> nn.Module:
        cls = getattr(importlib.import_module("transformers"), name)
        model = cls(cls.config_class(**options)).train()
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # of keys and values, for inference
        return model  # type: ignore[no-any-return]

    return Model("transformers", make, batch, loss_fn, switch)


def _diffusion(name: str, batch: Any, **options: Any) -> Model:
    def make() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**options)  # type: ignore[no-any-return]

    return Model("diffusers", make, batch, squares, True)


_TEXT: dict[str, Any] = {"vocab_size": 8192, "pad_token_id": 0}
_BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
_ENCODER = {**_TEXT, **_BLOCKS, "max_position_embeddings": 160}
_DECODER = {**_TEXT, **_BLOCKS, "num_key_value_heads": 4, "max_position_embeddings": 160}
_WIDE: dict[str, Any] = {**_TEXT, "hidden_size": 256, "n_layer": 4, "n_head": 8}
_GPT: dict[str, Any] = {
    "vocab_size": 8192,
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ: dict[str, Any] = {
    **_TEXT,
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 768,
    "decoder_ffn_dim": 768,
    "max_position_embeddings": 160,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
}
_T5: dict[str, Any] = {
    **_TEXT,
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 768,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 8,
    "decoder_start_token_id": 0,
}
_PIXELS: dict[str, Any] = {**_BLOCKS, "image_size": 96, "patch_size": 8}
_SPEECH: dict[str, Any] = {
    **_BLOCKS,
    "vocab_size": 32,
    "conv_dim": (128, 128, 128),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
_UNET: dict[str, Any] = {
    "block_out_channels": (64, 128, 128),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def _pixels() -> Batch:
    return {"pixel_values": torch.randn(8, 3, 96, 96)}


def _labelled() -> Batch:
    return {**_pixels(), "labels": torch.randint(10, (8,))}


def _speech() -> Batch:
    return {"input_values": torch.randn(4, 8000), "labels": torch.randint(1, 31, (4, 12))}


def _spectrogram() -> Batch:
    return {"input_features": torch.randn(4, 80, 256), "labels": torch.randint(3, 8000, (4, 48))}


def _pairs() -> Batch:
    ids = torch.randint(3, 8000, (8, 48))
    return {"input_ids": ids, **_pixels(), "return_loss": True}


def _noisy(channels: int, size: int, **more: Any) -> Callable[[], Batch]:
    def make() -> Batch:
        sample = torch.randn(4, channels, size, size)
        drawn = {name: draw() for name, draw in more.items()}
        return {"sample": sample, "timestep": torch.tensor([3, 50, 700, 9]), **drawn}

    return make


def _latents(**more: Any) -> Callable[[], Batch]:
    def make() -> Batch:
        latents = torch.randn(4, 4, 32, 32)
        drawn = {name: draw() for name, draw in more.items()}
        return {"hidden_states": latents, "timestep": torch.tensor([3, 50, 700, 9]), **drawn}

    return make


_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "in_channels": 4,
    "num_layers": 4,
    "sample_size": 32,
}

MODELS: dict[str, Model] = {
    # torchvision
    "alexnet": _vision("alexnet"),
    "vgg11_bn": _vision("vgg11_bn", 8, 64),
    "resnet18": _vision("resnet18"),
    "resnet50": _vision("resnet50"),
    "resnext50_32x4d": _vision("resnext50_32x4d"),
    "wide_resnet50_2": _vision("wide_resnet50_2", 8),
    "densenet121": _vision("densenet121", 8),
    "googlenet": _vision("googlenet", aux_logits=False, init_weights=False),
    "inception_v3": _vision("inception_v3", 8, 128, aux_logits=False, init_weights=False),
    "mobilenet_v2": _vision("mobilenet_v2"),
    "mobilenet_v3_large": _vision("mobilenet_v3_large"),
    "mnasnet1_0": _vision("mnasnet1_0"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "efficientnet_v2_s": _vision("efficientnet_v2_s", 8),
    "regnet_y_400mf": _vision("regnet_y_400mf"),
    "regnet_x_800mf": _vision("regnet_x_800mf"),
    "shufflenet_v2_x1_0": _vision("shufflenet_v2_x1_0"),
    "squeezenet1_1": _vision("squeezenet1_1"),
    "convnext_tiny": _vision("convnext_tiny", 8),
    "swin_t": _vision("swin_t", 8),
    "swin_v2_t": _vision("swin_v2_t", 8),
    "vision transformer": _vision(
        "VisionTransformer",
        image_size=96,
        patch_size=8,
        num_layers=6,
        num_heads=6,
        hidden_dim=384,
        mlp_dim=1536,
        dropout=0.1,
    ),
    "fcn_resnet50": _segmentation("fcn_resnet50"),
    "deeplabv3_resnet50": _segmentation("deeplabv3_resnet50"),
    "lraspp_mobilenet_v3": _segmentation("lraspp_mobilenet_v3_large"),
    "r3d_18": _video("r3d_18"),
    "r2plus1d_18": _video("r2plus1d_18"),
    # timm
    "timm resnet26t": _timm("resnet26t"),
    "timm seresnet50": _timm("seresnet50"),
    "timm res2net50": _timm("res2net50_26w_4s"),
    "timm resnest14d": _timm("resnest14d"),
    "timm cspresnet50": _timm("cspresnet50"),
    "timm dla34": _timm("dla34"),
    "timm dpn48b": _timm("dpn48b"),
    "timm hrnet_w18_small": _timm("hrnet_w18_small", 8),
    "timm nf_resnet26": _timm("nf_resnet26"),
    "timm eca_nfnet_l0": _timm("eca_nfnet_l0", 8),
    "timm repvgg_a0": _timm("repvgg_a0"),
    "timm ghostnet_100": _timm("ghostnet_100"),
    "timm mobilenetv4": _timm("mobilenetv4_conv_small"),
    "timm efficientnet_lite0": _timm("efficientnet_lite0", drop_path_rate=0.1),
    "timm regnety_002": _timm("regnety_002"),
    "timm convnext_atto": _timm("convnext_atto", drop_path_rate=0.1),
    "timm convnextv2_atto": _timm("convnextv2_atto"),
    "timm inception_next": _timm("inception_next_atto"),
    "timm fastvit_t8": _timm("fastvit_t8", 8),
    "timm edgenext": _timm("edgenext_xx_small"),
    "timm efficientvit_b0": _timm("efficientvit_b0"),
    "timm mobilevit_xxs": _timm("mobilevit_xxs", size=128),
    "timm poolformer_s12": _timm("poolformer_s12"),
    "timm vit_tiny": _timm(
        "vit_tiny_patch16_224", img_size=96, depth=6, proj_drop_rate=0.1, drop_path_rate=0.1
    ),
    "timm deit_tiny": _timm("deit_tiny_patch16_224", img_size=96, depth=6),
    "timm beit": _timm("beit_base_patch16_224", img_size=96, depth=3),
    "timm eva02_tiny": _timm("eva02_tiny_patch14_224", size=98, img_size=98, depth=4),
    "timm cait_xxs24": _timm("cait_xxs24_224", img_size=96, depth=6),
    "timm xcit_nano": _timm("xcit_nano_12_p16_224", img_size=96),
    "timm swin_tiny": _timm("swin_tiny_patch4_window7_224", size=112, img_size=112, window_size=7),
    "timm mixer_s16": _timm("mixer_s16_224", img_size=96),
    "timm resmlp_12": _timm("resmlp_12_224", img_size=96),
    # transformers
    "gpt2": _hf("GPT2LMHeadModel", tokens(), **_GPT),
    "gptj": _hf("GPTJForCausalLM", tokens(), rotary_dim=16, **_GPT),
    "gpt_neox": _hf("GPTNeoXForCausalLM", tokens(), **_ENCODER),
    "gpt_bigcode": _hf("GPTBigCodeForCausalLM", tokens(), **_GPT),
    "llama": _hf("LlamaForCausalLM", tokens(), **_DECODER),
    "mistral": _hf("MistralForCausalLM", tokens(), sliding_window=64, **_DECODER),
    "gemma2": _hf("Gemma2ForCausalLM", tokens(), head_dim=32, **_DECODER),
    "gemma3": _hf("Gemma3ForCausalLM", tokens(), head_dim=32, **_DECODER),
    "qwen2": _hf("Qwen2ForCausalLM", tokens(), **_DECODER),
    "qwen3": _hf("Qwen3ForCausalLM", tokens(), head_dim=32, **_DECODER),
    "phi": _hf("PhiForCausalLM", tokens(), **_DECODER),
    "phi3": _hf("Phi3ForCausalLM", tokens(), **_DECODER),
    "olmo2": _hf("Olmo2ForCausalLM", tokens(), **_DECODER),
    "cohere": _hf("CohereForCausalLM", tokens(), **_DECODER),
    "starcoder2": _hf("Starcoder2ForCausalLM", tokens(), **_DECODER),
    "stablelm": _hf("StableLmForCausalLM", tokens(), **_DECODER),
    "granite": _hf("GraniteForCausalLM", tokens(), **_DECODER),
    "falcon": _hf("FalconForCausalLM", tokens(), **_TEXT, **_BLOCKS),
    "bloom": _hf("BloomForCausalLM", tokens(), hidden_dropout=0.1, **_WIDE),
    "mpt": _hf("MptForCausalLM", tokens(), d_model=256, n_heads=8, n_layers=4, **_TEXT),
    "opt": _hf(
        "OPTForCausalLM",
        tokens(),
        ffn_dim=768,
        word_embed_proj_dim=256,
        dropout=0.1,
        **{k: v for k, v in _ENCODER.items() if k != "intermediate_size"},
    ),
    "mamba": _hf(
        "MambaForCausalLM",
        tokens(2, 64),
        state_size=8,
        num_hidden_layers=2,
        hidden_size=256,
        **_TEXT,
    ),
    "bert": _hf("BertForMaskedLM", tokens(), **_ENCODER),
    "roberta": _hf("RobertaForMaskedLM", tokens(), **_ENCODER),
    "albert": _hf("AlbertForMaskedLM", tokens(), switch=False, embedding_size=64, **_ENCODER),
    "distilbert": _hf(
        "DistilBertForMaskedLM", tokens(), dim=256, hidden_dim=768, n_layers=4, n_heads=8, **_TEXT
    ),
    "electra": _hf("ElectraForMaskedLM", tokens(), embedding_size=64, **_ENCODER),
    "deberta_v2": _hf(
        "DebertaV2ForMaskedLM",
        tokens(),
        relative_attention=True,
        pos_att_type="c2p|p2c",
        **_ENCODER,
    ),
    "mpnet": _hf("MPNetForMaskedLM", tokens(), switch=False, **_ENCODER),
    "modernbert": _hf("ModernBertForMaskedLM", tokens(), **_ENCODER),
    "t5": _hf("T5ForConditionalGeneration", tokens(), **_T5),
    "bart": _hf("BartForConditionalGeneration", tokens(), **_SEQ2SEQ),
    "pegasus": _hf("PegasusForConditionalGeneration", tokens(), **_SEQ2SEQ),
    "m2m_100": _hf("M2M100ForConditionalGeneration", tokens(), **_SEQ2SEQ),
    "whisper": _hf(
        "WhisperForConditionalGeneration",
        _spectrogram,
        max_source_positions=128,
        max_target_positions=64,
        **_SEQ2SEQ,
    ),
    "wav2vec2": _hf("Wav2Vec2ForCTC", _speech, **_SPEECH),
    "hubert": _hf("HubertForCTC", _speech, **_SPEECH),
    "vit": _hf("ViTForImageClassification", _labelled, num_labels=10, **_PIXELS),
    "dinov2": _hf("Dinov2ForImageClassification", _labelled, num_labels=10, **_PIXELS),
    "segformer": _hf("SegformerModel", _pixels, loss_fn=squares, hidden_sizes=[32, 64, 128, 256]),
    "convnext": _hf("ConvNextForImageClassification", _labelled, switch=False, num_labels=10),
    "clip": _hf(
        "CLIPModel", _pairs, text_config=_ENCODER, vision_config=_PIXELS, projection_dim=128
    ),
    # diffusers
    "unet_2d": _diffusion(
        "UNet2DModel",
        _noisy(3, 64),
        sample_size=64,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
        **_UNET,
    ),
    "unet_2d_condition": _diffusion(
        "UNet2DConditionModel",
        _noisy(4, 32, encoder_hidden_states=lambda: torch.randn(4, 16, 128)),
        sample_size=32,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=128,
        attention_head_dim=8,
        **_UNET,
    ),
    "autoencoder_kl": _diffusion(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(4, 3, 64, 64)},
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    ),
    "vq_model": _diffusion(
        "VQModel",
        lambda: {"sample": torch.randn(4, 3, 64, 64)},
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    ),
    "dit": _diffusion(
        "DiTTransformer2DModel",
        _latents(class_labels=lambda: torch.tensor([1, 2, 3, 4])),
        dropout=0.1,
        norm_num_groups=8,
        **_TRANSFORMER,
    ),
    "pixart": _diffusion(
        "PixArtTransformer2DModel",
        _latents(
            encoder_hidden_states=lambda: torch.randn(4, 16, 128),
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
        cross_attention_dim=256,
        caption_channels=128,
        norm_num_groups=8,
        **_TRANSFORMER,
    ),
    "sd3": _diffusion(
        "SD3Transformer2DModel",
        _latents(
            encoder_hidden_states=lambda: torch.randn(4, 16, 128),
            pooled_projections=lambda: torch.randn(4, 256),
        ),
        patch_size=2,
        joint_attention_dim=128,
        caption_projection_dim=256,
        pooled_projection_dim=256,
        pos_embed_max_size=32,
        out_channels=4,
        **_TRANSFORMER,
    ),
}
