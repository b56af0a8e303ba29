"""Models that nobody here wrote, for `benchmarks.emulation_models`: sizes, batches and losses.

They are as wide as they are used, or nearly, and not as deep, so that their peaks are of
activations as well as weights, and a step is a second or less of launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.library_models import (
    Batch,
    MakeBatch,
    MakeModel,
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

SCALE = Scale(
    vocabulary=8192,
    width=256,
    inner_width=768,
    layers=4,
    heads=8,
    positions=160,
    image_size=96,
    channels=64,
    latent_size=32,
)
_TOKENS = tokens(4, 64, SCALE.vocabulary)
_WIDE = SCALE.text(hidden_size=SCALE.width, n_layer=SCALE.layers, n_head=SCALE.heads)
_SPEECH = SCALE.speech(apply_spec_augment=False, layerdrop=0.0)


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
    make: MakeModel
    batch: MakeBatch
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
    switchable: bool = False


def of_pixels(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a segmentation."""
    labels = torch.zeros_like(batch["x"][:, 0], dtype=torch.long)
    return nn.functional.cross_entropy(model(batch["x"])["out"], labels)


def clips() -> Batch:
    return {"x": torch.randn(4, 3, 8, 56, 56), "labels": torch.randint(10, (4,))}


def _vision(name: str, samples: int = 16, size: int = 96, **options: Any) -> Model:
    make = torchvision_model(name, num_classes=10, **options)
    return Model("torchvision", make, images(samples, size), of_images)


def _segmentation(name: str) -> Model:
    make = torchvision_model(name, ".segmentation", weights_backbone=None, num_classes=10)
    return Model("torchvision", make, images(8, 96), of_pixels)


def _video(name: str) -> Model:
    make = torchvision_model(name, ".video", num_classes=10)
    return Model("torchvision", make, clips, of_images)


def _timm(name: str, samples: int = 16, size: int = 96, **options: Any) -> Model:
    make = timm_model(name, **options)
    return Model("timm", make, images(samples, size), of_images, "img_size" in options)


