"""MemOPD (arXiv 2608.07068): PPO on the task reward plus full-vocabulary reverse KL to a frozen
teacher, every token scored in the exact state in which it was sampled.

    python train.py                      # the preset `tiny`, an invented encyclopedia, to the end
    python train.py --distill history    # the control of Figure 3a: the teacher reads the history
    python train.py --distill none       # PPO alone
    python train.py --questions Q.jsonl --corpus INDEX --student NAME --teacher NAME   # real ones
    python train.py --stage sft --sft_data TURNS.jsonl --student NAME                  # before that
    torchrun --nproc-per-node=4 train.py --preset 3b ...                               # four GPUs

What the paper does not state, and we chose (MEM1's values where it has them; all are flags):
 1. Advantages are whitened over the batch's action tokens; Eq. 10 says nothing about it.
 2. The critic is a separate copy of the student with a value head, read at g(t,k); its loss clips.
 3. Policy, reference and teacher are all scored at the sampling temperature.
 4. The task reward is the EM summed over questions; a malformed response ends an episode at 0.
 5. log pi_old comes from the same packs as the update, so that the first ratio is exactly 1. What
    the sampler recorded is compared with it in every step, as a proxy of Eq. 5 in the loop.
 6. `tiny` makes the teacher by SFT, and the student from it by SFT on an expert with bad habits:
    it can and does not. These are what training has to undo.

Shapes: N sampled action tokens of the batch, in the order trajectory, call, token; H hidden size.
"""

import copy
import json
import math
import os
import random
import re
import shutil
import time
import warnings
from bisect import bisect_left
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import checkpoint as dcp, fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import HfArgumentParser

import losses
from env import SearchEnv, ToyWiki, compose, load_questions, open_retriever, toy_envs, toy_texts
from eval import check_room, evaluate, show_rejected, table
from pack import action_hidden, check_model, pack, pack_all, pack_history
from rce import rce
from rollout import call_ids, call_names, check_environment, check_sampling, check_tokenizers
from rollout import command, continuous, encode_text, end_ids, finish_folders, format_trajectory
from rollout import generate, history_ids, load, load_trajectories, max_positions, replay, rollout
from rollout import save_trajectories, scripted, stop_on, task_generators, toy_model
from rollout import train_tokenizer, uninterrupted, update_rule, update_rules, whole_folder, write


def flag(default, text):
    """A field of Config with its help: symbol, and where the value is from."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Every hyper-parameter, with the symbol and the source of its value; presets change some."""

    preset: Literal["tiny", "small", "3b"] = flag("tiny", "the toy, 0.5B on 24 GB, the paper's 3B")
    stage: Literal["rl", "sft", "warm_start"] = flag("rl", "Section 3.4, 3.2, or the toy's models")
    run_dir: str = flag("runs/tiny", "folder for models, metrics and trajectories")
    resume: bool = flag(False, "continue from the newest checkpoint in --run_dir, if there is one")
    keep: int = flag(2, "checkpoints that stay on disk")
    save_every: int = flag(50, "steps between checkpoints")
    allow_mismatch: bool = flag(False, "continue where packs and sampler disagree (logp_mismatch)")
    seed: int = flag(0, "random seed of the whole run")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "torch device")
    dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "of computing, not of what is trained")
    gradient_checkpointing: bool = flag(True, "keep one hidden state per layer, recompute the rest")
    offload: bool = flag(False, "reference and teacher are on the device only while they score")
    student: str = flag("", "pi_theta at first; empty: SFT on the toy (Section 3.2)")
    teacher: str = flag("", "pi_T; empty: SFT on the toy")
    reference: str = flag("", "pi_ref; empty: the student")
    critic: str = flag("", "V_phi before it has a value head; empty: the student")
    questions: list[str] = flag([], "files of training questions (env.load_questions); none: toy")
    test_questions: list[str] = flag([], "files of held-out questions")
    corpus: str = flag("", "passages: an index of env.py, a JSONL, or a retrieval server's URL")
    top_k: int = flag(3, "passages of a search (Search-R1: 3)")
    max_obs: int = flag(1000, "tokens of an observation at most, in whole passages (MEM1: 1000)")
    steps: int = flag(500, "updates of pi_old (MEM1: 500)")
    tasks_per_step: int = flag(128, "tasks, or episodes of SFT, in a step (MEM1: 128)")
    horizon: int = flag(2, "questions per training task (Section 4.1: trained on Q2 only)")
    update: Literal[tuple(update_rules(None))] = flag("mem1", "U of Eq. 1 (Section 3.2: MEM1's)")
    reward: Literal["em", "f1"] = flag("em", "r_t of the last call, over all questions (MEM1: em)")
    temperature: float = flag(1.0, "sampling temperature; all log-probs use it, too (MEM1: 1)")
    engine: Literal["plain", "continuous"] = flag("plain", "generate, or transformers' pages")
    max_new_tokens: int = flag(1000, "tokens of one response at most (MEM1: 1000)")
    max_len: int = flag(4096, "tokens of one call; longer examples are left out (Section 3.3)")
    share: Literal["tree", "q"] = flag("tree", "stored once: every common prefix, or q (Eq. 4)")
    max_tokens: int = flag(16384, "tokens of one pack, the micro-batch; no result depends on it")
    distill: Literal["aligned", "history", "none"] = flag("aligned", "MemOPD, Figure 3a, or PPO")
    distill_coef: float = flag(0.02, "lambda of Eq. 11 (Section 4.1: 0.02)")
    teacher_on: Literal["all", "memory", "query", "answer"] = flag("all", "m_T, by env.py's tags")
    replay: str = flag("", "trajectories.jsonl of a run: its states count in Eq. 7, and not in PPO")
    replay_share: float = flag(0.25, "trajectories from it, as a share of --tasks_per_step")
    entropy_coef: float = flag(0.001, "alpha of Eq. 11 (not in the paper; MEM1: .001)")
    kl_coef: float = flag(0.001, "beta of Eq. 8 (not in the paper; MEM1: .001)")
    gamma: float = flag(1.0, "gamma of Eq. 9 (not in the paper; MEM1: 1)")
    gae_lambda: float = flag(1.0, "lambda_GAE of Eq. 9 (not in the paper; MEM1: 1)")
    clip_coef: float = flag(0.2, "epsilon of Eq. 10 (not in the paper; MEM1: .2)")
    value_clip: float = flag(0.5, "range of the clipped value loss (not in the paper; MEM1: .5)")
    whiten_advantages: bool = flag(True, "give A of Eq. 9 mean 0, deviation 1 (not in the paper)")
    ppo_epochs: int = flag(1, "updates on each batch (not in the paper; MEM1: 1)")
    actor_lr: float = flag(1e-6, "learning rate of pi_theta (not in the paper; MEM1: 1e-6)")
    critic_lr: float = flag(1e-5, "learning rate of V_phi (not in the paper; MEM1: 1e-5)")
    max_grad_norm: float = flag(1.0, "gradient clip of both (not in the paper; MEM1: 1)")
    horizons: list[int] = flag([2, 8, 16], "questions per task in the last table (Section 4.1)")
    eval_questions: int = flag(640, "held-out questions per horizon and model; 0: no table")
    sft_data: str = flag("", "episodes of eval.py --keep_correct (Section 4.1: 20,036 turns)")
    sft_epochs: int = flag(1, "passes over them (Section 4.1: 1)")
    sft_lr: float = flag(1e-5, "learning rate of SFT, with warm-up and decay (not in the paper)")
    hidden_size: int = flag(128, "width of the toy models")
    layers: int = flag(3, "layers of the toy models")
    vocab_size: int = flag(1024, "tokens of the toy's byte-level BPE")
    sft_steps: int = flag(1000, "SFT updates until the teacher")
    sft_student: int = flag(100, "SFT updates from there to the student, on bad habits")
    sft_first_hop: float = flag(0.8, "habit: the first of two hops is taken for the answer")
    sft_give_up: float = flag(0.0, "habit: at a turn all is answered while questions are open")
    sft_tight: float = flag(0.3, "share of SFT tasks with fewer turns than they may need")
    sft_questions: int = flag(32, "questions in each SFT batch, over tasks of mixed length")
    sft_horizon: int = flag(16, "the longest SFT task; reached step by step from 3 questions on")


