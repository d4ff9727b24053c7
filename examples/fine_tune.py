"""Fine-tuning in a swarm with TRL's ``SFTTrainer``: LoRA adapters of a small model, on sentences that count.

    pip install -c constraints.txt '.[hf]'
    shoal host examples/fine_tune.toml                  # prints the invite
    python examples/fine_tune.py 'shoal://…'            # on as many machines as you like

The model is made from a config and the tokenizer knows bytes, so nothing is downloaded; with ``--model`` it is one of
the Hub or of a folder. Several on one machine need their own identities: --identity a.id, --identity b.id, …
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shoal.integrations.transformers import join
from shoal.peer.options import SHOAL_HOME, SessionOptions

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes."""
    letters = {one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab={**letters, "<|end|>": 256, "<|pad|>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")


def make_model() -> LlamaForCausalLM:
    """A base that is the same on every machine, as a checkpoint of the Hub would be."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=128, eos_token_id=256, **sizes))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("invite")
    arguments.add_argument("--model", help="a model of the Hub, or a folder")
    arguments.add_argument("--full", action="store_true", help="train all parameters: for a run of its own")
    arguments.add_argument("--identity", type=Path, default=SHOAL_HOME / "identity")
    arguments.add_argument("--state", type=Path, default=SHOAL_HOME / "runs")
    options = arguments.parse_args()

    texts = [f"{NUMBERS[one % 10]} comes before {NUMBERS[(one + 1) % 10]}" for one in range(1000)]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model) if options.model else make_model(),
        processing_class=AutoTokenizer.from_pretrained(options.model) if options.model else make_tokenizer(),
        args=SFTConfig("fine_tuned", per_device_train_batch_size=8, learning_rate=2e-3, report_to="none"),
        train_dataset=Dataset.from_dict({"text": texts}),
        peft_config=None if options.full else LoraConfig(r=8, target_modules="all-linear"),
    )
    where = SessionOptions(identity=options.identity, state=options.state)
    with join(trainer, options.invite, where):
        trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
