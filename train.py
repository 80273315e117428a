"""MemOPD (arXiv 2608.07068): PPO on the task reward plus full-vocabulary reverse KL to a frozen teacher, every token
scored in the exact state in which it was sampled.

    python train.py                       # the preset `tiny`: an invented encyclopedia, on a CPU or one GPU, to the end
    python train.py --distill history     # the control of Figure 3a: the teacher reads a flat history
    python train.py --distill none        # PPO alone
    python train.py --questions Q.jsonl --corpus INDEX --student NAME --teacher NAME     # real questions and models
    python train.py --stage sft --sft_data TURNS.jsonl --student NAME                    # SFT (Section 3.2) before that

What the paper does not state, and we chose (values are MEM1's where it has them, and flags):
 1. Advantages are whitened over the batch's action tokens; Eq. 10 says nothing about it.
 2. The critic is a separate copy of the student with a value head, read at g(t,k); its loss clips the value.
 3. Policy, reference and teacher are all scored at the sampling temperature.
 4. The task reward is the sum of EM over the questions; a malformed response ends the episode with reward 0.
 5. log pi_old is a pass of its own over the packs of the update, so that the first ratio is exactly 1. What the sampler
    recorded is compared with it in every step (`logp_mismatch`): the audit of Eq. 5 in the loop.
 6. `tiny` makes student and teacher in one run of SFT: the student is an early snapshot of what becomes the teacher.

Shapes: N sampled action tokens of the whole batch, in the order trajectory, call, token; H hidden size.
"""
import copy
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, HfArgumentParser, LlamaConfig

from env import STOP, SearchEnv, ToyWiki, compose, load_questions, open_retriever, step_all, toy_envs
from eval import evaluate, table
from losses import action_scores, actor_loss, gae, ppo_loss, token_rewards, value_loss, whiten
from pack import Packed, action_hidden, check_model, pack, pack_history, split
from rce import check_tokenizers, rce
from rollout import (Trajectory, format_trajectory, generate, load, rollout, save_trajectories, scripted, stop_on,
                     task_generators, train_tokenizer, update_rules)


