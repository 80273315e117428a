"""Rollout context equivalence (Section 3.3) and the state audit (Tables 3 and 4, Figure 3b, Section 4.4).

    Eq. 5   max over (t,k) of || logits_pack[g(t,k)] - logits_independent[t,k] ||_inf <= eps_num, full vocabulary

The truth is one unpadded call at a time and shares no code with pack.py; a padded batch would be none, since padding
changes rounding and a lost mask would be lost in both. Against it stand the packs, and what training usually reads in
their place: a flat history, or the right tokens with wrong visibility or positions. Audit in float32 or float64, where
eps_num is tight; in bfloat16 packs and single calls are both judged against float32. Beside it stands `pack.verify`,
which needs no model and can name what is wrong. Needs pack.py, rollout.py and env.py.

    python rce.py                           # a random model with large logits, the toy's expert
    python rce.py --model runs/tiny/student --trajectories runs/tiny/trajectories.jsonl --teacher runs/tiny/teacher
    python rce.py --model NAME --questions questions.jsonl --corpus corpus.jsonl        # samples for itself

The exit status is 0 if RCE holds, 1 if it does not (with the worst call and token) or the audit could not run.
Shapes: N sampled action tokens in the order of the calls, V vocabulary, H hidden size.
"""
import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from env import SearchEnv, ToyWiki, load_questions, open_retriever, step_all, toy_envs
from pack import Packed, action_hidden, pack, pack_history, split, verify
from rollout import (Call, Trajectory, generate, load, load_trajectories, rollout, scripted, stop_on, task_generators,
                     train_tokenizer, update_rules)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # eps_num of Eq. 5, as a share of the largest logit
ROWS = 128  # action tokens whose (rows, V) logits are held at once


# ---- the truth, and what stands in its place: hidden states (N, H) in the order of the calls -------------------------

@torch.no_grad()
def independent_logits(model, prompt_ids: list[int], action_ids: list[int]) -> torch.Tensor:
    """(len(a), V): the logits of each action token from one unpadded call of the model on z_t + a_t."""
    ids = torch.tensor([prompt_ids + action_ids[:-1]], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(action_ids)).logits[0]


@torch.no_grad()
def padded_hidden(model, calls: list[Call], batch_size: int) -> torch.Tensor:
    """Left-padded batches: right states and another order of rounding, hence the floor of Table 3."""
    hidden = []
    for start in tqdm(range(0, len(calls), batch_size), desc=f"batches of {batch_size}", leave=False):
        batch = calls[start:start + batch_size]
        rows = [c.prompt_ids + c.action_ids[:-1] for c in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows], device=model.device)                # (B, L)
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=model.device)    # (B, L)
        out = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False,
                               position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).last_hidden_state           # (B, L, H)
        hidden += [h[-len(call.action_ids):] for h, call in zip(out, batch)]
    return torch.cat(hidden)


@torch.no_grad()
def packed_hidden(model, packs: list[Packed], name: str) -> torch.Tensor:
    """One forward for each pack."""
    return torch.cat([action_hidden(model, packed) for packed in tqdm(packs, desc=name, leave=False)])


def pack_all(trajectories: list[Trajectory], share: str = "tree", max_tokens: int = 4096) -> list[Packed]:
    """The calls of all trajectories in packs, their structure checked. share: "tree" (every common prefix once) or "q"
    (Eq. 4 to the letter)."""
    calls, _ = calls_of(trajectories)
    prompts, actions = [c.prompt_ids for c in calls], [c.action_ids for c in calls]
    shared = [t.prefix_len if share == "q" else None for t in trajectories for _ in t.calls]
    longest = max(map(len, map(list.__add__, prompts, actions)))
    runs = split(prompts, actions, max(max_tokens, longest), shared)
    packs = [pack(prompts[run], actions[run], shared[run]) for run in runs]
    for packed, run in zip(packs, runs):
        verify(packed, prompts[run], actions[run])
    return packs