def train(config: Config, tasks=None) -> None:
    """Warm start or load, then the loop, then the table. Results are on disk as soon as known.

    tasks(split, n, k, step=0): n fresh environments (see `rollout.Environment`) of k questions, of
    the split "train", or of "test", where there may be fewer or none; the same on every rank and
    whenever it is asked. By default search tasks of the toy or of files."""
    torch.manual_seed(config.seed)
    own = tasks is not None
    data = None if own else open_data(config)
    check_run(config, own)
    models = load_models(config) if config.student else None
    tokenizer = models.tokenizer if models else train_tokenizer(toy_texts(), config.vocab_size)
    tasks = tasks or search_tasks(data, tokenizer, config)
    check_tasks(tokenizer, tasks, config)
    recorded = []
    if config.replay:
        recorded = load_trajectories(config.replay, tokenizer)
        recorded = without_long_turns(recorded, config.replay, config)
    run = open_run(config, own)  # a config or a model that is wrong leaves no folder
    if not config.student:
        if rank() == 0 and not (run / "warm_start").exists():  # a resumed run may have both
            warm_start(config, run)
        gather(None)
        config = replace(config, student=f"{run}/warm_start", teacher=f"{run}/teacher")
    if config.stage == "warm_start":
        return
    models = models or load_models(config)
    done = resume(run, models.trained)

    for step in progress(done, config.steps, f"{config.distill}, Q{config.horizon}"):
        cost = {}  # seconds of the paragraphs that take long, and on CUDA their peak memory

        # 1. Roll out (Section 3.2, Eq. 1): the student acts with compact memory.
        with clock(cost, "rollout"):
            asked = tasks("train", config.tasks_per_step, config.horizon, step)
            envs, trajectories = roll_out(models, asked, step, config)

        # 2. Pack (Section 3.3, Eq. 4 and 6): every call in its exact state.
        with clock(cost, "pack"):
            packs = teacher_packs = pack_calls(trajectories, config)
            if config.distill == "history":  # the control of Figure 3a
                teacher_packs = pack_histories(trajectories, config)
            replayed = pick_replay(recorded, step, config)  # none without --replay
            replay_packs = pack_calls(replayed, config)

        # 3. Score (Section 3.4): old policy, reference, critic and teacher read these states.
        with clock(cost, "score"):
            teacher_packs = [*teacher_packs, *replay_packs]
            logp_old, logp_ref, values, teacher_hidden = score(models, packs, teacher_packs, config)

        # 4. Audit (Eq. 5, by proxy): the packs must say what the sampler recorded.
        with clock(cost, "audit"):
            mismatch = audit(models, trajectories, logp_old, step, config)

        # 5. Advantages (Eq. 8 and 9): over whole trajectories, one step per sampled token.
        advantages, returns = advantages_of(trajectories, logp_old, logp_ref, values, config)
        m_T = teacher_mask([*trajectories, *replayed], models.tokenizer, config)
        batch = Batch(logp_old, values, advantages, returns, teacher_hidden, m_T)

        # 6. Update (Eq. 7, 10 and 11): the student by PPO and guidance, the critic by its returns.
        with clock(cost, "update"):
            found = update_policy(models, packs, batch, config, step, replay_packs)

        growth = logp_old - logp_ref
        found |= mismatch | batch_metrics(envs, trajectories, packs, growth, len(asked))
        log(run, stage="rl", step=step, **found, **cost)
        print0(STEP_LINE.format(step=step, **found))
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            save_all(run, step + 1, models.trained, models.tokenizer, trajectories, config.keep)

    print_learned(models, tasks, config)
    final_table(models, tasks, run, config)


# ---- the parts of a step, in the order in which they are called ----------------------------------
@dataclass(frozen=True)
class Models:
    """The four models of Section 3.2, and what trains two of them."""

    tokenizer: object
    student: torch.nn.Module  # pi_theta
    critic: torch.nn.Module  # V_phi
    reference: torch.nn.Module  # pi_ref
    teacher: torch.nn.Module | None  # pi_T
    teacher_head: Tensor | None  # (V_T, H_T)
    trained: dict[str, tuple]  # name: (model, its optimizer)


def roll_out(models, batch, step, config):
    """Eq. 1 on this rank's part of a batch of environments, with the noise of their places in it.
    Examples that become too long are left out (Section 3.3)."""
    if not batch:
        raise ValueError(f"step {step}: there are no tasks of length {config.horizon} to train on")
    tokenizer, places = models.tokenizer, range(rank(), len(batch), world())
    envs = [batch[place] for place in places]
    noise = task_generators(config.seed, step, places)
    ends = end_ids(tokenizer, models.student)
    stop = stop_on(tokenizer, getattr(batch[0], "stop", ()), ends)
    T = config.temperature

    def sample(prompts, rows):
        generators = [noise[row] for row in rows]
        return generate(models.student, prompts, config.max_new_tokens, T, stop, generators)

    def reject(why):
        show_rejected(f"step {step}, {why}")

    found, update = [], update_rule(config.update, tokenizer)
    longest = config.max_len - config.max_new_tokens
    with unsharded(models.student):  # by all ranks, with tasks or without
        if envs:
            with engine(sample, models.student, stop, step, len(envs), config) as sample:
                found = rollout(sample, tokenizer, envs, update, longest, None, ends, reject)
    kept = [i for i, trajectory in enumerate(found) if trajectory is not None]
    if not sum(gather(len(kept))):
        raise ValueError(f"step {step}: all {len(batch)} examples are longer than --max_len allows")
    return [envs[i] for i in kept], [found[i] for i in kept]


def pack_calls(trajectories, config):
    """Eq. 4 and 6: all calls, in order, in packs of `max_tokens`, or of the longest call."""
    prompts, actions, prefix_lens = call_ids(trajectories)
    share = prefix_lens if config.share == "q" else None
    sizes = [len(prompt) + len(action) for prompt, action in zip(prompts, actions)]
    packs = pack_all(prompts, actions, max([config.max_tokens, *sizes]), share, config.max_len)
    return with_empty_packs([packed.to(config.device) for packed in packs], config)


