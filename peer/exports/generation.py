"""Text from an exported folder, by transformers: for models that the recipe gpt's own sampling cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.peer.exports.tokenizer_files import TOKENIZER_FILE
from shoal.swarm.errors import StateFileError, UserError


def generate_from_folder(folder: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """Continue ``prompt`` by up to ``tokens`` tokens; temperature 0 takes the likeliest one, ``top_k`` 0 all.

    Nothing is downloaded, and no code from the folder runs. Raises ``UserError`` or ``StateFileError``."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise UserError(f"{folder}: needs a package: pip install 'shoal[hf]' ({error})") from error
    if not (folder / TOKENIZER_FILE).exists():
        raise StateFileError(f"{folder}: has no {TOKENIZER_FILE}: export it with --tokenizer")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **local).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise StateFileError(f"{folder}: not an exported model: {str(error)[:300]}") from error
    inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].shape[1]:
        raise UserError("--prompt: give at least one token to continue")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": 1.0}
    torch.manual_seed(seed)
    found = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=tokens, **sampling
    )
    text: str = tokenizer.decode(found[0])
    return text
