"""Does a run fit? Its memory on 1, 2 and 4 devices, by arithmetic on the models' configs.

    python -m experiments.memory --preset 3b
    python -m experiments.memory --preset 3b --offload --max_tokens 8192   # any flags of train.py

No weights are loaded. Every prompt, response and pack is taken to be as long as the flags allow.
Not in it: the CUDA context, and fragmentation. tests/test_memory.py compares the arithmetic with
what is alive in real updates, scores and rollouts: it must not fall below that, nor exceed it by
more than a quarter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval import markdown
from train import Config, parse_config

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
    I: int  # noqa: E741  intermediate size of the MLP
    V: int  # vocabulary
    kv: int  # numbers in the KV cache per token


def model_sizes(path: str) -> Sizes:
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
        I=config.intermediate_size,
        V=config.vocab_size,
        kv=2 * L * config.num_key_value_heads * width,
    )


def estimate(config: Config, devices: int) -> list[tuple[str, str, float]]:
    """(part, phases, bytes) on each device; phases are first letters of PHASES."""
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
    tasks = math.ceil(config.tasks_per_step / devices)
    longest_prompt = config.max_len - config.max_new_tokens
    calls = 2 * config.horizon + 2  # of an episode, at most
    N, S = tasks * calls * config.max_new_tokens, config.max_tokens

    # one layer reads a pack, or the head a chunk of its action tokens
    prompts_in_layer = tasks * longest_prompt * (3 * student.I + 5 * student.H)
    pack_in_layer = b * S * (3 * widest.I + 5 * widest.H)
    chunk = 4 * student.V * min(S, max(64, 2**23 // student.V))  # logits in float32
    logits = 3.5 * chunk + 2 * b * S * widest.H
    # for backward a layer keeps 4 I of the MLP and 11 H of norms, attention and residuals; the
    # backward itself adds 3 I
    kept_per_layer = 4 * student.I + 11 * student.H
    if config.gradient_checkpointing:
        kept_per_layer = student.H
    layer_backward = b * S * (7 * student.I + 11 * student.H)
    # chunked_loss sums the head's gradient in float32; next to it stand a chunk's part of it, and
    # what the loss makes of the chunk's logits
    head = student.H * student.V
    head_backward = 13 * chunk + (4 + b) * head
    # the gradient of a tied head waits for that of the embedding; then both stand next to their sum
    tied = student.P == student.body
    waiting = b * head if tied and not fsdp else 0

    unreduced = fsdp * (b + 4) * (student.rest + student.layer)
    return [
        ("student and critic: weights and two moments in float32", "rsu", 12 * trained / devices),
        ("their gradients in float32", "u", 4 * trained / devices),
        ("reference and teacher", "s" if config.offload else "rsu", b * frozen / devices),
        ("the student, whole", "r", fsdp * b * student.P),
        ("KV cache", "r", b * tasks * config.max_len * student.kv),
        ("all prompts in one layer", "r", b * prompts_in_layer),
        ("logits and probabilities of the next tokens", "r", 28 * tasks * student.V),
        ("the teacher's hidden states and head", "u", taught * b * teacher.H * (N + teacher.V)),
        ("a pack in one layer, or a chunk of the vocabulary", "s", max(pack_in_layer, logits)),
        ("a pack: what all layers keep for backward", "u", b * S * student.L * kept_per_layer),
        (
            "a pack: one layer, or a chunk of the vocabulary, with gradients",
            "u",
            max(layer_backward + waiting, head_backward, 3 * waiting),
        ),
        (
            "embedding, head and two layers, whole",
            "su",
            fsdp * b * (widest.rest + 2 * widest.layer),
        ),
        ("their gradients before they are reduced", "u", unreduced),
    ]


def memory_table(config: Config) -> Iterator[str]:
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


def gib(n: float) -> str:
    return f"{n / 2**30:.2f}"


def main():
    try:
        print("\n".join(memory_table(parse_config())))
    except ValueError as error:
        raise SystemExit(f"memory.py: {error}") from None


if __name__ == "__main__":
    main()