def flag(default, text: str):
    """A field of Config with its help: symbol, and where the value is from."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Every hyper-parameter, with the symbol and the source of its value; `PRESETS` change some."""
    preset: Literal["tiny", "3b"] = flag(
        "tiny", "defaults, which flags override: tiny for the toy, 3b for the paper's values and MEM1's")
    stage: Literal["rl", "sft"] = flag("rl", "rl: Section 3.4; sft: turn-level examples first (Section 3.2)")
    run: str = flag("runs/tiny", "folder for models, metrics and trajectories; must not exist yet, but for --resume")
    resume: bool = flag(False, "go on from the newest checkpoint in --run, with the same settings")
    keep: int = flag(2, "checkpoints that stay on disk")
    allow_mismatch: bool = flag(False, "go on where `logp_mismatch` says that packs and sampler disagree")
    seed: int = flag(0, "of everything random")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "torch device")
    student: str = flag("", "pi_theta at first, and pi_ref: folder or hub name; empty: SFT on the toy (Section 3.2)")
    teacher: str = flag("", "pi_T: folder or hub name; empty: SFT on the toy (Section 3.2)")
    distill: Literal["aligned", "history", "none"] = flag(
        "aligned", "the state that the teacher reads: aligned = MemOPD, history = the control of Figure 3a, none = PPO")
    # data
    questions: str = flag("", "files of training questions, joined by commas (env.load_questions); empty: the toy")
    test_questions: str = flag("", "files of held-out questions, joined by commas; empty: the toy")
    corpus: str = flag("", "passages: an index of env.py, a JSONL, or a retrieval server's URL")
    top_k: int = flag(3, "passages of a search (Search-R1: 3)")
    max_obs: int = flag(1000, "tokens of an observation at most, in whole passages (MEM1: 1000)")
    # roll out
    steps: int = flag(500, "updates of pi_old (MEM1: 500)")
    tasks_per_step: int = flag(128, "tasks that are rolled out in a step (MEM1: 128)")
    horizon: int = flag(2, "questions per training task (Section 4.1: trained on Q2 only)")
    update: Literal["mem1", "full_response", "suffix_retention", "summary_replacement", "sliding_window",
                    "retrieval_refresh"] = flag("mem1", "the update rule U of Eq. 1 (Section 3.2: MEM1's)")
    reward: Literal["em", "f1"] = flag("em", "r_t of the last call, summed over questions (MEM1: em)")
    temperature: float = flag(1.0, "of sampling, and of every log-prob (MEM1: 1)")
    max_new_tokens: int = flag(1000, "tokens of one response at most (MEM1: 1000)")
    max_len: int = flag(4096, "tokens of one call at most; longer ones are refused, never cut (Section 3.3)")
    # pack
    share: Literal["tree", "q"] = flag("tree", "what a pack stores once: every common prefix, or q alone (Eq. 4)")
    max_tokens: int = flag(16384, "tokens of one pack, the micro-batch; results do not depend on it")
    # objective
    distill_coef: float = flag(0.02, "lambda of Eq. 11 (Section 4.1: 0.02)")
    entropy_coef: float = flag(0.001, "alpha of Eq. 11 (not in the paper; MEM1: .001)")
    kl_coef: float = flag(0.001, "beta of Eq. 8 (not in the paper; MEM1: .001)")
    gamma: float = flag(1.0, "gamma of Eq. 9 (not in the paper; MEM1: 1)")
    gae_lambda: float = flag(1.0, "lambda_GAE of Eq. 9 (not in the paper; MEM1: 1)")
    clip_coef: float = flag(0.2, "epsilon of Eq. 10 (not in the paper; MEM1: .2)")
    value_clip: float = flag(0.5, "range of the clipped value loss (not in the paper; MEM1: .5)")
    whiten_advantages: bool = flag(True, "scale A of Eq. 9 to mean 0 and deviation 1 over the batch (not in the paper)")
    ppo_epochs: int = flag(1, "updates on each batch (not in the paper; MEM1: 1)")
    actor_lr: float = flag(1e-6, "learning rate of pi_theta (not in the paper; MEM1: 1e-6)")
    critic_lr: float = flag(1e-5, "learning rate of V_phi (not in the paper; MEM1: 1e-5)")
    max_grad_norm: float = flag(1.0, "gradient clip of both (not in the paper; MEM1: 1)")
    save_every: int = flag(50, "steps between checkpoints")
    # evaluation
    horizons: str = flag("2,8,16", "questions per task in the last table (Section 4.1: Q2, Q8, Q16)")
    eval_questions: int = flag(640, "held-out questions per horizon and model (Q2: 320 tasks); 0: no table")
    # SFT on recorded episodes
    sft_data: str = flag("", "episodes as text, from eval.py --keep_correct (Section 4.1: 20,036 examples)")
    sft_epochs: int = flag(1, "passes over them (Section 4.1: 1)")
    sft_lr: float = flag(1e-5, "learning rate of SFT, with warm-up and decay (not in the paper)")
    # warm start of the toy
    hidden_size: int = flag(128, "width of the toy models")
    layers: int = flag(3, "layers of the toy models")
    vocab_size: int = flag(1024, "tokens of the toy's byte-level BPE")
    sft_steps: int = flag(1000, "SFT updates until the teacher")
    sft_student: int = flag(500, "SFT updates until the student")
    sft_questions: int = flag(32, "questions in each SFT batch, over tasks of mixed length")
    sft_horizon: int = flag(16, "the longest SFT task; reached step by step from 3 questions on")


PRESETS = {"tiny": dict(
    steps=50, tasks_per_step=48, top_k=2, max_new_tokens=128, max_len=640, max_tokens=8192, distill_coef=1.0,
    ppo_epochs=2, actor_lr=2e-4, critic_lr=1e-3),
    "3b": dict(run="runs/3b")}  # the defaults above


warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process saves for itself
# p99 of |log-prob at sampling - log-prob of the packed forward| that rounding explains
MISMATCH = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.5}