def _hf(
    name: str, batch: MakeBatch, *, loss_fn: Any = None, switch: bool = True, **options: Any
) -> Model:
    make = transformers_model(name, **options)
    return Model("transformers", make, batch, loss_fn, switch)


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
    "gpt2": _hf("GPT2LMHeadModel", _TOKENS, **SCALE.gpt()),
    "gptj": _hf("GPTJForCausalLM", _TOKENS, rotary_dim=16, **SCALE.gpt()),
    "gpt_neox": _hf("GPTNeoXForCausalLM", _TOKENS, **SCALE.encoder()),
    "gpt_bigcode": _hf("GPTBigCodeForCausalLM", _TOKENS, **SCALE.gpt()),
    "llama": _hf("LlamaForCausalLM", _TOKENS, **SCALE.decoder()),
    "mistral": _hf("MistralForCausalLM", _TOKENS, sliding_window=64, **SCALE.decoder()),
    "gemma2": _hf("Gemma2ForCausalLM", _TOKENS, head_dim=32, **SCALE.decoder()),
    "gemma3": _hf("Gemma3ForCausalLM", _TOKENS, head_dim=32, **SCALE.decoder()),
    "qwen2": _hf("Qwen2ForCausalLM", _TOKENS, **SCALE.decoder()),
    "qwen3": _hf("Qwen3ForCausalLM", _TOKENS, head_dim=32, **SCALE.decoder()),
    "phi": _hf("PhiForCausalLM", _TOKENS, **SCALE.decoder()),
    "phi3": _hf("Phi3ForCausalLM", _TOKENS, **SCALE.decoder()),
    "olmo2": _hf("Olmo2ForCausalLM", _TOKENS, **SCALE.decoder()),
    "cohere": _hf("CohereForCausalLM", _TOKENS, **SCALE.decoder()),
    "starcoder2": _hf("Starcoder2ForCausalLM", _TOKENS, **SCALE.decoder()),
    "stablelm": _hf("StableLmForCausalLM", _TOKENS, **SCALE.decoder()),
    "granite": _hf("GraniteForCausalLM", _TOKENS, **SCALE.decoder()),
    "falcon": _hf("FalconForCausalLM", _TOKENS, **SCALE.text(), **SCALE.blocks()),
    "bloom": _hf("BloomForCausalLM", _TOKENS, hidden_dropout=0.1, **_WIDE),
    "mpt": _hf("MptForCausalLM", _TOKENS, d_model=256, n_heads=8, n_layers=4, **SCALE.text()),
    "opt": _hf(
        "OPTForCausalLM",
        _TOKENS,
        ffn_dim=768,
        word_embed_proj_dim=256,
        dropout=0.1,
        **{k: v for k, v in SCALE.encoder().items() if k != "intermediate_size"},
    ),
    "mamba": _hf(
        "MambaForCausalLM",
        tokens(2, 64, SCALE.vocabulary),
        state_size=8,
        num_hidden_layers=2,
        hidden_size=256,
        **SCALE.text(),
    ),
    "bert": _hf("BertForMaskedLM", _TOKENS, **SCALE.encoder()),
    "roberta": _hf("RobertaForMaskedLM", _TOKENS, **SCALE.encoder()),
    "albert": _hf("AlbertForMaskedLM", _TOKENS, switch=False, embedding_size=64, **SCALE.encoder()),
    "distilbert": _hf(
        "DistilBertForMaskedLM",
        _TOKENS,
        dim=256,
        hidden_dim=768,
        n_layers=4,
        n_heads=8,
        **SCALE.text(),
    ),
    "electra": _hf("ElectraForMaskedLM", _TOKENS, embedding_size=64, **SCALE.encoder()),
    "deberta_v2": _hf(
        "DebertaV2ForMaskedLM",
        _TOKENS,
        relative_attention=True,
        pos_att_type="c2p|p2c",
        **SCALE.encoder(),
    ),
    "mpnet": _hf("MPNetForMaskedLM", _TOKENS, switch=False, **SCALE.encoder()),
    "modernbert": _hf("ModernBertForMaskedLM", _TOKENS, **SCALE.encoder()),
    "t5": _hf("T5ForConditionalGeneration", _TOKENS, **SCALE.t5()),
    "bart": _hf("BartForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "pegasus": _hf("PegasusForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "m2m_100": _hf("M2M100ForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "whisper": _hf(
        "WhisperForConditionalGeneration",
        spectrogram(4, (80, 256), 48, SCALE.vocabulary),
        max_source_positions=128,
        max_target_positions=64,
        **SCALE.sequence_to_sequence(),
    ),
    "wav2vec2": _hf("Wav2Vec2ForCTC", speech(4, 8000, 12), **_SPEECH),
    "hubert": _hf("HubertForCTC", speech(4, 8000, 12), **_SPEECH),
    "vit": _hf(
        "ViTForImageClassification", labelled(8, SCALE.image_size), num_labels=10, **SCALE.patches()
    ),
    "dinov2": _hf(
        "Dinov2ForImageClassification",
        labelled(8, SCALE.image_size),
        num_labels=10,
        **SCALE.patches(),
    ),
    "segformer": _hf(
        "SegformerModel",
        pixels(8, SCALE.image_size),
        loss_fn=squares,
        hidden_sizes=[32, 64, 128, 256],
    ),
    "convnext": _hf(
        "ConvNextForImageClassification", labelled(8, SCALE.image_size), switch=False, num_labels=10
    ),
    "clip": _hf(
        "CLIPModel",
        pairs(8, SCALE.image_size, 48, SCALE.vocabulary),
        text_config=SCALE.encoder(),
        vision_config=SCALE.patches(),
        projection_dim=128,
    ),
    # diffusers
    **{
        name: Model("diffusers", make, batch, squares, True)
        for name, (make, batch) in diffusion(SCALE).items()
    },
}
