"""Benchmarks: what packs, the chunked loss and the sampler save, and what a search index finds.

    python -m experiments.bench                   # packs, then losses
    python -m experiments.bench packs             # packs against the best way without (Figure 3c)
    python -m experiments.bench losses            # chunked_loss against the logits of all tokens
    python -m experiments.bench sampling          # generate against simpler ways to sample
    python -m experiments.bench recall INDEX HOTPOTQA.json   # passages found, and time per query

A command with --help lists its flags: model sizes, rounds, device. Models and ids are random. Times
are paired: every round runs all forms, each round in another order, and what is shown are medians
over the rounds of ratios within a round.
"""

import argparse
import random
import re
import resource
import sqlite3
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, quantiles
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

import losses
import rollout
from env import SqliteRetriever, json_records, open_retriever
from eval import markdown
from pack import action_hidden, pack, pad

MIB = 2**20


# ---- packs (Figure 3c): calls scored and trained on, packed and unpacked -------------------------

WORKLOADS = {f"q {q}, {n} calls": {"q": q, "calls": n} for q in (128, 300, 1024) for n in (2, 4, 8)}
WORKLOADS |= {
    "8 rollouts of one task, q 300, 4 calls": {"q": 300, "calls": 4, "rollouts": 8},
    "append-only, q 300, 8 calls": {"q": 300, "calls": 8, "append_only": True},
    "nothing shared, 4 calls": {"q": 0, "calls": 4},
    "one call, q 300": {"q": 300, "calls": 1},
}
COLUMNS = (
    "calls | shared | tokens | ratio of tokens | of work | forward: loop / batch / sorted | "
    "forward + backward | to the best | of the token ratio | MiB | max abs dlogit"
).split(" | ")
SINGLES = ("loop", "batch", "sorted")  # the ways without packs


def pack_rows(model, rounds):
    """The cells under COLUMNS, two rows for each of WORKLOADS."""
    for title, workload in WORKLOADS.items():
        yield from compare_forms(model, title, *make_calls(**workload), rounds)