def parse_config(args: list[str] | None = None) -> Config:
    """Defaults < preset < flags. Wrong names and values end with a usage message."""
    named, _ = HfArgumentParser(Config, add_help=False, allow_abbrev=False).parse_known_args(args)
    parser = HfArgumentParser(Config, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.set_defaults(**PRESETS[named.preset])
    config, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
    problems = [f"unknown arguments: {' '.join(unknown)}"] if unknown else []
    for name in ("steps", "tasks_per_step", "horizon", "temperature", "max_new_tokens", "max_tokens", "ppo_epochs",
                 "save_every", "sft_steps", "sft_questions", "sft_horizon", "sft_epochs", "top_k", "max_obs", "keep"):
        if getattr(config, name) <= 0:
            problems.append(f"--{name} must be positive")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", config.horizons):
        problems.append(f"--horizons takes question counts such as 2,8,16, not {config.horizons!r}")
    if not 1 <= config.sft_student <= config.sft_steps:
        problems.append(f"--sft_student {config.sft_student} is no step of --sft_steps {config.sft_steps}")
    if config.hidden_size % 32 or config.hidden_size <= 0:
        problems.append(f"--hidden_size {config.hidden_size} is no multiple of the heads' width, 32")
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        problems.append(f"--device {config.device} is not there: {str(error).splitlines()[0]}")
    if config.max_len <= config.max_new_tokens:
        problems.append(f"--max_len {config.max_len} leaves no room for a prompt beside --max_new_tokens "
                        f"{config.max_new_tokens}")
    if bool(config.questions) != bool(config.corpus) or config.test_questions and not config.questions:
        problems.append("--questions and --corpus go together, --test_questions with both")
    if config.questions and config.stage == "rl" and not config.student:
        problems.append("--questions needs a --student: the toy's models read the toy alone")
    if (config.stage == "sft") != bool(config.sft_data) or config.sft_data and not config.student:
        problems.append("--stage sft needs --sft_data and a --student to begin with, and --sft_data needs that stage")
    alone = config.distill == "none" or config.stage == "sft"
    if bool(config.student) != bool(config.teacher) and (config.teacher or not alone):
        problems.append("--student and --teacher go together (with --distill none a --student is enough)")
    if problems:
        parser.error("; ".join(problems))
    return config


# ---- models ----------------------------------------------------------------------------------------------------------

def load_model(path: str, device: str) -> tuple:
    """(tokenizer, causal model with packed attention, float32). Raises ValueError if packs cannot be run on it."""
    tokenizer, model = load(path, device, "packed", torch.float32)
    check_model(model)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(f"{path}: the tokenizer has {len(tokenizer)} tokens, the model only {model.config.vocab_size}")
    return tokenizer, model


def load_models(config: Config) -> tuple:
    """(tokenizer, student, teacher or None) from the folders or hub names of the flags."""
    tokenizer, student = load_model(config.student, config.device)
    if not config.teacher:
        return tokenizer, student, None
    teacher_tokenizer, teacher = load_model(config.teacher, config.device)
    check_tokenizers(tokenizer, teacher_tokenizer)
    return tokenizer, student, frozen(teacher)


def frozen(model):
    """A copy that never trains: pi_ref, pi_T. Its config is its own: one model must not flip the other's attention."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def make_critic(student):
    """V_phi: a copy of the student's body with a value head that starts at 0; nothing is shared."""
    config = copy.deepcopy(student.config)
    config.num_labels, config.classifier_dropout = 1, 0.0
    critic = AutoModelForTokenClassification.from_config(config, attn_implementation="packed").to(student.device)
    critic.base_model.load_state_dict(student.base_model.state_dict())
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic


def head(model) -> torch.Tensor:
    """(V, H)."""
    return model.get_output_embeddings().weight


def policy_scores(model, packed: Packed, temperature: float, teacher_hidden=None, teacher=None) -> tuple:
    """log pi(a), H, and the KL of Eq. 7 to the teacher, at every action token of a pack, (N,) each."""
    return action_scores(action_hidden(model, packed), head(model), packed.action_ids, teacher_hidden,
                         None if teacher is None else head(teacher), temperature)


def values_of(critic, packed: Packed) -> torch.Tensor:
    """V of Eq. 9 at g(t,k), where the action token is predicted, (N,)."""
    return critic.score(action_hidden(critic, packed))[:, 0]


# ---- warm start: SFT on the scripted expert (Section 3.2) ------------------------------------------------------------

def toy_texts() -> list[str]:
    """What the toy's tokenizer is trained on: the passages of a few worlds, and episodes of the expert."""
    texts = [f"( {p.title} ) {p.text}" for seed in range(4) for p in ToyWiki(seed).passages]
    for env in toy_envs("train", 40, 3):
        texts.append(env.prompt())
        done = False
        while not done:
            response = ToyWiki.expert(env)
            observation, _, done = env.step(response)
            texts += [response, observation]
    return texts


def toy_model(tokenizer, config: Config):
    """A small random Llama. (Not a Qwen2: AutoTokenizer replaces the tokenizer saved with one by Qwen's own.)"""
    heads = config.hidden_size // 32
    return AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=config.hidden_size, intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers, num_attention_heads=heads, num_key_value_heads=heads, attention_bias=True,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id), attn_implementation="packed").to(config.device)