def histories(trajectories: list[Trajectory]) -> list[Packed]:
    """Persistent history: every trajectory as one flat sequence [q, a_0, o_0, a_1, o_1, ...]."""
    return [pack_history([t.calls[0].prompt_ids[:t.prefix_len]], [[c.action_ids for c in t.calls]],
                         [[c.observation_ids for c in t.calls]]) for t in trajectories]


def corrupted(packs: list[Packed]) -> dict[str, list[Packed]]:
    """Figure 3b, the actions fixed: every earlier token visible, running positions, and both."""
    def ends(packed):
        return torch.full_like(packed.subtree_end, len(packed.subtree_end))

    def places(packed):
        return torch.arange(len(packed.position_ids))
    return {"visibility only": [replace(p, subtree_end=ends(p)) for p in packs],
            "positions only": [replace(p, position_ids=places(p)) for p in packs],
            "both": [replace(p, subtree_end=ends(p), position_ids=places(p)) for p in packs]}


def action_domain(trajectories: list[Trajectory], flat: list[Packed], q_packs: list[Packed]) -> dict[str, int]:
    """N, and the spurious positions that a mask by role adds to it. Trajectory mask: all that follows q in the flat
    history, so the observations. Response mask: all that follows q in Eq. 4, so every x_t, context copies and
    observations. (The paper defines neither; of its counts the two differ by about one copy of each kept response.)"""
    exact, q = sum(len(p.action_ids) for p in flat), sum(t.prefix_len for t in trajectories)
    return {"exact": exact, "trajectory mask adds": sum(len(p.input_ids) for p in flat) - q - exact,
            "response mask adds": sum(len(p.input_ids) for p in q_packs) - q - exact}


# ---- the comparison --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Difference:
    """One representation against the truth, (N,) each, a value a sampled token."""
    dlogit: torch.Tensor    # || logits - truth ||_inf over the vocabulary, as in Eq. 5
    logratio: torch.Tensor  # log pi(a) - truth
    kl: torch.Tensor        # KL(truth || representation), full vocabulary
    gap: torch.Tensor       # how far its top prediction is below the top one, in logits of the truth; 0: the same
    eps: float              # eps_num in logits: two logits of the truth closer than 2 eps are a tie
    max_logit: float        # of the truth
    places: list[str]       # the call and token of each

    def __getitem__(self, rows: list[int]) -> "Difference":
        tensors = (x[rows] for x in (self.dlogit, self.logratio, self.kl, self.gap))
        return Difference(*tensors, self.eps, self.max_logit, [self.places[i] for i in rows])

    def holds(self, single: "Difference | None" = None) -> bool:
        """Eq. 5. Given single calls in the same low precision: no more than twice as far from the truth as they are."""
        if single is None:
            return self.dlogit.max().item() <= self.eps
        return all(x.abs().quantile(0.99) <= 2 * y.abs().quantile(0.99) and x.abs().max() <= 2 * y.abs().max()
                   for x, y in ((self.dlogit, single.dlogit), (self.logratio, single.logratio)))

    def summary(self, clip_coef: float = 0.2) -> dict:
        """The columns of Tables 3 and 4. False clip: the share of ratios of an unchanged policy outside 1 +- eps."""
        dlogp, ratio, N = self.logratio.abs(), self.logratio.exp(), len(self.gap)
        changed = int((self.gap > 2 * self.eps).sum())
        worst = self.dlogit.argmax().item()  # a NaN anywhere is the worst of all
        return {"tokens": N, "p99_dlogp": dlogp.quantile(0.99).item(), "max_dlogp": dlogp.max().item(),
                "max_dlogit": self.dlogit[worst].item(), "max_logit": self.max_logit, "worst": self.places[worst],
                "top1": 1 - changed / N, "changed": changed, "mean_kl": self.kl.mean().item(),
                "ties": [self.places[i] for i in torch.nonzero((self.gap > 0) & (self.gap <= 2 * self.eps))[:, 0]],
                "false_clip": ((ratio - 1).abs() > clip_coef).float().mean().item()}

    def __str__(self):
        return ("max |dlogit| {max_dlogit:.2e} at {worst}, max |logit| {max_logit:.1f}, top predictions changed "
                "{changed}/{tokens}").format(**self.summary())


