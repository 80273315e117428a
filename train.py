"""MemOPD (arXiv 2608.07068): PPO on the task reward plus full-vocabulary reverse KL to a frozen teacher, every token
scored in the exact state in which it was sampled.

    python train.py                       # the preset `tiny`: an invented encyclopedia, on a CPU or one GPU, to the end
    python train.py --distill history     # the control of Figure 3a: the teacher reads a flat history
    python train.py --distill none        # PPO alone
    python train.py --questions Q.jsonl --corpus INDEX --student NAME --teacher NAME     # real questions and models
    python train.py --stage sft --sft_data TURNS.jsonl --student NAME                    # SFT (Section 3.2) before that
    torchrun --nproc-per-node=4 train.py --preset 3b ...                                 # the same on four GPUs
    python train.py --preset 3b --estimate                                               # does it fit?

What the paper does not state, and we chose (values are MEM1's where it has them, and flags):
 1. Advantages are whitened over the batch's action tokens; Eq. 10 says nothing about it.
 2. The critic is a separate copy of the student with a value head, read at g(t,k); its loss clips the value.
 3. Policy, reference and teacher are all scored at the sampling temperature.
 4. The task reward is the sum of EM over the questions; a malformed response ends the episode with reward 0.
 5. log pi_old is a pass of its own over the packs of the update, so that the first ratio is exactly 1. What the sampler
    recorded is compared with it in every step (`logp_mismatch`): the audit of Eq. 5 in the loop.
 6. `tiny` makes student and teacher in one run of SFT: the student branches off half way, and ends there.

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
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partialmethod, wraps
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, HfArgumentParser,
                          LlamaConfig)

from env import STOP, SearchEnv, ToyWiki, compose, load_questions, open_retriever, step_all, toy_envs
from eval import METRICS, evaluate, table
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
    preset: Literal["tiny", "small", "3b"] = flag(
        "tiny", "defaults, which flags override: tiny for the toy, 3b for the paper's values and MEM1's, small for "
        "models of 0.5B and 1.5B on one GPU of 24 GB")
    stage: Literal["rl", "sft", "warm_start"] = flag(
        "rl", "rl: Section 3.4; sft: turn-level examples first (Section 3.2); warm_start: only the toy's models")
    run_dir: str = flag(
        "runs/tiny", "folder for models, metrics and trajectories; must not exist yet, but for --resume")
    resume: bool = flag(False, "go on from the newest checkpoint in --run_dir, with the same settings")
    keep: int = flag(2, "checkpoints that stay on disk")
    allow_mismatch: bool = flag(False, "go on where `logp_mismatch` says that packs and sampler disagree")
    seed: int = flag(0, "of everything random")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "torch device")
    dtype: Literal["float32", "bfloat16"] = flag(
        "bfloat16", "of computing and of frozen models; what trains keeps float32 weights, gradients and moments")
    gradient_checkpointing: bool = flag(True, "keep one hidden state a layer, and compute the rest again in backward")
    offload: bool = flag(False, "reference and teacher are on the device only while they score")
    estimate: bool = flag(False, "print the memory that 1, 2 and 4 devices need, from the models' configs, and stop")
    # models
    student: str = flag("", "pi_theta at first: folder or hub name; empty: SFT on the toy (Section 3.2)")
    teacher: str = flag("", "pi_T: folder or hub name; empty: SFT on the toy (Section 3.2)")
    reference: str = flag("", "pi_ref: folder or hub name; empty: the student")
    critic: str = flag("", "V_phi before it has a value head: folder or hub name; empty: the student")
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
    sft_student: int = flag(500, "SFT updates until the student leaves the teacher's run")
    sft_anneal: int = flag(100, "SFT updates of its own that end the student's")
    sft_questions: int = flag(32, "questions in each SFT batch, over tasks of mixed length")
    sft_horizon: int = flag(16, "the longest SFT task; reached step by step from 3 questions on")


PRESETS = {
    "tiny": dict(
        dtype="float32", gradient_checkpointing=False, steps=50, tasks_per_step=48, top_k=2, max_new_tokens=128,
        max_len=640, max_tokens=8192, distill_coef=1.0, ppo_epochs=2, actor_lr=5e-5, critic_lr=1e-3),
    "small": dict(
        run_dir="runs/small", student="Qwen/Qwen2.5-0.5B-Instruct", teacher="Qwen/Qwen2.5-1.5B-Instruct", offload=True,
        tasks_per_step=32, max_new_tokens=500, max_len=2048, max_tokens=8192),
    # the defaults above; which 7B model the paper means it does not say
    "3b": dict(run_dir="runs/3b", student="Qwen/Qwen2.5-3B", teacher="Qwen/Qwen2.5-7B-Instruct")}

# p99 of |log-prob at sampling - log-prob of the packed forward| that rounding explains
MISMATCH = {"float32": 1e-3, "bfloat16": 0.5}
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process saves for itself


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
    if config.stage == "warm_start" and config.student:
        problems.append("--stage warm_start makes the toy's models, and takes no --student")
    if bool(config.student) != bool(config.teacher) and (config.teacher or not alone):
        problems.append("--student and --teacher go together (with --distill none a --student is enough)")
    if (config.reference or config.critic or config.estimate) and not config.student:
        problems.append("--reference, --critic and --estimate need a --student")
    if problems:
        parser.error("; ".join(problems))
    return config


# ---- many devices, and bfloat16 (one device in float32 can skip this: nothing here does anything then) ---------------
# Each rank of torchrun rolls out tasks of its own, with whole weights. Then all ranks go through as many packs, since
# every forward and backward of a sharded model is an exchange; counts, means and norms are those of the whole batch.

def join(config: Config) -> Config:
    """Become a rank of torchrun, or the only one where --dtype needs FSDP: the config, with the device of this rank."""
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    if alone and config.dtype == "float32":
        return config
    if config.device == "cuda":
        config = replace(config, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(config.device)
    # rollouts differ in length, so nobody gives up on a slow rank; when one is lost, torchrun ends the others
    dist.init_process_group("cpu:gloo,cuda:nccl" if config.device.startswith("cuda") else "gloo",
                            timeout=timedelta(days=7), **alone)
    if rank():
        sys.stdout = open(os.devnull, "w")
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    return config


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(x) -> list:
    """The x of every rank; all wait for each other."""
    found = [x] * world()
    if dist.is_initialized():
        dist.all_gather_object(found, x)
    return found


def shard(model, config: Config):
    """FSDP2 layer by layer, then what is left (a tied embedding and head stay together): parameters, gradients and
    moments are spread over the ranks, computing is in --dtype, gradients are summed in float32."""
    if dist.is_initialized():
        mesh = init_device_mesh(torch.device(config.device).type, (world(),))
        policy = MixedPrecisionPolicy(getattr(torch, config.dtype), torch.float32, cast_forward_inputs=False)
        for module in (*model.base_model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model.apply_whole = MethodType(lambda self, function, *args: function(self, *args), model)
        register_fsdp_forward_method(model, "apply_whole")
    return model


def as_forward(function):
    """function(model, ...) as one forward of FSDP, in which body and head have whole weights."""
    @wraps(function)
    def run(model, *args):
        return model.apply_whole(function, *args) if isinstance(model, FSDPModule) else function(model, *args)
    return run


@contextmanager
def unsharded(model):
    """Whole weights for any number of forwards without exchange, such as those of a rollout."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def whole(x: torch.Tensor) -> torch.Tensor:
    """A tensor that is spread over the ranks, put together on each."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def even(packs: list[Packed], config: Config) -> list[Packed]:
    """Add packs without a sampled token, until this rank has as many as any other."""
    nothing = pack([[0]], [[0]]).to(config.device)
    nothing = replace(nothing, **{name: getattr(nothing, name)[:0] for name in (
        "predict_idx", "action_ids", "action_idx", "call_idx")})
    return packs + [nothing] * (max(gather(len(packs))) - len(packs))


# ---- models ----------------------------------------------------------------------------------------------------------

def load_model(path: str, config: Config, dtype: torch.dtype = torch.float32) -> tuple:
    """(tokenizer, causal model with packed attention). Raises ValueError if packs cannot be run on it."""
    # FSDP moves it to the device part by part
    tokenizer, model = load(path, "cpu" if dist.is_initialized() else config.device, "packed", dtype)
    check_model(model)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(f"{path}: the tokenizer has {len(tokenizer)} tokens, the model only {model.config.vocab_size}")
    return tokenizer, model


def frozen(path: str, tokenizer, config: Config):
    """A model that never trains, of the same tokenizer: pi_ref, pi_T."""
    its_tokenizer, model = load_model(path, config, getattr(torch, config.dtype))
    check_tokenizers(tokenizer, its_tokenizer)
    model = shard(model.requires_grad_(False), config)
    return model.to("cpu") if config.offload else model


def trainable(model, lr: float, config: Config) -> tuple:
    """(model, its optimizer), of float32 weights and moments."""
    if config.gradient_checkpointing:
        # its name from transformers 5.24 on, and before
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.train()  # there is no dropout, but transformers wants to know that this is training
    model = shard(model, config)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0,
                                    fused=config.device.startswith("cuda") or None)  # without temporary copies


def make_critic(student):
    """V_phi: a copy of the student's body with a value head that starts at 0; nothing is shared."""
    config = copy.deepcopy(student.config)
    config.num_labels, config.classifier_dropout = 1, 0.0
    critic = AutoModelForTokenClassification.from_config(
        config, attn_implementation="packed", dtype=student.dtype).to(student.device)
    critic.base_model.load_state_dict(student.base_model.state_dict())
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic.eval()


