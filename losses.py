"""The objective (Section 3.4), Eq. 7-11, over the N sampled action tokens and nothing else.

    Eq. 7   L_OPD = 1/sum(m_T) sum m_T KL(p_theta || p_T)        reverse_kl, action_scores
    Eq. 8   r~ = r - beta [log pi_old - log pi_ref]_+            token_rewards
    Eq. 9   delta_n = r~_n + gamma V_{n+1} - V_n, ...            gae
    Eq. 10  L_PPO = -1/N sum min(rho A, clip(rho) A)             ppo_loss
    Eq. 11  L_actor = L_PPO - alpha H + lambda L_OPD             actor_loss

Losses are (N,), one value a token, until Eq. 11 divides their sums by the counts of the whole batch: so a result does
not depend on how the batch was cut into packs. `action_scores` gives log-prob, entropy and KL in one chunked pass over
the vocabulary, with the gradient in closed form; `log_prob`, `entropy` and `reverse_kl` say the same in a line or two.
Shapes: N sampled action tokens, V vocabulary, H hidden size. Needs torch only.

    python losses.py             # Eq. 7-11 on four tokens of two trajectories
    python losses.py --bench     # memory and time of action_scores beside the plain forms, at V = 151,936
"""
import argparse
import resource
import time

import torch


# ---- Eq. 7: what the teacher says ------------------------------------------------------------------------------------

def log_prob(logits: torch.Tensor, action_ids: torch.Tensor) -> torch.Tensor:
    """log pi(a): (N, V), (N,) -> (N,)."""
    return logits.log_softmax(-1).gather(-1, action_ids[:, None])[:, 0]


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """H of the policy: (N, V) -> (N,)."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def reverse_kl(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Eq. 7 per token: (N, V), (N, V_T) -> (N,). Vocabularies of different padding are cut to their common size."""
    common = min(logits.shape[-1], teacher_logits.shape[-1])
    logp, teacher_logp = logits[:, :common].log_softmax(-1), teacher_logits[:, :common].log_softmax(-1)
    return (logp.exp() * (logp - teacher_logp)).sum(-1)


