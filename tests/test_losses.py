"""Eq. 7-11 against autograd, float64, and definitions written another way."""

import re

import pytest
import torch

import losses
from losses import action_scores, actor_loss, gae, ppo_loss, reverse_kl, token_rewards, value_loss


def case(N=7, V=5, V_T=5, H=4, H_T=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)
    return make(N, H), make(V, H), torch.randint(min(V, V_T), (N,), generator=g), make(N, H_T), make(V_T, H_T)


@pytest.mark.parametrize("V, V_T", [(5, 5), (5, 7), (7, 5)])
def test_action_scores_are_the_readable_forms(V, V_T):
    """Would catch: cutting the student's vocabulary for log-prob and entropy too; softmax before the cut; a
    lost temperature; chunks that lose rows."""
    hidden, head, ids, teacher_hidden, teacher_head = case(V=V, V_T=V_T)
    for temperature in (1.0, 0.7):
        z, t = hidden @ head.T / temperature, teacher_hidden @ teacher_head.T / temperature
        for chunk in (1, 3, 100):
            logp, entropy, kl = action_scores(
                hidden, head, ids, teacher_hidden, teacher_head, temperature, chunk
            )
            policy = torch.distributions.Categorical(logits=z)
            C = min(V, V_T)
            expected = torch.distributions.kl_divergence(
                torch.distributions.Categorical(logits=z[:, :C]),
                torch.distributions.Categorical(logits=t[:, :C]),
            )
            torch.testing.assert_close(logp, policy.log_prob(ids))
            torch.testing.assert_close(entropy, policy.entropy())
            torch.testing.assert_close(kl, expected)
            torch.testing.assert_close(reverse_kl(z, t), expected)
            torch.testing.assert_close(losses.log_prob(z, ids), policy.log_prob(ids))
            torch.testing.assert_close(losses.entropy(z), policy.entropy())


@pytest.mark.parametrize("V, V_T", [(5, 5), (5, 7), (7, 5)])
def test_action_scores_gradients(V, V_T):
    """Closed forms against finite differences, each output alone and all together; the teacher gets none.
    Would catch the gradient of a sampled KL (k1, k3) in place of the exact one."""
    hidden, head, ids, teacher_hidden, teacher_head = case(V=V, V_T=V_T)
    (
        hidden.requires_grad_(),
        head.requires_grad_(),
        teacher_hidden.requires_grad_(),
        teacher_head.requires_grad_(),
    )
    for used in ([0], [1], [2], [0, 1, 2]):
        assert torch.autograd.gradcheck(
            lambda h, w: tuple(
                action_scores(h, w, ids, teacher_hidden.detach(), teacher_head.detach(), 0.7, 3)[i]
                for i in used
            ),
            (hidden, head),
        )
    sum(x.sum() for x in action_scores(hidden, head, ids, teacher_hidden, teacher_head)).backward()
    assert teacher_hidden.grad is None and teacher_head.grad is None and hidden.grad.abs().sum() > 0