def pack_histories(trajectories, config):
    """The control's wrong states: each trajectory as one flat history."""
    packs = [pack_history(*history_ids(t)).to(config.device) for t in trajectories]
    return with_empty_packs(packs, config)


@torch.no_grad()
def score(models, packs, teacher_packs, config):
    """Section 3.4: log pi_old, log pi_ref and V, (N,) each, and the teacher's hidden states (N,
    H_T) (its logits would be 40 times larger at V = 152,000) or None."""
    T, teacher_hidden = config.temperature, None
    logp_old = torch.cat([log_prob_of(models.student, packed, T) for packed in packs])
    with on_device(models.reference, config):
        logp_ref = torch.cat([log_prob_of(models.reference, packed, T) for packed in packs])
    values = torch.cat([values_of(models.critic, packed) for packed in packs])
    if models.teacher is not None:
        with on_device(models.teacher, config):
            hidden = [hidden_of(models.teacher, packed) for packed in teacher_packs]
        teacher_hidden = torch.cat(hidden)
    return logp_old, logp_ref, values, teacher_hidden


def audit(models, trajectories, logp_old, step, config):
    """Eq. 5 by its proxy: |recorded log-prob - that of the packed forward|; a p99 beyond rounding
    is a ValueError. In the first step RCE itself is printed, for a few tasks."""
    with unsharded(models.student):
        if step == 0 and rank() == 0 and trajectories:
            prompts, actions, prefix_lens = call_ids(trajectories[:4])
            share = prefix_lens if config.share == "q" else None
            names = call_names(trajectories[:4])
            found = rce(models.student, prompts, actions, share, names=names)
            print0(f"RCE (Eq. 5) on the first tasks: {found}")
    recorded = [x for t in trajectories for call in t.calls for x in call.logprobs]
    off = (logp_old - torch.tensor(recorded).to(logp_old)).abs()
    off = torch.cat(gather(off.cpu()))  # of all ranks
    p99 = off.quantile(0.99).item()
    limit = {"float32": 1e-3, "bfloat16": 0.5}[config.dtype]  # what rounding explains
    if not p99 <= limit and not config.allow_mismatch:
        problem = f"step {step}: logp_mismatch p99 {p99:.1e} is over {limit:g}"
        advice = "--allow_mismatch continues all the same"
        raise ValueError(f"{problem}: packs do not see what the sampler saw; {advice}")
    return {"logp_mismatch": p99, "logp_mismatch_max": off.max().item()}


def advantages_of(trajectories, logp_old, logp_ref, values, config):
    """Eq. 8 and 9: advantages and returns, (N,) each. The reward of a call stands on its last
    action token, and a trajectory ends with the last token of its last call."""
    rewards = torch.zeros_like(logp_old)
    last = torch.zeros_like(logp_old, dtype=torch.bool)
    end = -1
    for trajectory in trajectories:
        for call in trajectory.calls:
            end += len(call.action_ids)
            rewards[end] = call.reward
        last[end] = True
    rewards = losses.token_rewards(rewards, logp_old, logp_ref, config.kl_coef)
    advantages, returns = losses.gae(rewards, values, last, config.gamma, config.gae_lambda)
    if config.whiten_advantages:
        parts = [part.to(advantages) for part in gather(advantages.cpu())]
        white = losses.whiten(torch.cat(parts))
        advantages = white.split([len(part) for part in parts])[rank()]
    return advantages, returns


@dataclass(frozen=True)
class Batch:
    """What stays fixed while the models are updated on a batch."""

    logp_old: Tensor  # (N,)
    values: Tensor  # (N,)
    advantages: Tensor  # (N,)
    returns: Tensor  # (N,)
    teacher_hidden: Tensor | None  # (N + R, H_T): R tokens of --replay follow, in Eq. 7 alone
    teacher_mask: Tensor  # m_T, (N + R,)

    def __getitem__(self, rows):
        columns = [getattr(self, column.name) for column in fields(self)]
        return Batch(*(None if x is None else x[rows] for x in columns))


def teacher_mask(trajectories, tokenizer, config):
    """m_T of Eq. 7, (N,) bool: the action tokens of the role --teacher_on."""
    chosen = []
    for action in call_ids(trajectories)[1]:
        roles = ["all"] * len(action)
        if config.teacher_on != "all":
            roles = token_roles(action, tokenizer)
        chosen += [role == config.teacher_on for role in roles]
    return torch.tensor(chosen, dtype=torch.bool, device=config.device)


def update_policy(models, packs, batch, config, step=0, replay_packs=()):
    """Eq. 7, 10, 11 and the value loss: `ppo_epochs` updates, and the last one's metrics. Sums are
    divided by the counts of the whole batch, so that max_tokens, share and ranks change nothing."""
    n = len(batch.logp_old)
    m_T = batch.teacher_mask
    ours = (n, m_T[:n].sum().item(), m_T[n:].sum().item())
    N, N_own, N_replay = map(sum, zip(*gather(ours)))
    metrics = {"replay_tokens": N_replay} if replay_packs else {}
    if not N_own and models.teacher is not None:
        print0(f"step {step}: no guidance, no action token has the role {config.teacher_on}")
    for epoch in range(config.ppo_epochs):
        sums, max_logratio, start = Counter(), 0.0, 0
        for i, packed in enumerate([*packs, *replay_packs]):
            rows = slice(start, start + len(packed.action_ids))
            start = rows.stop
            part = batch[rows]
            counts = (N, N_own + N_replay)
            objective = actor_objective(packed, part, models.teacher_head, counts, config)
            loss, found = loss_of(models.student, packed, config.temperature, objective)
            backward(loss)
            teacher_kl = found.pop("teacher_kl").sum().item()
            if i >= len(packs):  # the critic learns from the batch's own states
                sums["replay_kl"] += teacher_kl / max(N_replay, 1)
                continue
            sums["teacher_kl"] += teacher_kl / max(N_own, 1)
            values = values_of(models.critic, packed)
            value = losses.value_loss(values, part.values, part.returns, config.value_clip)
            backward(value.sum() / N)
            max_logratio = max([max_logratio, *found.pop("logratio").abs().tolist()])
            for name, x in {**found, "value_loss": value}.items():
                sums[name] += x.sum().item() / N
        everyone = gather((sums, max_logratio))
        for name in sums:
            metrics[name] = sum(theirs[name] for theirs, _ in everyone)
        metrics["max_logratio"] = max(theirs for _, theirs in everyone)
        metrics["actor_grad_norm"] = clip_gradient(models.student, config)
        metrics["critic_grad_norm"] = clip_gradient(models.critic, config)
        check_finite(step, metrics, models.student, models.critic)
        for _, optimizer in models.trained.values():
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:  # before any update every ratio must be 1: scores and updates read the same
            metrics["first_max_logratio"] = metrics["max_logratio"]
            metrics["first_clipfrac"] = metrics["clipfrac"]
    return metrics