def action_scores(hidden: torch.Tensor, head: torch.Tensor, action_ids: torch.Tensor,
                  teacher_hidden: torch.Tensor | None = None, teacher_head: torch.Tensor | None = None,
                  temperature: float = 1.0, chunk: int | None = None
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log pi(a), H, and the KL of Eq. 7 (0 without a teacher), each (N,), in at least float32.

    hidden (N, H) and head (V, H) of the policy; teacher_hidden (N, H_T) and teacher_head (V_T, H_T): hidden states,
    since the teacher's logits would be 40 times larger at V = 152k. All logits are divided by the temperature that
    sampled the actions. Memory is O(chunk x V): `chunk` tokens at a time, done again in backward. The teacher gets no
    gradient."""
    chunk = chunk or max(64, 2**25 // len(head))
    return _ActionScores.apply(hidden, head, action_ids, teacher_hidden, teacher_head, temperature, chunk)


class _ActionScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, action_ids, teacher_hidden, teacher_head, temperature, chunk):
        ctx.save_for_backward(hidden, head, action_ids, teacher_hidden, teacher_head)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # what the loss does not use costs nothing in backward
        dtype, teacher = torch.promote_types(hidden.dtype, torch.float32), (teacher_hidden, teacher_head)
        scores = [hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3)]
        for rows, logp, common_logp, log_ratio in _chunks(hidden, head, *teacher, temperature, chunk):
            scores[0][rows] = logp.gather(1, action_ids[rows, None])[:, 0]
            scores[1][rows] = -(logp.exp() * logp).sum(-1)
            scores[2][rows] = (common_logp.exp() * log_ratio).sum(-1)
        return tuple(scores)

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, grad_kl):
        hidden, head, action_ids, *teacher = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))
        for rows, logp, common_logp, log_ratio in _chunks(hidden, head, *teacher, ctx.temperature, ctx.chunk):
            grad, p = torch.zeros_like(logp), logp.exp()  # (rows, V)
            if grad_logp is not None:     # d log pi(a) / dz = onehot(a) - p
                grad.sub_(p * grad_logp[rows, None]).scatter_add_(1, action_ids[rows, None], grad_logp[rows, None])
            if grad_entropy is not None:  # d H / dz = -p (log p + H)
                h = -(p * logp).sum(-1, keepdim=True)
                grad -= grad_entropy[rows, None] * p * (logp + h)
            if grad_kl is not None:       # d KL / dz = p (log p - log p_T - KL), over the common vocabulary
                p = common_logp.exp()
                kl = (p * log_ratio).sum(-1, keepdim=True)
                grad[:, :p.shape[1]] += grad_kl[rows, None] * p * (log_ratio - kl)
            grad = (grad / ctx.temperature).to(head.dtype)
            grad_hidden[rows] = grad @ head
            grad_head += grad.T @ hidden[rows]
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None, None


def _chunks(hidden, head, teacher_hidden, teacher_head, temperature, chunk):
    """Yield, a chunk of tokens at a time: rows, log p, and over the common vocabulary log p and log p - log p_T."""
    def logits(h, w):
        return (h @ w.T).to(torch.promote_types(h.dtype, torch.float32)) / temperature
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        z = logits(hidden[rows], head)  # (rows, V)
        logp = z.log_softmax(-1)
        if teacher_hidden is None:
            yield rows, logp, logp[:, :0], logp[:, :0]
            continue
        t = logits(teacher_hidden[rows], teacher_head)  # (rows, V_T)
        common = min(z.shape[1], t.shape[1])
        common_logp = logp if common == z.shape[1] else z[:, :common].log_softmax(-1)
        yield rows, logp, common_logp, common_logp - t[:, :common].log_softmax(-1).to(z.dtype)


# ---- Eq. 8 and 9: rewards and advantages, without gradients ----------------------------------------------------------

def token_rewards(rewards: torch.Tensor, logp_old: torch.Tensor, logp_ref: torch.Tensor, beta: float) -> torch.Tensor:
    """Eq. 8, (N,) each: the task reward, which stands on the last action token of a call, less the reference penalty on
    every token."""
    reference_kl = (logp_old - logp_ref).clamp(min=0)  # only where the policy has grown more sure than the reference
    return rewards - beta * reference_kl


def gae(rewards: torch.Tensor, values: torch.Tensor, last: torch.Tensor, gamma: float,
        gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 9 over whole trajectories, one after the other, a step per sampled token: advantages and returns, (N,).

    last (N,) bool marks each trajectory's final action token: the value after it is 0, and nothing leaks past it."""
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value, is_last in zip(*(x.flip(0).tolist() for x in (rewards, values, last)), strict=True):
        if is_last:
            advantage = next_value = 0.0
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * advantage
        advantages.append(advantage)
        next_value = value
    advantages = torch.tensor(advantages, dtype=values.dtype, device=values.device).flip(0)
    return advantages, advantages + values


def whiten(advantages: torch.Tensor) -> torch.Tensor:
    """Mean 0, deviation 1 over the batch's action tokens (not in the paper; MEM1's trainer does so)."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


# ---- Eq. 10 and 11: the policy and the critic ------------------------------------------------------------------------

def ppo_loss(logp: torch.Tensor, logp_old: torch.Tensor, advantages: torch.Tensor,
             clip_coef: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eq. 10 per token, (N,); beside it approx_kl and clipfrac per token, without gradient."""
    logratio = logp - logp_old
    ratio = logratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)
    with torch.no_grad():
        approx_kl, clipfrac = (ratio - 1) - logratio, ((ratio - 1).abs() > clip_coef).float()
    return loss, approx_kl, clipfrac