def warm_start(config: Config, run: Path, log: Callable) -> tuple:
    """One run of SFT on the toy makes both models, the student after `sft_student` steps and the teacher at the end:
    (tokenizer, student, teacher)."""
    tokenizer = train_tokenizer(toy_texts(), config.vocab_size)
    model, update = toy_model(tokenizer, config), update_rules(tokenizer)[config.update]
    matrices = [p for p in model.base_model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.01, weight_decay=0),
                  torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: sft_rate(s / config.sft_steps)) for o in optimizers]
    for step in (bar := tqdm(range(config.sft_steps), desc="warm start (SFT)")):
        rng, envs = random.Random(f"{config.seed} {step}"), []
        longest = sft_longest(step / config.sft_steps, config.sft_horizon)
        while sum(len(env.task.questions) for env in envs) < config.sft_questions:
            envs += toy_envs(f"sft-{config.seed}-{len(envs)}", 1, rng.randint(1, longest), seed=step)
        trajectories = rollout(scripted(ToyWiki.expert, tokenizer, envs), tokenizer, envs, step_all, update)
        calls = [call for trajectory in trajectories for call in trajectory.calls]
        packed = pack([c.prompt_ids for c in calls], [c.action_ids for c in calls]).to(config.device)
        loss, accuracy = sft_loss(model, packed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        model.zero_grad()
        bar.set_postfix(questions=longest, loss=f"{loss.item():.3f}", accuracy=f"{accuracy:.3f}")
        log(stage="sft", step=step, longest=longest, loss=loss.item(), accuracy=accuracy)
        if step + 1 == config.sft_student:
            student = copy.deepcopy(model)
            save(run / "warm_start", student, tokenizer)
    save(run / "teacher", model, tokenizer)
    return tokenizer, student, frozen(model)


def sft_loss(model, packed: Packed) -> tuple[torch.Tensor, float]:
    """Cross-entropy on the action tokens of turn-level examples, and the share of them that is predicted right."""
    hidden = action_hidden(model, packed)
    logp, _, _ = action_scores(hidden, head(model), packed.action_ids)
    with torch.no_grad():
        right = (hidden @ head(model).T).argmax(-1) == packed.action_ids
    return -logp.mean(), right.float().mean().item()


def sft_longest(progress: float, horizon: int) -> int:
    """The curriculum: tasks of one to three questions first, then longer ones, growing one question at a time."""
    return min(horizon, 3 + round(max(0.0, progress - 0.3) / 0.3 * max(0, horizon - 3)))


def sft_rate(progress: float) -> float:
    """Share of the learning rate: up over the first 4 %, constant, then down over the last 40 %."""
    return min(1.0, progress / 0.04 + 0.02, 0.02 + (1 - progress) / 0.4)


# ---- SFT on recorded episodes (Section 3.2) --------------------------------------------------------------------------

class Replay:
    """An episode that eval.py kept as text, as an environment in which it happens again."""

    def __init__(self, record: dict):
        self.task, self.text = SimpleNamespace(id=record["task"]), record["prompt"]
        self.turns = [(turn["response"], turn["observation"]) for turn in record["turns"]]
        self.at = 0
        if not self.turns or not all(response and isinstance(response + seen, str) for response, seen in self.turns):
            raise ValueError("an episode needs turns, each with a response and an observation")

    def prompt(self) -> str:
        """The text of q."""
        return self.text

    def response(self) -> str:
        """What the agent said next."""
        return self.turns[self.at][0]

    @staticmethod
    def step_all(envs: list["Replay"], responses: list[str]) -> list[tuple[str, float, bool]]:
        """Eq. 1, as recorded."""
        for env in envs:
            env.at += 1
        return [(env.turns[env.at - 1][1], 0.0, env.at == len(env.turns)) for env in envs]


def replay(path: str, tokenizer, update: Callable) -> list[Trajectory]:
    """The episodes of a file, tokenised once, in the contexts that the update rule makes of them. Raises ValueError
    naming the line that holds none."""
    episodes = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                episodes.append(Replay(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: no episode of eval.py --keep_correct ({error})") from None
    return rollout(scripted(Replay.response, tokenizer, episodes), tokenizer, episodes, Replay.step_all, update)


def sft(config: Config) -> None:
    """Train --student on the turn-level examples of --sft_data: every response in the exact context of its call."""
    torch.manual_seed(config.seed)
    tokenizer, model = load_model(config.student, config.device)
    trajectories = replay(config.sft_data, tokenizer, update_rules(tokenizer)[config.update])
    run, log = open_run(config)
    n = config.tasks_per_step
    batches = [random.Random(f"{config.seed} {epoch}").sample(trajectories, len(trajectories))[i:i + n]
               for epoch in range(config.sft_epochs) for i in range(0, len(trajectories), n)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.sft_lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: sft_rate(step / len(batches)))
    for step, batch in enumerate(bar := tqdm(batches, desc=f"SFT, {sum(len(t.calls) for t in trajectories)} examples")):
        packs = pack_calls(batch, config)
        N, metrics = sum(len(packed.action_ids) for packed in packs), defaultdict(float)
        for packed in packs:
            loss, accuracy = sft_loss(model, packed)
            share = len(packed.action_ids) / N
            (loss * share).backward()
            metrics["loss"] += loss.item() * share
            metrics["accuracy"] += accuracy * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix({name: f"{value:.3f}" for name, value in metrics.items()})
        log(stage="sft", step=step, action_tokens=N, **metrics)
    save(run / "student", model, tokenizer)


# ---- tasks -----------------------------------------------------------------------------------------------------------

def open_data(config: Config) -> Callable[..., list[tuple]]:
    """tasks(split, n, k, step) -> n pairs of (task of k questions, its retriever): of the toy, or of the files of the
    flags, whose training questions are all used before any comes again. Raises ValueError where there are too few, or
    a held-out question is a training one."""
    horizons = [int(k) for k in config.horizons.split(",")] if config.eval_questions else []
    if not config.questions:
        def toy(split, n, k, step=0):
            envs = toy_envs(f"train-{config.seed}" if split == "train" else split, n, k, step)
            return [(env.task, env.retriever) for env in envs]
        toy("test", 1, max(config.horizon, config.sft_horizon, *horizons))  # an error now, and not after the training
        return toy
    retriever, questions = open_retriever(config.corpus), {
        name: [task for path in paths.split(",") if path for task in load_questions(path)]
        for name, paths in (("train", config.questions), ("test", config.test_questions))}
    known = {task.questions for task in questions["train"]}
    for task in questions["test"]:
        if task.questions in known:
            raise ValueError(f"held-out question {task.id} is a training question too: {task.questions[0]}")
    for name, k in (("train", config.horizon), *(("test", k) for k in horizons if questions["test"])):
        print(f"{name}: {len(questions[name])} questions make {len(compose(questions[name], k))} tasks of {k}")

    def files(name, n, k, step=0):
        """Held-out tasks are the same for every seed and step."""
        if name == "test":
            return [(task, retriever) for task in compose(questions[name], k)[:n]] if questions[name] else []
        places, size = range(step * n, (step + 1) * n), len(questions[name]) // k
        epochs = {e: compose(questions[name], k, f"{config.seed} {e}") for e in {i // size for i in places}}
        return [(epochs[i // size][i % size], retriever) for i in places]
    return files


def make_envs(tasks: list[tuple], tokenizer, config: Config) -> list[SearchEnv]:
    """Fresh episodes."""
    return [SearchEnv(task, retriever, config.reward, config.top_k, budget=config.max_obs,
                      length=lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
            for task, retriever in tasks]


# ---- the parts of a step ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Batch:
    """What stays fixed while the models are updated on a batch; all (N,) but the teacher's hidden states."""
    logp_old: torch.Tensor
    values_old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    teacher_hidden: torch.Tensor | None  # (N, H_T)

    def split(self, sizes: list[int]) -> list["Batch"]:
        """The part of each pack."""
        columns = [getattr(self, f.name) for f in fields(self)]
        return [Batch(*row) for row in zip(*([None] * len(sizes) if x is None else x.split(sizes) for x in columns))]


def pack_calls(trajectories: list[Trajectory], config: Config) -> list[Packed]:
    """Eq. 4 and 6: all calls, in order, in packs of at most `max_tokens`."""
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    prompts, actions = [c.prompt_ids for c in calls], [c.action_ids for c in calls]
    shared = [t.prefix_len if config.share == "q" else None for t in trajectories for _ in t.calls]
    return [pack(prompts[run], actions[run], shared[run], config.max_len).to(config.device)
            for run in split(prompts, actions, config.max_tokens, shared)]


def pack_histories(trajectories: list[Trajectory], config: Config) -> list[Packed]:
    """The control's wrong states: each trajectory as one flat history, as many in a pack as `max_tokens` holds."""
    prefixes = [t.calls[0].prompt_ids[:t.prefix_len] for t in trajectories]
    actions = [[c.action_ids for c in t.calls] for t in trajectories]
    observations = [[c.observation_ids for c in t.calls] for t in trajectories]
    flat = [[i for c in t.calls for i in c.action_ids + c.observation_ids] for t in trajectories]
    longest = max(map(len, map(list.__add__, prefixes, flat)))
    return [pack_history(prefixes[run], actions[run], observations[run]).to(config.device)
            for run in split(prefixes, flat, max(config.max_tokens, longest), 0)]


def advantages_of(trajectories: list[Trajectory], logp_old, logp_ref, values, config: Config) -> tuple:
    """Eq. 8 and 9: the reward of a call stands on its last action token, and a trajectory ends with its last call's.
    Advantages and returns, (N,) each."""
    rewards, last = torch.zeros_like(logp_old), torch.zeros_like(logp_old, dtype=torch.bool)
    end = -1
    for trajectory in trajectories:
        for call in trajectory.calls:
            end += len(call.action_ids)
            rewards[end] = call.reward
        last[end] = True
    rewards = token_rewards(rewards, logp_old, logp_ref, config.kl_coef)
    advantages, returns = gae(rewards, values, last, config.gamma, config.gae_lambda)
    return (whiten(advantages) if config.whiten_advantages else advantages), returns


class Clock:
    """Seconds since the last lap, summed by name."""

    def __init__(self, device: str):
        self.seconds, self.device, self.last = defaultdict(float), device, time.perf_counter()

    def lap(self, name: str) -> None:
        """What passed since the last lap was `name`."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[f"seconds_{name}"] += now - self.last
        self.last = now


def update_policy(student, critic, optimizers, packs: list[Packed], batch: Batch, teacher, config: Config,
                  clock: Clock) -> dict:
    """Eq. 7, 10 and 11 and the value loss: `ppo_epochs` updates on the whole batch, and the metrics of the last one.
    Sums over packs are divided by the N of the batch, so neither max_tokens nor share changes the result."""
    N, first = len(batch.logp_old), {}
    for _ in range(config.ppo_epochs):
        metrics, logratios = defaultdict(float), []
        for packed, part in zip(packs, batch.split([len(p.action_ids) for p in packs])):
            logp, entropy, kl = policy_scores(student, packed, config.temperature, part.teacher_hidden, teacher)
            ppo, approx_kl, clipfrac = ppo_loss(logp, part.logp_old, part.advantages, config.clip_coef)
            actor_loss(ppo, entropy, kl, config.entropy_coef, config.distill_coef, N, N).backward()
            clock.lap("update_student")
            value = value_loss(values_of(critic, packed), part.values_old, part.returns, config.value_clip)
            (value.sum() / N).backward()
            clock.lap("update_critic")
            for name, x in (("ppo_loss", ppo), ("entropy", entropy), ("teacher_kl", kl), ("approx_kl", approx_kl),
                            ("clipfrac", clipfrac), ("value_loss", value)):
                metrics[name] += x.sum().item() / N
            logratios.append((logp.detach() - part.logp_old).abs().max())
        metrics["max_logratio"] = torch.stack(logratios).max().item()
        for name, model in (("actor", student), ("critic", critic)):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            metrics[f"{name}_grad_norm"] = norm.item()
        for name, value in metrics.items():
            if not math.isfinite(value):  # before it reaches a weight
                bad = [n for model in (student, critic) for n, p in model.named_parameters()
                       if p.grad is not None and not p.grad.isfinite().all()]
                also = f", and so is the gradient of {bad[0]}" if bad else ""
                raise FloatingPointError(f"{name} is {value}{also}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        clock.lap("update_optimizers")
        # before any update the ratio is 1 in every token: the cheapest detector of a misaligned state
        first = first or {"first_max_logratio": metrics["max_logratio"], "first_clipfrac": metrics["clipfrac"]}
    return {**first, **metrics}


def rollout_metrics(envs: list, trajectories: list[Trajectory], packs: list[Packed]) -> dict:
    """What the batch was like: means over tasks, counts, and the share of tokens that packing saved."""
    calls, n = [call for trajectory in trajectories for call in trajectory.calls], len(envs)
    em, f1 = (sum(scores) / n for scores in zip(*(env.score() for env in envs)))
    return {"reward": sum(call.reward for call in calls) / n, "em": em, "f1": f1,
            "answered": sum(env.answers is not None for env in envs) / n,
            "calls": len(calls), "action_tokens": sum(len(call.action_ids) for call in calls),
            "tokens_saved": 1 - (sum(len(packed.input_ids) for packed in packs)
                                 / sum(len(call.prompt_ids) + len(call.action_ids) for call in calls))}


# ---- files -----------------------------------------------------------------------------------------------------------

@contextmanager
def uninterrupted():
    """Hold SIGINT back until the block is done, so that a file that is being written gets whole."""
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


@uninterrupted()
def write(file: Path, text: str) -> None:
    """A whole file or the old one, whatever happens meanwhile."""
    file.with_suffix(".part").write_text(text)
    os.replace(file.with_suffix(".part"), file)


@uninterrupted()
def save(folder: Path, *parts) -> None:
    """`save_pretrained` all parts, whole or not at all: into a temporary folder beside it, then renamed."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as temporary:
        for part in parts:
            part.save_pretrained(f"{temporary}/new")
        if folder.exists():
            os.rename(folder, f"{temporary}/old")
        os.rename(f"{temporary}/new", folder)


def save_checkpoint(run: Path, step: int, student, critic, optimizers, keep: int) -> None:
    """What a run needs to go on after `step` steps, weights and optimizers: under a temporary name first, so that a
    folder called step-* is whole; the last `keep` of them stay."""
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary, uninterrupted():
        dcp.save(training_state(student, critic, optimizers), checkpoint_id=f"{temporary}/new", no_dist=True)
        os.rename(f"{temporary}/new", folder / f"step-{step:06d}")
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(path: Path, student, critic, optimizers) -> None:
    """Put what `save_checkpoint` wrote back, in place."""
    state = training_state(student, critic, optimizers)
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    for name, model, optimizer in zip(("student", "critic"), (student, critic), optimizers):
        set_state_dict(model, optimizer, model_state_dict=state[name], optim_state_dict=state[f"{name}_optimizer"])


def training_state(student, critic, optimizers) -> dict:
    """Weights and optimizer states by parameter name. Sampling noise and task order need none: they come from
    (seed, step, task)."""
    state = {}
    for name, model, optimizer in zip(("student", "critic"), (student, critic), optimizers):
        state[name], state[f"{name}_optimizer"] = get_state_dict(model, optimizer)
    return state


def checkpoints(run: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def open_run(config: Config) -> tuple[Path, Callable]:
    """(folder, log), where log(**metrics) adds a line to metrics.jsonl. A new folder, never over an old one; or with
    --resume the old one, if it has the same settings, without what came after its newest checkpoint."""
    run, settings = Path(config.run), asdict(config)
    if config.resume and (run / "config.json").exists():
        theirs = json.loads((run / "config.json").read_text())
        for name in settings.keys() - {"resume", "steps", "save_every", "keep", "device", "allow_mismatch"}:
            if settings[name] != theirs.get(name):
                raise ValueError(f"{run} was made with --{name} {theirs.get(name)}, not {settings[name]}; a run goes "
                                 "on with its own settings")
        for unfinished in [*run.glob(".saving-*"), *(run / "checkpoints").glob(".saving-*")]:
            shutil.rmtree(unfinished)
        cut_metrics(run, len(checkpoints(run)) and int(checkpoints(run)[-1].name[5:]))
    else:
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(f"{run} exists already; choose another folder with --run, or remove it") from None
    write(run / "config.json", json.dumps(settings, indent=1) + "\n")

    @uninterrupted()
    def log(**metrics):
        with open(run / "metrics.jsonl", "a") as f:
            f.write(json.dumps(metrics) + "\n")

    return run, log


def cut_metrics(run: Path, steps: int) -> None:
    """Keep the lines of the steps before the checkpoint, and of a warm start that was finished."""
    file, finished, kept = run / "metrics.jsonl", (run / "teacher").exists(), []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # the last one, cut off
            continue
        if finished if record["stage"] == "sft" else record["step"] < steps:
            kept.append(line + "\n")
    write(file, "".join(kept))


def show(student, tokenizer, config: Config, tasks: Callable, when: str) -> None:
    """Print one task, held out where there are such, as the student does it, decoded."""
    held_out = tasks("test", 1, config.horizon)
    envs = make_envs(held_out or tasks("train", 1, config.horizon), tokenizer, config)
    _, (trajectory,) = evaluate(student, tokenizer, envs, config.update, config.max_new_tokens, config.max_len)
    title = f"one {'held-out' if held_out else 'training'} task {when}"
    tqdm.write(f"\n--- {title}; the answers are {' ; '.join(a[0] for a in envs[0].task.answers)}\n"
               f"{format_trajectory(trajectory, tokenizer)}\n")


def compare_models(models: dict, tokenizer, config: Config, tasks: Callable) -> Iterator[tuple[str, str, dict]]:
    """The rows of the last table: every model on every horizon, on the same held-out tasks."""
    for k in map(int, config.horizons.split(",")):
        for name, model in models.items():
            envs = make_envs(tasks("test", max(1, config.eval_questions // k), k), tokenizer, config)
            metrics, _ = evaluate(model, tokenizer, envs, config.update, config.max_new_tokens, config.max_len,
                                  progress=f"Q{k}, {name}")
            yield f"Q{k}", name, metrics


# ---- the run ---------------------------------------------------------------------------------------------------------

def train(config: Config) -> None:
    """Warm start or load, then the loop, then the table. Everything lands in the run folder as soon as it is known."""
    torch.manual_seed(config.seed)
    tasks = open_data(config)
    run, log = open_run(config)
    if not config.student and (run / "teacher").exists():  # a run that goes on has its warm start behind it
        config = replace(config, student=str(run / "warm_start"), teacher=str(run / "teacher"))
    tokenizer, student, teacher = load_models(config) if config.student else warm_start(config, run, log)
    reference, critic = frozen(student), make_critic(student)
    teacher = None if config.distill == "none" else teacher
    optimizers = [torch.optim.AdamW(student.parameters(), lr=config.actor_lr, weight_decay=0),
                  torch.optim.AdamW(critic.parameters(), lr=config.critic_lr, weight_decay=0)]
    update, stop, T = update_rules(tokenizer)[config.update], stop_on(tokenizer, STOP), config.temperature
    done = 0
    if found := checkpoints(run):
        load_checkpoint(found[-1], student, critic, optimizers)
        done = int(found[-1].name[5:])
        tqdm.write(f"goes on after {done} steps, from {found[-1]}")
    show(student, tokenizer, config, tasks, "before training")

    for step in tqdm(range(done, config.steps), desc=f"{config.distill}, Q{config.horizon}", initial=done,
                     total=config.steps):
        clock = Clock(config.device)
        # 1. Roll out (Section 3.2, Eq. 1): the student samples with compact memory, and every call is recorded.
        envs = make_envs(tasks("train", config.tasks_per_step, config.horizon, step), tokenizer, config)
        noise = task_generators(config.seed, step, [env.task.id for env in envs])
        trajectories = rollout(
            lambda prompts, rows: generate(student, prompts, config.max_new_tokens, T, stop, [noise[i] for i in rows]),
            tokenizer, envs, step_all, update, config.max_len - config.max_new_tokens)
        clock.lap("rollout")

        # 2. Pack (Section 3.3, Eq. 4 and 6): every call in its exact state; only sampled tokens are decisions.
        packs = pack_calls(trajectories, config)
        teacher_packs = pack_histories(trajectories, config) if config.distill == "history" else packs  # Figure 3a
        clock.lap("pack")

        # 3. Audit (Eq. 5): the packed forward must give the log-probs that the sampler recorded.
        if step == 0:
            tqdm.write(f"RCE (Eq. 5) on the first tasks: {rce(student, trajectories[:4], config.share)}")
            clock.lap("audit")
        with torch.no_grad():
            logp_old = torch.cat([policy_scores(student, p, T)[0] for p in packs])                             # (N,)
            sampled = torch.tensor([x for t in trajectories for call in t.calls for x in call.logprobs])
            mismatch = (logp_old - sampled.to(logp_old)).abs()
            p99 = mismatch.quantile(0.99).item()
            if not p99 <= MISMATCH[student.dtype] and not config.allow_mismatch:
                raise ValueError(f"step {step}: logp_mismatch p99 {p99:.1e} is over {MISMATCH[student.dtype]:g}: packs "
                                 "do not see what the sampler saw; --allow_mismatch goes on all the same")
            clock.lap("score_student")

            # 4. Score (Section 3.4): reference, critic and teacher read the same states.
            logp_ref = torch.cat([policy_scores(reference, p, T)[0] for p in packs])                           # (N,)
            clock.lap("score_reference")
            values = torch.cat([values_of(critic, p) for p in packs])                                          # (N,)
            clock.lap("score_critic")
            teacher_hidden = torch.cat([action_hidden(teacher, p) for p in teacher_packs]) if teacher else None
            clock.lap("score_teacher")

        # 5. Advantages (Eq. 8 and 9): over whole trajectories, one step per sampled token.
        advantages, returns = advantages_of(trajectories, logp_old, logp_ref, values, config)

        # 6. Update (Eq. 7, 10 and 11): the student by PPO and guidance, the critic by its returns.
        batch = Batch(logp_old, values, advantages, returns, teacher_hidden)
        try:
            losses = update_policy(student, critic, optimizers, packs, batch, teacher, config, clock)
        except FloatingPointError as error:
            good = [str(path) for path in checkpoints(run)[-1:]]
            raise ValueError(f"step {step}: {error}; the last good checkpoint is {good or 'none'}") from None

        metrics = {"stage": "rl", "step": step, **rollout_metrics(envs, trajectories, packs), **losses,
                   "logp_mismatch": p99, "logp_mismatch_max": mismatch.max().item(),
                   "reference_kl": (logp_old - logp_ref).clamp(min=0).mean().item(),
                   **clock.seconds}
        log(**metrics)
        tqdm.write("step {step:3d}  reward {reward:.2f}  answered {answered:.2f}  teacher_kl {teacher_kl:.3f}  entropy "
                   "{entropy:.3f}  clipfrac {clipfrac:.3f}  logp_mismatch {logp_mismatch:.0e}".format(**metrics))
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            save(run / "student", student, tokenizer)
            save_checkpoint(run, step + 1, student, critic, optimizers, config.keep)
            with uninterrupted():
                save_trajectories(run / "trajectories.jsonl", trajectories)

    show(student, tokenizer, config, tasks, "after training")
    if config.eval_questions and tasks("test", 1, 1):
        models = {"warm_start": reference, "student": student, **({"teacher": teacher} if teacher else {})}
        result = "\n".join(table(compare_models(models, tokenizer, config, tasks)))
        write(run / "table.md", result + "\n")
        print(result)


def main() -> None:
    config = parse_config()
    try:
        (sft if config.stage == "sft" else train)(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"\ninterrupted; what was computed so far is in {config.run}") from None


if __name__ == "__main__":
    main()
