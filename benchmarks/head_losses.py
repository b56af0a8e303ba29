"""What `head_loss.rows` changes: gradients of other people's models, memory, and the answer.

    python -m benchmarks.head_losses classes    loss and gradients of 21 classes of transformers
    python -m benchmarks.head_losses memory     bytes a sample of GPT-2 small, by dry runs
    python -m benchmarks.head_losses search     searches on the CPU with and without it

The models are made from configurations of two small layers, with 4,200 classes and no dropout, and
learn to repeat their input. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autofit
from autofit.registry import collect_dimensions, load_strategies
from autofit.testing import PlainContext
from benchmarks import workloads

CLASSES = 4200
CAUSAL = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
PAIRS = "AutoModelForSeq2SeqLM"
MODELS = {
    **dict.fromkeys(
        ("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "opt", "bloom", "gpt_neox"),
        CAUSAL,
    ),
    **dict.fromkeys(("gptj", "gemma", "gemma2", "falcon", "stablelm", "cohere"), CAUSAL),
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra"), MASKED),
    **dict.fromkeys(("t5", "bart"), PAIRS),
}
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size",), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 16),
    "vocab_size": CLASSES,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "decoder_start_token_id": 0,
}


def build(name: str) -> nn.Module:
    """Return a small model of that class, in training, without dropout."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name)
    for key, size in _SIZES.items():
        with suppress(AttributeError):  # derived from others
            if hasattr(config, key) or key == "decoder_start_token_id":
                setattr(config, key, size)
    made: nn.Module = getattr(transformers, MODELS[name]).from_config(config)
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made.train()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a model that learns to repeat its input."""
    value: Tensor = model(input_ids=ids, labels=ids).loss
    return value


def classes() -> Iterator[tuple[str, ...]]:
    """Yield, for each class, whether the setting is offered, and how far a step with it differs."""
    yield "class", "offered", "loss", "gradients"
    ids = torch.randint(5, CLASSES, (2, 48), generator=torch.Generator().manual_seed(0))
    for name in MODELS:
        workload = autofit.Workload(partial(build, name), ids, loss_fn=loss)
        (strategy,) = load_strategies(["head_loss"])
        context = PlainContext(lambda given=workload: given, "cpu")  # type: ignore[misc]  # a default
        found = collect_dimensions([strategy], context)
        if not found:
            yield name, "; ".join(context.notes) or "no: the loss needs the logits", "", ""
            continue
        rows, dimension = 32, next(iter(found.values()))
        payloads = {"head_loss.rows": dimension.payloads[dimension.values[1]]}
        compared = context.compare({"head_loss.rows": rows}, payloads, strategy)
        heads = ", ".join(payloads["head_loss.rows"]["heads"])
        yield name, heads, f"{compared.loss:.1e}", f"{compared.gradient:.1e}"


def memory() -> Iterator[tuple[str, ...]]:
    """Yield bytes a sample, and the largest micro-batch in 24 GiB, of GPT-2 small."""
    yield "precision", "rows", "MiB a sample, peak allocated", "largest micro-batch in 24 GiB"
    workload = workloads.gpt2_small()
    for precision in ("default", "bfloat16"):
        for rows in (0, 256, 2048):
            settings = {"precision.dtype": precision, "head_loss.rows": rows}
            peaks = [_peak(workload, size, settings) for size in (4, 8)]
            largest = _largest(workload, settings)
            yield precision, str(rows), f"{(peaks[1] - peaks[0]) / 4 / 2**20:.0f}", str(largest)


def _peak(workload: autofit.Workload, size: int, settings: Mapping[str, Any]) -> int:
    plan = autofit.Plan(size, settings=settings)
    return autofit.predict(workload, plan=plan, gpu="H200").peak_allocated_bytes


def _largest(workload: autofit.Workload, settings: Mapping[str, Any]) -> int:
    """Return the largest micro-batch that is predicted to need at most 24 GiB."""
    fits, too_large = 1, 2

    def needs(size: int) -> int:
        plan = autofit.Plan(size, settings=settings)
        return autofit.predict(workload, plan=plan, gpu="H200").required_bytes

    while needs(too_large) <= 24 * 2**30:
        fits, too_large = too_large, 2 * too_large
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if needs(middle) <= 24 * 2**30 else (fits, middle)
    return fits


class Decoder(nn.Module):
    """ids (n, 64) -> logits (n, 64, 32,000), with a causal transformer 128 wide of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 32_000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        logits: Tensor = self.head(self.body(self.embedding(ids), mask=mask, is_causal=True))
        return logits


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross entropy of the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def search() -> Iterator[tuple[str, ...]]:
    """Yield the answers of searches with and without the setting, three seeds each, in turns."""
    yield "strategies", "seed", "answer", "samples/s", "probes"
    ids = torch.randint(32_000, (4, 64), generator=torch.Generator().manual_seed(0))
    workload = autofit.Workload(Decoder, (ids, ids), criterion=next_token, global_batch=32)
    others = ["checkpointing", "precision", "optimizer"]
    for seed in range(3):
        for names in (others, [*others, "head_loss"]):
            report = autofit.search(
                workload, device="cpu", vram_budget="256MiB", strategies=names, seed=seed,
                progress=False,
            )  # fmt: skip
            speed = f"{report.best.samples_per_second:.1f}"
            yield names[-1], str(seed), str(report.plan), speed, str(len(report.trials))


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"classes": classes, "memory": memory, "search": search}
    parser.add_argument("command", choices=commands)
    for at, cells in enumerate(commands[parser.parse_args().command]()):
        print(f"| {' | '.join(cells)} |", flush=True)
        if not at:
            print("|---" * len(cells) + "|")


if __name__ == "__main__":
    main()