def calls_of(trajectories: list[Trajectory]) -> tuple[list[Call], list[str]]:
    """All calls in order, and what to call them."""
    return ([call for t in trajectories for call in t.calls],
            [f"task {t.task_id}, call {i}" for t in trajectories for i in range(len(t.calls))])


def check_ids(model, trajectories: list[Trajectory]) -> None:
    """Raise ValueError naming the first call that holds an id which the model does not have."""
    for call, name in zip(*calls_of(trajectories)):
        largest = max(call.prompt_ids + call.action_ids)
        if largest >= model.config.vocab_size:
            raise ValueError(f"{name}: id {largest} is beyond the model's vocabulary of {model.config.vocab_size}; "
                             "these trajectories are of another tokenizer")


@torch.no_grad()
def compare(model, hidden: dict[str, torch.Tensor], calls: list[Call], names: list[str] | None = None,
            truth=None) -> dict[str, Difference]:
    """Every representation, (N, H) hidden states of the model, against independent calls of `truth` (by default the
    model itself), each computed once; a few (ROWS, V) tensors are held at a time."""
    names, truth = names or [f"call {c}" for c in range(len(calls))], truth or model
    head, eps_share = model.get_output_embeddings(), TOLERANCE.get(model.dtype, 0.0)
    columns, places, largest, start = {name: [] for name in hidden}, [], 0.0, 0
    for name, call in tqdm(list(zip(names, calls)), desc="single calls", leave=False):
        logits = independent_logits(truth, call.prompt_ids, call.action_ids)               # (len(a), V)
        largest = max(largest, logits.abs().max().item())
        places += [f"{name}, token {k}" for k in range(len(logits))]
        for k in range(0, len(logits), ROWS):
            right = logits[k:k + ROWS].to(torch.promote_types(logits.dtype, torch.float32))  # (rows, V)
            chosen = torch.tensor(call.action_ids[k:k + ROWS], device=right.device)[:, None]
            p, best, normalizer = right.softmax(-1), right.amax(-1), right.logsumexp(-1)
            for representation, states in hidden.items():
                found = head(states[start:start + len(right)]).to(right.dtype)             # (rows, V)
                off = found - right                                                        # (rows, V)
                shift = found.logsumexp(-1) - normalizer
                columns[representation].append(torch.stack([
                    off.abs().amax(-1), off.gather(1, chosen)[:, 0] - shift,
                    shift - torch.linalg.vecdot(p, off),
                    best - right.gather(1, found.argmax(-1, keepdim=True))[:, 0]]).cpu())
            start += len(right)
    return {name: Difference(*torch.cat(parts, 1), eps_share * largest, largest, places)
            for name, parts in columns.items()}


def rce(model, trajectories: list[Trajectory], share: str = "tree", max_tokens: int = 4096) -> Difference:
    """Eq. 5 for trajectories: pack them, check the structure, and compare with independent calls. Raises ValueError if
    the structure is wrong or an id is beyond the model's vocabulary."""
    check_ids(model, trajectories)
    hidden = packed_hidden(model, pack_all(trajectories, share, max_tokens), f"packs, {share}")
    return compare(model, {share: hidden}, *calls_of(trajectories))[share]


# ---- what to audit ---------------------------------------------------------------------------------------------------