@contextmanager
def at_hand(model, config: Config):
    """A frozen model on the device; with --offload only now."""
    if config.offload:
        model.to(config.device)
    yield
    if config.offload:
        model.to("cpu")


def head(model) -> torch.Tensor:
    """(V, H)."""
    return model.get_output_embeddings().weight


hidden_of = as_forward(action_hidden)


@as_forward
def policy_scores(model, packed: Packed, temperature: float, teacher_hidden=None, teacher_head=None) -> tuple:
    """log pi(a), H, and the KL of Eq. 7 to the teacher, at every action token of a pack, (N,) each."""
    return action_scores(action_hidden(model, packed), head(model), packed.action_ids, teacher_hidden, teacher_head,
                         temperature)


@as_forward
def values_of(critic, packed: Packed) -> torch.Tensor:
    """V of Eq. 9 at g(t,k), where the action token is predicted, (N,); the value head is float32 at least."""
    hidden, score = action_hidden(critic, packed), critic.score
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    values = F.linear(hidden.to(dtype), score.weight.to(dtype), score.bias.to(dtype))                      # (N, 1)
    return values[:, 0].clone()  # FSDP wants no view


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


def warm_start(config: Config, run: Path, log: Callable) -> None:
    """SFT on the toy makes both models: the teacher in `sft_steps`, and the student as a branch that leaves it after
    `sft_student` steps, for `sft_anneal` more in which its learning rate falls to 0. Small as it is, it runs on one
    device."""
    tokenizer = train_tokenizer(toy_texts(), config.vocab_size)
    model, update = toy_model(tokenizer, config), update_rules(tokenizer)[config.update]
    matrices = [p for p in model.base_model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.01, weight_decay=0),
                  torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0)]
    full_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    bar = tqdm(total=config.sft_steps + config.sft_anneal, desc="warm start (SFT)")

    def learn(step, rate, model_name):
        """One update, on turn-level examples of the expert's episodes."""
        rng, envs = random.Random(f"{config.seed} {step}"), []
        longest = sft_longest(step / config.sft_steps, config.sft_horizon)
        while sum(len(env.task.questions) for env in envs) < config.sft_questions:
            envs += toy_envs(f"sft-{config.seed}-{len(envs)}", 1, rng.randint(1, longest), seed=step)
        trajectories = rollout(scripted(ToyWiki.expert, tokenizer, envs), tokenizer, envs, step_all, update)
        calls = [call for trajectory in trajectories for call in trajectory.calls]
        packed = pack([c.prompt_ids for c in calls], [c.action_ids for c in calls]).to(config.device)
        loss = -policy_scores(model, packed, 1.0)[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, full_rate in zip(optimizers, full_rates):
            optimizer.param_groups[0]["lr"] = full_rate * rate
            optimizer.step()
        model.zero_grad()
        bar.update()
        bar.set_postfix(questions=longest, loss=f"{loss.item():.3f}")
        log(stage="warm_start", model=model_name, step=step, longest=longest, loss=loss.item())

    for step in range(config.sft_steps):
        learn(step, sft_rate(step / config.sft_steps), "teacher")
        if step + 1 == config.sft_student:
            parts = (model, *optimizers)
            branched_off = copy.deepcopy([part.state_dict() for part in parts])
            for i in range(config.sft_anneal):
                learn(step + 1 + i, 1 - i / config.sft_anneal, "student")
            save(run / "warm_start", model, tokenizer)
            for part, state in zip(parts, branched_off):
                part.load_state_dict(state)
    save(run / "teacher", model, tokenizer)


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
    tokenizer, student = load_model(config.student, config)
    trajectories = replay(config.sft_data, tokenizer, update_rules(tokenizer)[config.update])
    run, log = open_run(config)
    n = config.tasks_per_step
    batches = [random.Random(f"{config.seed} {epoch}").sample(trajectories, len(trajectories))[i:i + n]
               for epoch in range(config.sft_epochs) for i in range(0, len(trajectories), n)]
    trained = {"student": trainable(student, config.sft_lr, config)}
    student, optimizer = trained["student"]
    done = resume(run, trained)
    for step in (bar := tqdm(range(done, len(batches)), f"SFT, {sum(len(t.calls) for t in trajectories)} examples",
                             initial=done, total=len(batches))):
        optimizer.param_groups[0]["lr"] = config.sft_lr * sft_rate(step / len(batches))
        packs = even(pack_calls(batches[step][rank()::world()], config), config)
        N, loss = sum(gather(sum(len(packed.action_ids) for packed in packs))), 0.0
        for packed in packs:
            part = -policy_scores(student, packed, 1.0)[0].sum() / N
            (part * world()).backward()  # FSDP takes the mean over ranks
            loss += part.item()
        norm = clip(student, config)
        loss = sum(gather(loss))
        try:
            check_finite({"loss": loss, "grad_norm": norm}, student)
        except FloatingPointError as error:
            raise ValueError(f"step {step}: {error}; {last_good(run)}") from None
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss:.3f}")
        log(stage="sft", step=step, action_tokens=N, loss=loss, grad_norm=norm)
        if (step + 1) % config.save_every == 0 or step + 1 == len(batches):
            save_all(run, step + 1, trained, tokenizer, [], config)


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
    longest = max(map(len, map(list.__add__, prefixes, flat)), default=0)
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
    if config.whiten_advantages:
        parts = [part.to(advantages) for part in gather(advantages.cpu())]
        advantages = whiten(torch.cat(parts)).split([len(part) for part in parts])[rank()]
    return advantages, returns


