"""Rollout context equivalence (Section 3.3): does a pack give every sampled token the logits of its own call?

    Eq. 5   max over (t,k) of || logits_pack[g(t,k)] - logits_independent[t,k] ||_inf <= eps_num, full vocabulary

The reference is one unpadded call at a time and shares no code with pack.py; a padded batch would be none, since
padding changes rounding and a lost mask would be lost in both. Audit in float32 or float64: bfloat16 hides errors.
Beside it stands `pack.verify`, which needs no model and can name what is wrong. Needs pack.py, rollout.py and env.py.

    python rce.py                      # a random model with large logits, the toy's expert, all six update rules
    python rce.py --model runs/tiny/student --trajectories runs/tiny/trajectories.jsonl
"""
import argparse
from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from env import ToyWiki, step_all, toy_envs
from pack import Packed, action_hidden, pack, pack_history, split, verify
from rollout import Call, Trajectory, load_trajectories, rollout, scripted, train_tokenizer, update_rules

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # eps_num of Eq. 5, as a share of the largest logit


@torch.no_grad()
def independent_logits(model, prompt_ids: list[int], action_ids: list[int]) -> torch.Tensor:
    """(len(a), V): the logits of each action token from one unpadded call of the model on z_t + a_t."""
    ids = torch.tensor([prompt_ids + action_ids[:-1]], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1:]


@dataclass(frozen=True)
class Equivalence:
    """What Eq. 5 found over `calls` calls and `tokens` sampled tokens."""
    calls: int
    tokens: int
    max_error: float     # max |dlogit| over all tokens and the full vocabulary
    max_logit: float     # max |logit| of the independent calls
    same_argmax: int     # tokens whose top prediction is the same
    worst: str           # the call and token of max_error

    def holds(self, tolerance: float) -> bool:
        return self.max_error <= tolerance * self.max_logit and self.same_argmax == self.tokens

    def __str__(self):
        return (f"max |dlogit| {self.max_error:.2e} at {self.worst}, max |logit| {self.max_logit:.1f}, "
                f"same top prediction {self.same_argmax}/{self.tokens}")


@torch.no_grad()
def compare(model, packs: list[Packed], calls: list[Call], names: list[str] | None = None) -> Equivalence:
    """Eq. 5 for packs that hold `calls` in order, one call's (len(a), V) logits at a time."""
    names, head = names or [f"call {c}" for c in range(len(calls))], model.get_output_embeddings().weight
    hidden = torch.cat([action_hidden(model, packed) for packed in packs])               # (N, H)
    errors, places, largest, same = [], [], 0.0, 0
    for name, call, rows in zip(names, calls, hidden.split([len(call.action_ids) for call in calls])):
        independent = independent_logits(model, call.prompt_ids, call.action_ids)        # (len(a), V)
        packed_logits = rows @ head.T
        errors.append((packed_logits - independent).abs().amax(-1))
        places += [f"{name}, token {k}" for k in range(len(rows))]
        largest = max(largest, independent.abs().max().item())
        same += (packed_logits.argmax(-1) == independent.argmax(-1)).sum().item()
    errors = torch.cat(errors)                                                           # (N,)
    worst = errors.argmax().item()  # a NaN anywhere is the worst of all
    return Equivalence(len(calls), len(hidden), errors[worst].item(), largest, same, places[worst])


def rce(model, trajectories: list[Trajectory], share: str = "tree", max_tokens: int = 8192) -> Equivalence:
    """Pack the trajectories, check the structure, and compare with independent calls (Eq. 5).

    share: "tree" (every common prefix once) or "q" (Eq. 4 to the letter). Raises ValueError if the structure is wrong
    or an id is beyond the model's vocabulary."""
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    names = [f"task {t.task_id}, call {i}" for t in trajectories for i in range(len(t.calls))]
    for name, call in zip(names, calls):
        largest = max(call.prompt_ids + call.action_ids)
        if largest >= model.config.vocab_size:
            raise ValueError(f"{name}: id {largest} is beyond the model's vocabulary of {model.config.vocab_size}; "
                             "these trajectories are of another tokenizer")
    prompts, actions = [c.prompt_ids for c in calls], [c.action_ids for c in calls]
    shared = [t.prefix_len for t in trajectories for _ in t.calls] if share == "q" else [None] * len(calls)
    runs = split(prompts, actions, max_tokens)
    packs = [pack(prompts[run], actions[run], shared[run]) for run in runs]
    for packed, run in zip(packs, runs):
        verify(packed, prompts[run], actions[run])
    return compare(model, packs, calls, names)


def toy(dtype: torch.dtype) -> tuple:
    """A random model whose logits reach 5 and more, and the expert's trajectories under each update rule."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([p.text for p in ToyWiki(0).passages], 512)
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2), attn_implementation="packed").to(dtype).eval()
    sets = {}
    for name, update in update_rules(tokenizer).items():
        envs = toy_envs("train", 3, k=2)
        sets[name] = rollout(scripted(ToyWiki.expert, tokenizer, envs), tokenizer, envs, step_all, update)
    return model, sets


def wrong_states(model, trajectories: list[Trajectory]) -> dict[str, Equivalence]:
    """For contrast: the flat history, and the right pack with one half of its state corrupted (Figure 3b)."""
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    packed = pack([c.prompt_ids for c in calls], [c.action_ids for c in calls])
    place = torch.arange(len(packed.input_ids))
    to_the_end = torch.full_like(place, len(place))
    history = pack_history([t.calls[0].prompt_ids[:t.prefix_len] for t in trajectories],
                           [[c.action_ids for c in t.calls] for t in trajectories],
                           [[c.observation_ids for c in t.calls] for t in trajectories])
    return {"flat history": compare(model, [history], calls),
            "positions of the pack": compare(model, [replace(packed, position_ids=place)], calls),
            "everything visible": compare(model, [replace(packed, subtree_end=to_the_end)], calls)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or hub name; by default a random model")
    parser.add_argument("--trajectories", help="a file of rollout.save_trajectories; by default the toy's expert")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    if bool(args.model) != bool(args.trajectories):
        parser.error("--model and --trajectories go together: the ids must be of the model's tokenizer")
    dtype, failed = getattr(torch, args.dtype), False
    try:
        if args.model:
            model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="packed", dtype=dtype).eval()
            sets = {"recorded": load_trajectories(args.trajectories)}
        else:
            model, sets = toy(dtype)
        for name, trajectories in sets.items():
            for share in ("tree", "q"):
                found = rce(model, trajectories, share)
                failed |= not found.holds(TOLERANCE[dtype])
                print(f"{name:<19} share={share:<4} {found.calls} calls: {found}", flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"rce.py: {error}") from None
    print(f"RCE (Eq. 5) {'FAILS' if failed else 'holds'} at {TOLERANCE[dtype]:g} of the largest logit\n\nwrong states:")
    for name, found in wrong_states(model, trajectories[:8]).items():  # "everything visible" costs S^2
        print(f"{name:<24} {found}", flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
