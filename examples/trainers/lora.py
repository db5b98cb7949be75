"""LoRA with transformers' Trainer and peft, as it is: ``poseidon run --nproc 2 lora.py``. Only adapters travel."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main():
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500))
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    texts = torch.randint(0, 500, (64, 32), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=4, report_to=[])
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in texts]).train()


if __name__ == "__main__":
    main()
