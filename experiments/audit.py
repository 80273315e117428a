"""The state audit (Section 4.4): Tables 3 and 4, Figure 3b, the teacher audit and the action
domain.

How far are the log-probs of the sampled tokens from those of independent calls if they are computed
from a flat history, from padded batches, from packs, or from packs with half of their state wrong?
The truth, the comparison and the verdict are those of rce.py.

    python -m experiments.audit                 # a random model, the toy's expert
    python -m experiments.audit --model runs/tiny/student --teacher runs/tiny/teacher \\
        --trajectories runs/tiny/trajectories.jsonl
    python -m experiments.audit --model NAME --questions questions.jsonl --corpus corpus.jsonl

The last one samples for itself, in a protocol without tags, so that a model that never learned the
format can be audited. The exit status is 0 if RCE holds for all packs, else 1.
Shapes: N sampled action tokens in the order of the calls, H hidden size.
"""

import argparse
import copy
import json
from dataclasses import replace

import torch
from tqdm import tqdm

from env import SearchEnv, ToyWiki, load_questions, open_retriever, toy_envs
from eval import markdown
from pack import pack_history
from rce import TOLERANCE, check_ids, checked_packs, compare, corrupted, packed_hidden
from rollout import call_ids, call_names, check_tokenizers, command, end_ids
from rollout import generate, history_ids, load
from rollout import load_trajectories, rollout, scripted, stop_on, task_generators, toy_model
from rollout import train_tokenizer, update_rules
from train import token_roles

CORRUPTIONS = list(corrupted([]))  # of Figure 3b


# ---- the audit -----------------------------------------------------------------------------------
def audit(model, sets, teacher=None, clip_coef=0.2, tokenizer=None):
    """All tables as plain numbers, from {name of a set: trajectories}. The first set is audited in
    full, of the others only the packs. `holds` is the verdict over all packs, the student's and the
    teacher's; `failures` names the worst token of each that fails."""
    share = TOLERANCE.get(model.dtype)
    truth = model if share else copy.deepcopy(model).float()
    first, *_ = sets
    report, failures = audit_states(model, sets[first], truth, clip_coef, first)
    for name, trajectories in sets.items():
        if name != first:
            found = audit_packs(model, trajectories, truth, name)
            report["table4"][name] = found.summary(clip_coef)
            failures += failure(f"{name}, packing, tree", found)
    if teacher is not None:
        rows, right = audit_teacher(teacher, sets[first], clip_coef, tokenizer)
        report["teacher"] = rows
        failures += failure("teacher, packing, tree", right)
    if share:
        criterion = f"no logit off by more than {share:g} of the largest"
    else:
        limit = "p99 and max of the packs' errors at most twice those of single calls"
        criterion = f"{limit}, both against float32"
    return {**report, "holds": not failures, "criterion": criterion, "failures": failures}


def failure(name, found):
    """What the verdict says against a representation: one message, or none."""
    return [] if found.holds() else [f"{name}: {found}"]


def audit_states(model, trajectories, truth, clip_coef, name):
    """Table 3, Figure 3b, the first row of Table 4 and the action domain; and what fails."""
    prompts, actions, prefix_lens = call_ids(trajectories)
    names = call_names(trajectories)
    check_ids(model, prompts, actions, names)
    flat = histories(trajectories)
    q_packs = []  # one per trajectory, whatever its length: Eq. 4 to the letter
    for trajectory in trajectories:
        ids = call_ids([trajectory])
        q_packs += checked_packs(*ids, max_tokens=10**9)
    tree = checked_packs(prompts, actions)
    by_q = checked_packs(prompts, actions, prefix_lens)
    hidden = {
        "persistent history": packed_hidden(model, flat, f"{name}: histories"),
        "batching floor": padded_hidden(model, prompts, actions, 8),
        "packing, q": packed_hidden(model, by_q, f"{name}: packs, q"),
        "packing, tree": packed_hidden(model, tree, f"{name}: packs, tree"),
    }
    for wrong, packs in corrupted(q_packs).items():
        hidden[wrong] = packed_hidden(model, packs, f"{name}: {wrong}")
    found = compare(model, hidden, prompts, actions, names, truth)
    table = {key: difference.summary(clip_coef) for key, difference in found.items()}
    failures = []
    for key in ("packing, tree", "packing, q"):
        failures += failure(f"{name}, {key}", found[key])
    order = ["persistent history", "batching floor", "single calls", "packing, q", "packing, tree"]
    report = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "trajectories": len(trajectories),
        "calls": len(prompts),
        "table3": {key: table[key] for key in order if key in table},
        "table4": {name: table["packing, tree"]},
        "figure3b": {key: table[key] for key in CORRUPTIONS},
        "action_domain": action_domain(trajectories, flat, q_packs),
    }
    return report, failures


