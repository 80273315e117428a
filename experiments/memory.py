"""Does a run fit? Its memory on 1, 2 and 4 devices, by arithmetic on the models' configs.

    python -m experiments.memory --preset 3b
    python -m experiments.memory --preset 3b --offload --max_tokens 8192   # any flags of train.py

No weights are loaded. Every prompt, response and pack is taken to be as long as the flags allow.
Not in it: the CUDA context, and fragmentation. tests/test_memory.py compares the arithmetic with
what is alive in real updates, scores and rollouts: it must not fall below that, nor exceed it by
more than a quarter.
"""

import math
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval import markdown
from rollout import PREFILL, command
from train import parse_config

PHASES = ("roll out", "score", "update")  # named by their first letters in a table


@dataclass(frozen=True)
class Sizes:
    """What the arithmetic needs to know of a model."""

    P: int  # parameters
    body: int  # those without the head
    layer: int  # those of one layer
    rest: int  # those outside the layers
    L: int  # layers
    H: int  # hidden size
    M: int  # width of the MLP
    V: int  # vocabulary
    kv: int  # numbers in the KV cache per token


def model_sizes(path):
    """The sizes of a folder's or hub name's model, from its config alone. Raises ValueError where
    there is none."""
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: no config to read there ({reason})") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def count(module):
        return sum(p.numel() for p in module.parameters())

    P, L, layer = count(model), config.num_hidden_layers, count(model.base_model.layers[0])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(
        P=P,
        body=count(model.base_model),
        layer=layer,
        rest=P - layer * L,
        L=L,
        H=config.hidden_size,
        M=config.intermediate_size,
        V=config.vocab_size,
        kv=2 * L * config.num_key_value_heads * width,
    )


def estimate(config, devices):
    """(part, phases, bytes) on each device, phases by first letters of PHASES."""
    student = model_sizes(config.student)
    critic = model_sizes(config.critic or config.student)
    reference = model_sizes(config.reference or config.student)
    teacher = model_sizes(config.teacher or config.student)
    taught = config.distill != "none"
    widest = max([student, teacher] if taught else [student], key=lambda model: model.P)
    b = torch.finfo(getattr(torch, config.dtype)).bits // 8  # bytes of a computed number
    fsdp = devices > 1 or config.dtype != "float32"

    trained = student.P + critic.body + critic.H + 1
    frozen = reference.P + taught * teacher.P
    tasks, S = math.ceil(config.tasks_per_step / devices), config.max_tokens
    longest_prompt = config.max_len - config.max_new_tokens
    read = min(tasks * longest_prompt, max(PREFILL, tasks))
    prompts = read * (3 * student.M + 5 * student.H)
    calls = 2 * config.horizon + 2  # of an episode, at most
    N = tasks * calls * config.max_new_tokens
    layer = b * S * (3 * widest.M + 5 * widest.H)
    logits = 3.5 * chunk_bytes(student.V, S) + 2 * b * S * widest.H
    kept, working, unreduced = pack_backward(student, S, b, fsdp, config.gradient_checkpointing)
    whole = fsdp * b * (widest.rest + 2 * widest.layer)
    return [
        ("student and critic: weights and two moments in float32", "rsu", 12 * trained / devices),
        ("their gradients in float32", "u", 4 * trained / devices),
        ("reference and teacher", "s" if config.offload else "rsu", b * frozen / devices),
        ("the student, whole", "r", fsdp * b * student.P),
        ("KV cache", "r", b * tasks * config.max_len * student.kv),
        ("a slice of the prompts in one layer", "r", b * prompts),
        ("logits and probabilities of the next tokens", "r", 28 * tasks * student.V),
        ("the teacher's hidden states and head", "u", taught * b * teacher.H * (N + teacher.V)),
        ("a pack in one layer, or a chunk of the vocabulary", "s", max(layer, logits)),
        ("a pack: what all layers keep for backward", "u", kept),
        ("a pack: one layer, or a chunk of the vocabulary, with gradients", "u", working),
        ("embedding, head and two layers, whole", "su", whole),
        ("their gradients before they are reduced", "u", unreduced),
    ]


def pack_backward(model, S, b, fsdp, gradient_checkpointing):
    """Bytes that a loss on a pack of S tokens needs: what all layers keep for the backward pass,
    what the layer or the chunk at work needs, and whole gradients before FSDP reduces them."""
    # a layer keeps 4 M of its MLP and 11 H of norms, attention and residuals; backward adds 3 M
    kept = model.H if gradient_checkpointing else 4 * model.M + 11 * model.H
    layer = b * S * (7 * model.M + 11 * model.H)
    unreduced = fsdp * (b + 4) * (model.rest + model.layer)
    # chunked_loss: the head's gradient in float32, in lower precision also a chunk's part of it,
    # and what the loss makes of the chunk's logits. That is over when gradients wait for FSDP
    head = b * model.H * model.V
    part = 0 if b == 4 else head
    states = 6 * b * S * model.H  # hidden states and their gradients
    chunks = 13 * chunk_bytes(model.V, S) + 4 * model.H * model.V + part + states - unreduced
    # without FSDP: this gradient and its scaled copy; where the head is tied, the copy waits
    # through all layers for the embedding's gradient, and then both stand next to their sum
    tied = model.P == model.body
    waiting, copies = (0, 0) if fsdp else (tied * head, (2 + tied) * head)
    return b * S * model.L * kept, max(layer + waiting, chunks, copies + states), unreduced


def chunk_bytes(V, S):
    """The logits of a chunk (see losses.chunks), in float32."""
    return 4 * V * min(S, max(64, 2**23 // V))


def memory_table(config):
    """`estimate` for 1, 2 and 4 devices, in GiB, as the lines of a Markdown table. Raises
    ValueError for a config whose models are not made yet."""
    if not config.student:
        raise ValueError("the estimate needs --student and --teacher (--distill none: --student)")
    devices = (1, 2, 4)
    columns = [estimate(config, n) for n in devices]
    rows = []
    for parts in zip(*columns):
        name, phases, _ = parts[0]
        rows.append([name, phases, *(gib(x) for _, _, x in parts)])
    for phase in PHASES:
        sums = []
        for column in columns:
            sums.append(sum(x for _, phases, x in column if phase[0] in phases))
        rows.append([f"**{phase}**", "", *map(gib, sums)])
    return markdown(["GiB on each device", "when", *map(str, devices)], rows)


def gib(n):
    return f"{n / 2**30:.2f}"


@command("experiments.memory")
def main():
    print("\n".join(memory_table(parse_config())))


if __name__ == "__main__":
    main()
