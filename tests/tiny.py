"""Random models and calls small enough to think about, for all tests."""

import random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import pack  # noqa: F401  registers the attention

V = 61
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,  # large weights: logits reach 5, and a wrong state is far off
}


def tiny(kind="qwen2", seed=0, attention="packed", **changes):
    """A random Qwen2 or Llama in eval mode."""
    torch.manual_seed(seed)
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig}[kind](**{**SHAPE, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def random_ids(rng, low, high):
    """low to high ids of the vocabulary."""
    return [rng.randrange(V) for _ in range(rng.randint(low, high))]


def random_calls(seed=0, tasks=3, calls=4):
    """(prompts, actions, prefix lengths) of several tasks that share a protocol text; the first x
    is empty, as in Eq. 2."""
    rng = random.Random(seed)
    protocol, prompts, actions, prefix_lens = random_ids(rng, 3, 6), [], [], []
    for _ in range(tasks):
        q = protocol + random_ids(rng, 2, 5)
        for t in range(calls):
            prompts.append(q + (random_ids(rng, 1, 9) if t else []))
            actions.append(random_ids(rng, 1, 7))
            prefix_lens.append(len(q))
    return prompts, actions, prefix_lens