def audit_packs(model, trajectories, truth, name):
    """The Difference of a set's packs, for Table 4."""
    prompts, actions, _ = call_ids(trajectories)
    names = call_names(trajectories)
    check_ids(model, prompts, actions, names)
    packs = checked_packs(prompts, actions)
    hidden = {"packing, tree": packed_hidden(model, packs, f"{name}: packs, tree")}
    return compare(model, hidden, prompts, actions, names, truth)["packing, tree"]


def audit_teacher(teacher, trajectories, clip_coef=0.2, tokenizer=None):
    """What the teacher says about the flat history instead of the exact state: {rows: summary}, for
    the calls before the first memory update and after it; with a tokenizer also call by call, and
    by what a token writes. And the Difference of its packs."""
    prompts, actions, _ = call_ids(trajectories)
    names = call_names(trajectories)
    check_ids(teacher, prompts, actions, names)
    hidden = {
        "history": packed_hidden(teacher, histories(trajectories), "teacher: histories"),
        "packing": packed_hidden(teacher, checked_packs(prompts, actions), "teacher: packs, tree"),
    }
    found = compare(teacher, hidden, prompts, actions, names)
    titles = ["before the first memory update", "after it"]
    titles += ["call 2", "call 3", "call 4", "call 5 and later"]
    titles += ["after it, memory", "after it, query", "after it, answer"]
    rows, n = {title: [] for title in titles}, 0  # the action tokens of each
    for trajectory in trajectories:
        for t, call in enumerate(trajectory.calls):
            roles = token_roles(call.action_ids, tokenizer) if tokenizer else []
            for k in range(len(call.action_ids)):
                rows["after it" if t else "before the first memory update"].append(n)
                if t and tokenizer:
                    rows[f"call {t + 1}" if t < 4 else "call 5 and later"].append(n)
                    rows[f"after it, {roles[k]}"].append(n)
                n += 1
    history = found["history"]
    table = {title: history[at].summary(clip_coef) for title, at in rows.items() if at}
    return table, found["packing"]


# ---- representations, and what they are made from ------------------------------------------------
def histories(trajectories):
    """Persistent history: every trajectory as one flat sequence [q, a_0, o_0, a_1, o_1, ...]."""
    return [pack_history(*history_ids(trajectory)) for trajectory in trajectories]


@torch.no_grad()
def padded_hidden(model, prompts, actions, batch_size):
    """(N, H) from left-padded batches: right states and another order of rounding, hence the floor
    of Table 3."""
    hidden = []
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc=f"batches of {batch_size}", leave=False):
        batch = slice(start, start + batch_size)
        rows = [p + a[:-1] for p, a in zip(prompts[batch], actions[batch])]
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)  # (B, L)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row)
            mask[i, longest - len(row) :] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        )
        for states, action in zip(out.last_hidden_state, actions[batch]):
            hidden.append(states[-len(action) :])
    return torch.cat(hidden)