def actor_objective(packed, batch, teacher_head, counts, config):
    """Eq. 11 as a function of a few tokens' logits, for `losses.chunked_loss`. counts: tokens of
    the whole batch, and of m_T. Replayed tokens have no log pi_old: Eq. 7 alone is left of it."""
    if batch.teacher_hidden is not None and teacher_head is None:
        raise ValueError("the batch has teacher_hidden, and there is no teacher_head to read it")

    def objective(logits, rows):  # (n, V), and which tokens of the pack they are
        now = batch[rows]
        T, clip = config.temperature, config.clip_coef
        n = len(now.logp_old)
        logp = losses.log_prob(logits, packed.action_ids[rows])[:n]
        entropy = losses.entropy(logits)[:n]
        ppo, approx_kl, clipfrac = losses.ppo_loss(logp, now.logp_old, now.advantages, clip)
        kl = logits.new_zeros(len(logits))
        if now.teacher_hidden is not None:
            teacher_logits = losses.head_logits(now.teacher_hidden, teacher_head, T)  # (n, V_T)
            kl = losses.reverse_kl(logits, teacher_logits)
        coefs = (config.entropy_coef, config.distill_coef)
        loss = losses.actor_loss(ppo, entropy, kl, *coefs, *counts, now.teacher_mask)
        kl = kl.where(now.teacher_mask, 0)
        metrics = {"ppo_loss": ppo, "entropy": entropy, "teacher_kl": kl, "approx_kl": approx_kl}
        return loss, metrics | {"clipfrac": clipfrac, "logratio": logp - now.logp_old}

    return objective