def test_reverse_kl_on_three_tokens_by_hand():
    """KL((1/2, 1/4, 1/4) || (1/4, 1/4, 1/2)) = 1/2 ln 2 - 1/4 ln 2 = ln(2) / 4; the forward KL is the same
    here only with the arguments swapped, so (1/2, 1/2, 0+) tells them apart."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    torch.testing.assert_close(reverse_kl(p, q), torch.tensor([0.25]) * torch.tensor(2.0).log())
    narrow, wide = torch.tensor([[0.0, 0.0, -30.0]]), torch.zeros(1, 3)
    torch.testing.assert_close(reverse_kl(narrow, wide), torch.tensor([1.5]).log())
    assert reverse_kl(wide, narrow) > 9


def test_benchmark_measures_both_forms(capsys):
    losses.bench("cpu", torch.float32, N=50, H=8, H_T=6, V=300)
    out = capsys.readouterr().out
    errors = re.findall(r"(\S+) \((?:hidden states|head)\)", out)
    assert len(errors) == 2 and max(map(float, errors)) < 1e-5 and "of the time" in out


def test_action_scores_without_teacher():
    hidden, head, ids, *_ = case()
    logp, _, kl = action_scores(hidden, head, ids)
    assert kl.abs().max() == 0 and logp.shape == (7,)


def test_action_scores_in_bfloat16_sum_in_float32():
    hidden, head, ids, *_ = case(dtype=torch.bfloat16)
    logp, entropy, kl = action_scores(hidden, head, ids)
    assert logp.dtype == entropy.dtype == kl.dtype == torch.float32


def test_token_rewards_penalise_only_growth():
    """Eq. 8: 0 where the policy is less sure than the reference (both signs)."""
    out = token_rewards(
        torch.tensor([0.0, 0.0, 2.0]),
        torch.tensor([-1.0, -3.0, -1.0]),
        torch.tensor([-2.0, -1.0, -1.5]),
        beta=0.1,
    )
    torch.testing.assert_close(out, torch.tensor([-0.1, 0.0, 1.95]))


def gae_by_definition(rewards, values, gamma, lam):
    """A_n = sum_j (gamma lam)^j delta_{n+j}, one trajectory, as a geometric sum."""
    N = len(rewards)
    deltas = [rewards[n] + gamma * (values[n + 1] if n + 1 < N else 0.0) - values[n] for n in range(N)]
    return [sum((gamma * lam) ** j * deltas[n + j] for j in range(N - n)) for n in range(N)]


def test_gae_does_not_leak_between_trajectories():
    """Eq. 9 on two trajectories in a row is Eq. 9 on each. Would catch bootstrapping from the next one's
    value, a nonzero terminal value, and lambda applied across the border."""
    g = torch.Generator().manual_seed(0)
    lengths, gamma, lam = (5, 3), 0.9, 0.8
    r, v = torch.randn(8, generator=g, dtype=torch.float64), torch.randn(8, generator=g, dtype=torch.float64)
    last = torch.tensor([0, 0, 0, 0, 1, 0, 0, 1], dtype=torch.bool)
    advantages, returns = gae(r, v, last, gamma, lam)
    expected = [
        a
        for part_r, part_v in zip(r.split(lengths), v.split(lengths))
        for a in gae_by_definition(part_r.tolist(), part_v.tolist(), gamma, lam)
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, advantages + v)


def test_gae_terminal_reward_reaches_the_last_action():
    """With gamma = 0 every advantage is r - V: the terminal reward lands on the last action though
    observations would follow it."""
    advantages, _ = gae(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([0.5, 0.5, 0.25]),
        torch.tensor([False, False, True]),
        0.0,
        0.95,
    )
    torch.testing.assert_close(advantages, torch.tensor([-0.5, -0.5, 0.75]))


def test_ppo_loss_by_hand():
    """Eq. 10 in its four cases: ratio 1.5 and 0.5, advantage of either sign, eps = 0.2. Would catch max for
    min, and a ratio that is always 1 (exp(logp - logp.detach()))."""
    logp_old = torch.zeros(4)
    logp = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    loss, approx_kl, clipfrac = ppo_loss(logp, logp_old, torch.tensor([2.0, -2.0, 2.0, -2.0]), 0.2)
    torch.testing.assert_close(loss, torch.tensor([-2.4, 3.0, -1.0, 1.6]))
    assert clipfrac.tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(approx_kl, torch.tensor([1.5, 1.5, 0.5, 0.5]) - 1 - logp.detach())
    loss.sum().backward()
    torch.testing.assert_close(
        logp.grad, torch.tensor([0.0, 3.0, -1.0, 0.0])
    )  # no gradient where the clip binds
    loss, _, clipfrac = ppo_loss(logp_old, logp_old, torch.ones(4), 0.2)
    assert loss.tolist() == [-1] * 4 and clipfrac.sum() == 0


def test_value_loss_takes_the_worse_of_plain_and_clipped():
    values, old, returns = torch.tensor([2.0, 0.2]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0])
    torch.testing.assert_close(
        value_loss(values, old, returns, 0.5), torch.tensor([0.5 * 1.5**2, 0.5 * 0.8**2])
    )


def test_actor_loss_is_additive_over_parts_of_a_batch():
    """Eq. 11: parts divided by the counts of the whole batch sum to the whole; a mask selects before it sums,
    so that what it leaves out may be NaN; an all-masked part gives 0, not NaN."""
    g = torch.Generator().manual_seed(0)
    ppo, entropy, kl = torch.randn(3, 6, generator=g)
    mask = torch.tensor([True, False, True, True, False, False])
    kl[1] = torch.nan
    whole = actor_loss(ppo, entropy, kl, 0.1, 0.5, 6, 3, mask)
    parts = [
        actor_loss(ppo[s], entropy[s], kl[s], 0.1, 0.5, 6, 3, mask[s])
        for s in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole, ppo.mean() - 0.1 * entropy.mean() + 0.5 * kl[mask].mean())
    assert actor_loss(ppo, entropy, kl, 0.0, 1.0, 6, 0, torch.zeros(6, dtype=torch.bool)) == ppo.mean()