def action_domain(trajectories, flat, q_packs):
    """N, and the spurious positions that a mask by role adds to it. Trajectory mask: all that
    follows q in the flat history, so the observations. Response mask: all that follows q in Eq. 4,
    so every x_t, context copies and observations. (The paper defines neither; of its counts the two
    differ by about one copy of each kept response.)"""
    exact = sum(len(packed.action_ids) for packed in flat)
    q = sum(trajectory.prefix_len for trajectory in trajectories)
    in_histories = sum(len(packed.input_ids) for packed in flat)
    in_packs = sum(len(packed.input_ids) for packed in q_packs)
    return {
        "exact": exact,
        "trajectory mask adds": in_histories - q - exact,
        "response mask adds": in_packs - q - exact,
    }


class FreeEnv(SearchEnv):
    """The free protocol, for a model that does not follow the tags. Whatever a response says is
    memory and query at once, the first words of the best passage are the observation, the number of
    calls is fixed, nothing is scored. Sampled actions and rewritten contexts are real, which is all
    that an audit needs."""

    WORDS = 40

    def __init__(self, task, retriever, calls):
        super().__init__(task, retriever, top_k=1)
        self.turns_left = calls

    def prompt(self):
        """The text of q: what an agent without tags needs to know."""
        return (
            "Answer step by step. You see only this text, your last note, and what a search for "
            f"that note found.\nQuestions: {' ; '.join(self.task.questions)}"
        )

    def read_action(self, response):
        """The whole response is the query, until the calls are used up."""
        self.turns_left -= 1
        return response if self.turns_left else None

    def observe(self, passages):
        """The first words of what was found."""
        short = []
        for passage in passages:
            words = passage.text.split()[: self.WORDS]
            short.append(replace(passage, text=" ".join(words)))
        return super().observe(short)