class Clock:
    """Seconds since the last lap, summed by name; on CUDA also the most memory, in GiB."""

    def __init__(self, device: str):
        self.cost, self.cuda, self.last = defaultdict(float), device.startswith("cuda"), time.perf_counter()

    def lap(self, name: str) -> None:
        """What passed since the last lap was `name`."""
        if self.cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.cost[f"gib_{name}"] = max(self.cost[f"gib_{name}"], peak)
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.cost[f"seconds_{name}"] += now - self.last
        self.last = now


def update_policy(student, critic, optimizers, packs: list[Packed], batch: Batch, teacher_head, config: Config,
                  clock: Clock) -> dict:
    """Eq. 7, 10 and 11 and the value loss: `ppo_epochs` updates on the whole batch, and the metrics of the last one.
    Sums over packs are divided by the N of the batch, so neither max_tokens, share nor ranks change the result."""
    N, first = sum(gather(len(batch.logp_old))), {}
    for _ in range(config.ppo_epochs):
        sums, logratio = defaultdict(float), 0.0
        for packed, part in zip(packs, batch.split([len(p.action_ids) for p in packs])):
            logp, entropy, kl = policy_scores(student, packed, config.temperature, part.teacher_hidden, teacher_head)
            ppo, approx_kl, clipfrac = ppo_loss(logp, part.logp_old, part.advantages, config.clip_coef)
            loss = actor_loss(ppo, entropy, kl, config.entropy_coef, config.distill_coef, N, N)
            (loss * world()).backward()  # FSDP takes the mean over ranks
            clock.lap("update_student")
            value = value_loss(values_of(critic, packed), part.values_old, part.returns, config.value_clip)
            (value.sum() / N * world()).backward()
            clock.lap("update_critic")
            for name, x in (("ppo_loss", ppo), ("entropy", entropy), ("teacher_kl", kl), ("approx_kl", approx_kl),
                            ("clipfrac", clipfrac), ("value_loss", value)):
                sums[name] += x.sum().item() / N
            if len(logp):
                logratio = max(logratio, (logp.detach() - part.logp_old).abs().max().item())
        everyone = gather((sums, logratio))
        metrics = {name: sum(theirs[name] for theirs, _ in everyone) for name in sums}
        metrics["max_logratio"] = max(logratio for _, logratio in everyone)
        for name, model in (("actor", student), ("critic", critic)):
            metrics[f"{name}_grad_norm"] = clip(model, config)
        check_finite(metrics, student, critic)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        clock.lap("update_optimizers")
        # before any update the ratio is 1 in every token: the cheapest detector of a misaligned state
        first = first or {"first_max_logratio": metrics["max_logratio"], "first_clipfrac": metrics["clipfrac"]}
    return {**first, **metrics}


