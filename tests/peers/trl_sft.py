# TRL's SFTTrainer with a tokenizer made on the spot: trl_sft.py ACCUMULATED [lora] [bf16]
import sys

from datasets import Dataset
from peer_data import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

accumulated, *more = sys.argv[1:]
set_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
)


def made(count, seed):
    """Texts of different length."""
    lines = [
        " ".join(f"w{(seed + place * 7 + step * (1 + place % 5)) % 40}" for step in range(3 + place * 5 % 11))
        for place in range(count)
    ]
    return Dataset.from_dict({"text": lines})


noise = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), n_embd=16, n_layer=1, n_head=2, n_positions=32, **noise))
adapters = None
if "lora" in more:
    from peft import LoraConfig

    adapters = LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model,
    SFTConfig(
        "out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=int(accumulated),
        eval_strategy="epoch",
        save_strategy="no",
        learning_rate=4.0 if adapters else 0.2,
        optim="sgd",
        bf16="bf16" in more,
        max_length=32,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=made(48, 1),
    eval_dataset=made(20, 2),
    processing_class=tokenizer,
    peft_config=adapters,
)
trainer.train()
losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
save(trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step, losses)