# ---- plumbing: read last -------------------------------------------------------------------------
def warm_start(config, run):
    """SFT on the toy makes both models: the teacher in `sft_steps`, and from it the student in
    `sft_student` more, on an expert with bad habits."""
    tokenizer = train_tokenizer(toy_texts(), config.vocab_size)
    model = toy_model(tokenizer, config.hidden_size, config.layers, "packed").to(config.device)
    bar = tqdm(total=config.sft_steps + config.sft_student, desc="warm start (SFT)")
    write(run / "metrics.jsonl", "")  # without what a killed warm start left

    def expert_with_habits(env):
        return ToyWiki.expert(env, config.sft_first_hop, config.sft_give_up)

    def sft_update(name, step, longest, rate, optimizers, respond):
        """One update, on turn-level examples of an expert's episodes."""
        batch = sft_batch(step, longest, respond, tokenizer, config)
        packed = pack(*batch).to(config.device)
        loss = sft_loss(model, packed, len(packed.action_ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate * optimizer.defaults["lr"]
            optimizer.step()
        model.zero_grad()
        bar.update()
        bar.set_postfix(questions=longest, loss=f"{loss.item():.3f}")
        log(run, stage="warm_start", model=name, step=step, longest=longest, loss=loss.item())

    optimizers = sft_optimizers(model)
    for step in range(config.sft_steps):
        done = step / config.sft_steps
        longest = sft_longest(done, config.sft_horizon)
        sft_update("teacher", step, longest, sft_rate(done), optimizers, ToyWiki.expert)
    save(run / "teacher", model, tokenizer)
    optimizers = sft_optimizers(model)
    for i in range(config.sft_student):
        step, rate = config.sft_steps + i, 0.5 * (1 - i / config.sft_student)
        sft_update("student", step, config.sft_horizon, rate, optimizers, expert_with_habits)
    save(run / "warm_start", model, tokenizer)


def sft_batch(step, longest, respond, tokenizer, config):
    """Prompts and actions of an expert's tasks, of 1 to `longest` questions each. Some get fewer
    turns than they may need, so that their last turn is seen."""
    rng = random.Random(f"{config.seed} {step}")
    envs, n = [], 0
    while n < config.sft_questions:
        k = rng.randint(1, longest)
        (env,) = toy_envs(f"sft-{config.seed}-{len(envs)}", 1, k, seed=step)
        if rng.random() < config.sft_tight:
            env.turns_left = rng.randint(2, env.turns_left)
        envs.append(env)
        n += k
    update = update_rule(config.update, tokenizer)
    return call_ids(rollout(scripted(respond, tokenizer, envs), tokenizer, envs, update))[:2]


def sft_optimizers(model):
    """Muon for the layers' matrices, AdamW for the rest."""
    layers = set(model.base_model.layers.parameters())
    matrices = [p for p in model.parameters() if p in layers and p.ndim == 2]
    others = [p for p in model.parameters() if p not in layers or p.ndim != 2]
    return Muon(matrices), torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0)


class Muon(torch.optim.Optimizer):
    """Momentum whose singular values are all set to 1. (torch.optim.Muon approximates that in
    bfloat16, which on many CPUs takes longer than the rest of an update.)"""

    def __init__(self, matrices):
        super().__init__(matrices, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        """An update of every matrix, from its gradient."""
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.05)
            U, _, Vh = torch.linalg.svd(p.grad.lerp(momentum, 0.95), full_matrices=False)
            rows, columns = p.shape
            p.sub_(U @ Vh, alpha=self.param_groups[0]["lr"] * max(1, rows / columns) ** 0.5)


def sft_longest(done, horizon):
    """The curriculum, by the share that is done: one to three questions, then one by one longer."""
    return min(horizon, 3 + round(max(0.0, done - 0.3) / 0.3 * max(0, horizon - 3)))


def sft_rate(done):
    """Share of the learning rate: up over the first 4 %, constant, down over the last 40 %."""
    return min(1.0, done / 0.04 + 0.02, 0.02 + (1 - done) / 0.4)


def sft_loss(model, packed, N):
    """The part of a pack in the mean cross-entropy over N action tokens."""

    def objective(logits, rows):
        return -losses.log_prob(logits, packed.action_ids[rows]).sum() / N, {}

    return loss_of(model, packed, 1.0, objective)[0]


def sft(config):
    """Train --student on --sft_data, every response in the exact context of its call."""
    torch.manual_seed(config.seed)
    check_run(config)
    tokenizer, student = load_model(config.student, config)
    trajectories = replay(config.sft_data, tokenizer, update_rule(config.update, tokenizer))
    trajectories = without_long_turns(trajectories, config.sft_data, config)
    run = open_run(config)
    n, batches = config.tasks_per_step, []
    for epoch in range(config.sft_epochs):
        order = random.Random(f"{config.seed} {epoch}").sample(trajectories, len(trajectories))
        batches += [order[i : i + n] for i in range(0, len(order), n)]
    trained = {"student": trainable(student, config.sft_lr, config)}
    student, optimizer = trained["student"]
    done = resume(run, trained)
    for step in progress(done, len(batches), "SFT"):
        optimizer.param_groups[0]["lr"] = config.sft_lr * sft_rate(step / len(batches))
        packs = pack_calls(batches[step][rank() :: world()], config)
        N = sum(gather(sum(len(packed.action_ids) for packed in packs)))
        total = 0.0
        for packed in packs:
            loss = sft_loss(student, packed, N)
            backward(loss)
            total += loss.item()
        found = {"loss": sum(gather(total)), "grad_norm": clip_gradient(student, config)}
        check_finite(step, found, student)
        optimizer.step()
        optimizer.zero_grad()
        log(run, stage="sft", step=step, action_tokens=N, **found)
        if (step + 1) % config.save_every == 0 or step + 1 == len(batches):
            save_all(run, step + 1, trained, tokenizer, [], config.keep)


def token_roles(action_ids, tokenizer):
    """What each token of a response writes, by the tags of env.py: memory up to </think>, and from
    there a query or an answer."""

    def closed(k):
        return "</think>" in tokenizer.decode(action_ids[:k])

    n = bisect_left(range(len(action_ids)), True, key=closed)
    rest = "query" if "<search>" in tokenizer.decode(action_ids) else "answer"
    return ["memory"] * n + [rest] * (len(action_ids) - n)


def pick_replay(recorded, step, config):
    """This rank's part of the recorded trajectories that are replayed in a step."""
    if not recorded:
        return []
    n = max(1, round(config.replay_share * config.tasks_per_step))
    picked = random.Random(f"replay {config.seed} {step}").choices(recorded, k=n)
    return picked[rank() :: world()]


def without_long_turns(trajectories, file, config):
    """SFT and --replay take single turns: those that fit into max_len (Section 3.3)."""
    kept, n = [], 0
    for trajectory in trajectories:
        sizes = [len(call.prompt_ids + call.action_ids) for call in trajectory.calls]
        calls = [call for call, size in zip(trajectory.calls, sizes) if size <= config.max_len]
        kept += [replace(trajectory, calls=calls)] if calls else []
        n += len(sizes) - len(calls)
    if not kept:
        raise ValueError(f"{file}: no turn in it fits into --max_len {config.max_len}")
    if n:
        print0(f"{n} turns are longer than --max_len {config.max_len} and left out")
    return kept


# ---- tasks, and what is shown of them ------------------------------------------------------------
def open_data(config):
    """tasks(split, n, k, step) -> n pairs (task of k questions, retriever), of the toy or of files.
    Raises ValueError where a held-out question is a training one."""
    horizons = config.horizons if config.eval_questions else []
    if not config.questions:

        def toy(split, n, k, step=0):
            split = f"train-{config.seed}" if split == "train" else split
            return [(env.task, env.retriever) for env in toy_envs(split, n, k, step)]

        toy("test", 1, max(config.horizon, config.sft_horizon, *horizons))  # an error comes now
        return toy
    train = [task for path in config.questions for task in load_questions(path)]
    test = [task for path in config.test_questions for task in load_questions(path)]
    retriever = open_retriever(config.corpus)
    known = {task.questions for task in train}
    for task in test:
        if task.questions in known:
            problem = f"held-out question {task.id} is a training question too"
            raise ValueError(f"{problem}: {task.questions[0]}")
    shown = dict.fromkeys([config.horizon, *horizons]) if test else []
    sets = [("train", train, config.horizon)] + [("test", test, k) for k in shown]
    for name, questions, k in sets:
        n = len(compose(questions, k))
        print0(f"{name}: {len(questions)} questions make {n} tasks of {k}")

    def files(split, n, k, step=0):
        """Held-out tasks are the same for every seed and step."""
        if split == "test":
            return [(task, retriever) for task in (compose(test, k)[:n] if test else [])]
        size, tasks = len(train) // k, []
        for i in range(step * n, (step + 1) * n):
            if not tasks or i % size == 0:
                epoch = compose(train, k, f"{config.seed} {i // size}")
            tasks.append((epoch[i % size], retriever))
        return tasks

    return files


def check_tasks(tokenizer, tasks, config):
    """Raise ValueError where an environment lacks something, or where the tasks of a length,
    trained or tested, cannot fit."""
    update_rule(config.update, tokenizer)  # a name that is none is an error now
    horizons = [config.horizon, *config.horizons] if config.eval_questions else [config.horizon]
    for split, k in [("train", config.horizon), *(("test", k) for k in horizons)]:
        envs = tasks(split, 8, k)
        if not envs and split == "train":
            raise ValueError(f"there are no tasks of length {k} to train on")
        for env in envs:
            check_environment(env, "score")
            scores = env.score()
            if not isinstance(scores, dict) or not scores or scores.keys() & set(OURS):
                problem = f"{type(env).__name__}.score() returned {str(scores)[:80]}"
                raise ValueError(f"{problem}, not {{name: number}}; taken are {', '.join(OURS)}")
        limits = (config.max_new_tokens, config.max_obs, config.max_len)
        if envs:
            check_room(tokenizer, envs, *limits)


def search_tasks(data, tokenizer, config):
    """`tasks` of `train` for the pairs of `open_data`, observations measured in tokens."""
    settings = {"length": lambda text: len(encode_text(tokenizer, text))}
    settings |= {"reward": config.reward, "top_k": config.top_k, "budget": config.max_obs}

    def tasks(*asked):
        return [SearchEnv(task, retriever, **settings) for task, retriever in data(*asked)]

    return tasks


def run_episodes(model, envs, models, config, title=None):
    """Greedy episodes of one of the models: means of scores and costs, and trajectories."""
    settings = (config.update, config.max_new_tokens, config.max_len)
    title = title if rank() == 0 else None
    with on_device(model, config), unsharded(model):
        if not envs:
            return {}, []
        return evaluate(model, models.tokenizer, envs, *settings, progress=title)


def print_learned(models, tasks, config):
    """Of 32 held-out tasks the one whose first score rose most from reference to student, as both
    do it; a training task where none is held out."""
    kind, asked = "held-out", ("test", 32, config.horizon)
    if not tasks(*asked):
        kind, asked = "training", ("train", 1, config.horizon)
    old, new = tasks(*asked), tasks(*asked)
    _, before = run_episodes(models.reference, old, models, config)
    _, after = run_episodes(models.student, new, models, config)
    first = next(iter(new[0].score()))

    def gain(i):
        return new[i].score()[first] - old[i].score()[first]

    i = max(range(len(new)), key=gain)
    episodes = {"before": (old[i], before[i]), "after": (new[i], after[i])}
    for when, (env, trajectory) in episodes.items():
        scores = ", ".join(f"{name} {x:g}" for name, x in env.score().items())
        print0(f"\n--- one {kind} task {when} training: {scores}")
        if trajectory:
            print0(format_trajectory(trajectory, models.tokenizer))


def final_table(models, tasks, run, config):
    """Print and write the last table: every model on every horizon, on the same held-out tasks."""
    if not config.eval_questions or not tasks("test", 1, config.horizons[0]):
        return
    start = "reference" if config.reference else "warm_start"
    compared = {start: models.reference, "student": models.student}
    if models.teacher is not None:
        compared["teacher"] = models.teacher
    rows = []
    for k in config.horizons:
        for name, model in compared.items():
            ours = tasks("test", max(1, config.eval_questions // k), k)[rank() :: world()]
            metrics, found = run_episodes(model, ours, models, config, f"Q{k}, {name}")
            total, tasks_of, clocks = Counter(), Counter(), [0.0]
            for n, n_kept, theirs in gather((len(ours), len(found) - found.count(None), metrics)):
                for metric, x in theirs.items():
                    counted = n_kept if metric in ("peak", "dependency") else n
                    total[metric] += counted * x
                    tasks_of[metric] += counted
                clocks.append(n * theirs.get("seconds", 0.0))
            if not total:  # no held-out tasks of this length
                continue
            total["seconds"] = max(clocks)  # ranks work at the same time
            means = {metric: x / max(1, tasks_of[metric]) for metric, x in total.items()}
            rows.append((f"Q{k}", name, means))
    text = "\n".join(table(rows))
    if rank() == 0:
        write(run / "table.md", text + "\n")
    print0(text)


def batch_metrics(envs, trajectories, packs, growth, n_asked):
    """Means and counts over the batch of all ranks. growth: log pi_old - log pi_ref, (N,). n_asked:
    the tasks of the batch, rejected ones included."""
    ours = Counter(tasks=len(envs), reference_kl=growth.clamp(min=0).sum().item())
    scores = [env.score() for env in envs]
    for call in [call for trajectory in trajectories for call in trajectory.calls]:
        n = len(call.action_ids)
        ours.update(calls=1, reward=call.reward, action_tokens=n, tokens=len(call.prompt_ids) + n)
    ours["packed"] = sum(len(packed.input_ids) for packed in packs if len(packed.action_ids))
    total, scores = Counter(), sum(gather(scores), [])
    for theirs in gather(ours):
        total.update(theirs)
    means = {name: 0.0 for name in scores[0]}
    for score in scores:
        means = {name: mean + score[name] / len(scores) for name, mean in means.items()}
    means["reward"] = total["reward"] / total["tasks"]
    means["reference_kl"] = total["reference_kl"] / total["action_tokens"]
    means["tokens_saved"] = 1 - total["packed"] / total["tokens"]
    means["rejected"] = n_asked - total["tasks"]
    return {"calls": total["calls"], "action_tokens": total["action_tokens"], **means}


# ---- models --------------------------------------------------------------------------------------
def load_models(config):
    """Policy, critic, reference and teacher, each with weights of its own."""
    tokenizer, student = load_model(config.student, config)
    critic = make_critic(load_model(config.critic, config)[1] if config.critic else student)
    reference = frozen(config.reference or config.student, tokenizer, config)
    teacher = teacher_head = None
    if config.distill != "none":
        teacher = frozen(config.teacher, tokenizer, config)
        head = teacher.get_output_embeddings().weight
        teacher_head = full_tensor(head).detach().to(config.device, copy=True)
    student, adam = trainable(student, config.actor_lr, config)
    critic, critic_adam = trainable(critic, config.critic_lr, config)
    trained = {"student": (student, adam), "critic": (critic, critic_adam)}
    return Models(tokenizer, student, critic, reference, teacher, teacher_head, trained)


def load_model(path, config, dtype=torch.float32):
    """(tokenizer, causal model), measured. Raises ValueError if packs or sampling are not exact."""
    device = "cpu" if dist.is_initialized() else config.device  # FSDP moves it part by part
    tokenizer, model = load(path, device, "packed", dtype)
    check_model(model)
    check_sampling(model)
    n, size = len(tokenizer), model.config.vocab_size
    if n > size:
        raise ValueError(f"{path}: the tokenizer has {n} tokens, the model only {size}")
    if config.max_len > max_positions(model):
        raise ValueError(f"{path}: it has {max_positions(model)} positions: lower --max_len")
    return tokenizer, model


def frozen(path, tokenizer, config):
    """A model that never trains, with the same tokenizer: pi_ref, pi_T."""
    its_tokenizer, model = load_model(path, config, getattr(torch, config.dtype))
    check_tokenizers(tokenizer, its_tokenizer)
    model = shard(model.requires_grad_(False), config)
    return model.to("cpu") if config.offload else model


def trainable(model, lr, config):
    """(model, its optimizer), with float32 weights and moments."""
    if config.gradient_checkpointing:
        body = getattr(model, "body", model)
        new = getattr(body, "activation_checkpointing_enable", None)  # from transformers 5.24 on
        (new or body.gradient_checkpointing_enable)({"use_reentrant": False})
        model.train()  # there must be no dropout, but eval mode would switch checkpointing off
        check_model(body)
    model = shard(model, config)
    weights = [p for p in model.parameters() if p.requires_grad]
    fused = config.device.startswith("cuda") or None  # without temporary copies
    return model, torch.optim.AdamW(weights, lr=lr, weight_decay=0, fused=fused)


def make_critic(student):
    """V_phi: a copy of the student's body and a linear head that starts at 0; nothing is shared."""
    critic = torch.nn.Module()
    critic.body = copy.deepcopy(student.get_decoder())
    H = student.get_output_embeddings().weight.shape[1]
    critic.score = torch.nn.Linear(H, 1, device=student.device, dtype=student.dtype)
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    check_model(critic.body)
    return critic.eval()


def as_forward(function):
    """function(model, ...) as one forward of FSDP, in which body and head have whole weights."""

    @wraps(function)
    def run(model, *args):
        if isinstance(model, fsdp.FSDPModule):
            return model.apply_whole(function, *args)
        return function(model, *args)

    return run


hidden_of = as_forward(action_hidden)


@as_forward
def log_prob_of(model, packed, temperature):
    """log pi(a) of every action token of a pack, (N,), without gradient."""
    hidden = action_hidden(model, packed)
    return losses.chunked_log_prob(
        hidden, model.get_output_embeddings().weight, packed.action_ids, temperature
    )


@as_forward
def loss_of(model, packed, temperature, objective):
    """`losses.chunked_loss` over the action tokens of a pack: the scalar, and (N,) metrics."""
    return losses.chunked_loss(
        objective, action_hidden(model, packed), model.get_output_embeddings().weight, temperature
    )


@as_forward
def values_of(critic, packed):
    """V of Eq. 9 at g(t,k), where the token is predicted, (N,), in at least float32."""
    hidden = action_hidden(critic.body, packed)
    score = critic.score
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    values = F.linear(hidden.to(dtype), score.weight.to(dtype), score.bias.to(dtype))  # (N, 1)
    return values[:, 0].clone()  # FSDP wants no view


def backward(loss):
    """Add the gradient of this rank's part of a sum; FSDP takes the mean over ranks."""
    (loss * world()).backward()


def clip_gradient(model, config):
    """Scale the gradient down to a norm of `max_grad_norm`. Returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    return full_tensor(norm).item()


def check_finite(step, metrics, *models):
    """Raise FloatingPointError naming what is not finite, before it reaches a weight."""
    for metric, value in metrics.items():
        if math.isfinite(value):
            continue
        problem = f"step {step}: {metric} is {value}"
        for model in models:
            for name, p in model.named_parameters():
                if p.grad is not None and not full_tensor(p.grad).isfinite().all():
                    raise FloatingPointError(f"{problem}, and so is the gradient of {name}")
        raise FloatingPointError(problem)


# ---- many devices, bfloat16, --offload: without them nothing here does anything ------------------
# Each rank rolls out its own tasks with whole weights. Then all go through as many packs, since
# every forward and backward of a sharded model is an exchange. Counts and norms are the whole
# batch's.


def join(config):
    """Become a rank of torchrun, or the only one for bfloat16: the config with its device."""
    torchrun = "RANK" in os.environ
    if not torchrun and config.dtype == "float32":
        return config
    if config.device == "cuda":
        config = replace(config, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(config.device)
    backend = "cpu:gloo,cuda:nccl" if config.device.startswith("cuda") else "gloo"
    alone = {} if torchrun else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # rollouts differ in length: where torchrun ends all if one is lost, nobody gives up on a rank
    watched = "TORCHELASTIC_RUN_ID" in os.environ
    patience = timedelta(days=7) if watched else timedelta(minutes=30)
    dist.init_process_group(backend, timeout=patience, **alone)
    return config


def rank():
    return int(os.environ.get("RANK", 0))  # torchrun's, also before the ranks have joined


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def gather(x):
    """The x of every rank; all wait for each other."""
    found = [x] * world()
    if dist.is_initialized():
        dist.all_gather_object(found, x)
    return found


def shard(model, config):
    """FSDP2 layer by layer, then the rest (a tied embedding and head stay together): --dtype
    computes, gradients are summed in float32."""
    if not dist.is_initialized():
        return model
    mesh = init_device_mesh(torch.device(config.device).type, (world(),))
    dtype = getattr(torch, config.dtype)
    policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
    for module in (*layers, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    model.apply_whole = MethodType(lambda self, function, *args: function(self, *args), model)
    fsdp.register_fsdp_forward_method(model, "apply_whole")
    return model


@contextmanager
def unsharded(model):
    """Whole weights for any number of forwards without exchange, such as those of a rollout."""
    modules = [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


@contextmanager
def engine(plain, model, stop, step, n, config):
    """What samples n episodes: `plain`, or with --engine continuous the cache of transformers."""
    if config.engine == "plain":
        yield plain
        return
    settings = (config.max_new_tokens, config.temperature, stop)
    seed = hash((config.seed, step, rank())) % 2**32
    room = None if model.device.type == "cuda" else n * (config.max_len + 256)  # with page ends
    with continuous(model, *settings, seed, room) as sample:
        yield sample


@contextmanager
def on_device(model, config):
    """A model on the device; with --offload a frozen one only now."""
    offloaded = config.offload and not any(p.requires_grad for p in model.parameters())
    if offloaded:
        model.to(config.device)
    try:
        yield
    finally:
        if offloaded:
            model.to("cpu")


def full_tensor(x):
    """A tensor that is spread over the ranks, put together on each."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def with_empty_packs(packs, config):
    """Add packs without a sampled token until this rank has as many as any other."""
    empty = pack([[0]], [[0]]).to(config.device)
    names = ("predict_idx", "action_ids", "action_idx", "call_idx")
    empty = replace(empty, **{name: getattr(empty, name)[:0] for name in names})
    return packs + [empty] * (max(gather(len(packs))) - len(packs))


# ---- files, and what people see ------------------------------------------------------------------
OURS = (  # names in metrics.jsonl and in records, which no score may have
    "run stage step reward teacher_kl replay_kl replay_tokens ppo_loss entropy approx_kl clipfrac "
    "value_loss max_logratio first_max_logratio first_clipfrac actor_grad_norm critic_grad_norm "
    "logp_mismatch logp_mismatch_max calls action_tokens reference_kl tokens_saved rejected task "
    "asked peak dependency seconds said"
).split()
STEP_LINE = (
    "step {step:3d}  reward {reward:.2f}  teacher_kl {teacher_kl:.3f}  "
    "entropy {entropy:.3f}  clipfrac {clipfrac:.3f}  logp_mismatch {logp_mismatch:.0e}"
)


def print0(text):
    if rank() == 0:
        tqdm.write(text)


def progress(done, total, title):
    """The steps that are left, with a bar over all of them."""
    return tqdm(range(done, total), title, initial=done, total=total, disable=rank() != 0)


@contextmanager
def clock(cost, name):
    """Note the seconds of a block, and on CUDA its peak memory in GiB."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        cost[f"gib_{name}"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    cost[f"seconds_{name}"] = time.perf_counter() - start


@uninterrupted()
def log(run, **metrics):
    """Add a line to metrics.jsonl."""
    if rank() == 0:
        with open(run / "metrics.jsonl", "a") as f:
            f.write(json.dumps(metrics) + "\n")


def save(folder, model, tokenizer):
    """`save_pretrained` both. All ranks put the weights together, the first writes them."""
    weights = None  # the model's own
    if isinstance(model, fsdp.FSDPModule):
        once = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # what is tied
        weights = {n: full_tensor(x).cpu() for n, x in model.state_dict().items() if n in once}
    if rank() == 0:
        with whole_folder(folder) as part:
            model.save_pretrained(part, state_dict=weights)
            tokenizer.save_pretrained(part)


def save_all(run, step, trained, tokenizer, trajectories, keep):
    """The student, a checkpoint, the trajectories; OSError names what is left on failure."""
    try:
        save(run / "student", trained["student"][0], tokenizer)
        save_checkpoint(run, step, trained, keep)
        everyone = sum(gather(trajectories), [])
        if everyone and rank() == 0:
            save_trajectories(run / "trajectories.jsonl", everyone)
    except (Exception, dcp.api.CheckpointException) as error:
        cause = cause_of(error)
        free = f"{shutil.disk_usage(run).free >> 20} MiB are free there"
        problem = f"step {step - 1} is done, but could not be saved: {cause} ({free})"
        raise OSError(f"{problem}; {last_good(run)}") from None


def cause_of(error):
    """What came first, on any rank: a writer that fails fails again when it closes."""
    cause = next(iter(getattr(error, "failures", {}).values()), [error])[0]
    while cause.__context__:
        cause = cause.__context__
    return cause


def save_checkpoint(run, step, trained, keep):
    """What a run needs to continue after `step` steps, on any number of ranks."""
    with whole_folder(run / "checkpoints" / f"step-{step:06d}", rank() == 0) as part:
        state = training_state(trained)
        dcp.save(state, checkpoint_id=str(part), no_dist=not dist.is_initialized())
    for old in checkpoints(run)[:-keep] if rank() == 0 else []:
        shutil.rmtree(old, ignore_errors=True)
    gather(None)


def resume(run, trained):
    """Load the newest checkpoint that can be read, if there is any, and cut the metrics after it:
    how many steps are done."""
    done, kept, file = 0, [], run / "metrics.jsonl"
    for newest in reversed(checkpoints(run)):
        state = training_state(trained)
        try:  # on all ranks or on none
            dcp.load(state, checkpoint_id=str(newest), no_dist=not dist.is_initialized())
        except (Exception, dcp.api.CheckpointException) as error:
            print0(f"{newest} is damaged, the one before it is used ({cause_of(error)})")
            continue
        for name, (model, optimizer) in trained.items():
            rate = optimizer.param_groups[0]["lr"]  # of this run: a flag may have changed it
            weights, moments = state[name], state[f"{name}_optimizer"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            optimizer.param_groups[0]["lr"] = rate
        done = int(newest.name.removeprefix("step-"))
        print0(f"resumes after {done} steps, from {newest}")
        break
    else:
        if checkpoints(run):
            raise ValueError(f"no checkpoint in {run} can be read: start a new run")
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError, LookupError, TypeError):  # the last one may be cut off
            record = json.loads(line)
            if record["stage"] == "warm_start" or record["step"] < done:
                kept.append(line + "\n")
    gather(None)
    if rank() == 0:
        write(file, "".join(kept))
    return done


def training_state(trained):
    """Weights and optimizer states. Noise, task order and rates come from (seed, step, task)."""
    state = {}
    for name, (model, optimizer) in trained.items():
        state[name], state[f"{name}_optimizer"] = get_state_dict(model, optimizer)
    return state


def checkpoints(run):
    """Our own, oldest first; what else lies there is not touched."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted(folder for folder in folders if re.fullmatch(r"step-\d{6}", folder.name))


def last_good(run):
    """What a run can be resumed from."""
    found = checkpoints(run)
    return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"


def check_run(config, own=False):
    """Raise ValueError where the run folder would go over another, or would go on with other tasks
    than it began with; nothing is made yet. own: tasks that a script handed in."""
    run = Path(config.run_dir)
    if rank() == 0 and run.exists() and not (config.resume and (run / "config.json").exists()):
        raise ValueError(f"{run} exists already; remove it, or give another --run_dir")
    file = run / "config.json"
    saved = json.loads(file.read_text()) if file.exists() else {}
    if saved.get("own_tasks", own) != own:
        began = "tasks of a script" if saved["own_tasks"] else "tasks of train.py"
        raise ValueError(f"{run} began with {began}: resume it with them")


def open_run(config, own=False):
    """The run folder, a new one or with --resume the old one, once its models are known to load."""
    run = Path(config.run_dir)
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        for folder in (run, run / "checkpoints"):
            finish_folders(folder)
        saved = {**asdict(config), "own_tasks": own}
        write(run / "config.json", json.dumps(saved, indent=1, default=str) + "\n")
    gather(None)
    return run


# ---- the command line ----------------------------------------------------------------------------

PRESETS = {
    "tiny": {
        "dtype": "float32", "gradient_checkpointing": False, "steps": 50, "tasks_per_step": 24,
        "horizon": 4, "horizons": [2, 4, 8, 16], "top_k": 2, "max_new_tokens": 128,
        "max_obs": 128, "max_len": 640, "max_tokens": 8192, "distill_coef": 1.0,
        "ppo_epochs": 2, "actor_lr": 5e-5, "critic_lr": 1e-3,
    },
    "small": {
        "run_dir": "runs/small", "student": "Qwen/Qwen2.5-0.5B-Instruct",
        "teacher": "Qwen/Qwen2.5-1.5B-Instruct", "offload": True, "tasks_per_step": 32,
        "max_new_tokens": 500, "max_obs": 500, "max_len": 2048, "max_tokens": 8192,
    },
    "3b": {  # the paper does not say which 7B model it means
        "run_dir": "runs/3b", "student": "Qwen/Qwen2.5-3B", "teacher": "Qwen/Qwen2.5-7B-Instruct",
    },
}  # fmt: skip
MAY_BE_ZERO = (  # every other number must be positive
    "seed eval_questions sft_student sft_first_hop sft_give_up sft_tight distill_coef "
    "entropy_coef kl_coef gamma gae_lambda clip_coef value_clip actor_lr critic_lr sft_lr"
).split()
FIXED = (  # what a resumed run cannot change: its data and its models
    "preset stage seed student teacher reference critic distill questions test_questions corpus "
    "top_k max_obs tasks_per_step horizon update reward teacher_on replay replay_share sft_data "
    "hidden_size layers vocab_size sft_steps sft_student sft_first_hop sft_give_up sft_tight "
    "sft_questions sft_horizon"
).split()


def parse_config(args=None):
    """Defaults < preset < flags; with --resume, the run's own settings < flags."""
    first = HfArgumentParser(Config, add_help=False, allow_abbrev=False)
    named, _ = first.parse_known_args(args)
    parser = HfArgumentParser(Config, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    file, saved = Path(named.run_dir) / "config.json", {}
    if named.resume and file.exists():
        try:
            saved = json.loads(file.read_text()) | {"resume": True, "run_dir": named.run_dir}
            saved.pop("own_tasks", None)  # for `check_run`
        except (ValueError, TypeError) as error:
            parser.error(f"{file} is damaged ({error}): start a new run")
    parser.set_defaults(**(saved or PRESETS[named.preset]))
    config, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
    problems = find_problems(config)
    if unknown:
        problems.append(f"unknown arguments: {' '.join(unknown)}")
    for name, value in asdict(config).items():
        if value != saved.get(name, value):
            change = f"--{name} {value}, not {saved[name]}"
            if name in FIXED:
                problems.append(f"{named.run_dir} cannot be resumed with {change}: start a new run")
            else:
                print0(f"{named.run_dir} is resumed with {change}")
    if problems:
        parser.error("; ".join(problems))
    return config


def find_problems(config):
    """What is wrong with a config, in words."""
    c, sft = config, config.stage == "sft"
    problems = []
    for name, x in asdict(c).items():
        if type(x) in (int, float) and not 0 < x < math.inf:
            if x != 0 or name not in MAY_BE_ZERO:
                least = "at least 0" if name in MAY_BE_ZERO else "positive"
                problems.append(f"--{name} must be {least}, not {x}")
    try:
        torch.empty(0, device=c.device)
    except (RuntimeError, AssertionError) as error:
        problems.append(f"--device {c.device} is not there: {str(error).splitlines()[0]}")
    lone_file = bool(c.questions) != bool(c.corpus) or c.test_questions and not c.questions
    needs_teacher = c.teacher or c.distill != "none" and not sft
    lone_model = bool(c.student) != bool(c.teacher) and needs_teacher
    rules = [
        (min(c.horizons, default=0) < 1, "--horizons takes question counts such as 2 8 16"),
        (max(c.gamma, c.gae_lambda) > 1, "--gamma and --gae_lambda are at most 1"),
        (max(c.sft_first_hop, c.sft_give_up, c.sft_tight) > 1,
         "--sft_first_hop, --sft_give_up and --sft_tight are at most 1"),
        (c.hidden_size % 32, "--hidden_size must be a multiple of 32"),
        (c.max_len <= 2 * c.max_new_tokens + c.max_obs,
         "--max_len leaves no room for a prompt: q, --max_obs and twice --max_new_tokens (Eq. 2)"),
        (lone_file, "--questions and --corpus go together, --test_questions with both"),
        (c.questions and c.stage == "rl" and not c.student,
         "--questions needs a --student: the toy's models read only the toy"),
        (sft != bool(c.sft_data) or c.sft_data and not c.student,
         "--stage sft needs --sft_data and a --student, and --sft_data needs that stage"),
        (c.stage == "warm_start" and c.student,
         "--stage warm_start makes the toy's models, and takes no --student"),
        (lone_model, "--student and --teacher go together (with --distill none, --student alone)"),
        (c.replay and c.distill != "aligned",
         "--replay adds exact states to Eq. 7: it needs --distill aligned"),
        ((c.reference or c.critic) and not c.student, "--reference and --critic need a --student"),
    ]  # fmt: skip
    return problems + [message for wrong, message in rules if wrong]


def main(args=None, tasks=None, update=None):
    """The command. A script hands in tasks of its own (see `train`) and an update rule U."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # for one process
    config = parse_config(args)
    config = replace(config, update=update or config.update)
    with command("train.py", f"; what was computed is in {config.run_dir}"):
        try:
            config = join(config)
            sft(config) if config.stage == "sft" else train(config, tasks)
        except FloatingPointError as error:
            raise SystemExit(f"train.py: {error}; {last_good(Path(config.run_dir))}") from None
        except RuntimeError as error:  # out of memory, or another rank that is gone
            left = last_good(Path(config.run_dir))
            error.add_note(f"rank {rank()} of {world()}; {left}, and --resume continues from it")
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    main()
