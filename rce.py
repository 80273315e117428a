"""Rollout context equivalence (Section 3.3): are the packed logits those of independent calls?

    Eq. 5   max over (t,k) of || logits_pack[g(t,k)] - logits_independent[t,k] ||_inf <= eps_num

over the full vocabulary. The truth is one unpadded call at a time, without packs or masks; a padded
batch would not do, since padding changes the rounding and a lost mask would be lost in both.
`pack.verify` also checks the structure: it needs no model and can name what is wrong. Use float32
or float64, where eps_num is tight; in bfloat16 packs and single calls are both compared with
float32, and packs may be off twice as far. To copy `rce`, copy pack.py, too; only the command needs
rollout.py. Shapes: N sampled action tokens in the order of the calls, V vocabulary, H hidden size.

    python rce.py        # Figure 3b in small: right packs, wrong visibility, wrong positions
    python rce.py --model runs/tiny/student --trajectories runs/tiny/trajectories.jsonl

The exit status is 0 if RCE holds, else 1. The audits of Section 4.4 are in experiments/audit.py.
"""

import argparse
import copy
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from pack import action_hidden, pack_all, verify

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # eps_num, as a share of the largest logit
ROWS = 128  # action tokens whose (rows, V) logits are held at once


def rce(model, prompts, actions, share=None, max_tokens=4096, names=None, truth=None):
    """Eq. 5 for any calls (z_t, a_t): pack them, check the structure, compare with single calls.
    share: as in `pack`. names: of the calls, for messages. truth: as in `compare`. Raises
    ValueError if the structure is wrong or an id is beyond the vocabulary."""
    check_ids(model, prompts, actions, names)
    packs = checked_packs(prompts, actions, share, max_tokens)
    hidden = {"packs": packed_hidden(model, packs)}
    return compare(model, hidden, prompts, actions, names, truth)["packs"]


@torch.no_grad()
def independent_logits(model, prompt_ids, action_ids):
    """(len(a), V): the logits of each action token, from one unpadded call on z_t + a_t."""
    ids = torch.tensor([prompt_ids + action_ids[:-1]], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(action_ids)).logits[0]


@torch.no_grad()
def packed_hidden(model, packs, title="packs"):
    """(N, H), in one forward per pack."""
    bar = tqdm(packs, desc=title, leave=False)
    return torch.cat([action_hidden(model, packed) for packed in bar])


def checked_packs(prompts, actions, share=None, max_tokens=4096):
    """`pack_all`, with every pack's structure checked. A call over max_tokens gets its own."""
    longest = max(len(prompt) + len(action) for prompt, action in zip(prompts, actions))
    packs = pack_all(prompts, actions, max(max_tokens, longest), share)
    start = 0
    for packed in packs:
        run = slice(start, start + int(packed.call_idx[-1]) + 1)
        verify(packed, prompts[run], actions[run])
        start = run.stop
    return packs


def check_ids(model, prompts, actions, names=None):
    """Raise ValueError naming the first call with an id that the model does not have."""
    size = model.config.vocab_size
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        largest = max(prompt + action)
        if largest >= size:
            name = names[c] if names else f"call {c}"
            problem = f"id {largest} is beyond the model's vocabulary of {size}"
            raise ValueError(f"{name}: {problem}; these trajectories are of another tokenizer")


@dataclass(frozen=True)
class Difference:
    """One representation against the truth: (N,) each, one value per sampled token."""

    dlogit: Tensor  # || logits - truth ||_inf over the vocabulary, as in Eq. 5
    logratio: Tensor  # log pi(a) - truth
    kl: Tensor  # KL(truth || representation), full vocabulary
    gap: Tensor  # how far its top prediction is below the truth's, in logits of the truth
    places: list[str]  # the call and token of each
    max_logit: float  # of the truth
    eps: float  # eps_num in logits; two logits of the truth closer than 2 eps are a tie
    single: "Difference | None" = None  # that of single calls, where the truth is more precise

    def __getitem__(self, rows):
        part = {name: getattr(self, name)[rows] for name in ("dlogit", "logratio", "kl", "gap")}
        return replace(self, **part, places=[self.places[i] for i in rows])

    def holds(self):
        """Eq. 5. In low precision: at most twice as far from float32 as single calls are."""
        if self.single is None:
            return self.dlogit.max().item() <= self.eps
        for name in ("dlogit", "logratio"):
            ours = getattr(self, name).abs()
            theirs = getattr(self.single, name).abs()
            if not ours.quantile(0.99) <= 2 * theirs.quantile(0.99):
                return False
            if not ours.max() <= 2 * theirs.max():
                return False
        return True

    def summary(self, clip_coef=0.2):
        """The columns of Tables 3 and 4. False clip: an unchanged policy's ratios out of range."""
        N = len(self.gap)
        dlogp = self.logratio.abs()
        changed = int((self.gap > 2 * self.eps).sum())
        tied = torch.nonzero((self.gap > 0) & (self.gap <= 2 * self.eps))[:, 0]
        worst = self.dlogit.argmax().item()  # a NaN anywhere counts as the worst
        clipped = (self.logratio.exp() - 1).abs() > clip_coef
        return {
            "tokens": N,
            "p99_dlogp": dlogp.quantile(0.99).item(),
            "max_dlogp": dlogp.max().item(),
            "max_dlogit": self.dlogit[worst].item(),
            "max_logit": self.max_logit,
            "worst": self.places[worst],
            "top1": 1 - changed / N,
            "changed": changed,
            "mean_kl": self.kl.mean().item(),
            "ties": [self.places[i] for i in tied],
            "false_clip": clipped.float().mean().item(),
        }

    def __str__(self):
        s = self.summary()
        worst = f"max |dlogit| {s['max_dlogit']:.2e} at {s['worst']}"
        changed = f"top predictions changed {s['changed']}/{s['tokens']}"
        return f"{worst}, max |logit| {s['max_logit']:.1f}, {changed}"