def value_loss(values: torch.Tensor, values_old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """The critic's squared error per token, (N,), the value clipped around the old one (MEM1; the paper is silent)."""
    clipped = values_old + (values - values_old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def actor_loss(ppo: torch.Tensor, entropy: torch.Tensor, kl: torch.Tensor, entropy_coef: float, distill_coef: float,
               n_actions: int, n_teacher: int, teacher_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Eq. 11, the share of these tokens: L_PPO - alpha H + lambda L_OPD, a scalar.

    n_actions and n_teacher are sum(m_act) and sum(m_T) of the *whole batch*, whatever part of it is given here;
    teacher_mask (N,) bool is m_T, by default all of m_act."""
    guided = kl if teacher_mask is None else kl[teacher_mask]  # select, then sum: what is masked may be anything
    return (ppo - entropy_coef * entropy).sum() / max(n_actions, 1) + distill_coef * guided.sum() / max(n_teacher, 1)


def bench(device: str, dtype: torch.dtype, N: int, H: int, H_T: int, V: int) -> None:
    """Print the extra peak memory, the time, and the gradients of both ways to the three scores of Eq. 7, 10 and 11."""
    def peak():
        """MiB; on a CPU of this process: it never falls, so the smaller one is measured first."""
        if device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def chunked(*x):
        return action_scores(*x)

    def plain(hidden, head, action_ids, teacher_hidden, teacher_head):
        logits, teacher_logits = (hidden @ head.T).float(), (teacher_hidden @ teacher_head.T).float()
        return log_prob(logits, action_ids), entropy(logits), reverse_kl(logits, teacher_logits)
    g = torch.Generator().manual_seed(0)
    hidden, head, teacher_hidden, teacher_head = (
        (torch.randn(*shape, generator=g) * scale).to(device, dtype) for scale, shape in
        ((1.0, (N, H)), (0.1, (V, H)), (1.0, (N, H_T)), (0.1, (V, H_T))))
    action_ids = torch.randint(V, (N,), generator=g).to(device)
    found, before = {}, peak()
    for form in (chunked, plain):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        start = time.perf_counter()
        sum(x.mean() for x in form(h, w, action_ids, teacher_hidden, teacher_head)).backward()
        extra = peak() - before
        found[form] = extra, time.perf_counter() - start, h.grad, w.grad
    (memory, seconds, *grads), (memory_plain, seconds_plain, *grads_plain) = found[chunked], found[plain]
    errors = [f"{(a - b).norm() / b.norm():.0e}" for a, b in zip(grads, grads_plain)]
    print(f"{N} action tokens, V = {V}, H = {H}, H_T = {H_T}, {dtype}: {memory:.0f} MiB beyond the inputs against "
          f"{memory_plain:.0f} ({memory / max(memory_plain, 1e-9):.0%}), {seconds / seconds_plain:.2f} of the time; "
          f"relative difference of the gradients {errors[0]} (hidden states), {errors[1]} (head)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", action="store_true", help="measure action_scores beside the plain forms")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    sizes = ("tokens", 2048), ("hidden_size", 512), ("teacher_hidden_size", 512), ("vocab_size", 151_936)
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    if args.bench:
        return bench(args.device, getattr(torch, args.dtype), args.tokens, args.hidden_size, args.teacher_hidden_size,
                     args.vocab_size)
    torch.manual_seed(0)
    logits, teacher_logits, action_ids = torch.randn(4, 5), torch.randn(4, 7), torch.tensor([0, 1, 2, 3])
    logp, h, kl = action_scores(logits, torch.eye(5), action_ids, teacher_logits, torch.eye(7))
    logp_ref = logp - torch.tensor([0.5, -0.5, 0.0, 1.0])
    rewards = token_rewards(torch.tensor([0.0, 0.0, 1.0, 0.0]), logp, logp_ref, beta=0.1)
    last = torch.tensor([False, False, True, True])
    advantages, _ = gae(rewards, torch.full((4,), 0.25), last, gamma=1.0, gae_lambda=0.9)
    ppo, _, _ = ppo_loss(logp, logp - 0.1, advantages, clip_coef=0.2)
    loss = actor_loss(ppo, h, kl, entropy_coef=0.001, distill_coef=0.02, n_actions=4, n_teacher=4)

    print("four sampled tokens: a trajectory of three and one of one; V = 5, the teacher's padded to 7")
    for name, x in (("        log pi(a)", logp), ("        H", h), ("Eq. 7   KL(p_theta || p_T)", kl),
                    ("Eq. 8   r~ = r - beta [..]_+", rewards), ("Eq. 9   A", advantages),
                    ("Eq. 10  -min(rho A, clip(rho) A)", ppo)):
        print(f"{name:<34}", " ".join(f"{v:8.4f}" for v in x.tolist()))
    print(f"{'Eq. 11  L_PPO - alpha H + lambda L_OPD':<38} {loss:8.4f}")


if __name__ == "__main__":
    main()