def clip(model, config: Config) -> float:
    """Scale the gradient down to `max_grad_norm`: its norm before."""
    return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)).item()


def check_finite(metrics: dict[str, float], *models) -> None:
    """Raise FloatingPointError that names what is not finite, before it reaches a weight."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            bad = [n for model in models for n, p in model.named_parameters()
                   if p.grad is not None and not whole(p.grad).isfinite().all()]
            also = f", and so is the gradient of {bad[0]}" if bad else ""
            raise FloatingPointError(f"{name} is {value}{also}")


def rollout_metrics(envs: list, trajectories: list[Trajectory], packs: list[Packed]) -> dict:
    """What the batch of all ranks was like: means over tasks, counts, and the share of tokens that packing saved."""
    calls, scores = [call for trajectory in trajectories for call in trajectory.calls], [env.score() for env in envs]
    ours = {"tasks": len(envs), "calls": len(calls), "action_tokens": sum(len(call.action_ids) for call in calls),
            "reward": sum(call.reward for call in calls), "em": sum(em for em, _ in scores),
            "f1": sum(f1 for _, f1 in scores), "answered": sum(env.answers is not None for env in envs),
            "tokens": sum(len(call.prompt_ids) + len(call.action_ids) for call in calls),
            "packed": sum(len(packed.input_ids) for packed in packs if len(packed.action_ids))}
    everyone = gather(ours)
    total = {name: sum(theirs[name] for theirs in everyone) for name in ours}
    return {**{name: total[name] / total["tasks"] for name in ("reward", "em", "f1", "answered")},
            "calls": total["calls"], "action_tokens": total["action_tokens"],
            "tokens_saved": 1 - total["packed"] / total["tokens"]}


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
    """A whole file or the old one, whatever happens meanwhile. The first rank writes."""
    if rank():
        return
    file.with_suffix(".part").write_text(text)
    os.replace(file.with_suffix(".part"), file)


@uninterrupted()
def save(folder: Path, model, tokenizer) -> None:
    """`save_pretrained` both, whole or not at all: into a temporary folder beside it, then renamed. The first rank
    writes what all put together."""
    weights = None  # its own
    if isinstance(model, FSDPModule):
        weights = {name: whole(x).detach().cpu() for name, x in model.named_parameters()}  # what is tied once
    if rank():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as temporary:
        model.save_pretrained(f"{temporary}/new", state_dict=weights)
        tokenizer.save_pretrained(f"{temporary}/new")
        if folder.exists():
            os.rename(folder, f"{temporary}/old")
        os.rename(f"{temporary}/new", folder)


def save_all(run: Path, step: int, trained: dict, tokenizer, trajectories: list[Trajectory], config: Config) -> None:
    """The student, the checkpoint, and the trajectories of all ranks. Raises OSError that names what is left."""
    try:
        save(run / "student", trained["student"][0], tokenizer)
        save_checkpoint(run, step, trained, config.keep)
        everyone = [trajectory for part in gather(trajectories) for trajectory in part]
        with uninterrupted():
            if everyone and not rank():
                save_trajectories(run / "trajectories.jsonl", everyone)
    except (Exception, dcp.api.CheckpointException) as error:
        for failure in getattr(error, "failures", {}).values():
            error = failure[0]
        while error.__context__:  # what came first: a writer that fails fails again while it closes its file
            error = error.__context__
        raise OSError(f"step {step - 1} is done, but could not be saved: {error} ({shutil.disk_usage(run).free >> 20} "
                      f"MiB are free there); {last_good(run)}") from None


def save_checkpoint(run: Path, step: int, trained: dict, keep: int) -> None:
    """What a run needs to go on after `step` steps on any number of ranks, weights and optimizers: under a temporary
    name first, so that a folder called step-* is whole; the last `keep` of them stay."""
    part = run / "checkpoints" / ".saving-step"
    part.parent.mkdir(exist_ok=True)
    try:
        with uninterrupted():
            dcp.save(training_state(trained), checkpoint_id=str(part), no_dist=not dist.is_initialized())
            if not rank():
                os.rename(part, part.with_name(f"step-{step:06d}"))
    finally:
        if not rank():
            for old in [part, *checkpoints(run)[:-keep]]:
                shutil.rmtree(old, ignore_errors=True)
    gather(None)


def resume(run: Path, trained: dict) -> int:
    """Put the newest checkpoint back, in place, if there is one: how many steps are done."""
    if not (found := checkpoints(run)):
        return 0
    state = training_state(trained)
    dcp.load(state, checkpoint_id=str(found[-1]), no_dist=not dist.is_initialized())
    for name, (model, optimizer) in trained.items():
        set_state_dict(model, optimizer, model_state_dict=state[name], optim_state_dict=state[f"{name}_optimizer"])
    done = int(found[-1].name[5:])
    tqdm.write(f"goes on after {done} steps, from {found[-1]}")
    return done


def training_state(trained: dict) -> dict:
    """Weights and optimizer states by parameter name. Sampling noise, task order and learning rates need none: they
    come from (seed, step, task)."""
    state = {}
    for name, (model, optimizer) in trained.items():
        state[name], state[f"{name}_optimizer"] = get_state_dict(model, optimizer)
    return state


def checkpoints(run: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def last_good(run: Path) -> str:
    """Where to go on from."""
    return f"the last good checkpoint is {checkpoints(run)[-1]}" if checkpoints(run) else "there is no checkpoint yet"


def open_run(config: Config) -> tuple[Path, Callable]:
    """(folder, log), where log(**metrics) adds a line to metrics.jsonl. A new folder, never over an old one; or with
    --resume the old one, if it has the same settings, without what came after its newest checkpoint."""
    run, settings = Path(config.run_dir), asdict(config)

    @uninterrupted()
    def log(**metrics):
        if not rank():
            with open(run / "metrics.jsonl", "a") as f:
                f.write(json.dumps(metrics) + "\n")

    if rank():
        gather(None)
        return run, log
    if config.resume and (run / "config.json").exists():
        theirs = json.loads((run / "config.json").read_text())
        for name in settings.keys() - {
                "run_dir", "resume", "steps", "save_every", "keep", "device", "offload", "allow_mismatch"}:
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
            raise ValueError(f"{run} exists already; choose another folder with --run_dir, or remove it") from None
    write(run / "config.json", json.dumps(settings, indent=1) + "\n")
    gather(None)
    return run, log


def cut_metrics(run: Path, steps: int) -> None:
    """Keep the lines of the steps before the checkpoint, and of a warm start that was finished."""
    file, finished, kept = run / "metrics.jsonl", (run / "teacher").exists(), []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # the last one, cut off
            continue
        if finished if record["stage"] == "warm_start" else record["step"] < steps:
            kept.append(line + "\n")
    write(file, "".join(kept))


def show(student, tokenizer, config: Config, tasks: Callable, when: str) -> None:
    """Print one task, held out where there are such, as the student does it, decoded."""
    held_out = tasks("test", 1, config.horizon)
    envs = make_envs(held_out or tasks("train", 1, config.horizon), tokenizer, config)
    with unsharded(student):
        _, (trajectory,) = evaluate(student, tokenizer, envs, config.update, config.max_new_tokens, config.max_len)
    title = f"one {'held-out' if held_out else 'training'} task {when}"
    tqdm.write(f"\n--- {title}; the answers are {' ; '.join(a[0] for a in envs[0].task.answers)}\n"
               f"{format_trajectory(trajectory, tokenizer)}\n")


def compare_models(models: dict, tokenizer, config: Config, tasks: Callable) -> Iterator[tuple[str, str, dict]]:
    """The rows of the last table: every model on every horizon, on the same held-out tasks."""
    for k in map(int, config.horizons.split(",")):
        for name, model in models.items():
            ours = make_envs(tasks("test", max(1, config.eval_questions // k), k)[rank()::world()], tokenizer, config)
            with at_hand(model, config), unsharded(model):
                metrics, _ = evaluate(model, tokenizer, ours, config.update, config.max_new_tokens, config.max_len,
                                      progress=f"Q{k}, {name}") if ours else ({}, [])
            everyone = gather((len(ours), metrics))
            total = sum(n for n, _ in everyone)
            yield f"Q{k}", name, {m: sum(n * theirs[m] for n, theirs in everyone if n) / total for m in METRICS}


# ---- memory ----------------------------------------------------------------------------------------------------------

def sizes(path: str) -> SimpleNamespace:
    """What the arithmetic needs to know of a model, from its config alone: parameters in all (P), in its body, in a
    layer, in what is no layer; layers L, widths H and I, vocabulary V; numbers in the KV cache per token."""
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no config to read there ({str(error).splitlines()[0]})") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    P, body, layer = (sum(p.numel() for p in module.parameters())
                      for module in (model, model.base_model, model.base_model.layers[0]))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return SimpleNamespace(P=P, body=body, layer=layer, rest=P - layer * config.num_hidden_layers, V=config.vocab_size,
                           L=config.num_hidden_layers, H=config.hidden_size, I=config.intermediate_size,
                           kv=2 * config.num_hidden_layers * config.num_key_value_heads * width)


def estimate(config: Config, devices: int) -> list[tuple[str, str, float]]:
    """(part, phases, bytes) on each device, by arithmetic. Phases: r roll out, s score, u update. At most: every
    prompt, response and pack as long as the flags allow. Not in it: the CUDA context, and fragmentation."""
    student, critic, reference, teacher = (
        sizes(path or config.student) for path in (config.student, config.critic, config.reference, config.teacher))
    b = torch.finfo(getattr(torch, config.dtype)).bits // 8
    fsdp = devices > 1 or config.dtype != "float32"
    taught = config.distill != "none"
    trained, kept = student.P + critic.body + critic.H + 1, reference.P + taught * teacher.P
    widest = max([student, teacher][:1 + taught], key=lambda m: m.P)
    tasks, S = math.ceil(config.tasks_per_step / devices), config.max_tokens
    N = tasks * (2 * config.horizon + 2) * config.max_new_tokens  # an episode has at most so many calls
    chunk = 4 * student.V * min(S, max(64, 2**25 // student.V))
    # saved for backward in a layer: 4 I of the MLP, 11 H of norms, attention and residuals; backward adds 3 I more
    per_layer = student.H if config.gradient_checkpointing else 4 * student.I + 11 * student.H
    return [
        ("student and critic: weights and two moments in float32", "rsu", 12 * trained / devices),
        ("their gradients in float32", "u", 4 * trained / devices),
        ("reference and teacher", "s" if config.offload else "rsu", b * kept / devices),
        ("the student, whole", "r", fsdp * b * student.P),
        ("KV cache", "r", b * tasks * config.max_len * student.kv),
        ("all prompts in one layer", "r", b * tasks * (config.max_len - config.max_new_tokens)
         * (3 * student.I + 5 * student.H)),
        ("logits and probabilities of the next tokens", "r", 28 * tasks * student.V),
        ("the teacher's hidden states and head", "u", taught * b * teacher.H * (N + teacher.V)),
        ("a pack in one layer, or a chunk of the vocabulary", "s",
         max(b * S * (3 * widest.I + 5 * widest.H), 4.5 * chunk)),
        ("a pack: what all layers keep for backward", "u", b * S * student.L * per_layer),
        ("a pack: one layer, or a chunk of the vocabulary, with gradients", "u",
         max(b * S * (7 * student.I + 11 * student.H), 10 * chunk + 4 * student.H * student.V)),
        ("embedding, head and two layers, whole", "su", fsdp * b * (widest.rest + 2 * widest.layer)),
        ("their gradients before they are reduced", "u", fsdp * (b + 4) * (student.rest + student.layer))]


def memory_table(config: Config) -> str:
    """`estimate` for 1, 2 and 4 devices, in GiB."""
    columns = [estimate(config, devices) for devices in (1, 2, 4)]
    rows = [(name, phases, *(column[i][2] for column in columns)) for i, (name, phases, _) in enumerate(columns[0])]
    rows += [(f"**{name}**", "", *(sum(x for _, phases, x in column if name[0] in phases) for column in columns))
             for name in ("roll out", "score", "update")]
    return "\n".join(["| GiB on each device | when | 1 | 2 | 4 |", "|---|---|---|---|---|", *(
        f"| {name} | {phases} | {' | '.join(f'{x / 2**30:.2f}' for x in values)} |" for name, phases, *values in rows)])


# ---- the run ---------------------------------------------------------------------------------------------------------

def train(config: Config) -> None:
    """Warm start or load, then the loop, then the table. Everything lands in the run folder as soon as it is known."""
    torch.manual_seed(config.seed)
    tasks = open_data(config)
    run, log = open_run(config)
    if not config.student:
        if not rank() and not (run / "teacher").exists():  # a run that goes on may have it behind it
            warm_start(config, run, log)
        gather(None)
        if config.stage == "warm_start":
            return
        config = replace(config, student=str(run / "warm_start"), teacher=str(run / "teacher"))
    tokenizer, student = load_model(config.student, config)
    critic = make_critic(load_model(config.critic, config)[1] if config.critic else student)
    reference, teacher, teacher_head = frozen(config.reference or config.student, tokenizer, config), None, None
    if config.distill != "none":
        teacher = frozen(config.teacher, tokenizer, config)
        teacher_head = whole(head(teacher)).detach().to(config.device, copy=True)                          # (V_T, H_T)
    trained = {"student": trainable(student, config.actor_lr, config),
               "critic": trainable(critic, config.critic_lr, config)}
    (student, critic), optimizers = zip(*trained.values())
    update, stop, T = update_rules(tokenizer)[config.update], stop_on(tokenizer, STOP), config.temperature
    done = resume(run, trained)
    show(student, tokenizer, config, tasks, "before training")

    for step in tqdm(range(done, config.steps), desc=f"{config.distill}, Q{config.horizon}", initial=done,
                     total=config.steps):
        clock = Clock(config.device)
        # 1. Roll out (Section 3.2, Eq. 1): the student samples with compact memory, and every call is recorded.
        ours = tasks("train", config.tasks_per_step, config.horizon, step)[rank()::world()]
        envs = make_envs(ours, tokenizer, config)
        noise = task_generators(config.seed, step, [env.task.id for env in envs])
        with unsharded(student):
            trajectories = rollout(
                lambda prompts, rows: generate(student, prompts, config.max_new_tokens, T, stop,
                                               [noise[i] for i in rows]),
                tokenizer, envs, step_all, update, config.max_len - config.max_new_tokens) if envs else []
        clock.lap("rollout")

        # 2. Pack (Section 3.3, Eq. 4 and 6): every call in its exact state; only sampled tokens are decisions.
        packs = even(pack_calls(trajectories, config), config)
        teacher_packs = packs
        if config.distill == "history":  # Figure 3a
            teacher_packs = even(pack_histories(trajectories, config), config)
        clock.lap("pack")

        # 3. Audit (Eq. 5): the packed forward must give the log-probs that the sampler recorded.
        if step == 0:
            with unsharded(student):
                if trajectories:
                    tqdm.write(f"RCE (Eq. 5) on the first tasks: {rce(student, trajectories[:4], config.share)}")
            clock.lap("audit")
        with torch.no_grad():
            logp_old = torch.cat([policy_scores(student, p, T)[0] for p in packs])                             # (N,)
            sampled = torch.tensor([x for t in trajectories for call in t.calls for x in call.logprobs])
            mismatch = torch.cat(gather((logp_old - sampled.to(logp_old)).abs().cpu()))
            p99 = mismatch.quantile(0.99).item()
            if not p99 <= MISMATCH[config.dtype] and not config.allow_mismatch:
                raise ValueError(f"step {step}: logp_mismatch p99 {p99:.1e} is over {MISMATCH[config.dtype]:g}: packs "
                                 "do not see what the sampler saw; --allow_mismatch goes on all the same")
            clock.lap("score_student")

            # 4. Score (Section 3.4): reference, critic and teacher read the same states.
            with at_hand(reference, config):
                logp_ref = torch.cat([policy_scores(reference, p, T)[0] for p in packs])                       # (N,)
            clock.lap("score_reference")
            values = torch.cat([values_of(critic, p) for p in packs])                                          # (N,)
            clock.lap("score_critic")
            teacher_hidden = None
            if teacher is not None:
                with at_hand(teacher, config):
                    teacher_hidden = torch.cat([hidden_of(teacher, p) for p in teacher_packs])             # (N, H_T)
            clock.lap("score_teacher")

        # 5. Advantages (Eq. 8 and 9): over whole trajectories, one step per sampled token.
        advantages, returns = advantages_of(trajectories, logp_old, logp_ref, values, config)

        # 6. Update (Eq. 7, 10 and 11): the student by PPO and guidance, the critic by its returns.
        batch = Batch(logp_old, values, advantages, returns, teacher_hidden)
        try:
            losses = update_policy(student, critic, optimizers, packs, batch, teacher_head, config, clock)
        except FloatingPointError as error:
            raise ValueError(f"step {step}: {error}; {last_good(run)}") from None

        reference_kl = torch.cat(gather((logp_old - logp_ref).clamp(min=0).cpu()))
        metrics = {"stage": "rl", "step": step, **rollout_metrics(envs, trajectories, packs), **losses,
                   "logp_mismatch": p99, "logp_mismatch_max": mismatch.max().item(),
                   "reference_kl": reference_kl.mean().item(), **clock.cost}
        log(**metrics)
        tqdm.write("step {step:3d}  reward {reward:.2f}  answered {answered:.2f}  teacher_kl {teacher_kl:.3f}  entropy "
                   "{entropy:.3f}  clipfrac {clipfrac:.3f}  logp_mismatch {logp_mismatch:.0e}".format(**metrics))
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            save_all(run, step + 1, trained, tokenizer, trajectories, config)

    show(student, tokenizer, config, tasks, "after training")
    if config.eval_questions and tasks("test", 1, 1):
        models = {"warm_start": reference, "student": student, **({} if teacher is None else {"teacher": teacher})}
        result = "\n".join(table(compare_models(models, tokenizer, config, tasks)))
        write(run / "table.md", result + "\n")
        print(result)


def main() -> None:
    config = parse_config()
    try:
        if config.estimate:
            return print(memory_table(config))
        config = join(config)
        (sft if config.stage == "sft" else train)(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"\ninterrupted; what was computed so far is in {config.run_dir}") from None
    except RuntimeError as error:  # out of memory, or another rank that is gone
        error.add_note(f"rank {rank()} of {world()}; {last_good(Path(config.run_dir))}, and --resume goes on from it")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