@torch.no_grad()
def compare(model, hidden, prompts, actions, names=None, truth=None):
    """{name: Difference} of every representation, {name: (N, H) hidden states of the model}, to
    single calls of `truth`, by default the model itself. With another truth, a more precise one,
    the model's own single calls are compared, too, and the others judged by them."""
    truth = truth or model
    head = model.get_output_embeddings()
    columns, places = defaultdict(list), []
    max_logit, start = 0.0, 0
    for c, prompt in enumerate(tqdm(prompts, desc="single calls", leave=False)):
        logits = independent_logits(truth, prompt, actions[c])  # (len(a), V)
        own = None if truth is model else independent_logits(model, prompt, actions[c])
        max_logit = max(max_logit, logits.abs().max().item())
        name = names[c] if names else f"call {c}"
        places += [f"{name}, token {k}" for k in range(len(logits))]
        for k in range(0, len(logits), ROWS):
            right = logits[k : k + ROWS]  # (rows, V)
            ids = torch.tensor(actions[c][k : k + ROWS])
            for representation, states in hidden.items():
                found = head(states[start : start + len(right)])  # (rows, V)
                columns[representation].append(_differences(found, right, ids))
            if own is not None:
                columns["single calls"].append(_differences(own[k : k + ROWS], right, ids))
            start += len(right)
    eps = TOLERANCE.get(model.dtype, 0.0) * max_logit
    found = {}
    for name, parts in columns.items():
        found[name] = Difference(*torch.cat(parts, dim=1), places, max_logit, eps)
    single = found.get("single calls")
    return {name: replace(difference, single=single) for name, difference in found.items()}


def _differences(found, right, ids):
    """(4, rows): the tensors of a Difference, from the logits of both sides, (rows, V) each."""
    right = right.to(torch.promote_types(right.dtype, torch.float32))
    off = found.to(right.dtype) - right
    shift = found.to(right.dtype).logsumexp(-1) - right.logsumexp(-1)
    logratio = off.gather(1, ids[:, None].to(off.device))[:, 0] - shift
    kl = shift - torch.linalg.vecdot(right.softmax(-1), off)
    gap = right.amax(-1) - right.gather(1, found.argmax(-1, keepdim=True))[:, 0]
    return torch.stack([off.abs().amax(-1), logratio, kl, gap]).cpu()


def corrupted(packs):
    """Figure 3b, the actions fixed: all earlier tokens visible, running positions, and both."""
    wrong = {"visibility only": [], "positions only": [], "both": []}
    for packed in packs:
        all_visible = torch.full_like(packed.subtree_end, len(packed.subtree_end))
        running = torch.ones_like(packed.position_ids).cumsum(0) - 1
        visible = replace(packed, subtree_end=all_visible)
        wrong["visibility only"].append(visible)
        wrong["positions only"].append(replace(packed, position_ids=running))
        wrong["both"].append(replace(visible, position_ids=running))
    return wrong


def demo():
    """Eq. 5 and Figure 3b on a random model, with a trajectory of four invented calls."""
    from rollout import toy_model, train_tokenizer

    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = train_tokenizer(["a b c"], 300)
    model = toy_model(tokenizer, 128, 3, attention="packed", scale=0.05).eval()

    def ids(n):
        return [rng.randrange(len(tokenizer)) for _ in range(n)]

    q, x = ids(30), []
    prompts, actions = [], []
    for _ in range(4):
        prompts.append(q + x)
        actions.append(ids(20))
        x = actions[-1] + ids(20)  # MEM1 keeps the last response, and what was observed
    packs = checked_packs(prompts, actions, [len(q)] * 4)
    hidden = {"right": packed_hidden(model, packs)}
    for name, wrong in corrupted(packs).items():
        hidden[name] = packed_hidden(model, wrong)
    found = compare(model, hidden, prompts, actions)
    print("Log-probs of packed calls against independent calls (Eq. 5, Figure 3b):\n")
    for name, difference in found.items():
        s = difference.summary()
        changed = f"{s['changed']:2d} of {s['tokens']} top predictions changed"
        print(f"  {name:<16} p99 |dlogp| {s['p99_dlogp']:.1e}   {changed}")
    print(
        "\nVisibility is the larger error, positions the smaller. Both together can be less wrong\n"
        "than visibility alone: with running positions all that is visible is one coherent\n"
        "sequence; without them, tokens of different calls claim the same places.\n"
    )
    return found["right"]


def main():
    from rollout import call_ids, call_names, command, load, load_trajectories

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", help="a model folder or hub name; by default a demonstration")
    parser.add_argument("--trajectories", help="a file that train.py or save_trajectories wrote")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if bool(args.model) != bool(args.trajectories):
        parser.error("--model and --trajectories go together")
    torch.set_float32_matmul_precision("highest")  # TF32 would round float32 to 11 bits
    with command("rce.py"):
        if not args.model:
            found = demo()
        else:
            dtype = getattr(torch, args.dtype)
            trajectories = load_trajectories(args.trajectories)
            if not trajectories:
                raise ValueError(f"{args.trajectories}: no trajectories in it")
            prompts, actions, _ = call_ids(trajectories)
            _, model = load(args.model, args.device, "packed", dtype)
            truth = model if dtype in TOLERANCE else copy.deepcopy(model).float()
            found = rce(model, prompts, actions, None, 4096, call_names(trajectories), truth)
        print(f"RCE (Eq. 5) {'holds' if found.holds() else 'FAILS'} for {args.dtype}: {found}")
    raise SystemExit(int(not found.holds()))


if __name__ == "__main__":
    main()