def sample_sets(model, tokenizer, tasks, calls, max_new_tokens, seed=0):
    """Trajectories of (task, retriever) pairs in the free protocol under every update rule; those
    after `mem1`, which Table 4 has for comparison, on the first quarter of the same tasks."""
    sets, ends = {}, end_ids(tokenizer, model)
    stop = stop_on(tokenizer, (), ends)
    for rule, update in update_rules(tokenizer).items():
        part = tasks if rule == "mem1" else tasks[: max(1, len(tasks) // 4)]
        envs = [FreeEnv(task, retriever, calls) for task, retriever in part]
        # by the id inside its file, so that what the committed tables say can be sampled again
        noise = task_generators(seed, 0, [task.id.rpartition(":")[2] for task, _ in part])

        def sample(prompts, rows):
            generators = [noise[row] for row in rows]
            return generate(model, prompts, max_new_tokens, 1.0, stop, generators)

        title = f"sampling, {rule}"
        sets[rule] = rollout(sample, tokenizer, envs, update, progress=title, ends=ends)
    return sets


def toy(dtype):
    """A random model, and the expert's trajectories under each update rule."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([passage.text for passage in ToyWiki(0).passages], 512)
    model = toy_model(tokenizer, 64, 2, attention="packed", scale=0.2).to(dtype).eval()
    sets = {}
    for name, update in update_rules(tokenizer).items():
        envs = toy_envs("train", 3, k=2)
        expert = scripted(ToyWiki.expert, tokenizer, envs)
        sets[name] = rollout(expert, tokenizer, envs, update)
    return model, sets


# ---- the command ---------------------------------------------------------------------------------
def tables(report):
    """The lines that people read."""
    dlogp = {"p99 abs dlogp": "{p99_dlogp:.2e}", "max abs dlogp": "{max_dlogp:.2e}"}
    top1 = {"top-1 %": "{top1:.2%}"}
    top = top1 | {"changed": "{changed}", "false clip %": "{false_clip:.2%}"}
    size = f"{report['trajectories']} trajectories, {report['calls']} calls"
    N = report["action_domain"]["exact"]
    tokens = {"tokens": "{tokens}"}

    def table(title, first, rows, columns):
        yield from ("", title, "")
        cells = []
        for name, row in rows.items():
            cells.append([name] + [form.format(**row) for form in columns.values()])
        yield from markdown([first, *columns], cells)

    title = f"**Table 3**: {size}, {N} action tokens, against unpadded single calls"
    columns = dlogp | {"max abs dlogit": "{max_dlogit:.2e}"} | top
    yield from table(title, "representation", report["table3"], columns)
    title = "**Table 4**: packs (tree) under each context update"
    yield from table(title, "context update", report["table4"], tokens | dlogp | top1)
    title = "**Figure 3b**: the pack with one half of its state corrupted, or both"
    yield from table(title, "corruption", report["figure3b"], dlogp | top)
    if "teacher" in report:
        title = "**Teacher**: the flat history against the exact state"
        columns = tokens | dlogp | top1 | {"changed": "{changed}", "mean KL": "{mean_kl:.2e}"}
        yield from table(title, "calls", report["teacher"], columns)
    domain = [f"{name} {count}" for name, count in report["action_domain"].items()]
    yield "\n**Action domain**: " + ", ".join(domain)
    ties = {}
    for name, row in [*report["table3"].items(), *report["table4"].items()]:
        if name not in ("persistent history", "batching floor", "single calls"):
            ties |= dict.fromkeys(row["ties"])
    if ties:
        title = "Ties, where packs prefer the second of two logits closer than the tolerance"
        yield f"\n{title}: {'; '.join(ties)}"
    verdict = "holds" if report["holds"] else "FAILS"
    yield f"\nRCE (Eq. 5) {verdict} for {report['dtype']}: {report['criterion']}"
    for failed in report["failures"]:
        yield f"- {failed}"


def load_subject(args, dtype):
    """What the command asks to audit: (model, {name of a set: trajectories}, teacher or None, the
    tokenizer where the search protocol was followed)."""
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
        tasks = [(task, retriever) for task in load_questions(args.questions)[: args.tasks]]
    else:
        tasks = [(env.task, env.retriever) for env in toy_envs("test", args.tasks, k=2)]
    sets = sample_sets(model, tokenizer, tasks, args.calls, args.max_new_tokens, args.seed)
    return model, sets, teacher, None


def parse(argv=None):
    """The command line, checked."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="experiments.audit", description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("--model", help="a model folder or hub name; by default a random model")
    add("--trajectories", help="a file that train.py wrote; by default they are sampled")
    add("--teacher", help="a second model, which reads the same trajectories")
    add("--questions", help="a file of questions to sample on; by default the toy's")
    add("--corpus", help="an index of env.py, a JSONL of passages, or a retrieval server's URL")
    add("--tasks", type=int, default=64, help="tasks to sample (default 64)")
    add("--calls", type=int, default=4, help="calls of each task (default 4)")
    add("--max_new_tokens", type=int, default=72, help="tokens of a response (default 72)")
    add("--quick", action="store_true", help="3 tasks, 16 tokens per response: about a minute")
    add("--seed", type=int, default=0, help="random seed of the sampling (default 0)")
    add("--clip_coef", type=float, default=0.2, help="epsilon of Eq. 10, for false clips")
    add("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", action="store_true", help="print numbers for machines instead of tables")
    args = parser.parse_args(argv)
    if args.quick:
        args.tasks, args.max_new_tokens = 3, 16
    if bool(args.questions) != bool(args.corpus):
        parser.error("--questions and --corpus go together")
    if (args.trajectories or args.questions or args.teacher) and not args.model:
        parser.error("--trajectories, --questions and --teacher need a --model")
    if min(args.tasks, args.calls, args.max_new_tokens) < 1:
        parser.error("--tasks, --calls and --max_new_tokens must be positive")
    return args


@command("experiments.audit")
def main(argv=None):
    args = parse(argv)
    torch.set_float32_matmul_precision("highest")  # TF32 would round float32 to 11 bits
    model, sets, teacher, tokenizer = load_subject(args, getattr(torch, args.dtype))
    report = audit(model, sets, teacher, args.clip_coef, tokenizer)
    lines = [json.dumps(report, indent=1)] if args.json else tables(report)
    for line in lines:
        print(line, flush=True)
    raise SystemExit(int(not report["holds"]))


if __name__ == "__main__":
    main()
