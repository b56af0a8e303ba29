"""Tune a Hugging Face Trainer: same samples per optimizer step, less time, within a budget."""

import torch
import transformers

import autofit
from autofit.integrations import transformers as tuning


def tiny_gpt2() -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(1, 256, (count, 64))
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    trainer = transformers.Trainer(
        tiny_gpt2(),
        transformers.TrainingArguments(
            "out",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=8,
            max_steps=4,
            use_cpu=True,  # leave it out on a GPU
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=texts(128),
    )

    options = autofit.SearchOptions(effort="quick")
    report = tuning.search(trainer, vram_budget="96MiB", max_probes=6, options=options)
    print(report)
    print(tuning.apply(report, trainer))
    trainer.train()

    args = trainer.args
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    print(f"trained {trainer.state.global_step} steps of {samples} samples")
