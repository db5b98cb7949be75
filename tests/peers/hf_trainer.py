# Hugging Face's Trainer: hf_trainer.py {classes,words} ACCUMULATED [bf16] [fp16] [lora] [ragged] [kept]
import sys

import torch
from peer_data import Numbered, device, save, texts
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

kind, accumulated, *more = sys.argv[1:]
set_seed(0)
if kind == "classes":
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    noise = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **noise))
else:
    noise = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, **noise))
if "lora" in more:
    from peft import LoraConfig, get_peft_model

    layers = ["query"] if kind == "classes" else ["c_attn"]
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules=layers))
model.eval()  # as from_pretrained leaves it
arguments = TrainingArguments(
    "out",
    num_train_epochs=3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    gradient_accumulation_steps=int(accumulated),
    eval_strategy="epoch",
    save_strategy="epoch" if "kept" in more else "no",
    load_best_model_at_end="kept" in more,
    save_total_limit=1 if "kept" in more else None,
    learning_rate=4.0 if "lora" in more else 0.2,
    optim="sgd",
    bf16="bf16" in more,
    fp16="fp16" in more,
    report_to=[],
    use_cpu=device == "cpu",
    disable_tqdm=True,
)


def collate(rows):
    """Pad to the longest, as collators of tokenizers do; padding is no target."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows]
        )

    ids = padded("input_ids", 0)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    labels = torch.stack([row["labels"] for row in rows]) if kind == "classes" else padded("labels", -100)
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long(), "labels": labels}


def made(count, seed):
    rows = texts(count, seed, kind == "classes")
    if "ragged" in more:
        for place, row in enumerate(rows):
            names = ["input_ids"] if kind == "classes" else ["input_ids", "labels"]
            row.update({name: row[name][: 4 + place * 5 % 9] for name in names})
    return rows


# Windows of accumulated batches divide evenly between the workers.
train = made(45 if accumulated == "1" else 48, 1)
trainer = Trainer(
    model,
    arguments,
    train_dataset=Numbered(train, True),
    eval_dataset=Numbered(made(20, 2), False),
    data_collator=collate if "ragged" in more else None,
)
trainer.train()
losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
save(model, trainer.state.global_step, losses)