class FreeEnv(SearchEnv):
    """The free protocol, for a model that does not follow the tags. Whatever a response says is memory and query at
    once, the first words of the best passage are the observation, the number of calls is fixed, nothing is scored.
    Sampled actions and rewritten contexts are real, which is all that an audit needs."""
    WORDS = 40

    def __init__(self, task, retriever, calls: int):
        super().__init__(task, retriever, top_k=1)
        self.turns_left = calls

    def prompt(self) -> str:
        return ("Answer step by step. You see only this text, your last note, and what a search for that note found.\n"
                f"Questions: {' ; '.join(self.task.questions)}")

    def query(self, response: str) -> str | None:
        self.turns_left -= 1
        return response if self.turns_left else None

    def observe(self, passages: list) -> str:
        return super().observe([replace(p, text=" ".join(p.text.split()[:self.WORDS])) for p in passages])


def sample_sets(model, tokenizer, tasks: list[tuple], calls: int, max_new_tokens: int,
                seed: int = 0) -> dict[str, list[Trajectory]]:
    """Trajectories of (task, retriever) pairs in the free protocol under every update rule; those after `mem1`, which
    Table 4 has for comparison, on the first quarter of the same tasks."""
    sets, stop = {}, stop_on(tokenizer, ())
    for rule, update in update_rules(tokenizer).items():
        part = tasks if rule == "mem1" else tasks[:max(1, len(tasks) // 4)]
        envs = [FreeEnv(task, retriever, calls) for task, retriever in part]
        noise = task_generators(seed, 0, [task.id for task, _ in part])

        def sample(prompts, rows):
            return generate(model, prompts, max_new_tokens, 1.0, stop, [noise[i] for i in rows])
        sets[rule] = rollout(sample, tokenizer, envs, step_all, update, progress=f"sampling, {rule}")
    return sets


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


# ---- the audit -------------------------------------------------------------------------------------------------------

def audit(model, sets: dict[str, list[Trajectory]], teacher=None, clip_coef: float = 0.2, tokenizer=None) -> dict:
    """Tables 3 and 4, Figure 3b and the teacher audit, as plain numbers. The first set is audited in full, of the
    others only the packs. `holds` is the verdict over all packs, student's and teacher's; `failures` names the worst
    token of each that does not."""
    report, failures, share = {}, [], TOLERANCE.get(model.dtype)

    def judge(name, found, single=None):
        if not found.holds(single):
            failures.append(f"{name}: {found}")

    truth = model if share else copy.deepcopy(model).float()
    for name, trajectories in sets.items():
        check_ids(model, trajectories)
        (calls, names), first = calls_of(trajectories), not report
        hidden = {} if share else {"single calls": padded_hidden(model, calls, 1)}
        hidden["packing, tree"] = packed_hidden(model, pack_all(trajectories), f"{name}: packs, tree")
        if first:
            flat, q_packs = histories(trajectories), [p for t in trajectories for p in pack_all([t], "q", 10**9)]
            hidden["persistent history"] = packed_hidden(model, flat, f"{name}: histories")
            hidden["batching floor"] = padded_hidden(model, calls, 8)
            hidden["packing, q"] = packed_hidden(model, pack_all(trajectories, "q"), f"{name}: packs, q")
            for what, packs in corrupted(q_packs).items():
                hidden[what] = packed_hidden(model, packs, f"{name}: {what}")
        found = compare(model, hidden, calls, names, truth)
        for key in ("packing, tree", "packing, q"):
            if key in found:
                judge(f"{name}, {key}", found[key], found.get("single calls"))
        table = {key: difference.summary(clip_coef) for key, difference in found.items()}
        if first:
            order = ("persistent history", "batching floor", "single calls", "packing, q", "packing, tree")
            report = {"dtype": str(model.dtype).removeprefix("torch."),
                      "trajectories": len(trajectories), "calls": len(calls),
                      "table3": {key: table[key] for key in order if key in table}, "table4": {},
                      "figure3b": {key: table[key] for key in corrupted([])},
                      "action_domain": action_domain(trajectories, flat, q_packs)}
            if teacher is not None:
                report["teacher"], right = audit_teacher(teacher, trajectories, flat, clip_coef, tokenizer)
                judge("teacher, packing, tree", right)
        report["table4"][name] = table["packing, tree"]
    criterion = (f"no logit off by more than {share:g} of the largest" if share else
                 "p99 and max of the packs' errors at most twice those of single calls, both against float32")
    return {**report, "holds": not failures, "criterion": criterion, "failures": failures}


def audit_teacher(teacher, trajectories: list[Trajectory], flat: list[Packed], clip_coef: float,
                  tokenizer=None) -> tuple:
    """What the teacher says about the flat history instead of the exact state, in the calls before the first memory
    update and after it; with a tokenizer also call by call, and by what a token writes: {name: summary}; and the
    Difference of its packs."""
    check_ids(teacher, trajectories)
    hidden = {"history": packed_hidden(teacher, flat, "teacher: histories"),
              "packing": packed_hidden(teacher, pack_all(trajectories), "teacher: packs, tree")}
    found = compare(teacher, hidden, *calls_of(trajectories))
    names = ("before the first memory update", "after it", "call 2", "call 3", "call 4", "call 5 and later",
             "after it, memory", "after it, query", "after it, answer")
    rows, tokens = {name: [] for name in names}, count()
    for t, call in ((t, call) for trajectory in trajectories for t, call in enumerate(trajectory.calls)):
        names = ["after it" if t else "before the first memory update"]
        names += [f"call {t + 1}" if t < 4 else "call 5 and later"] if tokenizer and t else []
        for part in writes(call, tokenizer):
            n = next(tokens)
            for name in names + ([f"after it, {part}"] if tokenizer and t else []):
                rows[name].append(n)
    return {name: found["history"][at].summary(clip_coef) for name, at in rows.items() if at}, found["packing"]


def writes(call: Call, tokenizer) -> list[str]:
    """What each action token writes in the search protocol: memory up to </think>, then a query or an answer."""
    if tokenizer is None:
        return [""] * len(call.action_ids)
    rest = "query" if "<search>" in tokenizer.decode(call.action_ids) else "answer"
    return ["memory" if "</think>" not in tokenizer.decode(call.action_ids[:k]) else rest
            for k in range(len(call.action_ids))]


def markdown(report: dict) -> Iterator[str]:
    """The lines that people read."""
    def table(title, first, rows, columns):
        yield from ("", title, "", f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|")
        for name, row in rows.items():
            yield f"| {name} | {' | '.join(form.format(**row) for form in columns.values())} |"

    dlogp = {"p99 abs dlogp": "{p99_dlogp:.2e}", "max abs dlogp": "{max_dlogp:.2e}"}
    top = {"top-1 %": "{top1:.2%}", "changed": "{changed}", "false clip %": "{false_clip:.2%}"}
    kl = {"mean KL": "{mean_kl:.2e}"}
    N = report["action_domain"]["exact"]
    yield from table(f"**Table 3**: {report['trajectories']} trajectories, {report['calls']} calls, {N} action tokens, "
                     "against unpadded single calls", "representation", report["table3"],
                     dlogp | {"max abs dlogit": "{max_dlogit:.2e}"} | top)
    yield from table("**Table 4**: packs (tree) under each context update", "context update", report["table4"],
                     {"tokens": "{tokens}"} | dlogp | {"top-1 %": "{top1:.2%}"})
    yield from table("**Figure 3b**: the pack with one half of its state corrupted, or both", "corruption",
                     report["figure3b"], dlogp | top)
    if "teacher" in report:
        yield from table("**Teacher**: the flat history against the exact state", "calls", report["teacher"],
                         {"tokens": "{tokens}"} | dlogp | {"top-1 %": "{top1:.2%}", "changed": "{changed}"} | kl)
    yield "\n**Action domain**: " + ", ".join(f"{name} {count}" for name, count in report["action_domain"].items())
    packs = [row for name, row in report["table3"].items() if name.startswith("packing")] + [*report["table4"].values()]
    if ties := dict.fromkeys(tie for row in packs for tie in row["ties"]):
        yield f"\nTies, where packs prefer the second of two logits closer than the tolerance: {'; '.join(ties)}"
    yield f"\nRCE (Eq. 5) {'holds' if report['holds'] else 'FAILS'} for {report['dtype']}: {report['criterion']}"
    yield from (f"- {failure}" for failure in report["failures"])


def check_tokenizers(student, teacher) -> None:
    """Eq. 7 compares distributions id by id: raise ValueError unless every id means the same to both tokenizers. (The
    models' vocabularies may be padded differently.)"""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise ValueError(f"student and teacher have different tokenizers: {token!r} is id {ours.get(token)} to the "
                             f"student, {theirs.get(token)} to the teacher; take one of the same family")


def subject(args, dtype: torch.dtype) -> tuple:
    """(model, {name of a set: trajectories}, teacher or None, tokenizer where the search protocol was followed), as the
    command asks."""
    if not args.model:
        return *toy(dtype), None, None
    tokenizer, model = load(args.model, args.device, "packed", dtype)
    teacher = None
    if args.teacher:
        teacher_tokenizer, teacher = load(args.teacher, args.device, "packed", torch.float32)
        check_tokenizers(tokenizer, teacher_tokenizer)
    if args.trajectories:
        recorded = load_trajectories(args.trajectories)
        if not recorded:
            raise ValueError(f"{args.trajectories}: no trajectories in it")
        return model, {"recorded": recorded}, teacher, tokenizer
    if args.questions:
        retriever = open_retriever(args.corpus)
        tasks = [(task, retriever) for task in load_questions(args.questions)[:args.tasks]]
    else:
        tasks = [(env.task, env.retriever) for env in toy_envs("test", args.tasks, k=2)]
    return model, sample_sets(model, tokenizer, tasks, args.calls, args.max_new_tokens, args.seed), teacher, None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or hub name; by default a random model")
    parser.add_argument("--trajectories", help="a file of rollout.save_trajectories, with the model's token ids; by "
                        "default they are sampled, with a free protocol")
    parser.add_argument("--teacher", help="a second model, which reads the same trajectories")
    parser.add_argument("--questions", help="a file of questions to sample on (env.load_questions); by default the toy")
    parser.add_argument("--corpus", help="an index of env.py, a JSONL of passages, or a retrieval server's URL")
    parser.add_argument("--tasks", type=int, default=64, help="tasks to sample (default 64)")
    parser.add_argument("--calls", type=int, default=4, help="calls of each task (default 4)")
    parser.add_argument("--max_new_tokens", type=int, default=72, help="tokens of a response at most (default 72)")
    parser.add_argument("--quick", action="store_true", help="3 tasks, 16 tokens a response: a minute on a small model")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--clip_coef", type=float, default=0.2, help="epsilon of Eq. 10, for false clips (default .2)")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print numbers for machines instead of tables")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.max_new_tokens = 3, 16
    if bool(args.questions) != bool(args.corpus):
        parser.error("--questions and --corpus go together")
    if (args.trajectories or args.questions or args.teacher) and not args.model:
        parser.error("--trajectories, --questions and --teacher need a --model")
    if min(args.tasks, args.calls, args.max_new_tokens) < 1:
        parser.error("--tasks, --calls and --max_new_tokens must be positive")
    dtype = getattr(torch, args.dtype)
    torch.set_float32_matmul_precision("highest")  # TF32 would round float32 to 11 bits
    try:
        model, sets, teacher, tokenizer = subject(args, dtype)
        report = audit(model, sets, teacher, args.clip_coef, tokenizer)
    except (ValueError, OSError) as error:
        raise SystemExit(f"rce.py: {error}") from None
    for line in [json.dumps(report, indent=1)] if args.json else markdown(report):
        print(line, flush=True)
    raise SystemExit(int(not report["holds"]))


if __name__ == "__main__":
    main()