def make_calls(q, calls, rollouts=1, append_only=False, block=200):
    """(prompts, actions, |q| of each call): random ids in blocks [x_t, a_t] of `block` tokens, give
    or take a fifth, half of them sampled. append_only: a call also reads all blocks before it."""
    rng = random.Random(0)

    def ids(n):
        return [rng.randrange(1000) for _ in range(n)]

    prefix, prompts, actions = ids(q), [], []
    for _ in range(rollouts):
        context = []
        for _ in range(calls):
            length = rng.randint(block * 4 // 5, block * 6 // 5)
            x, a = ids(length - length // 2), ids(length // 2)
            prompts.append(prefix + context + x)
            actions.append(a)
            if append_only:
                context = context + x + a
    return prompts, actions, [q] * len(prompts)


def compare_forms(model, title, prompts, actions, prefix_lens, rounds):
    """One workload: a row for packs that share q, and one for the whole tree."""
    forms = make_forms(model, prompts, actions, prefix_lens)
    ids = [torch.tensor(action, device=model.device) for action in actions]
    runs = {}
    for name, form in forms.items():
        for backward in (False, True):
            runs[name, backward] = partial(cross_entropy, model, form, ids, backward)
    times = paired_seconds(model, runs, rounds)

    def ratios(other, name, backward):
        return [a / b for a, b in zip(times[other, backward], times[name, backward])]

    best = min(SINGLES, key=lambda name: median(times[name, True]))
    memory = {name: mib(model, runs[name, True]) for name in (best, "q", "tree")}
    right = logits_of(model, forms["loop"], actions)
    alone = pack(prompts, actions, share=0)
    for name, share in (("q", prefix_lens), ("tree", None)):
        packed = pack(prompts, actions, share)
        before, after = len(alone.input_ids), len(packed.input_ids)
        saved, work = before / after, multiplications(model, alone) / multiplications(model, packed)
        cells = [title, name, f"{before} -> {after}", f"{saved:.2f}", f"{work:.2f}"]
        for backward in (False, True):
            medians = [median(ratios(other, name, backward)) for other in SINGLES]
            cells.append(" / ".join(f"{ratio:.2f}" for ratio in medians))
        low, gain, high = quantiles(ratios(best, name, True), n=4)
        cells += [f"{best} {gain:.2f} [{low:.2f}, {high:.2f}]", f"{gain / saved:.0%}"]
        cells.append(f"{memory[best]:.0f} -> {memory[name]:.0f}")
        off = logits_of(model, forms[name], actions) - right
        cells.append(f"{off.abs().max().item():.0e}")
        yield cells


def make_forms(model, prompts, actions, prefix_lens):
    """The ways to read the calls: a loop of single ones, one padded batch, four batches sorted by
    length; packs that share q, or all that they can. Each yields, batch by batch, the numbers of
    its calls and their hidden states at g(t,k)."""
    n = len(prompts)

    def packed(share):
        yield list(range(n)), action_hidden(model, pack(prompts, actions, share).to(model.device))

    batches = partial(padded_batches, model, prompts, actions)
    return {
        "loop": partial(batches, 1),
        "batch": partial(batches, n),
        "sorted": partial(batches, -(-n // 4)),
        "q": partial(packed, prefix_lens),
        "tree": partial(packed, None),
    }


def padded_batches(model, prompts, actions, size):
    """Batches of `size` calls of similar length. They are padded on the right and need no mask,
    which is SDPA's fastest case."""
    calls = [prompt + action for prompt, action in zip(prompts, actions)]
    order = sorted(range(len(calls)), key=lambda c: len(calls[c]))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        ids = pad_sequence([torch.tensor(calls[c]) for c in rows], batch_first=True)
        out = model.base_model(input_ids=ids.to(model.device), use_cache=False)
        found = []
        for c, hidden in zip(rows, out.last_hidden_state):  # (L, H)
            first = len(prompts[c]) - 1
            found.append(hidden[first : first + len(actions[c])])
        yield rows, torch.cat(found)


def cross_entropy(model, form, ids, backward):
    """The summed loss of all calls with a full head, and its backward pass."""
    head = model.get_output_embeddings()
    with torch.set_grad_enabled(backward):
        for rows, hidden in form():
            logits = head(hidden).float()  # (n, V)
            targets = torch.cat([ids[c] for c in rows])
            loss = F.cross_entropy(logits, targets, reduction="sum")
            if backward:
                loss.backward()


@torch.no_grad()
def logits_of(model, form, actions):
    """(N, V), in the order of the calls."""
    head, parts = model.get_output_embeddings(), {}
    for rows, hidden in form():
        lengths = [len(actions[c]) for c in rows]
        parts |= zip(rows, head(hidden).split(lengths))
    return torch.cat([parts[c] for c in range(len(actions))]).float()


def multiplications(model, packed):
    """Of a forward pass: the layers' weights for each token, two products of the width for each
    visible pair, and the head for each action token."""
    config, layers = model.config, model.base_model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    pairs = (packed.position_ids + 1).sum().item()  # a token sees as many as it is deep
    attention = 2 * pairs * config.num_hidden_layers * config.hidden_size
    head = len(packed.action_ids) * config.vocab_size * config.hidden_size
    return len(packed.input_ids) * weights + attention + head


def mib(model, run):
    """MiB of a run: on CUDA its peak above what was there before, elsewhere what its forward passes
    keep for the backward."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive, most = {}, 0

    def keep(tensor):
        """Count a storage once, and no weights."""
        nonlocal most
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            alive[storage.data_ptr()] = storage.nbytes()
            most = max(most, sum(alive.values()))
        return tensor

    def use(tensor):
        alive.clear()  # the backward pass of this batch has begun
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, use):
        run()
    return most / MIB


def overhead(model):
    """What building costs: a pack with its mask against the forward and backward that it serves,
    and the BlockMask against create_block_mask at S = 16,384."""
    prompts, actions, _ = make_calls(300, 8)

    def build():
        packed = pack(prompts, actions).to(model.device)
        return packed.block_mask if model.device.type == "cuda" else packed.segments

    packed = pack(prompts, actions).to(model.device)

    def use():
        action_hidden(model, packed).sum().backward()

    share = fastest(model, build) / fastest(model, use)
    yield f"Pack and mask of q 300, 8 calls: {share:.2%} of the forward and backward they serve."
    prompts, actions, _ = make_calls(300, 64)
    long = pad(pack(prompts, actions), 16384).to(model.device)
    S, end = len(long.input_ids), long.subtree_end

    def mask_mod(b, h, q, k):
        return (k <= q) & (q < end[k])

    def generic():
        create_block_mask(mask_mod, None, None, S, S, device=end.device)

    def ours():
        return replace(long).block_mask  # a new pack, whose mask is not made yet

    ratio = fastest(model, generic, 1) / fastest(model, ours)
    yield f"BlockMask at S = {S}: create_block_mask takes {ratio:.0f} times as long as the tree."


# ---- losses: memory and time of Eq. 7, 10 and 11 at a real vocabulary ----------------------------
def token_terms(logits, teacher_logits, action_ids):
    """What an actor's loss needs of each token, (N,): log pi(a), H and KL."""
    kl = losses.reverse_kl(logits, teacher_logits)
    return losses.log_prob(logits, action_ids) + losses.entropy(logits) + kl


def chunked(hidden, head, teacher_hidden, teacher_head, action_ids, chunk):
    """The mean, a few tokens at a time."""

    def objective(logits, rows):
        teacher_logits = losses.head_logits(teacher_hidden[rows], teacher_head)
        terms = token_terms(logits, teacher_logits, action_ids[rows])
        return terms.sum() / len(action_ids), {}

    return losses.chunked_loss(objective, hidden, head, chunk=chunk)[0]


def plain(hidden, head, teacher_hidden, teacher_head, action_ids, chunk):
    """The mean, with the logits of all tokens at once."""
    logits = losses.head_logits(hidden, head)
    teacher_logits = losses.head_logits(teacher_hidden, teacher_head)
    return token_terms(logits, teacher_logits, action_ids).mean()


LOSSES = {"chunked": chunked, "plain": plain}


def loss_line(args):
    """Both forms in one sentence: extra memory, time, and how far their gradients differ."""
    memory, seconds, gradients = {}, {name: [] for name in LOSSES}, {}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.rounds):
            for name in sorted(LOSSES, reverse=i % 2):
                file = Path(folder) / name
                memory[name], found = in_new_process(measure_loss, name, args, file)
                seconds[name].append(found)
        for name in LOSSES:
            gradients[name] = torch.load(Path(folder) / name)
    share = memory["chunked"] / max(memory["plain"], 1e-9)
    ratio = median(a / b for a, b in zip(seconds["chunked"], seconds["plain"]))
    errors = []
    for ours, right in zip(gradients["chunked"], gradients["plain"]):
        errors.append(f"{(ours - right).norm() / right.norm():.0e}")
    sizes = f"V = {args.vocab_size}, H = {args.hidden_size}, H_T = {args.teacher_hidden_size}"
    extra = f"{memory['chunked']:.0f} MiB beyond the inputs against {memory['plain']:.0f}"
    differ = f"{errors[0]} (hidden states), {errors[1]} (head)"
    return (
        f"{args.tokens} action tokens, {sizes}, {args.dtype}: {extra} ({share:.1%}), {ratio:.2f} "
        f"of the time; relative difference of the gradients {differ}"
    )


def in_new_process(function, *args):
    """function(*args) in a separate process: the peak that one reports on a CPU never falls."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure_loss(name, args, file):
    """Peak MiB beyond the inputs, and seconds, of a form with its backward pass. Writes the
    gradients to hidden states and head to a file."""
    form = LOSSES[name]
    form(*loss_inputs(args, tokens=8, vocab_size=100), args.chunk).backward()  # the warm-up
    inputs = loss_inputs(args, args.tokens, args.vocab_size)
    synchronize(args.device)
    before, start = peak_mib(args.device), time.perf_counter()
    form(*inputs, args.chunk).backward()
    synchronize(args.device)
    found = peak_mib(args.device) - before, time.perf_counter() - start
    torch.save([inputs[0].grad.cpu(), inputs[1].grad.cpu()], file)
    return found


def loss_inputs(args, tokens, vocab_size):
    """Hidden states and head of student and teacher, and action ids. They are filled in place, so
    that no temporary copy raises the peak."""
    H, H_T = args.hidden_size, args.teacher_hidden_size
    g = torch.Generator(args.device).manual_seed(0)
    settings = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    inputs = []
    for width in (H, H_T):
        for rows, scale in ((tokens, 1.0), (vocab_size, 0.1)):
            inputs.append(torch.empty(rows, width, **settings).normal_(0, scale, generator=g))
    for x in inputs[:2]:  # the student's
        x.requires_grad_()
    inputs.append(torch.randint(vocab_size, (tokens,), generator=g, device=args.device))
    return inputs


def peak_mib(device):
    """The most memory that this process has held so far."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / MIB
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says begins at the peak of the process that started this
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


# ---- sampling: what generate gains by its two economies ------------------------------------------
def sampling_rows(model, prompts, max_new_tokens, rounds):
    """`generate`, which reads a common prefix once and lets finished rows leave, against itself
    without each of the two, and prompt by prompt: seconds, their ratio to those of `generate`, and
    how many responses are the same."""
    everyone, responses = range(len(prompts)), {}

    def stop(ids):
        return ids[-1] % 32 == 0  # after 32 tokens, on average

    def sample(rows, stop=stop):
        noise = rollout.task_generators(0, 0, [str(i) for i in rows])
        batch = [prompts[i] for i in rows]
        return rollout.generate(model, batch, max_new_tokens, 1.0, stop, noise)[0]

    def sample_without_prefix():
        empty = DynamicCache(config=model.config), 0, sys.maxsize
        with patch.object(rollout, "_read_common_prefix", return_value=empty):
            return sample(everyone)

    def sample_without_leaving():
        found = sample(everyone, stop=None)
        for ids in found:
            ends = [n for n in range(1, len(ids)) if stop(ids[:n])]
            del ids[ends[0] if ends else len(ids) :]
        return found

    def sample_alone():
        return [sample([i])[0] for i in everyone]

    forms = {
        "generate": partial(sample, everyone),
        "without the shared prefix": sample_without_prefix,
        "without leaving": sample_without_leaving,
        "one by one": sample_alone,
    }

    def run(name):
        responses[name] = forms[name]()

    times = paired_seconds(model, {name: partial(run, name) for name in forms}, rounds)
    right = responses["generate"]
    for name, seconds in times.items():
        ratio = median(a / b for a, b in zip(seconds, times["generate"]))
        same = sum(a == b for a, b in zip(responses[name], right))
        yield [name, f"{median(seconds):.2f}", f"{ratio:.2f}", f"{same} of {len(right)}"]


# ---- recall: what a search index finds -----------------------------------------------------------
def recall(retriever, hotpotqa):
    """How many of the passages that HotpotQA's own JSON names for a question are among the first 3
    and 10 that the question finds, and the time of a query."""

    def read(record):
        if "supporting_facts" not in record:
            raise ValueError("recall needs HotpotQA's own JSON, with supporting_facts")
        return record["question"], {title for title, _ in record["supporting_facts"]}

    found, seconds = {3: [], 10: []}, []
    for question, gold in json_records(hotpotqa, read):
        start = time.perf_counter()
        (passages,) = retriever.search([question], 10)
        seconds.append(time.perf_counter() - start)
        titles = [passage.title for passage in passages]
        for k in found:
            found[k] += [title in titles[:k] for title in gold]
    seconds.sort()
    p50, p99 = (1000 * seconds[int(share * len(seconds))] for share in (0.5, 0.99))
    shares = f"recall@3 {fmean(found[3]):.1%}, recall@10 {fmean(found[10]):.1%}"
    return f"{len(seconds)} questions: {shares}, p50 {p50:.0f} ms, p99 {p99:.0f} ms"


# ---- clocks --------------------------------------------------------------------------------------
def paired_seconds(model, runs, rounds):
    """Seconds of every run in every round, each round in another order; one more warms up."""
    times, names = {name: [] for name in runs}, list(runs)
    for i in range(rounds + 1):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            model.zero_grad()
            times[name].append(seconds_of(model, runs[name]))
    return {name: seconds[1:] for name, seconds in times.items()}


def fastest(model, run, n=5):
    """Seconds of a run, the least of n."""
    return min(seconds_of(model, run) for _ in range(n))


def seconds_of(model, run):
    """Of one call, with what it left to the device."""
    synchronize(model.device.type)
    start = time.perf_counter()
    run()
    synchronize(model.device.type)
    return time.perf_counter() - start


def synchronize(device):
    """Wait until a GPU has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# ---- the commands --------------------------------------------------------------------------------

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
LOSS = {"tokens": 2048, "hidden_size": 512, "teacher_hidden_size": 512, "vocab_size": 151_936}
SAMPLING = {**MODEL, "prompts": 32, "max_new_tokens": 128}


def make_parser():
    """The four commands and their flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command")
    measured = {
        "packs": ("time a random Qwen2 on packs and without them", 5, MODEL),
        "losses": ("memory and time of chunked_loss and of the plain form", 3, LOSS),
        "sampling": ("time generate and simpler ways to sample", 3, SAMPLING),
    }
    for name, (text, rounds, sizes) in measured.items():
        command = commands.add_parser(name, help=text, description=text)
        add = command.add_argument
        add("--rounds", type=int, default=rounds, help=f"of paired timings (default {rounds})")
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--dtype", choices=["float32", "bfloat16"], default="float32")
        for size, default in sizes.items():
            add(f"--{size}", type=int, default=default, help=f"default {default}")
        if name == "losses":
            add("--chunk", type=int, help="tokens at a time (default: that of chunked_loss)")
    command = commands.add_parser("recall", help="what an index finds for HotpotQA's questions")
    command.add_argument("index", help="an index, a JSONL of passages, or a server's URL")
    command.add_argument("hotpotqa", help="HotpotQA's own JSON")
    every = "let common words count too, whatever they cost"
    command.add_argument("--all_words", action="store_true", help=every)
    return parser


def random_model(args):
    """A Qwen2 of the sizes given."""
    torch.manual_seed(0)
    sizes = {name: getattr(args, name) for name in MODEL}
    config = Qwen2Config(**sizes, dtype=getattr(torch, args.dtype))
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="packed").eval()


def lines_of(args):
    """What a command prints, each line as soon as it is known."""
    if args.command == "packs":
        model = random_model(args)
        yield from markdown(COLUMNS, pack_rows(model, args.rounds))
        yield ""
        yield from overhead(model)
    elif args.command == "losses":
        yield loss_line(args)
    elif args.command == "sampling":
        prompts, _, _ = make_calls(300, args.prompts)
        rows = sampling_rows(random_model(args), prompts, args.max_new_tokens, args.rounds)
        yield from markdown(["sampler", "seconds", "to generate", "same responses"], rows)
    else:
        if args.all_words:
            SqliteRetriever.POSTINGS = 10**12
        yield recall(open_retriever(args.index), args.hotpotqa)


@rollout.command("experiments.bench")
def main():
    parser = make_parser()
    args = parser.parse_args()
    if args.command == "packs" and args.rounds < 2:
        parser.error("--rounds must be at least 2, for quartiles")
    if args.command == "packs" and args.vocab_size < 1000:
        parser.error("--vocab_size must be at least 1000, from which the ids are drawn")
    todo = [args] if args.command else [parser.parse_args([name]) for name in ("packs", "losses")]
    try:
        for command in todo:
            for line in lines_of(command):
                print(line, flush=True)
    except sqlite3.Error as error:
        raise ValueError(error) from None


if __name__ == "__main__":
    main()
